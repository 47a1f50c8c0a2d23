"""The QEMU driver: one `microvm` machine whose RAM is a file, and whose checkpoint is device state alone.

Promises the `Vmm` interface of `base`: every step is checked by asking QEMU for its status, never inferred,
and a dead process ends every call at once with its exit status and the console's tail. Must not decide when
to save, hold no path of the host, and trust nothing that QEMU says. Neighbours: `command` is the command
line, `monitor` the control socket, `closure` the jail's root.

    spawn ─ monitor greets ─ capabilities ─► prelaunch ── cont ──► running ⇄ paused ── migrate ──► postmigrate
                                         └─► inmigrate ── migrate-incoming ──► paused

Source: QEMU 10, docs/interop/qmp-spec.rst, docs/devel/migration/main.rst; qapi/run-state.json,
qapi/migration.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final, cast

import trio

from microvm.errors import HostError, VmmError
from microvm.host.process import JailedProcess, JailSpec, spawn_jailed
from microvm.vmm.base import Accelerator, VmmPlan, VmmTraits
from microvm.vmm.closure import Closure
from microvm.vmm.command import (
    CPU_MODEL,
    DISK_PATH,
    INITRD_PATH,
    KERNEL_PATH,
    RAM_PATH,
    Machine,
    encode_argv,
    encode_cmdline,
)
from microvm.vmm.monitor import Command, Monitor, MonitorError, MonitorLostError
from microvm.wire.qmp import BlockIoError, Event, MigrationChanged, Resumed, Stopped

ANSWER_SECONDS: Final = 60.0
"""For each step. All take milliseconds; with every core of the host busy a start was seen to take seconds,
and `stop` waits for the disk requests under way. Callers with less patience set their own deadline."""

REAP_SECONDS: Final = 10.0
"""For a process that got SIGKILL; longer means an uninterruptible system call on failing storage."""

DYING_SECONDS: Final = 1.0
"""From the monitor's end to the process's: QEMU closes its sockets a moment before it exits."""

POLL_SECONDS: Final = 0.002  # a save takes 4 ms

TAIL_BYTES: Final = 4096

FILE_SLACK_BYTES: Final = 64 << 20
"""RLIMIT_FSIZE beyond the larger of RAM and disk: device state and console are far below it."""

TRAITS: Final = VmmTraits(kind="qemu", channel_survives_save=True, memfile_is_live=True)

_CAPABILITIES: Final = {
    "capabilities": [
        {"capability": "x-ignore-shared", "state": True},  # RAM stays in its file
        {"capability": "events", "state": True},  # MIGRATION events instead of polling
    ]
}
_HALTED: Final = frozenset({"prelaunch", "paused", "postmigrate", "io-error"})
_BETWEEN: Final = "finish-migrate"
"""Between the event that says "completed" and the end of the save; no event tells of the end."""

_MIGRATION_ENDS: Final = frozenset({"completed", "failed", "cancelled"})

Launcher = Callable[[JailSpec], JailedProcess]


class QemuKind:
    """Starts QEMUs from one closure.

    Args:
        closure: The jail's root; stays the caller's, who keeps it open.
        accelerator: As `probe.choose_accelerator` chose it.
        tsc_khz: The host's TSC rate, for the guests' command lines.
        launcher: Starts the process; another one only in tests.
    """

    def __init__(
        self,
        closure: Closure,
        accelerator: Accelerator,
        tsc_khz: int,
        launcher: Launcher = spawn_jailed,
    ) -> None:
        self._closure = closure
        self._accelerator = accelerator
        self._tsc_khz = tsc_khz
        self._launcher = launcher

    @property
    def traits(self) -> VmmTraits:
        """How this kind differs."""
        return TRAITS

    @property
    def accelerator(self) -> Accelerator:
        """What executes guest code."""
        return self._accelerator

    @property
    def version(self) -> str:
        """QEMU's version."""
        return self._closure.version

    @property
    def closure_digest(self) -> str:
        """The closure's SHA-256."""
        return self._closure.digest

    def cmdline(self, *, extra: str = "") -> str:
        """The guest kernel's command line for a cold boot."""
        return encode_cmdline(self._tsc_khz, extra=extra)

    @asynccontextmanager
    async def open_vmm(self, plan: VmmPlan) -> AsyncGenerator[QemuVmm]:
        """Starts a QEMU with the vCPUs stopped; see `base.VmmKind.open_vmm`.

        Raises:
            VmmError: It did not start or did not answer.
            HostError: The jail could not be made.
        """
        async with AsyncExitStack() as stack:
            ours, theirs = _open_socketpairs(stack)
            process = self._launcher(self._jail(plan, theirs))
            await stack.enter_async_context(process)
            for end in theirs:
                end.close()
            vmm = QemuVmm(process, trio.socket.from_stdlib_socket(ours[0]), ours[1], plan.console_fd)
            with _single_errors():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(vmm.serve_monitor, name=f"monitor {plan.label}")
                    nursery.start_soon(vmm.watch_process, name=f"process {plan.label}")
                    try:
                        await vmm.greet()
                        yield vmm
                    finally:
                        await vmm.kill()  # noqa: ASYNC102 - it shields itself
                        nursery.cancel_scope.cancel()

    def _jail(self, plan: VmmPlan, theirs: Sequence[socket.socket]) -> JailSpec:
        machine = Machine(
            label=plan.label,
            accelerator=self._accelerator.name,
            memory_mib=plan.memory_mib,
            vcpus=plan.vcpus,
            has_kernel=plan.boot is not None,
            has_tap=plan.tap_fd is not None,
            cmdline=plan.boot.cmdline if plan.boot else "",
        )
        binds = [(plan.memfile_fd, RAM_PATH), (plan.disk_fd, DISK_PATH)]
        if plan.boot:
            binds += [(plan.boot.kernel_fd, KERNEL_PATH), (plan.boot.initrd_fd, INITRD_PATH)]
        inherited = [end.fileno() for end in theirs]
        if plan.tap_fd is not None:
            inherited.append(plan.tap_fd)
        largest = max(plan.memory_mib << 20, os.fstat(plan.disk_fd).st_size)
        return JailSpec(
            root_fd=self._closure.root_fd,
            argv=encode_argv(self._closure.binary, machine),
            uid=plan.uid,
            gid=plan.uid,
            log_fd=plan.console_fd,
            env={"LC_ALL": "C"},
            cgroup_fd=plan.cgroup_fd,
            binds=tuple(binds),
            fds=tuple(inherited),
            limit_fsize_bytes=largest + FILE_SLACK_BYTES,
            with_kvm=self._accelerator.name == "kvm",
        )


