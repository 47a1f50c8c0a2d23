"""Templates: machines that were booted once, so that creating a VM is a reflink and a resume.

One template exists per image x VMM closure x accelerator x memory x vCPUs x network. The first creation of an
unseen combination waits for its build; others that want the same one wait for the same build. Nothing of a
workspace is
ever in a template: it is booted, its supervisor answers, the no-op command is run once so that the first real
command finds its programs in memory, and it is saved. This module must not know VMs or workspaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from microvm.agentlink import GuestCall
from microvm.errors import CapacityError, MicrovmError, first_error
from microvm.fleet import layout
from microvm.fleet.image import Image
from microvm.fleet.live import BOOT_TIMEOUT_S, CALL_TIMEOUT_S, Host, Live, open_live
from microvm.fleet.log import log
from microvm.fleet.room import BUILD_SLOT
from microvm.host.files import fsync_directory, host_errors
from microvm.model import AgentGeneration, VmSpec
from microvm.policy import templates as policy
from microvm.store import checkpoint

TEMPLATE_GENERATION: Final = 1


@dataclass(frozen=True, slots=True)
class Template:
    """A template that VMs can be made from."""

    key: str
    directory: Path
    manifest: checkpoint.Manifest


class _Waiter:
    """One request that waits for a template."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.error: MicrovmError | None = None


