"""A VMM whose machine is the real supervisor in a process: `microvm.vmm.base` for tests, with failures on
demand.

Its processors are a cgroup's freezer. Its disk is the workspace, packed into the plan's disk file whenever
the machine stops, so that files that are cloned are machines that are cloned. Its checkpoint holds no memory:
a load gives a guest that has just booted, with the disk as it was, and every job is gone (`KEEPS_MEMORY`).
"""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from microvm.errors import VmmError
from microvm.vmm.base import Accelerator, VmmPlan, VmmTraits
from tests.fake.guest_process import GuestProcess

KEEPS_MEMORY: Final = False
"""What the contract suite does not ask of this kind."""
_DISK: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"FAKEDISK"
_STATE_MAX: Final = 4096


@dataclass(slots=True)
class Hold:
    """A step that waits in the middle of a VMM until the test lets it go on."""

    reached: trio.Event = field(default_factory=trio.Event)
    release: trio.Event = field(default_factory=trio.Event)


class FakeVmmKind:
    """Starts fakes; the script for all of them.

    Attributes:
        machines: Every fake that was opened, the dead ones too, in order.
    """

    traits = VmmTraits(kind="fake", channel_survives_save=True, memfile_is_live=True)
    accelerator = Accelerator("tcg", "a process of this machine")
    version = "0"
    closure_digest = "0" * 64

    def __init__(self) -> None:
        self.machines: list[FakeVmm] = []
        self._failures: defaultdict[str, deque[Exception]] = defaultdict(deque)
        self._holds: defaultdict[str, deque[Hold]] = defaultdict(deque)

    def fail(self, step: str, error: Exception | None = None) -> None:
        """The next `step` (open, connect, boot, load, cont, stop, save, kill) fails."""
        self._failures[step].append(error or VmmError(f"{step} fails, as the test wants it"))

    def hold(self, step: str) -> Hold:
        """The next time that `step` is reached, it waits for `release`."""
        hold = Hold()
        self._holds[step].append(hold)
        return hold

    async def reach(self, step: str) -> None:
        """Does what the script has for `step`."""
        if self._holds[step]:
            hold = self._holds[step].popleft()
            hold.reached.set()
            await hold.release.wait()
        if self._failures[step]:
            raise self._failures[step].popleft()

    def cmdline(self, *, extra: str = "") -> str:
        """No kernel reads it."""
        return f"fake {extra}".strip()

    @asynccontextmanager
    async def open_vmm(self, plan: VmmPlan) -> AsyncGenerator[FakeVmm]:
        """See `VmmKind`."""
        await self.reach("open")
        disk_fd = os.dup(plan.disk_fd)
        guest = GuestProcess(
            Path(os.readlink(f"/proc/self/fd/{plan.cgroup_fd}")), frozen=True, log_fd=plan.console_fd
        )
        vmm = FakeVmm(self, plan, guest, disk_fd)
        self.machines.append(vmm)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(vmm.watch)
                try:
                    yield vmm
                finally:
                    with trio.CancelScope(shield=True):
                        await vmm.end()
                    nursery.cancel_scope.cancel()
        finally:
            vmm.release()


