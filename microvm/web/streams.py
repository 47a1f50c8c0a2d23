"""What the streaming routes ask of the fleet, and what each of them shares: how long it may go on.

Values and a protocol. It must not know Quart. Its neighbours: `transfers`, `events` and `follow` use it, the
daemon gives the fleet's side.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from microvm.errors import MicrovmError
from microvm.model import Change, FileFacts, JobRecord, OutputPiece, Principal, VmId, WorkspaceId

RECHECK_S: Final = 5.0
"""How often a stream asks whether its token still holds: revocation ends access at once, as people see it."""


class Listener(Protocol):
    """Changes as they come."""

    @property
    def missed(self) -> bool:
        """Whether changes behind the wanted id are not kept any more."""
        ...

    async def receive(self) -> Change:
        """The next change; raises trio.EndOfChannel for a listener that was too slow."""
        ...

    def close(self) -> None:
        """Ends the listening."""
        ...


class Follower(Protocol):
    """A job's output as it comes."""

    @property
    def job(self) -> JobRecord:
        """The job as it was last heard of."""
        ...

    @property
    def over(self) -> bool:
        """Whether the job has ended and all of its output was given."""
        ...

    async def next(self) -> list[OutputPiece]:
        """What came since; empty after a silence of some seconds, or at the end."""
        ...


class StreamApi(Protocol):
    """The fleet as streams see it.

    Every method looks ids up in the principal's workspace and raises `not_found` for others. What a context
    manager raises before it yields is the answer; what its bytes raise afterwards cuts the stream.
    """

    async def look(self, p: Principal, vm_id: str, path: str) -> FileFacts:
        """What a file below /workspace is now."""
        ...

    def read_file(
        self, p: Principal, vm_id: str, path: str, *, offset: int, length: int, tag: str
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of a file that has `tag`, the last of them only when it still has it."""
        ...

    def read_archive(
        self, p: Principal, vm_id: str, path: str
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """A directory as a tar archive."""
        ...

    async def write_file(
        self,
        p: Principal,
        vm_id: str,
        path: str,
        body: AsyncIterable[bytes],
        *,
        size: int | None,
        mode: str,
        make_parents: bool,
    ) -> tuple[int, str]:
        """Replace a file when the whole body is there; its size and SHA-256."""
        ...

    async def write_archive(
        self, p: Principal, vm_id: str, path: str, body: AsyncIterable[bytes], *, size: int | None
    ) -> int:
        """Put what a tar archive holds into a directory when all of it is there; the archive's length."""
        ...

    def listen(self, p: Principal, *, all_workspaces: bool, after: int | None) -> Listener:
        """Changes of VMs and jobs, from now on or from behind the id `after`."""
        ...

    def follow(self, p: Principal, vm_id: str, job_id: str, cursor: tuple[int, int]) -> Follower:
        """A job's output from `cursor` on."""
        ...

    async def end_workspace(self, workspace_id: WorkspaceId, *, destroy: bool) -> list[VmId]:
        """Kill the VMMs of a revoked workspace at once; with `destroy` remove its VMs."""
        ...


@dataclass(slots=True)
class Pass:
    """How long a stream may go on: while its caller may come in.

    Args:
        admit: Who the caller is, asked again; raises MicrovmError for one whose token holds no longer.
    """

    admit: Callable[[], Principal]
    _checked_at: float = field(default_factory=trio.current_time)

    def check(self) -> None:
        """Asks again when that is due.

        Raises:
            MicrovmError: `unauthenticated`.
        """
        now = trio.current_time()
        if now - self._checked_at >= RECHECK_S:
            self._checked_at = now
            self.admit()

    @property
    def holds(self) -> bool:
        """`check`, as a value."""
        try:
            self.check()
        except MicrovmError:
            return False
        return True