class Templates:
    """The templates of one service; `policy.templates` is the ledger.

    Args:
        host: What builds run on.
        image: What they boot.
        platform: What their checkpoints are bound to.
        nursery: Owns the builds.
    """

    def __init__(
        self, host: Host, image: Image, platform: checkpoint.Platform, nursery: trio.Nursery
    ) -> None:
        self._host = host
        self._image = image
        self._platform = platform
        self._nursery = nursery
        self._specs: dict[str, VmSpec] = {}
        self._ready = self._find()
        self._ledger = policy.restart(self._ready, time.time())
        self._set_aside = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._next_waiter = 0
        self._builds: dict[str, trio.CancelScope] = {}
        self._one_at_a_time = trio.Lock()

    def key(self, spec: VmSpec) -> str:
        """The name of the template for `spec`: a digest of everything that it depends on."""
        facts = {
            "image": self._image.digest,
            "closure": self._platform.closure,
            "accel": self._platform.accel,
            "cpu": self._platform.cpu,
            "memory_mib": spec.memory_mib,
            "vcpus": spec.vcpus,
            "network": spec.network,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    @contextlib.asynccontextmanager
    async def lend(
        self, spec: VmSpec, progress: Callable[[float, str], None] | None = None
    ) -> AsyncGenerator[Template]:
        """The template for `spec`, built now if there is none yet; it stays until the block ends.

        Raises:
            MicrovmError: The build failed; nothing of it is left and the next call builds anew.
            CapacityError: `draining`.

        Cancellation: ends the wait; the build goes on for the others.
        """
        key = self.key(spec)
        self._specs[key] = spec
        while True:
            await self._wait_grant(key, progress)
            if self._read(key) is not None:
                break
            log.error("template damaged, to be built anew", extra={"template": key})
            self._tell(policy.Retire(key))
            self._tell(policy.Done(key))
        try:
            yield self._ready[key]
        finally:
            self._tell(policy.Done(key))

    async def _wait_grant(self, key: str, progress: Callable[[float, str], None] | None) -> None:
        """Returns when the template is there and in use, which `Done` ends."""
        number, waiter = self._next_waiter, _Waiter()
        self._next_waiter += 1
        self._waiters[number] = waiter
        self._tell(policy.Want(key, number))
        if not waiter.answered.is_set() and progress is not None:
            progress(0.0, "building the template for machines of this size; later creations skip this")
        try:
            await waiter.answered.wait()
        except trio.Cancelled:
            # A grant that came with the cancellation counts: the template is not in use any more.
            self._tell(
                policy.Done(key) if self._waiters.pop(number, None) is None else policy.Leave(key, number)
            )
            raise
        if waiter.error is not None:
            raise waiter.error

    def drain(self) -> None:
        """Ends all builds and refuses new ones; their waiters get `draining`."""
        self._tell(policy.Drain())

    def _tell(self, event: policy.Event) -> None:
        self._ledger, effects = policy.decide(self._ledger, event, time.time())
        for effect in effects:
            self._run(effect)

    def _run(self, effect: policy.Effect) -> None:
        match effect:
            case policy.Build(key):
                self._builds[key] = trio.CancelScope()
                self._nursery.start_soon(self._run_build, key)
            case policy.CancelBuild(key):
                self._builds[key].cancel(reason="the service is draining")
            case policy.Grant(_, number):
                self._waiters.pop(number).answered.set()
            case policy.Deny(number, code, message):
                waiter = self._waiters.pop(number)
                waiter.error = (
                    CapacityError(code, message) if code == "draining" else MicrovmError(code, message)
                )
                waiter.answered.set()
            case policy.Destroy(key):
                self._ready.pop(key, None)
                self._destroy(key)

    def _destroy(self, key: str) -> None:
        """Frees the template's name at once, for the next build, and its files in a thread."""
        path = self._host.layout.template(key)
        aside = path.with_name(f"{key}.{next(self._set_aside)}")
        try:
            with host_errors("rename", path):
                os.rename(path, aside)
        except MicrovmError as error:
            log.error("template not removed", extra={"template": key, "why": error.message})
            return
        self._nursery.start_soon(self._remove, aside)

    async def _remove(self, path: Path) -> None:
        try:
            await trio.to_thread.run_sync(layout.remove_tree, path)
        except MicrovmError as error:
            log.error("template not removed", extra={"template": path.name, "why": error.message})

    async def _run_build(self, key: str) -> None:
        reason = "it was cancelled"
        with self._builds[key]:
            try:
                async with self._one_at_a_time:
                    if policy.is_wanted(self._ledger, key):
                        self._ready[key] = await self._build(key, self._specs[key])
                        reason = ""
            except* MicrovmError as group:
                reason = first_error(group).message
                log.error("template not built", extra={"template": key, "why": reason})
            except* Exception as group:  # noqa: BLE001 - the top of a build: its crash ends the build only
                reason = "the service failed; see its log"
                log.exception("template build crashed", extra={"template": key}, exc_info=group)
        del self._builds[key]
        self._tell(policy.BuildFailed(key, reason) if reason else policy.Built(key))

    def _find(self) -> dict[str, Template]:
        """What earlier runs left and is whole, oldest first; what was being built or removed is removed."""
        found: list[tuple[float, Template]] = []
        for path in list((self._host.layout.vm_dir / "templates").iterdir()):
            try:
                template = None if path.suffix else self._load(path.name)
                if template is not None:
                    found.append((path.stat().st_mtime, template))
                elif path.suffix:
                    layout.remove_tree(path)
            except (MicrovmError, OSError) as error:
                log.error("template not loaded", extra={"template": path.name, "why": str(error)})
        return {template.key: template for _, template in sorted(found, key=lambda each: each[0])}

    def _load(self, key: str) -> Template | None:
        """A template of an earlier run, if it is whole and fits this host; else it is removed."""
        template = self._read(key)
        if template is None:
            layout.remove_tree(self._host.layout.template(key))
        return template

    def _read(self, key: str) -> Template | None:
        """The template as it lies on the volume, if it is whole and fits this host."""
        directory = self._host.layout.template(key)
        with contextlib.ExitStack() as stack:
            try:
                ram_fd, disk_fd = (
                    stack.enter_context(_opened(directory / name)) for name in (layout.RAM, layout.DISK)
                )
                manifest = checkpoint.verify(
                    directory,
                    owner=key,
                    generation=TEMPLATE_GENERATION,
                    here=self._platform,
                    ram_fd=ram_fd,
                    disk_fd=disk_fd,
                )
            except MicrovmError as error:
                log.warning("template discarded", extra={"template": key, "why": error.message})
                return None
        return Template(key, directory, manifest)

    async def _build(self, key: str, spec: VmSpec) -> Template:
        started = trio.current_time()
        final = self._host.layout.template(key)
        work = final.with_name(f"{key}.building")
        layout.remove_tree(work)
        try:
            with host_errors("make directory", work):
                work.mkdir(mode=0o700)
            await trio.to_thread.run_sync(
                layout.clone_file,
                self._host.layout.image(self._image.digest),
                work / layout.DISK,
                limiter=self._host.limiter,
            )
            layout.make_ram(work / layout.RAM, spec.memory_mib)
            with self._image.open_boot(self._host.kind) as boot:
                async with open_live(
                    self._host,
                    label=f"template-{key[:12]}",
                    spec=spec,
                    slot=BUILD_SLOT,
                    directory=work,
                    logs=work,
                    on_guest_stream=_no_guest_streams,
                    boot=boot,
                ) as live:
                    await live.vmm.boot()
                    await live.greet(AgentGeneration(1), timeout_s=BOOT_TIMEOUT_S)
                    await live.link.noop(timeout_s=CALL_TIMEOUT_S)
                    await live.link.sync(timeout_s=CALL_TIMEOUT_S)
                    await live.freeze_and_stop()
                    manifest = await save_checkpoint(
                        live,
                        work,
                        owner=key,
                        generation=TEMPLATE_GENERATION,
                        spec=spec,
                        platform=self._platform,
                    )
            (work / layout.CONSOLE).unlink(missing_ok=True)
            with host_errors("rename", final):
                os.rename(work, final)
                fsync_directory(final.parent)
        except BaseException:
            layout.remove_tree(work)
            raise
        log.info(
            "template built",
            extra={
                "template": key,
                "memory_mib": spec.memory_mib,
                "vcpus": spec.vcpus,
                "seconds": round(trio.current_time() - started, 2),
            },
        )
        return Template(key, final, manifest)


def sweep_old(places: layout.Layout, image: Image, platform: checkpoint.Platform) -> list[Path]:
    """Removes templates and base disks of earlier images and VMMs; for the start, when nobody uses one.

    VMs' disks are clones and need neither.

    Returns:
        What was removed.
    """
    old = [path for path in (places.vm_dir / "images").iterdir() if path != places.image(image.digest)]
    for path in (places.vm_dir / "templates").iterdir():
        manifest = checkpoint.read(path)
        if (
            manifest is None
            or manifest.platform.image != image.digest
            or manifest.platform.closure != platform.closure
        ):
            old.append(path)
    for path in old:
        try:
            layout.remove_tree(path) if path.is_dir() else path.unlink()
            log.info("removed what an earlier image left", extra={"path": str(path)})
        except (MicrovmError, OSError) as error:
            log.error("not removed", extra={"path": str(path), "why": str(error)})
    return old


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int]:
    with host_errors("open", path):  # for reading: on a read-only volume it is as whole as ever
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


