"""What a VM's driver can have done: create, pause, hibernate, wake, boot, power off, release, remove.

Each effect is one ordered procedure over files, a VMM and a guest (the orders are rulings of the contract and
are repeated at each). An effect returns the record's changes, or raises `EffectError`, which says whether
its point of no return had passed. Decisions are the driver's; this module must not choose what happens next.
It is longer than most so that the orders stand side by side: a step added to one is often owed to the next.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from microvm.agentlink import GuestHandler
from microvm.errors import GuestError, HostError, MicrovmError, VmmError, first_error
from microvm.fleet import layout
from microvm.fleet.image import Image
from microvm.fleet.jobs import JobTable
from microvm.fleet.live import BOOT_TIMEOUT_S, CLEANUP_TIMEOUT_S, Host, Live, open_live
from microvm.fleet.log import log
from microvm.fleet.platforms import Engine, Engines
from microvm.fleet.room import CHECKPOINT_BYTES, Room
from microvm.fleet.templates import FsyncError, Templates, save_checkpoint
from microvm.host.files import host_errors, rename_durably
from microvm.model import AgentGeneration, Generation, VmRecord, VmState
from microvm.policy import lifecycle
from microvm.policy.lifecycle import Effect
from microvm.store import checkpoint
from microvm.vmm.base import BootSource, VmmKind

HALT_FREEZE_S: Final = 1.0  # the volume fills meanwhile: the reserve must last
POWER_OFF_TIMEOUT_S: Final = 5.0  # the contract's bound on sync and power-off, then kill


class Turn(Protocol):
    """One run of an effect, as the driver offers it."""

    @property
    def record(self) -> VmRecord:
        """The VM's record as committed."""
        ...

    @property
    def before(self) -> VmState:
        """The state that the effect left."""
        ...

    async def commit(self, step: str, **changes: Any) -> None:
        """Writes a point of no return and its changes of the record, as one FULL commit."""
        ...