class FakeVmm:
    """One machine. See `microvm.vmm.base.Vmm` for what the methods promise.

    Attributes:
        guest: The process, for tests that look into it.
        steps: The methods that were called, in order.
    """

    def __init__(self, kind: FakeVmmKind, plan: VmmPlan, guest: GuestProcess, disk_fd: int) -> None:
        self.guest = guest
        self.exited = trio.Event()
        self.exit_status: int | None = None
        self.stopped_by_itself = trio.Event()
        self.steps: list[str] = []
        self._kind = kind
        self._plan = plan
        self._disk_fd = disk_fd
        self._pidfd = os.pidfd_open(guest.process.pid)
        self._running = False
        self._loaded = False
        self._disk_behind = False  # the workspace has changed since it was packed
        self._connected = False

    @property
    def pid(self) -> int:
        """See `Vmm`."""
        return self.guest.process.pid

    async def watch(self) -> None:
        """Notices the death of the process, whoever caused it."""
        await trio.lowlevel.wait_readable(self._pidfd)
        self._collect()

    def _collect(self) -> None:
        if self.exit_status is None:
            self.exit_status = self.guest.process.wait()
            self.exited.set()

    async def connect(self) -> trio.abc.Stream:
        """See `Vmm`."""
        await self._reach("connect")
        assert not self._connected, "the channel is connected once"
        self._connected = True
        return trio.SocketStream(trio.socket.from_stdlib_socket(self.guest.sock))

    async def boot(self) -> None:
        """See `Vmm`."""
        await self._reach("boot")
        if self._plan.boot is None:
            raise VmmError("this machine waits for a checkpoint")
        self._insert_disk()
        self._run()

    async def load(self, state_fd: int) -> None:
        """See `Vmm`. A failed load ends the process, as QEMU's does."""
        await self._reach("load")
        try:
            state = json.loads(os.pread(state_fd, _STATE_MAX, 0))
            if state["memory_mib"] != self._plan.memory_mib:
                raise ValueError("another machine's state")
        except (ValueError, KeyError, TypeError) as error:
            await self.end()
            raise VmmError("the state cannot be loaded", exit_status=self.exit_status) from error
        self._insert_disk()
        self._loaded = True

    async def cont(self) -> None:
        """See `Vmm`."""
        await self._reach("cont")
        self.stopped_by_itself = trio.Event()
        self._run()

    def _run(self) -> None:
        self._running = True
        self._disk_behind = True
        self.guest.set_frozen(frozen=False)

    async def stop(self) -> None:
        """See `Vmm`."""
        await self._reach("stop")
        await self._halt()

    async def _halt(self) -> None:
        await self.guest.freeze()
        self._running = False
        self._eject_disk()

    async def save(self, state_fd: int) -> None:
        """See `Vmm`."""
        await self._reach("save")
        if self._running:
            raise VmmError("a running machine is not saved")
        state = json.dumps({"memory_mib": self._plan.memory_mib, "vcpus": self._plan.vcpus}).encode()
        os.ftruncate(state_fd, 0)
        os.pwrite(state_fd, state, 0)

    async def kill(self) -> None:
        """See `Vmm`."""
        self.steps.append("kill")
        await self.end()
        await self._kind.reach("kill")

    async def run_out_of_space(self) -> None:
        """The machine stops itself, as one does whose disk has no room for a write."""
        await self._halt()
        self.stopped_by_itself.set()

    def die(self) -> None:
        """The process dies of itself, now."""
        self.guest.kill()

    async def end(self) -> None:
        """Kills what is left of the machine and keeps its disk."""
        self.guest.kill()
        self._collect()
        await self.guest.remove_group()
        self._eject_disk()

    def release(self) -> None:
        """Closes and removes everything but the plan's files."""
        os.close(self._pidfd)
        os.close(self._disk_fd)
        if not self._connected:
            self.guest.sock.close()
        self.guest.remove_folder()

    async def _reach(self, step: str) -> None:
        self.steps.append(step)
        await self._kind.reach(step)
        if self.exited.is_set():
            raise VmmError(f"{step}: the VMM is dead", exit_status=self.exit_status)

    def _insert_disk(self) -> None:
        magic, length = _DISK.unpack(os.pread(self._disk_fd, _DISK.size, 0).ljust(_DISK.size, b"\0"))
        if magic == _MAGIC:
            self.guest.unpack(os.pread(self._disk_fd, length, _DISK.size))

    def _eject_disk(self) -> None:
        if self._disk_behind:
            self._disk_behind = False
            packed = self.guest.pack()
            os.pwrite(self._disk_fd, _DISK.pack(_MAGIC, len(packed)) + packed, 0)
