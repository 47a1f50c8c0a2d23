"""What a VM has while it is live: a VMM, the link to its supervisor, a slot, a cgroup, open files.

`open_live` grants all of it and gives all of it back, whatever happens in between. The steps that need a
fixed order (rulings on hibernation and waking) are methods of `Live`; when they happen is the driver's
decision, and this module must not know states, the store or policy.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import trio

from microvm.agentlink import AgentLink, GuestHandler, open_link
from microvm.errors import GuestError, MicrovmError, VmmError
from microvm.fleet import layout
from microvm.host.cgroup import CgroupTree, GroupLimits
from microvm.host.files import flush, host_errors
from microvm.model import AgentGeneration, VmSpec
from microvm.vmm.base import BootSource, Vmm, VmmKind, VmmPlan

T = TypeVar("T")

HELLO_TIMEOUT_S: Final = 30.0
"""A resumed guest answers in 0.1 s; with every core of the host busy it was seen to take seconds."""
BOOT_TIMEOUT_S: Final = 180.0
"""A cold boot takes 3 to 5 s under TCG on an idle machine; the bound is for a loaded one."""
CALL_TIMEOUT_S: Final = 30.0
FREEZE_TIMEOUT_S: Final = 20.0
DEATH_NOTICED_S: Final = 2.0
"""A process's end is told within milliseconds of its sockets' end; later where every core is busy."""
CLEANUP_TIMEOUT_S: Final = 10.0
VMM_PIDS: Final = 256
"""Threads of a QEMU: its vCPUs, at most 64 workers of its I/O pool (util/thread-pool.c), and a few more."""
VMM_VCPUS: Final = 1.0  # beside the guest's own: the main loop and the I/O workers
ENTROPY_BYTES: Final = 64  # twice the kernel's seed (drivers/char/random.c)


@dataclass(frozen=True, slots=True)
class Host:
    """What live VMs are made from: one per service."""

    layout: layout.Layout
    kind: VmmKind
    uid_base: int
    cgroups: CgroupTree
    limiter: trio.CapacityLimiter  # for fsync, clone and hash work; metadata has its own


@dataclass(slots=True)
class Live:
    """A live VM's resources; made by `open_live`.

    Attributes:
        ended: Set to give everything back.
    """

    vmm: Vmm
    link: AgentLink
    slot: int
    ram_fd: int
    disk_fd: int
    logs: Path
    host: Host
    ended: trio.Event = field(default_factory=trio.Event)
    _watch: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the event that `cont` replaces
    _stood_still: bool = True  # the vCPUs stopped, or never ran, since the guest's clock was set

    async def cont(self) -> None:
        """Runs the vCPUs."""
        await self.vmm.cont()
        self._watch.cancel(reason="the vCPUs run, and may stop themselves anew")

    async def halt(self) -> None:
        """Stops the vCPUs, frozen or not; `greet` knows what to do with either."""
        self._stood_still = True
        await self.vmm.stop()

    async def watch_space(self, on_stop: Callable[[], None]) -> None:
        """Calls `on_stop` each time the VMM stops the vCPUs because the volume is full; never returns."""
        while True:
            with trio.CancelScope() as self._watch:
                await self.vmm.stopped_by_itself.wait()
                self._stood_still = True
                on_stop()
                await trio.sleep_forever()

    async def greet(
        self,
        generation: AgentGeneration,
        *,
        machine_id: str | None = None,
        hostname: str | None = None,
        timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        """Hello, clock, entropy, identity — and only then the thaw. The vCPUs must be running.

        A guest that the VMM stopped for want of space had no time to freeze: it is frozen now, so that its
        clock can be set. One that was neither frozen nor stopped just goes on.

        Args:
            generation: The guest is this from now on.
            machine_id: Who it is from now on, 32 hexadecimal digits; None leaves it as it is.
            hostname: Its name from now on; None leaves it as it is.
            timeout_s: For the hello.

        Raises:
            GuestError: The guest did not answer or refused; nothing of the user's has run.
        """
        hello = await self._guest(self.link.hello(generation, timeout_s=timeout_s))
        if hello.state == "running":
            if not self._stood_still:
                return
            await self._guest(self.link.freeze(timeout_s=FREEZE_TIMEOUT_S))
            await self._guest(self.link.hello(generation, timeout_s=timeout_s))
        await self._guest(
            self.link.configure(
                realtime_ns=time.time_ns(),
                entropy=secrets.token_bytes(ENTROPY_BYTES),
                machine_id=machine_id,
                hostname=hostname,
                timeout_s=CALL_TIMEOUT_S,
            )
        )
        await self._guest(self.link.thaw(timeout_s=CALL_TIMEOUT_S))
        self._stood_still = False

    async def _guest(self, call: Awaitable[T]) -> T:
        """Awaits a guest call; if the VMM died meanwhile, that is the error."""
        try:
            return await call
        except GuestError as error:
            cause = await self.explain(error)
            if cause is error:
                raise
            raise cause from error

    async def explain(self, error: GuestError) -> MicrovmError:
        """What a failed guest call is told as: the VMM's death where that broke the channel."""
        if error.code != "guest_unreachable" or self.link.broken is None or self.ended.is_set():
            return error
        with trio.move_on_after(DEATH_NOTICED_S):  # the channel's end may be seen before the process's
            await self.vmm.exited.wait()
        return self.death() if self.vmm.exited.is_set() else error

    async def sync_guest(self) -> None:
        """Has the guest write its file systems out."""
        await self._guest(self.link.sync(timeout_s=CALL_TIMEOUT_S))

    async def freeze_and_stop(self) -> None:
        """Freezes the guest's jobs, quiesces the channel and stops the vCPUs."""
        await self._guest(self.link.freeze(timeout_s=FREEZE_TIMEOUT_S))
        self._stood_still = True
        await self.vmm.stop()

    async def sync_memory(self) -> None:
        """Fsync of RAM and disk. An error means that data may be gone: the VM must not run on.

        Raises:
            HostError: The first error of either file.
        """
        for name, fd in (("RAM", self.ram_fd), ("disk", self.disk_fd)):
            await run_host(self.host.limiter, "fsync", name, os.fsync, fd)

    async def flush_memory(self) -> None:
        """Writes dirty RAM pages out while the guest runs, so that the fsync after the stop is short."""
        await run_host(self.host.limiter, "flush", "RAM", flush, self.ram_fd)

    def death(self) -> VmmError:
        """The error that says how the VMM ended, with the console's last lines."""
        return VmmError(
            "The VM's VMM process ended unexpectedly; the VM is failed and its disk is intact.",
            exit_status=self.vmm.exit_status,
            console_tail=layout.console_tail(self.logs),
        )


