"""The service's life: check, recover, listen; and on the first SIGTERM stop listening, save everything, end.

    locks ► store ► image, closure, accelerator ► cgroups ► fleet (recovers) ► web (listens last)
    SIGTERM: web stops (5 s) ► template builds end ► VMs are checkpointed ► the rest

The second SIGTERM ends the process where it arrives. A crash of a part asks for the same way out; it never
unwinds over running VMs. This module wires and must not decide anything about VMs or requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Final

import trio

from microvm import __version__
from microvm.daemon import logs
from microvm.daemon.settings import Settings
from microvm.errors import MicrovmError, first_error
from microvm.fleet import (
    Fleet,
    FleetSettings,
    Image,
    Layout,
    open_fleet,
    open_image,
    place_base,
    verify_image,
)
from microvm.fleet.platforms import Engine
from microvm.fleet.room import BUILD_SLOT
from microvm.fleet.service import drain
from microvm.fleet.streams import Streams
from microvm.host.cgroup import CgroupTree, find_hierarchy
from microvm.host.clock import host_tsc_khz
from microvm.host.files import hold_lock, host_errors
from microvm.host.volume import check_reflink
from microvm.model import Quota
from microvm.store import Store, checkpoint, open_store
from microvm.vmm.kept import KeptClosures
from microvm.vmm.probe import ProbeGuest, choose_accelerator, identify_cpu
from microvm.vmm.qemu import QemuKind
from microvm.web.serve import serve_web
from microvm.web.server import Bound
from microvm.web.settings import WebSettings

log: Final = logging.getLogger("microvm.daemon")

WEB_GRACE_S: Final = 5.0  # long polls and stalled readers never end by themselves


@dataclass(frozen=True, slots=True)
class Running:
    """A service that accepts connections."""

    bound: Bound
    fleet: Fleet
    store: Store


async def run_service(
    settings: Settings, *, task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED
) -> None:
    """Runs the service until it is told to stop, and saves what runs.

    Must be called on the main thread: VMMs are started there and die with it.

    Raises:
        HostError: It cannot be started; the message says what to mend.
    """
    logs.configure(settings.log_level)
    failure: MicrovmError | None = None
    try:
        await _run(settings, task_status)
    except* MicrovmError as group:
        failure = first_error(group)
    if failure is not None:
        raise failure
    log.info("ended")


async def _run(settings: Settings, task_status: trio.TaskStatus[Running]) -> None:
    stop = trio.Event()
    with _signals(stop):
        async with _open_parts(settings, stop) as (fleet, store):
            async with trio.open_nursery() as nursery:
                bound = await nursery.start(_serve, settings, fleet, store, stop)
                _announce(settings, fleet, bound)
                task_status.started(Running(bound, fleet, store))
                await stop.wait()
                ends_at = trio.current_time() + settings.drain_seconds
                log.info("draining", extra={"vms": len(fleet.vms)})
                fleet.draining.set()
                fleet.parts.templates.drain()
            await drain(fleet, ends_at - trio.current_time())


async def _serve(
    settings: Settings, fleet: Fleet, store: Store, stop: trio.Event, *, task_status: trio.TaskStatus[Bound]
) -> None:
    """The doors; a crash of theirs asks for the drain."""
    web = WebSettings(
        listen=settings.listen,
        service_socket=str(settings.socket),
        admin_socket=str(settings.admin_socket),
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
        version=__version__,
        grace_s=WEB_GRACE_S,
    )
    bound: Bound | None = None
    try:
        async with trio.open_nursery() as nursery:
            serve = partial(serve_web, stop=stop, ready=lambda: not fleet.draining.is_set())
            bound = await nursery.start(serve, web, fleet, store.authenticate, Streams(fleet))
            assert bound is not None
            task_status.started(bound)
    except* Exception as group:
        if bound is None:
            raise
        log.exception("the web server crashed; saving everything and ending", exc_info=group)
        stop.set()


@contextlib.asynccontextmanager
async def _open_parts(settings: Settings, stop: trio.Event) -> AsyncGenerator[tuple[Fleet, Store]]:
    """Everything below the doors, in order; each check that fails says what to do."""
    places = Layout(settings.state_dir, settings.vm_dir)
    async with contextlib.AsyncExitStack() as stack:
        for directory in (settings.state_dir, settings.vm_dir):
            with host_errors("make directory", directory):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_reflink(settings.vm_dir)  # before anything is written: its volume may not be mounted
        for directory in (settings.state_dir, settings.vm_dir):
            stack.enter_context(hold_lock(directory / "service.lock"))
        places.prepare()
        with host_errors("make directory", settings.socket.parent):
            settings.socket.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        store = await stack.enter_async_context(open_store(settings.state_dir))
        image = open_image(settings.image)
        await trio.to_thread.run_sync(verify_image, image, settings.state_dir / "verified.json")
        await trio.to_thread.run_sync(place_base, image, places)
        tsc_khz = await trio.to_thread.run_sync(host_tsc_khz)
        cgroups = CgroupTree(find_hierarchy(), store.instance_id, settings.limits)
        cgroups.prepare()
        stack.push_async_callback(cgroups.remove)
        engines = _Engines(settings, image, cgroups, tsc_khz, stack)
        today = await engines.today()
        fleet = await stack.enter_async_context(
            open_fleet(
                FleetSettings(
                    layout=places,
                    uid_base=settings.uid_base,
                    budget=_host_budget(settings),
                    workspace_defaults=settings.workspace.quota,
                ),
                store,
                today.kind,
                cgroups,
                image,
                today.platform,
                older=engines.older,
                on_crash=stop.set,
            )
        )
        engines.sweep(fleet)
        yield fleet, store


class _Engines:
    """Opens closures: the image's, and kept ones that checkpoints of earlier images need.

    Ownership: what is opened stays open until `stack` ends.
    """

    def __init__(
        self,
        settings: Settings,
        image: Image,
        cgroups: CgroupTree,
        tsc_khz: int,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self._settings = settings
        self._image = image
        self._cgroups = cgroups
        self._tsc_khz = tsc_khz
        self._stack = stack
        self._kept = KeptClosures(settings.state_dir / "closures")

    async def today(self) -> Engine:
        """QEMU from the image's closure, with the accelerator that really runs guests here."""
        image = self._image
        await trio.to_thread.run_sync(
            partial(
                self._kept.keep,
                image.qemu_closure,
                image.qemu_digest,
                version=image.qemu_version,
                binary=image.qemu_binary,
            )
        )
        return await self._open(image.qemu_digest, "")

    async def older(self, digest: str) -> Engine | None:
        """The engine of a kept closure; None where it is not kept."""
        if not self._kept.has(digest):
            return None
        return await self._open(digest, f"-{digest[:12]}")

    def sweep(self, fleet: Fleet) -> None:
        """Forgets closures that no checkpoint needs any more."""
        needed = {vm.driver.record.vmm.get("closure", "") for vm in fleet.vms.values()}
        removed = self._kept.sweep(needed | {self._image.qemu_digest})
        if removed:
            log.info("closures removed", extra={"digests": removed})

    async def _open(self, digest: str, suffix: str) -> Engine:
        closure = self._stack.enter_context(self._kept.open(digest))
        state_dir = self._settings.state_dir
        async with self._cgroups.open_group(f"accelerator-probe{suffix}") as group:
            with self._image.open_parts() as (kernel_fd, initrd_fd):
                guest = ProbeGuest(
                    kernel_fd=kernel_fd,
                    initrd_fd=initrd_fd,
                    image_digest=self._image.digest,
                    directory=self._settings.vm_dir,
                    uid=self._settings.uid_base + BUILD_SLOT,
                    cgroup_fd=group.fd,
                    tsc_khz=self._tsc_khz,
                )
                accelerator = await choose_accelerator(
                    self._settings.accel, closure, guest, state_dir / f"accelerator{suffix}.json"
                )
                kind = QemuKind(closure, accelerator, self._tsc_khz)
                cpu = await identify_cpu(kind, guest, state_dir / f"cpu{suffix}.json")
        platform = checkpoint.Platform(
            vmm=kind.traits.kind,
            version=kind.version,
            closure=digest,
            accel=accelerator.name,
            cpu=cpu,
            tsc_khz=self._tsc_khz,
            image=self._image.digest,
        )
        return Engine(kind, platform)


def _host_budget(settings: Settings) -> Quota:
    """The host's bounds, with three quarters of its RAM and the volume's size where nothing was set."""
    ram_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    given = settings.quota
    return Quota(
        max_vms=given.max_vms,
        max_memory_mib=given.max_memory_mib or ram_mib * 3 // 4,
        max_storage_gib=given.max_storage_gib,
    )


def _announce(settings: Settings, fleet: Fleet, bound: Bound) -> None:
    """Says what an operator wants to see first."""
    kind = fleet.parts.host.kind
    log.info(
        "listening",
        extra={
            "url": bound.url,
            "socket": bound.service_socket,
            "vmm": f"{kind.traits.kind} {kind.version}",
            "accel": kind.accelerator.name,
            "accel_reason": kind.accelerator.reason,
            "image": fleet.parts.image.digest,
            "limits": settings.limits,
            "vms": len(fleet.vms),
        },
    )


@contextlib.contextmanager
def _signals(stop: trio.Event) -> Generator[None]:
    """First SIGTERM or SIGINT: `stop`. Second: the process ends in the handler, whatever Trio waits for."""
    token = trio.lowlevel.current_trio_token()
    asked = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        token.run_sync_soon(stop.set)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
