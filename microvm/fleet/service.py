"""The fleet's own beginning and end: recover before anything listens; drain from the inside out.

`open_fleet` yields a fleet whose VMs are what the contract says they are after whatever the last run went
through. `drain` is the way out that loses nothing; leaving the context without it kills what runs, and the
next start says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import trio

from microvm.errors import HostError, MicrovmError
from microvm.fleet import layout
from microvm.fleet.driver import VmDriver
from microvm.fleet.effects import Parts
from microvm.fleet.fleet import Fleet
from microvm.fleet.image import Image
from microvm.fleet.layout import Layout
from microvm.fleet.live import Host
from microvm.fleet.log import log
from microvm.fleet.platforms import Engine, Engines, Older
from microvm.fleet.receipts import Receipts
from microvm.fleet.recover import recover
from microvm.fleet.room import Room
from microvm.fleet.templates import Templates, sweep_old
from microvm.host.cgroup import CgroupTree
from microvm.model import Quota, VmId, VmState
from microvm.policy import lifecycle, shutdown
from microvm.store import Store, checkpoint
from microvm.vmm.base import VmmKind

HOST_THREADS = 4
"""Fsyncs, clones and hashes at once: they share one volume, and more of them make each slower."""

SPACE_LOOK_S = 1.0
"""The reserve (1 GiB or more) must outlast this and a halt: guests here write some 100 MB/s."""

COMPACT_LOOK_S = 60.0
MAX_EXTENTS = 20_000
"""Cloning costs some 7 us an extent: 0.1 s at 16 000 (measured on XFS)."""

CONSOLE_CUT_S = 1.0
JOURNAL_KEPT_S = 7 * 86400.0
HOURLY_S = 3600.0


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What an operator decides of the fleet."""

    layout: Layout
    uid_base: int
    budget: Quota
    workspace_defaults: Quota


@contextlib.asynccontextmanager
async def open_fleet(
    settings: FleetSettings,
    store: Store,
    kind: VmmKind,
    cgroups: CgroupTree,
    image: Image,
    platform: checkpoint.Platform,
    older: Older | None = None,
    on_crash: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Fleet]:
    """Recovers, then yields a running fleet.

    Args:
        settings: What the operator decided.
        store: Open; stays the caller's.
        kind: Starts VMMs.
        cgroups: The instance's own tree, prepared.
        image: Verified; its base disk is on the volume.
        platform: What checkpoints made here are bound to.
        older: Finds the VMMs of checkpoints that an earlier image's VMM saved.
        on_crash: Called when one of the fleet's own services crashed: it asks for the drain. A crash never
            unwinds over VMs.

    Ownership: must be entered on the main thread. Leaving kills every VMM that still runs.
    """
    swept = await cgroups.sweep()
    if swept:
        log.warning("killed what the last run left", extra={"groups": swept})
    loaded = await store.load()
    settings.layout.claim(store.instance_id, has_vms=bool(loaded.vms))
    kept = await recover(store, loaded, settings.layout)
    await trio.to_thread.run_sync(sweep_old, settings.layout, image, platform)
    host = Host(settings.layout, kind, settings.uid_base, cgroups, trio.CapacityLimiter(HOST_THREADS))
    room = Room(
        settings.layout.vm_dir,
        settings.budget,
        settings.workspace_defaults,
        store.workspace,
        [record for record, _ in kept],
    )
    async with trio.open_nursery() as services:
        today = Engine(kind, platform)
        engines = Engines(today) if older is None else Engines(today, older)
        templates = Templates(host, image, platform, services)
        receipts = Receipts(store, services)
        await receipts.load(loaded.receipts)
        async with trio.open_nursery() as drivers:
            fleet = Fleet(Parts(host, image, templates, room, engines), store, receipts, services, drivers)
            room.idle, room.put_to_rest = _idle(fleet), _put_to_rest(fleet)
            for record, jobs in kept:
                fleet.start(fleet.adopt(record, jobs))
            for serve in (_cut_consoles, _watch_space, _compact, _prune):
                services.start_soon(_serve_guarded, serve, fleet, on_crash)
            yield fleet
            drivers.cancel_scope.cancel(reason="the service ends")
        await fleet.write_backlog()
        services.cancel_scope.cancel(reason="the service ends")


async def drain(fleet: Fleet, budget_s: float) -> None:
    """Checkpoints everything that runs, a few at a time; what is over `budget_s` is killed and failed.

    Requests must have ended or been cancelled by then; waiters get `draining` at once.
    """
    runner = _Drain(fleet, budget_s)
    await runner.run()