async def run_host(
    limiter: trio.CapacityLimiter, operation: str, path: str, call: Callable[[int], object], fd: int
) -> None:
    """Runs a blocking call on a descriptor in a thread.

    Raises:
        HostError: The call failed.

    Cancellation: none once it has begun; a thread cannot be interrupted.
    """

    def work() -> None:
        with host_errors(operation, path):
            call(fd)

    await trio.to_thread.run_sync(work, limiter=limiter)


@contextlib.asynccontextmanager
async def open_live(
    host: Host,
    *,
    label: str,
    spec: VmSpec,
    slot: int,
    directory: Path,
    logs: Path,
    on_guest_stream: GuestHandler,
    boot: BootSource | None = None,
) -> AsyncGenerator[Live]:
    """Starts a VMM over the RAM and disk in `directory`, with its channel connected and nothing loaded yet.

    Args:
        host: The service's resources.
        label: For logs and process arguments.
        spec: The machine's size.
        slot: Whose UID the VMM runs as.
        directory: Holds the files `ram` and `disk`, root's, 0600; they belong to the slot's UID inside the
            block.
        logs: Holds the console log.
        on_guest_stream: Takes the streams that the guest opens.
        boot: What to boot; None to load a checkpoint.

    Raises:
        HostError, VmmError: Nothing is left behind.

    Ownership: must be entered on the main thread; leaving the block kills the VMM and returns everything.
    """
    async with contextlib.AsyncExitStack() as stack:
        uid = host.uid_base + slot
        ram_fd = stack.enter_context(_lent(directory / layout.RAM, uid))
        disk_fd = stack.enter_context(_lent(directory / layout.DISK, uid))
        console_fd = layout.open_console(logs)
        stack.callback(os.close, console_fd)
        group = await stack.enter_async_context(host.cgroups.open_group(label, _limits(spec)))
        plan = VmmPlan(
            label=label,
            memory_mib=spec.memory_mib,
            vcpus=spec.vcpus,
            memfile_fd=ram_fd,
            disk_fd=disk_fd,
            uid=uid,
            cgroup_fd=group.fd,
            console_fd=console_fd,
            boot=boot,
        )
        vmm = await stack.enter_async_context(host.kind.open_vmm(plan))
        stream = await stack.enter_async_context(await vmm.connect())
        link = await stack.enter_async_context(open_link(stream, on_guest_stream=on_guest_stream))
        yield Live(vmm, link, slot, ram_fd, disk_fd, logs, host)


def _limits(spec: VmSpec) -> GroupLimits:
    """What a VMM may take where groups are limited.

    No memory.max: all of guest RAM is page cache of the group, and a bound on it also bounds its dirty pages,
    beyond which every store of the guest waits for the disk.
    """
    return GroupLimits(cpu_max_vcpus=spec.vcpus + VMM_VCPUS, pids_max=VMM_PIDS)


@contextlib.contextmanager
def _lent(path: Path, uid: int) -> Generator[int]:
    """An open file that belongs to `uid` inside the block and to root again after it."""
    fd = layout.open_rw(path)
    try:
        with host_errors("chown", path):
            os.fchown(fd, uid, uid)
        try:
            yield fd
        finally:
            with contextlib.suppress(
                OSError
            ):  # the sweep of a later start would find a foreign owner and mend it
                os.fchown(fd, 0, 0)
    finally:
        os.close(fd)