class QemuVmm:
    """One running QEMU; implements `base.Vmm`. Made by `QemuKind.open_vmm` only."""

    def __init__(
        self,
        process: JailedProcess,
        connection: trio.socket.SocketType,
        agent: socket.socket,
        console_fd: int,
    ) -> None:
        self._process = process
        self._agent: socket.socket | None = agent
        self._console_fd = console_fd
        self._monitor = Monitor(connection, self._on_event)
        self._exited = trio.Event()
        self._stopped_by_itself = trio.Event()
        self._running = False
        self._migration_ended = trio.Event()

    @property
    def pid(self) -> int:
        """The process, in the daemon's PID namespace."""
        return self._process.pid

    @property
    def exited(self) -> trio.Event:
        """Set as soon as the process is dead."""
        return self._exited

    @property
    def exit_status(self) -> int | None:
        """As `os.waitstatus_to_exitcode` gives it; None while the process lives."""
        return self._process.exit_status

    @property
    def stopped_by_itself(self) -> trio.Event:
        """Set when QEMU stopped the vCPUs unasked; a new event after each `cont`."""
        return self._stopped_by_itself

    async def connect(self) -> trio.abc.Stream:
        """The byte stream to the guest's agent port, connected since the start; to be had once."""
        await trio.lowlevel.checkpoint()
        if self._agent is None:
            raise self._failure("the agent port is connected already")
        agent = socket.socket(fileno=self._agent.detach())
        self._agent = None
        return trio.SocketStream(trio.socket.from_stdlib_socket(agent))

    async def boot(self) -> None:
        """Starts the vCPUs at the kernel."""
        await self.cont()

    async def cont(self) -> None:
        """Runs the vCPUs; after a save this also gives the disk back to the machine."""
        async with self._doing("cont"):
            self._stopped_by_itself = trio.Event()
            self._running = True
            await self._monitor.execute("cont")
            await self._check_status("cont", frozenset({"running"}))

    async def stop(self) -> None:
        """Stops the vCPUs and drains the disk.

        A machine that stopped itself for want of space stays in that state, with its failed requests; `cont`
        tries them again, also after a save and load.
        """
        async with self._doing("stop"):
            self._running = False
            await self._monitor.execute("stop")
            await self._check_status("stop", _HALTED)

    async def save(self, state_fd: int) -> None:
        """Writes device state over whatever `state_fd`'s file held."""
        with _reopened(state_fd, os.O_WRONLY | os.O_TRUNC) as fd:
            async with self._doing("save"):
                await self._check_status("save", _HALTED)
                await self._migrate("save", "migrate", fd)
                await self._check_status("save", frozenset({"postmigrate"}))

    async def load(self, state_fd: int) -> None:
        """Loads device state from the beginning of `state_fd`'s file."""
        with _reopened(state_fd, os.O_RDONLY) as fd:
            async with self._doing("load"):
                await self._migrate("load", "migrate-incoming", fd)
                await self._check_status("load", frozenset({"paused", "io-error"}))

    async def cpu_digest(self) -> str:
        """SHA-256 over the features that the machine's processor shows to a guest.

        What a model's name stands for depends on QEMU's version and, under KVM, on the host's processor,
        microcode and kernel.
        """
        async with self._doing("identify the processor"):
            answer = await self._monitor.execute(
                "query-cpu-model-expansion", {"type": "full", "model": {"name": CPU_MODEL}}
            )
            text = json.dumps(_object(answer), sort_keys=True)
            return hashlib.sha256(text.encode()).hexdigest()

    async def kill(self) -> None:
        """Ends the process at once; returns when it is reaped."""
        self._process.kill()
        with trio.move_on_after(REAP_SECONDS, shield=True):
            await self.watch_process()

    async def greet(self) -> None:
        """Waits for the monitor and sets what every machine needs, so that later steps cannot fail for it."""
        async with self._doing("start"):
            await self._monitor.greeting()
            await self._monitor.execute_all(
                [Command("qmp_capabilities"), Command("migrate-set-capabilities", _CAPABILITIES)]
            )

    async def serve_monitor(self) -> None:
        """Reads the monitor to its end, and closes it; a process that cannot be controlled is killed."""
        try:
            await self._monitor.run()
        finally:
            self._monitor.close()
        if not self._monitor.misbehaved:
            with trio.move_on_after(DYING_SECONDS):
                await self._exited.wait()
        self._process.kill()

    async def watch_process(self) -> None:
        """Reaps the process."""
        await self._process.wait()
        self._exited.set()

    async def _migrate(self, what: str, command: str, fd: int) -> None:
        """Hands a file over and waits until QEMU is done with it."""
        self._migration_ended = trio.Event()
        await self._monitor.execute_all(
            [
                Command("getfd", {"fdname": "state"}, fd),
                Command(command, {"uri": "fd:state"}),
            ]
        )
        await self._wait_for_migration()
        outcome = _object(await self._monitor.execute("query-migrate"))
        if outcome.get("status") != "completed":
            raise self._failure(
                f"{what}: QEMU says {_said(outcome.get('error-desc', outcome.get('status')))}"
            )

    async def _wait_for_migration(self) -> None:
        """Waits for the end of saving or loading, or for the end of the monitor, which would never tell."""

        async def end_when_lost() -> None:
            await self._monitor.lost.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_when_lost)
            await self._migration_ended.wait()
            nursery.cancel_scope.cancel()

    async def _check_status(self, what: str, allowed: frozenset[str]) -> None:
        status = await self._status()
        while status == _BETWEEN:
            await trio.sleep(POLL_SECONDS)
            status = await self._status()
        if status not in allowed:
            raise self._failure(f"{what}: the machine is {_said(status)} then")

    async def _status(self) -> str:
        status = _object(await self._monitor.execute("query-status")).get("status")
        return status if isinstance(status, str) else _said(status)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MigrationChanged) and event.status in _MIGRATION_ENDS:
            self._migration_ended.set()
        elif (isinstance(event, BlockIoError) and event.stops) or (
            isinstance(event, Stopped) and self._running
        ):
            self._stopped_by_itself.set()
        elif isinstance(event, Resumed):
            self._running = True

    @asynccontextmanager
    async def _doing(self, what: str) -> AsyncGenerator[None]:
        """Bounds a step in time and turns what went wrong into a `VmmError`."""
        try:
            with trio.fail_after(ANSWER_SECONDS):
                yield
        except trio.TooSlowError as error:
            raise self._failure(f"{what}: QEMU did not answer in {ANSWER_SECONDS:.0f} s") from error
        except MonitorLostError as error:
            with trio.move_on_after(2 * DYING_SECONDS):
                await self._exited.wait()
            raise self._failure(f"{what}: {error}") from error
        except MonitorError as error:
            raise self._failure(f"{what}: {error}") from error

    def _failure(self, message: str) -> VmmError:
        if self.exit_status is not None:
            message += f" (QEMU ended with status {self.exit_status})"
        return VmmError(message, exit_status=self.exit_status, console_tail=_read_tail(self._console_fd))


