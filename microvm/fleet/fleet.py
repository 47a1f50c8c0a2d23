"""The fleet: all VMs of a service, behind the calls that tools make.

Every id is looked up in the caller's workspace, and somebody else's gets the very answer of one that never
existed. Mutations run in the fleet's own nursery: a caller that goes away ends its waiting, never the work.
What a VM goes through is its driver's business and what happens inside a guest is `work`'s; this module must
not change a VM's state or touch its files.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import outcome
import trio
from pydantic import TypeAdapter

from microvm.errors import CapacityError, HostError, MicrovmError, RequestError
from microvm.fleet import layout
from microvm.fleet.driver import VmDriver
from microvm.fleet.effects import Effects, Parts
from microvm.fleet.events import Events
from microvm.fleet.jobs import JobTable
from microvm.fleet.journal import VmJournal
from microvm.fleet.log import log
from microvm.fleet.receipts import Begun, Receipts
from microvm.fleet.transfer import Transfers
from microvm.fleet.work import GuestWork
from microvm.model import (
    ExecSpec,
    FileChunk,
    JobId,
    JobRecord,
    OutputPage,
    Principal,
    SuspendMode,
    VmId,
    VmRecord,
    VmSpec,
    VmState,
    VmView,
)
from microvm.policy import lifecycle
from microvm.store import Store, new_vm_id, writes

T = TypeVar("T")
Progress = Callable[[float, str], None]

LONGEST_ANSWER_S: Final = 50.0
"""A creation or wake that takes longer answers with the VM as it is by then: any answer stays under 60 s."""

VM_JSON: Final = TypeAdapter(VmRecord)


@dataclass(slots=True, eq=False)
class Vm:
    """One VM in the fleet: its driver, its jobs, and what calls do in its guest."""

    driver: VmDriver
    jobs: JobTable
    work: GuestWork
    transfers: Transfers


@dataclass(slots=True, eq=False)
class Fleet:
    """All VMs of one service; made by `open_fleet`.

    It satisfies `catalogue.api.FleetApi`, which documents the calls.
    """

    parts: Parts
    store: Store
    receipts: Receipts
    nursery: trio.Nursery
    drivers: trio.Nursery
    draining: trio.Event = field(default_factory=trio.Event)
    events: Events = field(default_factory=Events)
    vms: dict[VmId, Vm] = field(default_factory=dict[VmId, Vm])
    _backlog: dict[JobId, writes.Write[Any]] = field(default_factory=dict[JobId, "writes.Write[Any]"])
    _writing: trio.Lock = field(default_factory=trio.Lock)

    # ---- looking ----

    def list_vms(self, p: Principal, *, all_workspaces: bool) -> list[VmView]:
        """The workspace's VMs, oldest first; everybody's for an operator who asks."""
        if all_workspaces and not p.operator:
            raise RequestError("forbidden", "all=true needs an operator's token.")
        return [
            self._view(vm)
            for vm in self.vms.values()
            if not vm.driver.gone.is_set()
            and (all_workspaces or vm.driver.record.workspace_id == p.workspace_id)
        ]

    def status(self, p: Principal, vm_id: str) -> tuple[VmView, list[JobRecord]]:
        """A VM and its jobs; an operator may look at others' VMs."""
        vm = self.vm_of(p, vm_id, operator_may=True)
        return self._view(vm), vm.jobs.list()

    def vm_of(self, p: Principal, vm_id: str, *, operator_may: bool = False) -> Vm:
        """The caller's VM; somebody else's and one that never was are the same `not_found`."""
        vm = self.vms.get(VmId(vm_id))
        if vm is not None and not vm.driver.gone.is_set():
            mine = vm.driver.record.workspace_id == p.workspace_id
            if mine or (operator_may and p.operator):
                return vm
        raise RequestError("not_found", "There is no VM with this id; vm_list shows yours.")

    def _is_in(self, vm_id: str, *states: VmState) -> bool:
        vm = self.vms.get(VmId(vm_id))
        return vm is not None and vm.driver.record.state in states

    def _view(self, vm: Vm) -> VmView:
        record = vm.driver.record
        directory = self.parts.host.layout.vm(record.vm_id)
        live = vm.driver.effects.live
        used = layout.used_bytes(directory / layout.DISK)
        return VmView(
            record=record.with_(last_activity_at=vm.driver.last_activity_at),
            disk_used_mib=round(used / (1 << 20), 1),
            hibernates_at=vm.driver.hibernates_at,
            pid=None if live is None else live.vmm.pid,
        )

    # ---- a VM's life ----

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
        """Makes a VM from its template, which is built first where it is the first of its kind."""
        now = time.time()
        record = VmRecord(
            vm_id=new_vm_id(),
            workspace_id=p.workspace_id,
            state=VmState.CREATING,
            since=now,
            created_at=now,
            last_activity_at=now,
            spec=VmSpec(
                spec.memory_mib, spec.vcpus, spec.network, self.parts.image.disk_gib, self.parts.image.digest
            ),
            description=description,
            idle_seconds=idle_seconds,
            idle_mode=idle_mode,
            env=dict(env),
        )

        async def work(begun: Begun) -> dict[str, Any]:
            vm = await self._admit(record, begun, progress)
            await vm.driver.submit(lifecycle.Resume())
            return _answer(vm.driver.record)

        async def once() -> VmView:
            done = await self.receipts.once(p.workspace_id, request_id, "vm_create", arguments, work)
            return self._replay(done.answer)

        return await self.detached(once, late=lambda: self._late(record))

    async def _admit(self, record: VmRecord, begun: Begun, progress: Progress) -> Vm:
        """Reserves room, commits the receipt, the row and the intent, and starts the driver."""
        self.refuse_when_draining()
        slot = self.parts.room.create(record.vm_id, record.workspace_id, record.spec)
        try:
            record = record.with_(slot=slot)
            _, intent = await begun.commit(
                writes.insert_vm(record),
                writes.intent(record.vm_id, lifecycle.CREATE.name, None, time.time()),
            )
        except BaseException:
            self.parts.room.release(record.vm_id)
            raise
        vm = self.adopt(record, [])
        vm.driver.effects.progress = progress
        self.drivers.start_soon(self._drive, vm, intent)
        return vm

    def adopt(self, record: VmRecord, jobs: list[JobRecord]) -> Vm:
        """Takes a VM into the fleet; its driver is started by the caller."""
        table = JobTable(
            record.vm_id,
            self.parts.host.layout.logs(record.vm_id) / "jobs",
            jobs,
            save=lambda job: self._later(job.job_id, writes.put_job(job)),
            forget=lambda job_id: self._later(job_id, writes.remove_jobs([job_id])),
        )
        effects = Effects(self.parts, record, table)
        driver = VmDriver(record, VmJournal(self.store), effects)
        vm = Vm(driver, table, GuestWork(driver, table, self.nursery), Transfers(driver))
        table.changed = lambda job: self.events.publish(record.workspace_id, job)
        driver.changed = lambda: self.events.publish(record.workspace_id, self._view(vm))
        effects.on_guest_stream = vm.work.on_guest_call
        self.vms[record.vm_id] = vm
        return vm

    def start(self, vm: Vm) -> None:
        """Runs the driver of a VM that exists already."""
        self.drivers.start_soon(self._drive, vm, None)

    async def _drive(self, vm: Vm, create_intent: int | None) -> None:
        """A crash in one VM's driver ends that VM, never the service."""
        vm_id = vm.driver.record.vm_id
        try:
            await vm.driver.serve(create_intent=create_intent)
        except* Exception as group:  # noqa: BLE001 - the top of one VM: its crash ends this VM only
            log.exception("a VM's driver crashed", extra={"vm_id": vm_id}, exc_info=group)
            with trio.CancelScope(shield=True):
                await vm.driver.bury("the service failed while driving this VM; see its log")
        if vm.driver.gone.is_set():
            self.vms.pop(vm_id, None)

    async def suspend(
        self, p: Principal, vm_id: str, *, mode: SuspendMode, force: bool, progress: Progress
    ) -> VmView:
        """Pauses or hibernates; a VM that is there already is the answer."""
        progress(0.0, f"suspending ({mode})")
        return await self._transition(self.vm_of(p, vm_id), lifecycle.Suspend(mode, force))

    async def resume(
        self, p: Principal, vm_id: str, *, cold_boot: bool, discard_memory: bool, progress: Progress
    ) -> VmView:
        """Brings a VM to `running`."""
        vm = self.vm_of(p, vm_id)
        self.refuse_when_draining()
        progress(0.0, "booting from the disk" if cold_boot else "resuming")
        return await self._transition(vm, lifecycle.Resume(cold_boot, discard_memory))

    async def destroy(self, p: Principal, vm_id: str) -> None:
        """Removes a VM and all that belongs to it; wins over whatever is under way."""
        vm = self.vm_of(p, vm_id)
        await self.detached(lambda: vm.driver.submit(lifecycle.Destroy()))

    async def _transition(self, vm: Vm, event: lifecycle.Event) -> VmView:
        async def work() -> VmView:
            await vm.driver.submit(event)
            return self._view(vm)

        return await self.detached(work, late=lambda: self._view(vm))

    def _replay(self, answer: dict[str, Any]) -> VmView:
        """The VM of a recorded answer as it is now, or as it was when it is gone."""
        record = VM_JSON.validate_python(answer)
        vm = self.vms.get(record.vm_id)
        return VmView(record, 0.0) if vm is None else self._view(vm)

    def _late(self, record: VmRecord) -> VmView:
        vm = self.vms.get(record.vm_id)
        if vm is None:
            raise CapacityError("no_capacity", "The creation takes long; retry with the same request_id.")
        return self._view(vm)

    # ---- work in a guest ----

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
        """Starts a command once; with the first page when it ended within `wait_seconds`."""
        if self._is_in(vm_id, VmState.HIBERNATED, VmState.PAUSED):
            progress(0.0, "waking the VM")

        async def work(begun: Begun) -> dict[str, Any]:
            self.refuse_when_draining()
            return await self.vm_of(p, vm_id).work.start(spec, begun)

        async def once() -> JobRecord:
            done = await self.receipts.once(
                p.workspace_id, request_id, "vm_exec", {**arguments, "vm_id": vm_id}, work
            )
            return GuestWork.recorded(done.answer)

        job = await self.detached(once)
        vm = self.vms.get(VmId(vm_id))
        if vm is None:
            return job, None  # a replay after the VM is gone: the recorded answer
        return await vm.work.wait_first_page(job, wait_seconds, self.draining)

    async def job_status(self, p: Principal, vm_id: str, job_id: str, *, wait_seconds: float) -> JobRecord:
        """The job; wakes nothing."""
        vm = self.vm_of(p, vm_id)
        vm.jobs.get(job_id)
        return await vm.work.wait_end(job_id, wait_seconds, self.draining)

    async def job_cancel(self, p: Principal, vm_id: str, job_id: str) -> JobRecord:
        """Kills what is left of a job."""
        vm = self.vm_of(p, vm_id)
        vm.jobs.get(job_id)
        return await self.detached(lambda: vm.work.cancel(job_id))

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
        """Retained output from `cursor` on."""
        vm = self.vm_of(p, vm_id)
        vm.jobs.get(job_id)
        return await vm.work.output(job_id, cursor, max_bytes, wait_seconds, self.draining)

    async def read_file(self, p: Principal, vm_id: str, path: str, *, offset: int, length: int) -> FileChunk:
        """A part of a file below /workspace."""
        vm = self.vm_of(p, vm_id)
        return await self.detached(lambda: vm.work.read_file(path, offset, length))

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
        """Writes a file below /workspace."""
        vm = self.vm_of(p, vm_id)
        return await self.detached(
            lambda: vm.work.write_file(
                path, content, offset=offset, truncate=truncate, mode=mode, make_parents=make_parents
            )
        )

    # ---- inside ----

    def refuse_when_draining(self) -> None:
        """Raises `draining` once the service ends."""
        if self.draining.is_set():
            raise CapacityError(
                "draining", "The service is shutting down; try again when it is back.", retry_after_s=10.0
            )

    async def detached(self, work: Callable[[], Awaitable[T]], *, late: Callable[[], T] | None = None) -> T:
        """Runs `work` in the fleet's nursery and waits for it.

        Args:
            work: Goes on when the caller is cancelled.
            late: What is answered when the work takes longer than any answer may; None to wait on.
        """
        done = trio.Event()
        result: list[outcome.Outcome[T]] = []

        async def run() -> None:
            try:
                captured = await outcome.acapture(work)
                if isinstance(captured, outcome.Error) and not isinstance(captured.error, Exception):
                    raise captured.error  # the service ends: this is the nursery's, not the caller's
                result.append(captured)
            finally:
                done.set()

        self.nursery.start_soon(run)
        with trio.move_on_after(LONGEST_ANSWER_S if late else float("inf")):
            await done.wait()
        if result:
            return result[0].unwrap()
        if not done.is_set() and late is not None:
            return late()
        self.refuse_when_draining()
        raise MicrovmError("internal", "The service failed during this call; see its log.")

    def _later(self, job_id: JobId, write: writes.Write[Any]) -> None:
        """Commits a job's newest change, which nobody waits for.

        Only the newest: a guest that tells news faster than the disk takes them must not fill the memory.
        """
        idle = not self._backlog
        self._backlog[job_id] = write
        if idle:
            self.nursery.start_soon(self.write_backlog)

    async def write_backlog(self) -> None:
        """Commits what is left, one after another: two changes of one job must not change places."""
        async with self._writing:
            while self._backlog:
                try:
                    await self.store.commit(self._backlog.pop(next(iter(self._backlog))))
                except HostError as error:
                    log.error("job not recorded", extra={"why": error.message})


def _answer(record: VmRecord) -> dict[str, Any]:
    """A record as a receipt keeps it: without the values of its environment, which are secret."""
    answer: dict[str, Any] = VM_JSON.dump_python(record.with_(env={}), mode="json")
    return answer