class _Drain:
    """Runs `policy.shutdown` for one fleet."""

    def __init__(self, fleet: Fleet, budget_s: float) -> None:
        self._fleet = fleet
        self._state = shutdown.Drain(budget_s)
        self._ended = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._tell(shutdown.Stop())
            for vm in self._fleet.vms.values():
                vm.driver.begin_drain()
            self._tell(shutdown.RequestsEnded(self._live()))
            while not self._ended.is_set():
                wake_at = self._state.wake_at
                with trio.move_on_at(wake_at if wake_at is not None else float("inf")):
                    await self._ended.wait()
                if not self._ended.is_set():
                    self._tell(shutdown.Tick(self._live()))
            nursery.cancel_scope.cancel(reason="the drain is over")

    def _live(self) -> tuple[VmId, ...]:
        live = [vm for vm in self._fleet.vms.values() if vm.driver.active]
        live.sort(key=lambda vm: -vm.jobs.active)
        return tuple(vm.driver.record.vm_id for vm in live)

    def _tell(self, event: shutdown.Event) -> None:
        self._state, effects = shutdown.decide(self._state, event, trio.current_time())
        for effect in effects:
            self._run(effect)

    def _run(self, effect: shutdown.Effect) -> None:
        match effect:
            case shutdown.StopAccepting() | shutdown.AnswerWaiters() | shutdown.CancelRequests():
                self._fleet.draining.set()
            case shutdown.CancelBuilds():
                self._fleet.parts.templates.drain()
            case shutdown.Save(vm_id):
                assert self._nursery is not None
                self._nursery.start_soon(self._save, vm_id)
            case shutdown.Kill(vm_id, reason):
                self._kill(vm_id, reason)
            case shutdown.StopServices():
                self._ended.set()

    async def _save(self, vm_id: VmId) -> None:
        vm = self._fleet.vms.get(vm_id)
        try:
            if vm is not None:
                await vm.driver.submit(lifecycle.Drain())
        except Exception as error:  # noqa: BLE001 - whatever it was, the drain of the others goes on
            log.error("not saved", extra={"vm_id": vm_id, "why": str(error)})
        self._tell(shutdown.Rested(vm_id))

    def _kill(self, vm_id: VmId, reason: str) -> None:
        vm = self._fleet.vms.get(vm_id)
        log.error("killed", extra={"vm_id": vm_id, "why": reason})
        if vm is not None:
            vm.driver.effects.kill()
            vm.driver.vmm_died(reason)


def _idle(fleet: Fleet) -> Callable[[], tuple[VmId, ...]]:
    def idle() -> tuple[VmId, ...]:
        overdue = [
            vm.driver
            for vm in fleet.vms.values()
            if vm.driver.overdue and vm.driver.record.state is VmState.RUNNING
        ]
        overdue.sort(key=lambda driver: driver.last_activity_at)
        return tuple(driver.record.vm_id for driver in overdue)

    return idle


def _put_to_rest(fleet: Fleet) -> Callable[[VmId], Awaitable[None]]:
    async def put_to_rest(vm_id: VmId) -> None:
        vm = fleet.vms.get(vm_id)
        if vm is not None:
            await vm.driver.rest_if_overdue()

    return put_to_rest


async def _serve_guarded(
    serve: Callable[[Fleet], Awaitable[None]], fleet: Fleet, on_crash: Callable[[], None]
) -> None:
    try:
        await serve(fleet)
    except* Exception as group:  # noqa: BLE001 - the top of a service: its crash asks for the drain
        log.exception("a service crashed", extra={"service": serve.__name__}, exc_info=group)
        on_crash()


async def _cut_consoles(fleet: Fleet) -> None:
    """Keeps console logs at 1 MiB: a guest writes to them at will."""
    while True:
        await trio.sleep(CONSOLE_CUT_S)
        for vm in list(fleet.vms.values()):
            if vm.driver.effects.live is not None:
                try:
                    layout.cut_console(vm.driver.effects.logs)
                except HostError as error:
                    log.error("console not cut", extra={"why": error.message})


async def _watch_space(fleet: Fleet) -> None:
    """Has running VMs stand still before the volume is full: a store that finds no block kills a VMM."""
    while True:
        await trio.sleep(SPACE_LOOK_S)
        try:
            low = fleet.parts.room.is_low
        except HostError as error:
            log.error("the volume cannot be looked at", extra={"why": error.message})
            continue
        if low:
            for vm in list(fleet.vms.values()):
                vm.driver.low_on_space()


async def _compact(fleet: Fleet) -> None:
    """Writes memfiles of sleeping VMs anew whose extents have become many, one at a time."""
    looked_at: dict[VmId, int] = {}
    while True:
        await trio.sleep(COMPACT_LOOK_S)
        for vm_id, vm in list(fleet.vms.items()):
            record = vm.driver.record
            asleep = record.state is VmState.HIBERNATED and not vm.driver.active
            if asleep and looked_at.get(vm_id) != record.checkpoint_generation:
                looked_at[vm_id] = record.checkpoint_generation
                await _compact_one(vm.driver)


async def _compact_one(driver: VmDriver) -> None:
    ram = driver.effects.directory / layout.RAM
    try:
        if await trio.to_thread.run_sync(layout.extents_of, ram) > MAX_EXTENTS:
            await driver.submit(lifecycle.Compact())
    except MicrovmError as error:
        log.warning("memfile not written anew", extra={"path": str(ram), "why": error.message})


async def _prune(fleet: Fleet) -> None:
    """Forgets closed journal entries after a week."""
    while True:
        try:
            await fleet.store.prune_journal(JOURNAL_KEPT_S)
        except HostError as error:
            log.error("journal not pruned", extra={"why": error.message})
        await trio.sleep(HOURLY_S)