def _open_socketpairs(stack: ExitStack | AsyncExitStack) -> tuple[list[socket.socket], list[socket.socket]]:
    """Our ends and QEMU's: monitor, then agent port; the stack closes what was not closed or handed on."""
    ours: list[socket.socket] = []
    theirs: list[socket.socket] = []
    for _ in range(2):
        for ends, end in zip(
            (ours, theirs), socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM), strict=True
        ):
            stack.callback(end.close)
            ends.append(end)
    return ours, theirs


@contextmanager
def _single_errors() -> Generator[None]:
    """Lets an error out of the nursery as itself; the background tasks raise none, so it is alone."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        error = group.exceptions[0]
        raise error from error.__cause__


@contextmanager
def _reopened(fd: int, flags: int) -> Generator[int]:
    """The same file with an offset of its own at 0, and only the rights that QEMU needs."""
    try:
        reopened = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError as error:
        raise HostError("reopen", "the device state's file", error.errno or 0) from error
    try:
        yield reopened
    finally:
        os.close(reopened)


def _read_tail(console_fd: int) -> str:
    """The end of the console, with whatever is no text made visible; empty when it cannot be read."""
    try:
        with open(f"/proc/self/fd/{console_fd}", "rb") as console:
            size = console.seek(0, os.SEEK_END)
            console.seek(max(0, size - TAIL_BYTES))
            return console.read(TAIL_BYTES).decode("utf-8", "backslashreplace")
    except OSError:
        return ""


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MonitorError("an answer is not an object")
    return cast("dict[str, Any]", value)


def _said(value: Any) -> str:
    """Something hostile, printable and short."""
    return repr(value)[:300]
