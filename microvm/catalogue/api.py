"""What a tool's handler is given: the call, and the fleet it acts on.

`FleetApi` is the whole of what tools may ask of the fleet; a handler reaches nothing else. This module must
not know HTTP or MCP. Its neighbours: `handlers` uses it, `web` makes each `Call`, `fleet` satisfies the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from microvm.model import (
    ExecSpec,
    FileChunk,
    JobRecord,
    OutputPage,
    Principal,
    SuspendMode,
    VmSpec,
    VmView,
)

Progress: TypeAlias = Callable[[float, str], None]
"""Reports how far a call is: a fraction of the whole, 0 to 1, and words. Never blocks, never raises."""


class FleetApi(Protocol):
    """The fleet as tools see it.

    Every method looks ids up in the principal's workspace and raises `not_found` for others. Mutations run in
    the fleet's own nurseries.

    Cancellation: ends the waiting only; a mutation goes on.
    """

    async def create(
        self,
        p: Principal,
        request_id: str,
        spec: VmSpec,
        *,
        idle_seconds: float,
        idle_mode: SuspendMode,
        env: Mapping[str, str],
        description: str | None,
        arguments: dict[str, Any],
        progress: Progress,
    ) -> VmView:
        """Make a VM; `arguments` is what the receipt compares."""
        ...

    def list_vms(self, p: Principal, *, all_workspaces: bool) -> list[VmView]:
        """The workspace's VMs; everybody's with `all_workspaces` (operators only)."""
        ...

    def status(self, p: Principal, vm_id: str) -> tuple[VmView, list[JobRecord]]:
        """A VM and its remembered jobs; wakes nothing."""
        ...

    async def exec(
        self,
        p: Principal,
        vm_id: str,
        request_id: str,
        spec: ExecSpec,
        *,
        wait_seconds: float,
        arguments: dict[str, Any],
        progress: Progress,
    ) -> tuple[JobRecord, OutputPage | None]:
        """Start a command; its first page of output when it ended within `wait_seconds`."""
        ...

    async def job_status(self, p: Principal, vm_id: str, job_id: str, *, wait_seconds: float) -> JobRecord:
        """The job, after its end or `wait_seconds`, whichever is first; wakes nothing."""
        ...

    async def job_cancel(self, p: Principal, vm_id: str, job_id: str) -> JobRecord:
        """Kill what is left of a job."""
        ...

    async def job_output(
        self,
        p: Principal,
        vm_id: str,
        job_id: str,
        *,
        cursor: tuple[int, int],
        max_bytes: int,
        wait_seconds: float,
    ) -> OutputPage:
        """Retained bytes from `cursor` on, at most `max_bytes` of each stream."""
        ...

    async def read_file(self, p: Principal, vm_id: str, path: str, *, offset: int, length: int) -> FileChunk:
        """A part of a file below /workspace."""
        ...

    async def write_file(
        self,
        p: Principal,
        vm_id: str,
        path: str,
        content: bytes,
        *,
        offset: int | None,
        truncate: bool,
        mode: str,
        make_parents: bool,
    ) -> tuple[int, str]:
        """Write; returns the file's size and the SHA-256 of `content`."""
        ...

    async def suspend(
        self, p: Principal, vm_id: str, *, mode: SuspendMode, force: bool, progress: Progress
    ) -> VmView:
        """Pause or hibernate."""
        ...

    async def resume(
        self, p: Principal, vm_id: str, *, cold_boot: bool, discard_memory: bool, progress: Progress
    ) -> VmView:
        """Wake, or boot from the disk."""
        ...

    async def destroy(self, p: Principal, vm_id: str) -> None:
        """Remove the VM and all that belongs to it."""
        ...


def no_progress(_fraction: float, _message: str) -> None:
    """A `Progress` that nobody listens to."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool.

    Attributes:
        principal: Who calls.
        fleet: What the handler may act on.
        trace_id: 32 hexadecimal digits that logs and telemetry of this call share.
        progress: Where the handler reports how far it is.
    """

    principal: Principal
    fleet: FleetApi
    trace_id: str
    progress: Progress = no_progress
