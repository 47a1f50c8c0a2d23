"""What streams ask of the fleet: transfers, changes, live output, and the end of a workspace's VMs.

Beside the calls of tools (`fleet`), with the same rule: ids are looked up in the caller's workspace. It must
not know HTTP. `web.streams.StreamApi` documents the calls; this satisfies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from functools import partial
from typing import Final

import trio

from microvm.errors import MicrovmError, RequestError
from microvm.fleet.events import Listener
from microvm.fleet.fleet import Fleet, Vm
from microvm.fleet.log import log
from microvm.fleet.work import GuestWork
from microvm.model import FileFacts, JobRecord, JobState, OutputPiece, Principal, VmId, WorkspaceId
from microvm.policy import lifecycle

PIECE_BYTES: Final = 65536
"""Of each stream at a time: a pipe's worth."""
FOLLOW_S: Final = 5.0
"""How long a follower waits before it asks the guest again by itself; the guest tells of growth for 15 s."""
REVOKED: Final = "the workspace was revoked and its VMs were stopped"
KILL_LOOK_S: Final = 0.05
KILL_S: Final = 40.0


class Follower:
    """A job's output as it comes.

    Attributes:
        job: The job as it was last heard of; at the end, as it ended.
    """

    def __init__(
        self, work: GuestWork, job: JobRecord, cursor: tuple[int, int], draining: trio.Event
    ) -> None:
        self.job = job
        self._work = work
        self._cursor = cursor
        self._draining = draining
        self._over = False

    async def next(self) -> list[OutputPiece]:
        """What came since; empty when nothing did for a while, or at the end (`over`).

        Raises:
            MicrovmError: It cannot be followed any further; `draining` when the service ends.
        """
        try:
            page = await self._work.output(
                self.job.job_id, self._cursor, PIECE_BYTES, FOLLOW_S, self._draining
            )
        except MicrovmError:
            self.job = self._work.job(self.job.job_id)
            if self.job.state is not JobState.LOST:
                raise
            self._over = True
            return []
        self.job = page.job
        self._over = page.complete == (True, True) or page.job.state is JobState.LOST
        pieces = [
            OutputPiece(number, offset, data)
            for number, offset, data in zip((1, 2), page.offset, page.data, strict=True)
            if data
        ]
        self._cursor = (page.offset[0] + len(page.data[0]), page.offset[1] + len(page.data[1]))
        return pieces

    @property
    def over(self) -> bool:
        """Whether the job has ended and all that was kept was given."""
        return self._over


class Streams:
    """The streams of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def _awake(self, p: Principal, vm_id: str) -> Vm:
        vm = self._fleet.vm_of(p, vm_id)
        self._fleet.refuse_when_draining()
        return vm

    async def look(self, p: Principal, vm_id: str, path: str) -> FileFacts:
        """What a file is now."""
        return await self._awake(p, vm_id).transfers.look(path)

    @contextlib.asynccontextmanager
    async def read_file(
        self, p: Principal, vm_id: str, path: str, *, offset: int, length: int, tag: str
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """The bytes of a file."""
        transfers = self._awake(p, vm_id).transfers
        async with transfers.read_file(path, offset=offset, length=length, tag=tag) as data:
            yield data

    @contextlib.asynccontextmanager
    async def read_archive(self, p: Principal, vm_id: str, path: str) -> AsyncGenerator[AsyncIterator[bytes]]:
        """A directory as a tar archive."""
        async with self._awake(p, vm_id).transfers.read_archive(path) as data:
            yield data

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
        """Replaces a file when the whole body is there."""
        transfers = self._awake(p, vm_id).transfers
        return await transfers.write_file(path, body, size=size, mode=mode, make_parents=make_parents)

    async def write_archive(
        self, p: Principal, vm_id: str, path: str, body: AsyncIterable[bytes], *, size: int | None
    ) -> int:
        """Puts what a tar archive holds into a directory when all of it is there."""
        return await self._awake(p, vm_id).transfers.write_archive(path, body, size=size)

    def listen(self, p: Principal, *, all_workspaces: bool, after: int | None) -> Listener:
        """Changes of VMs and jobs."""
        if all_workspaces and not p.operator:
            raise RequestError("forbidden", "all=1 needs an operator's token.")
        return self._fleet.events.listen(None if all_workspaces else p.workspace_id, after)

    def follow(self, p: Principal, vm_id: str, job_id: str, cursor: tuple[int, int]) -> Follower:
        """A job's output from `cursor` on."""
        vm = self._fleet.vm_of(p, vm_id)
        return Follower(vm.work, vm.jobs.get(job_id), cursor, self._fleet.draining)

    async def end_workspace(self, workspace_id: WorkspaceId, *, destroy: bool) -> list[VmId]:
        """Kills the VMMs of a workspace that was revoked, at once; with `destroy` its VMs go, too.

        Returns:
            The VMs that were stopped, or destroyed.

        Cancellation: ends the wait; what was begun goes on.
        """
        vms = [vm for vm in self._fleet.vms.values() if vm.driver.record.workspace_id == workspace_id]
        ended: list[VmId] = []
        async with trio.open_nursery() as nursery:
            for vm in vms:
                vm.driver.begin_drain()  # what waits for a wake is refused
                nursery.start_soon(partial(self._end, vm, ended, destroy=destroy))
        return ended

    async def _end(self, vm: Vm, ended: list[VmId], *, destroy: bool) -> None:
        vm_id = vm.driver.record.vm_id
        if destroy:
            try:
                await self._fleet.detached(lambda: vm.driver.submit(lifecycle.Destroy()))
            except MicrovmError as error:
                log.error("not destroyed", extra={"vm_id": vm_id, "why": error.message})
                return
            ended.append(vm_id)
            return
        killed: object = None
        with trio.move_on_after(KILL_S):
            while vm.driver.active:
                live = vm.driver.effects.live
                if live is not None and live is not killed:
                    killed = live
                    vm.driver.effects.kill()
                    vm.driver.vmm_died(REVOKED)
                await trio.sleep(KILL_LOOK_S)
        if killed is not None:
            ended.append(vm_id)
