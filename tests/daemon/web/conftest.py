"""The doors on real sockets, before an in-memory fleet and streams that do as they are told.

The fleet here exists to test schemas, transport and failures; what a fleet must do is tested elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from microvm.catalogue import Progress
from microvm.errors import GuestError, MicrovmError, RequestError
from microvm.fleet.events import Events, Listener
from microvm.model import (
    ExecSpec,
    FileChunk,
    FileFacts,
    JobId,
    JobRecord,
    JobState,
    OutputPage,
    OutputPiece,
    Principal,
    SuspendMode,
    VmId,
    VmRecord,
    VmSpec,
    VmState,
    VmView,
    WorkspaceId,
)
from microvm.web import Bound, WebSettings, serve_web

VM_ID = "vm_" + "a" * 20
JOB_ID = "job_" + "b" * 20
PIECE = 32768
TOKENS = {
    "alice-token": Principal(WorkspaceId("alice")),
    "bob-token": Principal(WorkspaceId("bob")),
    "root-token": Principal(WorkspaceId("ops"), operator=True),
    "core-token": Principal(WorkspaceId("alice"), profile="core"),
}


def make_record(workspace: str) -> VmRecord:
    return VmRecord(
        VmId(VM_ID),
        WorkspaceId(workspace),
        VmState.RUNNING,
        since=1.0,
        created_at=1.0,
        spec=VmSpec(image_digest="sha256:0"),
        last_activity_at=2.0,
        vmm={"kind": "qemu", "accel": "tcg", "version": "10.0", "closure": "secret-path"},
    )


@dataclass
class FleetDouble:
    """One VM of alice's, one job, one file.

    Attributes:
        calls: What was asked, in order: method and arguments.
        act: Awaited inside every mutation, so that a test can wait, fail or report progress there.
    """

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    act: Callable[[Progress], Any] | None = None
    stdout: bytes = b"hello\n"
    stderr: bytes = b""
    content: bytes = b"file"

    async def _mutate(self, p: Principal, vm_id: str, name: str, progress: Progress, **told: Any) -> VmView:
        view = self._own(p, vm_id)
        self.calls.append((name, told))
        if self.act is not None:
            await self.act(progress)
        return view

    def _own(self, p: Principal, vm_id: str) -> VmView:
        if vm_id != VM_ID or p.workspace_id != "alice":
            raise RequestError("not_found", "there is no such VM")
        return VmView(make_record("alice"), disk_used_mib=12.5, hibernates_at=300.0, pid=7)

    def _job(self, job_id: str = JOB_ID) -> JobRecord:
        if job_id != JOB_ID:
            raise RequestError("not_found", "there is no such job")
        totals = (len(self.stdout), len(self.stderr))
        return JobRecord(
            JobId(JOB_ID),
            VmId(VM_ID),
            JobState.COMPLETED,
            "echo hello",
            started_at=1.0,
            ended_at=2.0,
            exit_code=0,
            totals=totals,
            kept=totals,
        )

    async def create(self, p: Principal, request_id: str, spec: VmSpec, **told: Any) -> VmView:
        return await self._mutate(
            Principal(WorkspaceId("alice")), VM_ID, "create", told.pop("progress"), spec=spec, **told
        )

    def list_vms(self, p: Principal, *, all_workspaces: bool) -> list[VmView]:
        self.calls.append(("list_vms", {"all_workspaces": all_workspaces}))
        return [VmView(make_record("alice"), 1.0)] if p.workspace_id == "alice" or all_workspaces else []

    def status(self, p: Principal, vm_id: str) -> tuple[VmView, list[JobRecord]]:
        return self._own(p, vm_id), [self._job()]

    async def exec(
        self, p: Principal, vm_id: str, request_id: str, spec: ExecSpec, **told: Any
    ) -> tuple[JobRecord, OutputPage | None]:
        await self._mutate(p, vm_id, "exec", told.pop("progress"), request_id=request_id, spec=spec, **told)
        return self._job(), self._page((0, 0), 16384) if told["wait_seconds"] else None

    async def job_status(self, p: Principal, vm_id: str, job_id: str, *, wait_seconds: float) -> JobRecord:
        self._own(p, vm_id)
        return self._job(job_id)

    async def job_cancel(self, p: Principal, vm_id: str, job_id: str) -> JobRecord:
        self._own(p, vm_id)
        return self._job(job_id)

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
        self._own(p, vm_id)
        self._job(job_id)
        return self._page(cursor, max_bytes)

    def _page(self, cursor: tuple[int, int], max_bytes: int) -> OutputPage:
        out = self.stdout[cursor[0] : cursor[0] + max_bytes]
        err = self.stderr[cursor[1] : cursor[1] + max_bytes]
        ends = (cursor[0] + len(out) >= len(self.stdout), cursor[1] + len(err) >= len(self.stderr))
        return OutputPage(self._job(), cursor, (out, err), ends)

    async def read_file(self, p: Principal, vm_id: str, path: str, *, offset: int, length: int) -> FileChunk:
        self._own(p, vm_id)
        part = self.content[offset : offset + length]
        return FileChunk(
            part, offset, len(self.content), offset + len(part) >= len(self.content), "0644", 3.0
        )

    async def write_file(
        self, p: Principal, vm_id: str, path: str, content: bytes, **told: Any
    ) -> tuple[int, str]:
        await self._mutate(p, vm_id, "write_file", lambda _f, _m: None, path=path, content=content, **told)
        return len(content), hashlib.sha256(content).hexdigest()

    async def suspend(
        self, p: Principal, vm_id: str, *, mode: SuspendMode, force: bool, progress: Progress
    ) -> VmView:
        return await self._mutate(p, vm_id, "suspend", progress, mode=mode, force=force)

    async def resume(
        self, p: Principal, vm_id: str, *, cold_boot: bool, discard_memory: bool, progress: Progress
    ) -> VmView:
        return await self._mutate(
            p, vm_id, "resume", progress, cold_boot=cold_boot, discard_memory=discard_memory
        )

    async def destroy(self, p: Principal, vm_id: str) -> None:
        await self._mutate(p, vm_id, "destroy", lambda _f, _m: None)


@dataclass
class FollowerDouble:
    """Gives what the test has put into `pieces`; over behind the last one.

    Attributes:
        news: Set by the test when there is more, or `ended`.
    """

    job: JobRecord
    pieces: list[OutputPiece | MicrovmError] = field(default_factory=list[OutputPiece | MicrovmError])
    ended: bool = False
    news: trio.Event = field(default_factory=trio.Event)

    @property
    def over(self) -> bool:
        return self.ended and not self.pieces

    async def next(self) -> list[OutputPiece]:
        if not self.pieces and not self.ended:
            await self.news.wait()
            self.news = trio.Event()
        await trio.lowlevel.checkpoint()
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            if isinstance(piece, MicrovmError):
                raise piece
        return [piece for piece in pieces if isinstance(piece, OutputPiece)]


@dataclass
class StreamDouble:
    """One VM of alice's with one file and one directory; what is written is kept when all of it came.

    Attributes:
        content: The file.
        wrong: Raised instead of the last bytes of the file or archive, as a guest does that saw it change.
        reading: How many reads are open now.
        taken: Bytes of the upload that were taken off the connection so far.
        hold: Awaited before each piece of an upload.
        written: Uploads that came whole: path, bytes, arguments.
        follower: What live output is made of.
    """

    content: bytes = b"0123456789"
    wrong: MicrovmError | None = None
    reading: int = 0
    taken: int = 0
    hold: Callable[[], Awaitable[object]] | None = None
    written: list[tuple[str, bytes, dict[str, Any]]] = field(
        default_factory=list[tuple[str, bytes, dict[str, Any]]]
    )
    events: Events = field(default_factory=Events)
    follower: FollowerDouble | None = None
    cursors: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    ended: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    def _check(self, p: Principal, vm_id: str) -> None:
        if vm_id != VM_ID or p.workspace_id != "alice":
            raise RequestError("not_found", "there is no such VM")

    async def look(self, p: Principal, vm_id: str, path: str) -> FileFacts:
        self._check(p, vm_id)
        if path != "file":
            raise RequestError("not_found", "there is no such file")
        return FileFacts(len(self.content), "0755", 1e9 + 0.5, "tag-1")

    @asynccontextmanager
    async def read_file(
        self, p: Principal, vm_id: str, path: str, *, offset: int, length: int, tag: str
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        assert tag == "tag-1"
        async with self._reading(self.content[offset : offset + length]) as pieces:
            yield pieces

    @asynccontextmanager
    async def read_archive(self, p: Principal, vm_id: str, path: str) -> AsyncGenerator[AsyncIterator[bytes]]:
        self._check(p, vm_id)
        if path not in {".", "dir"}:
            raise RequestError("not_found", "there is no such directory")
        async with self._reading(self.content) as pieces:
            yield pieces

    @asynccontextmanager
    async def _reading(self, data: bytes) -> AsyncGenerator[AsyncIterator[bytes]]:
        self.reading += 1
        try:
            async with aclosing(self._pieces(data)) as pieces:
                yield pieces
        finally:
            self.reading -= 1

    async def _pieces(self, data: bytes) -> AsyncGenerator[bytes]:
        for at in range(0, len(data), PIECE):
            await trio.lowlevel.checkpoint()
            if self.wrong is not None and at + PIECE >= len(data):
                raise self.wrong
            yield data[at : at + PIECE]
        if self.wrong is not None:
            raise self.wrong

    async def write_file(
        self, p: Principal, vm_id: str, path: str, body: AsyncIterable[bytes], **told: Any
    ) -> tuple[int, str]:
        self._check(p, vm_id)
        content = await self._take(path, body, told)
        return len(content), hashlib.sha256(content).hexdigest()

    async def write_archive(
        self, p: Principal, vm_id: str, path: str, body: AsyncIterable[bytes], **told: Any
    ) -> int:
        self._check(p, vm_id)
        return len(await self._take(path, body, told))

    async def _take(self, path: str, body: AsyncIterable[bytes], told: dict[str, Any]) -> bytes:
        if path == "full":
            raise GuestError("disk_full", "the guest's disk is full")
        content = bytearray()
        async for data in body:
            self.taken += len(data)
            content += data
            if self.hold is not None:
                await self.hold()
        self.written.append((path, bytes(content), told))
        return bytes(content)

    def listen(self, p: Principal, *, all_workspaces: bool, after: int | None) -> Listener:
        if all_workspaces and not p.operator:
            raise RequestError("forbidden", "for operators")
        return self.events.listen(None if all_workspaces else p.workspace_id, after)

    def follow(self, p: Principal, vm_id: str, job_id: str, cursor: tuple[int, int]) -> FollowerDouble:
        self._check(p, vm_id)
        self.cursors.append(cursor)
        if job_id != JOB_ID or self.follower is None:
            raise RequestError("not_found", "there is no such job")
        return self.follower

    async def end_workspace(self, workspace_id: WorkspaceId, *, destroy: bool) -> list[VmId]:
        self.ended.append((workspace_id, destroy))
        return [VmId(VM_ID)]


@dataclass
class Doors:
    """A running service, and ways in."""

    fleet: FleetDouble
    streams: StreamDouble
    bound: Bound
    stop: trio.Event
    stopped: trio.Event

    def http(self, token: str | None = "alice-token", *, uds: str | None = None) -> httpx2.AsyncClient:
        """A client of the HTTP door."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx2.AsyncHTTPTransport(uds=uds) if uds else None
        return httpx2.AsyncClient(
            base_url=self.bound.url if not uds else "http://localhost",
            headers=headers,
            transport=transport,
            timeout=10,
        )

    def mcp_http(self, token: str = "alice-token", uds: str | None = None) -> httpx2.AsyncClient:
        """The transport that the official client takes."""
        transport = httpx2.AsyncHTTPTransport(uds=uds) if uds else None
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {token}"}, transport=transport, timeout=10
        )

    @property
    def port(self) -> int:
        return int(self.bound.url.rpartition(":")[2])

    @contextmanager
    def acting(self, act: Callable[[Progress], Any]) -> Generator[None]:
        """Have every mutation await `act` meanwhile."""
        self.fleet.act = act
        yield
        self.fleet.act = None


def authenticate(token: str) -> Principal | None:
    return TOKENS.get(token)


@pytest.fixture
def web_settings(tmp_path: Path) -> Mapping[str, Any]:
    """Overridden by tests that need other settings."""
    return {
        "listen": "127.0.0.1:0",
        "service_socket": str(tmp_path / "service.sock"),
        "admin_socket": str(tmp_path / "admin.sock"),
        "version": "1.2.3",
        "grace_s": 1.0,
    }


@pytest.fixture
async def doors(web_settings: Mapping[str, Any], nursery: trio.Nursery) -> AsyncGenerator[Doors]:
    fleet, streams, stop, stopped = FleetDouble(), StreamDouble(), trio.Event(), trio.Event()

    async def run(*, task_status: trio.TaskStatus[Bound]) -> None:
        settings = WebSettings(**web_settings)
        await serve_web(settings, fleet, authenticate, streams, stop=stop, task_status=task_status)
        stopped.set()

    bound: Bound = await nursery.start(run)
    yield Doors(fleet, streams, bound, stop, stopped)
    stop.set()
    with trio.fail_after(10):
        await stopped.wait()