class EffectError(Exception):
    """An effect did not end well.

    Args:
        error: The cause.
        committed: Whether the point of no return had passed.
        guest_lost: Whether the VMM is dead or the guest may not run on.
        changes: What changed in the record nevertheless.
    """

    def __init__(
        self, error: MicrovmError, *, committed: bool = False, guest_lost: bool = False, **changes: Any
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.committed = committed
        self.guest_lost = guest_lost
        self.changes = changes


@dataclass(frozen=True, slots=True)
class Parts:
    """What all VMs' effects share."""

    host: Host
    image: Image
    templates: Templates
    room: Room
    engines: Engines


Changes = dict[str, Any]


@dataclass(slots=True, eq=False)
class Effects:
    """The effects of one VM.

    Attributes:
        live: The VM's live resources; None while it has none.
        death: How the VMM ended by itself; None once there is another.
    """

    parts: Parts
    record_id: VmRecord  # for ids and sizes, which never change
    jobs: JobTable
    on_guest_stream: GuestHandler | None = None  # set before the driver starts
    progress: Callable[[float, str], None] | None = None
    live: Live | None = None
    death: VmmError | None = None
    _engine: Engine | None = None  # what runs `live`
    _nursery: trio.Nursery | None = None
    _died: Callable[[str], None] | None = None
    _out_of_space: Callable[[], None] | None = None
    _closing: trio.Event = field(default_factory=trio.Event)

    @property
    def slot(self) -> int | None:
        """The slot that the VM holds while it is live."""
        return None if self.live is None else self.live.slot

    @property
    def directory(self) -> Path:
        """Where the VM's RAM, disk and checkpoint are."""
        return self.parts.host.layout.vm(self.record_id.vm_id)

    @property
    def logs(self) -> Path:
        """Where the VM's logs are."""
        return self.parts.host.layout.logs(self.record_id.vm_id)

    def attach(
        self, nursery: trio.Nursery, *, died: Callable[[str], None], out_of_space: Callable[[], None]
    ) -> None:
        """Gives the effects the driver's nursery and its ears; called once, before anything else."""
        self._nursery, self._died, self._out_of_space = nursery, died, out_of_space

    @property
    def _running_engine(self) -> Engine:
        return self._engine or self.parts.engines.today

    def kill(self) -> None:
        """Ends the VMM at once, which ends every wait on it."""
        if self.live is not None:
            self.live.ended.set()

    async def run(self, effect: Effect, turn: Turn) -> Changes:
        """Does what `effect` says.

        Returns:
            Changes of the record.

        Raises:
            EffectError: With what is true now.
        """
        work = {
            lifecycle.CREATE: self._create,
            lifecycle.PAUSE: self._pause,
            lifecycle.UNPAUSE: self._unpause,
            lifecycle.HALT: self._halt,
            lifecycle.COMPACT: self._compact,
            lifecycle.HIBERNATE: self._hibernate,
            lifecycle.WAKE: self._wake,
            lifecycle.BOOT: self._boot,
            lifecycle.POWER_OFF: self._power_off,
            lifecycle.RELEASE: self._release,
            lifecycle.REMOVE: self._remove,
        }[effect]
        error: MicrovmError
        try:
            return await work(turn)
        except* EffectError as group:
            failed: BaseException = group
            while isinstance(failed, BaseExceptionGroup):
                failed = failed.exceptions[0]
            raise failed from None
        except* MicrovmError as group:
            error = first_error(group)
        raise EffectError(error, guest_lost=self._is_dead())

    def _is_dead(self) -> bool:
        return self.live is None or self.live.vmm.exited.is_set()

    # ---- the VMM's life ----

    async def _start(self, *, boot: bool, slot: int | None = None, engine: Engine | None = None) -> Live:
        """Starts a VMM over the VM's files; it lives in a task of its own until `release`.

        Args:
            boot: Whether to boot the image's kernel; otherwise a checkpoint will be loaded.
            slot: Granted already; None asks for room.
            engine: What runs it; None for today's.
        """
        self._engine = engine or self.parts.engines.today
        assert self._nursery is not None
        assert self.live is None
        record = self.record_id
        if slot is None:
            slot = await self.parts.room.wake(record.vm_id, record.workspace_id)
        self._closing = trio.Event()
        self.death = None
        try:
            await self._nursery.start(self._hold, boot, slot)
        except BaseException:
            self.parts.room.rest(record.vm_id)
            raise
        live: Live | None = self.live
        assert live is not None
        return live

    async def _hold(self, boot: bool, slot: int, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: FBT001
        try:
            if boot:
                with self.parts.image.open_boot(self._running_engine.kind) as source:
                    await self._hold_live(source, slot, task_status)
            else:
                await self._hold_live(None, slot, task_status)
        except* MicrovmError as group:
            if self.live is None:
                raise  # not started: `nursery.start` hands this to the effect
            log.error("VMM left something behind", extra={"vm_id": self.record_id.vm_id}, exc_info=group)
        finally:
            self.live = None
            self.parts.room.rest(self.record_id.vm_id)
            self._closing.set()

    async def _hold_live(
        self, boot: BootSource | None, slot: int, task_status: trio.TaskStatus[None]
    ) -> None:
        record = self.record_id
        assert self._out_of_space is not None
        assert self.on_guest_stream is not None
        async with open_live(
            replace(self.parts.host, kind=self._running_engine.kind),
            label=record.vm_id,
            spec=record.spec,
            slot=slot,
            directory=self.directory,
            logs=self.logs,
            on_guest_stream=self.on_guest_stream,
            boot=boot,
        ) as live:
            self.live = live
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_death, live)
                nursery.start_soon(live.watch_space, self._out_of_space)
                await live.ended.wait()
                nursery.cancel_scope.cancel(reason="the VMM is released")

    async def _watch_death(self, live: Live) -> None:
        await live.vmm.exited.wait()
        assert self._died is not None
        self.death = live.death()
        self._died(self.death.message)

    async def release(self) -> None:
        """Ends the VMM and gives back all that the VM holds; nothing if it holds nothing."""
        if self.live is not None:
            self.live.ended.set()
            with trio.move_on_after(CLEANUP_TIMEOUT_S, shield=True):
                await self._closing.wait()

    # ---- effects ----

    async def _create(self, turn: Turn) -> Changes:
        """Template → reflink → load → run → become somebody. Nothing of a failed creation stays."""
        record = turn.record
        started = trio.current_time()
        async with self.parts.templates.lend(record.spec, self.progress) as template:
            resumed = trio.current_time()
            await trio.to_thread.run_sync(self._clone, template.directory, limiter=self.parts.host.limiter)
            live = await self._start(boot=False, slot=record.slot)
            state_fd = _open_state(template.directory, template.manifest)
        try:
            await live.vmm.load(state_fd)
        finally:
            os.close(state_fd)
        await live.cont()
        generation = AgentGeneration(record.agent_generation + 1)
        await live.greet(generation, machine_id=_machine_id(record), hostname=_hostname(record))
        ended = trio.current_time()
        return {
            "agent_generation": generation,
            "resume_ms": _ms(ended - resumed),
            "boot_ms": _ms(ended - started),
            "vmm": _vmm(self._running_engine.kind),
            "slot": live.slot,
        }

    def _clone(self, template: Path) -> None:
        with host_errors("make directory", self.directory):
            self.directory.mkdir(mode=0o700)
        for name in (layout.RAM, layout.DISK):
            layout.clone_file(template / name, self.directory / name)

    async def _pause(self, turn: Turn) -> Changes:
        live = self._running()
        try:
            await live.freeze_and_stop()
        except MicrovmError as error:
            raise await self._run_on_after(error, live, turn.record) from error
        self.jobs.freeze(frozen=True)
        return {}

    async def _halt(self, _turn: Turn) -> Changes:
        """Stops the vCPUs whatever the guest says: its next store could fail."""
        live = self._running()
        with trio.move_on_after(HALT_FREEZE_S):
            try:
                await live.link.freeze(timeout_s=HALT_FREEZE_S)
            except GuestError as error:
                log.warning("halted unfrozen", extra={"vm_id": self.record_id.vm_id, "why": error.message})
        await live.halt()
        self.jobs.freeze(frozen=True)
        return {}

    async def _unpause(self, turn: Turn) -> Changes:
        live = self._running()
        self.parts.room.check_write(CHECKPOINT_BYTES)  # else it would be stopped again at once
        generation = AgentGeneration(turn.record.agent_generation + 1)
        await self._run_on(live, generation)
        return {"agent_generation": generation}

    async def _run_on(self, live: Live, generation: AgentGeneration) -> None:
        """Runs a stopped guest; whatever fails here leaves a guest with a wrong clock, which may not run."""
        try:
            await live.cont()
            await live.greet(generation)
        except MicrovmError as error:
            raise EffectError(error, committed=True, guest_lost=True) from error
        self.jobs.freeze(frozen=False)

    async def _hibernate(self, turn: Turn) -> Changes:
        """Flush while running → freeze → stop → state, fsyncs, manifest (commit) → end the VMM.

        Whatever fails before the freeze has not touched the guest.
        """
        live = self._running()
        record = turn.record
        generation = Generation(record.checkpoint_generation + 1)
        was_running = turn.before is VmState.RUNNING
        self.parts.room.check_write(CHECKPOINT_BYTES, saves=True)
        if was_running:
            await self._flush(live)
        try:
            if was_running:
                await live.freeze_and_stop()
            await save_checkpoint(
                live,
                self.directory,
                owner=record.vm_id,
                generation=generation,
                spec=record.spec,
                platform=self._running_engine.platform,
            )
        except FsyncError as error:
            raise EffectError(error, guest_lost=True) from error
        except MicrovmError as error:
            if was_running or self._is_dead():
                raise await self._run_on_after(error, live, record) from error
            raise EffectError(error) from error  # paused as before
        self.jobs.freeze(frozen=True)
        await self.release()
        return {"checkpoint_generation": generation, "slot": None}

    async def _flush(self, live: Live) -> None:
        """Writes out what can be written while the guest runs, so that it stands still for a short time."""
        try:
            await live.flush_memory()
        except MicrovmError as error:
            raise EffectError(FsyncError(error), guest_lost=True) from error
        await live.sync_guest()

    async def _run_on_after(self, error: MicrovmError, live: Live, record: VmRecord) -> EffectError:
        """Lets a guest run on that could not be put to rest; answers with what to tell of it."""
        if self._is_dead():
            return EffectError(live.death(), guest_lost=True)
        generation = AgentGeneration(record.agent_generation + 1)
        await self._run_on(live, generation)
        return EffectError(error, agent_generation=generation)

    async def _wake(self, turn: Turn) -> Changes:
        """Verify → VMM, channel → load → spend → run → hello, clock, thaw.

        A failure before the checkpoint is spent changes nothing.
        """
        record = turn.record
        started = trio.current_time()
        engine = await self.parts.engines.of(checkpoint.read(self.directory))
        manifest = await trio.to_thread.run_sync(
            self._verify, record, engine.platform, limiter=self.parts.host.limiter
        )
        try:
            live = await self._start(boot=False, engine=engine)
            state_fd = _open_state(self.directory, manifest)
            try:
                await live.vmm.load(state_fd)
            finally:
                os.close(state_fd)
        except* MicrovmError as group:
            await self.release()
            raise EffectError(first_error(group)) from group
        generation = AgentGeneration(record.agent_generation + 1)
        try:
            await turn.commit("spent", spent_generation=manifest.generation, agent_generation=generation)
        except MicrovmError as error:
            await self.release()
            raise EffectError(error) from error
        await self._run_on(live, generation)
        self._drop_checkpoint(manifest)
        return {
            "resume_ms": _ms(trio.current_time() - started),
            "slot": live.slot,
            "vmm": _vmm(self._running_engine.kind),
        }

    def _verify(self, record: VmRecord, here: checkpoint.Platform) -> checkpoint.Manifest:
        try:
            ram_fd = layout.open_rw(self.directory / layout.RAM)
        except HostError as error:
            if error.errno != errno.ENOENT:
                raise
            raise checkpoint.CheckpointMismatchError("its memory is missing") from error
        try:
            disk_fd = layout.open_rw(self.directory / layout.DISK)
            try:
                return checkpoint.verify(
                    self.directory,
                    owner=record.vm_id,
                    generation=record.checkpoint_generation,
                    here=here,
                    ram_fd=ram_fd,
                    disk_fd=disk_fd,
                )
            finally:
                os.close(disk_fd)
        finally:
            os.close(ram_fd)

    def _drop_checkpoint(self, manifest: checkpoint.Manifest | None) -> None:
        """Removes a spent checkpoint's small files; if that fails, the store says that it is spent."""
        with contextlib.suppress(OSError):
            (self.directory / checkpoint.MANIFEST).unlink(missing_ok=True)
            if manifest is not None:
                (self.directory / manifest.state_file).unlink(missing_ok=True)

    async def _boot(self, turn: Turn) -> Changes:
        """From the disk, with empty RAM; what was in memory is gone, but not before there is room to boot."""
        record = turn.record
        await self.release()
        try:
            slot = await self.parts.room.wake(record.vm_id, record.workspace_id)
            try:
                await turn.commit("spent", spent_generation=record.checkpoint_generation)
            except BaseException:
                self.parts.room.rest(record.vm_id)
                raise
        except MicrovmError as error:
            raise EffectError(error) from error
        try:
            return await self._boot_empty(record, slot)
        except* MicrovmError as group:
            raise EffectError(first_error(group), committed=True) from group

    async def _boot_empty(self, record: VmRecord, slot: int) -> Changes:
        started = trio.current_time()
        try:
            self._drop_checkpoint(checkpoint.read(self.directory))
            ram = self.directory / layout.RAM
            _unlink(ram)
            layout.make_ram(ram, record.spec.memory_mib)
        except BaseException:
            self.parts.room.rest(record.vm_id)
            raise
        self.jobs.lose_active("the VM was booted from its disk")
        live = await self._start(boot=True, slot=slot)
        generation = AgentGeneration(record.agent_generation + 1)
        await live.vmm.boot()
        await live.greet(
            generation,
            machine_id=_machine_id(record),
            hostname=_hostname(record),
            timeout_s=BOOT_TIMEOUT_S,
        )
        return {
            "agent_generation": generation,
            "boot_ms": _ms(trio.current_time() - started),
            "slot": live.slot,
            "vmm": _vmm(self._running_engine.kind),
        }

    async def _compact(self, turn: Turn) -> Changes:
        """Copy RAM densely → fsync → manifest that knows both files → rename over the old one.

        Whatever the moment of a crash, the manifest knows the file that has the name.
        """
        record = turn.record
        self.parts.room.check_write(record.spec.memory_mib << 20)
        await trio.to_thread.run_sync(self._rewrite_ram, record, limiter=self.parts.host.limiter)
        return {}

    def _rewrite_ram(self, record: VmRecord) -> None:
        ram, work = self.directory / layout.RAM, self.directory / f"{layout.RAM}.new"
        manifest = checkpoint.read(self.directory)
        if manifest is None or manifest.generation != record.checkpoint_generation:
            return  # a wake will say what is wrong
        work.unlink(missing_ok=True)
        try:
            mark = layout.copy_densely(ram, work)
            checkpoint.commit(self.directory, replace(manifest, ram=mark, ram_before=manifest.ram))
            rename_durably(work, ram)
        finally:
            work.unlink(missing_ok=True)

    async def _power_off(self, turn: Turn) -> Changes:
        """Sync and power off, bounded; then kill."""
        live = self._running()
        changes: Changes = {}
        if turn.before is VmState.PAUSED:
            changes["agent_generation"] = AgentGeneration(turn.record.agent_generation + 1)
            await self._run_on(live, changes["agent_generation"])
        with trio.move_on_after(POWER_OFF_TIMEOUT_S), contextlib.suppress(GuestError):
            await live.link.poweroff(timeout_s=POWER_OFF_TIMEOUT_S)
            await live.vmm.exited.wait()
        self.jobs.lose_active("the VM was stopped")
        await self.release()
        self.death = None  # it was asked to end
        _unlink(self.directory / layout.RAM)
        return {**changes, "slot": None}

    async def _release(self, turn: Turn) -> Changes:
        await self.release()
        self.jobs.lose_active(turn.record.reason or "the VM was stopped")
        return {"slot": None}

    async def _remove(self, _turn: Turn) -> Changes:
        """Only forward: what cannot be removed now is removed at the next start."""
        await self.release()
        self.jobs.lose_active("the VM was destroyed")
        await trio.to_thread.run_sync(layout.remove_tree, self.directory, limiter=self.parts.host.limiter)
        await trio.to_thread.run_sync(layout.remove_tree, self.logs, limiter=self.parts.host.limiter)
        self.parts.room.release(self.record_id.vm_id)
        return {"slot": None}

    def _running(self) -> Live:
        if self.live is None:
            raise EffectError(MicrovmError("vm_failed", "The VM has no VMM."), guest_lost=True)
        return self.live


def _open_state(directory: Path, manifest: checkpoint.Manifest) -> int:
    path = directory / manifest.state_file
    with host_errors("open", path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _unlink(path: Path) -> None:
    with host_errors("unlink", path):
        path.unlink(missing_ok=True)


def _machine_id(record: VmRecord) -> str:
    """The same at every boot, whatever became of the guest's disk: the VM's id is random, and its own."""
    return hashlib.sha256(f"machine-id of {record.vm_id}".encode()).hexdigest()[:32]


def _hostname(record: VmRecord) -> str:
    return record.vm_id.replace("_", "-")  # RFC 1123 has no underscore


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _vmm(kind: VmmKind) -> dict[str, str]:
    return {
        "kind": kind.traits.kind,
        "accel": kind.accelerator.name,
        "version": kind.version,
        "closure": kind.closure_digest,
    }
