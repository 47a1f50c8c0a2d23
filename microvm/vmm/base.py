"""What every VMM can do, whatever its kind: the interface that `fleet` drives.

A `Vmm` is one process that runs one machine. Starting it and giving it a machine are separate steps, because
everything that can fail harmlessly (process, control socket, channel) must have happened before a checkpoint
is loaded. This module holds types only; `qemu` implements them, the contract suite in
`tests/contract` says what they promise, and it must not know of workspaces, the store or policy.

    open_vmm ──► started ──boot──► running ⇄ stopped ──save──► stopped
                    └─────load──► stopped ──cont──► running

Two differences between kinds are visible, as `VmmTraits`, and nothing else is.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import trio


@dataclass(frozen=True, slots=True)
class VmmTraits:
    """How a kind of VMM differs from the others.

    Attributes:
        kind: "qemu", "firecracker" or "fake".
        channel_survives_save: Whether the channel stays connected over a save; where it does not, `connect`
            is called again after `cont`.
        memfile_is_live: Whether the memfile is the machine's RAM while it runs (QEMU, shared mapping). Where
            it is not, `save` writes a new one, and a loaded memfile is immutable and may be shared.
    """

    kind: str
    channel_survives_save: bool
    memfile_is_live: bool


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What executes guest instructions, and why it was chosen."""

    name: str  # "kvm" or "tcg"
    reason: str


@dataclass(frozen=True, slots=True)
class BootSource:
    """What a cold boot starts from."""

    kernel_fd: int
    initrd_fd: int
    cmdline: str


@dataclass(frozen=True, slots=True)
class VmmPlan:
    """Everything a VMM is started with. The descriptors stay the caller's; the VMM gets duplicates.

    Attributes:
        label: For logs and the process's arguments; no meaning.
        memory_mib, vcpus: The machine's size.
        memfile_fd: RAM, a regular file of exactly `memory_mib` MiB, readable and writable by `uid`.
        disk_fd: The machine's disk, a raw image, readable and writable by `uid`.
        uid: UID and GID of the VM's slot.
        cgroup_fd: Directory of the cgroup that the process is born in.
        console_fd: Append-only file for the guest's console and the VMM's own messages.
        boot: What to boot; None for a process that will `load` a checkpoint.
        tap_fd: An open TAP for the machine's network device; None for no device at all.
    """

    label: str
    memory_mib: int
    vcpus: int
    memfile_fd: int
    disk_fd: int
    uid: int
    cgroup_fd: int
    console_fd: int
    boot: BootSource | None = None
    tap_fd: int | None = None


class Vmm(Protocol):
    """One running VMM process.

    Raises (all methods): VmmError when the process is dead, refuses, or does not answer in time.
    """

    @property
    def pid(self) -> int:
        """The process, in the daemon's PID namespace."""
        ...

    @property
    def exited(self) -> trio.Event:
        """Set as soon as the process is dead, whoever killed it."""
        ...

    @property
    def exit_status(self) -> int | None:
        """As `os.waitstatus_to_exitcode` gives it; None while the process lives."""
        ...

    @property
    def stopped_by_itself(self) -> trio.Event:
        """Set when the VMM stopped the vCPUs unasked, since a disk write found no space.

        `cont` clears it by putting a new event in its place, and tries the write again.
        """
        ...

    async def connect(self) -> trio.abc.Stream:
        """The byte stream to the guest's agent port.

        Connected before any guest code runs after a start or load. Ownership: the caller closes it.
        """
        ...

    async def boot(self) -> None:
        """Starts the vCPUs at the kernel of the plan's `boot`."""
        ...

    async def load(self, state_fd: int) -> None:
        """Loads device state over the plan's memfile and disk; returns with the vCPUs stopped.

        A failure leaves memfile and disk untouched.
        """
        ...

    async def cont(self) -> None:
        """Runs the vCPUs."""
        ...

    async def stop(self) -> None:
        """Stops the vCPUs; returns when they are stopped and the block layer is drained."""
        ...

    async def save(self, state_fd: int) -> None:
        """Writes device state, complete when this returns; the caller fsyncs.

        The vCPUs must be stopped, and stay so. Once for each stop: the next needs `cont` and `stop` first.
        """
        ...

    async def kill(self) -> None:
        """Ends the process at once and returns when it is reaped; one that is dead already is no error."""
        ...


class VmmKind(Protocol):
    """Starts VMMs of one kind from one closure."""

    @property
    def traits(self) -> VmmTraits:
        """How this kind differs."""
        ...

    @property
    def accelerator(self) -> Accelerator:
        """What executes guest code."""
        ...

    @property
    def version(self) -> str:
        """The VMM's own version."""
        ...

    @property
    def closure_digest(self) -> str:
        """SHA-256 over everything that the VMM consists of (binary, modules, libraries, firmware)."""
        ...

    def cmdline(self, *, extra: str = "") -> str:
        """The guest kernel's command line for a cold boot on this kind."""
        ...

    def open_vmm(self, plan: VmmPlan) -> AbstractAsyncContextManager[Vmm]:
        """Starts a process: control socket answered, channel connected, no machine running yet.

        Leaving the context kills the process, also when cancelled. Must be entered on the main thread.
        """
        ...