async def save_checkpoint(
    live: Live, directory: Path, *, owner: str, generation: int, spec: VmSpec, platform: checkpoint.Platform
) -> checkpoint.Manifest:
    """Saves a stopped VM's device state beside its RAM and disk and commits the manifest.

    When this returns the checkpoint survives a power loss. The order is fixed: state, fsync of state, RAM and
    disk, then the manifest's rename.

    Raises:
        FsyncError: RAM or disk may have lost data: the VM must not run on.
        VmmError, HostError: Nothing is committed; the state file is gone.
    """
    path = directory / checkpoint.state_name(generation)
    path.unlink(missing_ok=True)
    state_fd = layout.create_private(path)
    try:
        await live.vmm.save(state_fd)
        # In a thread: it waits for what other VMs write to the volume, and nobody else should.
        sha256, size = await trio.to_thread.run_sync(_seal_state, path, state_fd, limiter=live.host.limiter)
        try:
            await live.sync_memory()
        except MicrovmError as error:
            raise FsyncError(error) from error
        manifest = checkpoint.Manifest(
            owner=owner,
            generation=generation,
            memory_mib=spec.memory_mib,
            vcpus=spec.vcpus,
            platform=platform,
            ram=checkpoint.FileMark.of(live.ram_fd),
            disk=checkpoint.FileMark.of(live.disk_fd),
            state_file=path.name,
            state_bytes=size,
            state_sha256=sha256,
            facts={"spec": asdict(spec)},
        )
        await trio.to_thread.run_sync(checkpoint.commit, directory, manifest, limiter=live.host.limiter)
    except BaseException:
        checkpoint.withdraw(directory)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(state_fd)
    return manifest


def _seal_state(path: Path, state_fd: int) -> tuple[str, int]:
    with host_errors("fsync", path):
        os.fsync(state_fd)
    with host_errors("read", path):
        return checkpoint.sha256_of(state_fd)


class FsyncError(MicrovmError):
    """An fsync of RAM or disk failed: what the guest wrote may be gone."""

    def __init__(self, cause: MicrovmError) -> None:
        super().__init__("vm_failed", f"Saving the VM's memory failed and data may be lost: {cause.message}")


async def _no_guest_streams(_call: GuestCall) -> Mapping[str, Any]:
    """A template's guest runs no jobs and so has nothing to tell."""
    return {}
