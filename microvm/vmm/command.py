"""QEMU's command line and the guest kernel's, as pure functions of what the machine is.

Promises that a checkpoint's machine and the machine that loads it are told the same things wherever that
matters (devices, their order, sizes). Must not start anything. Neighbour: `qemu` opens what is named here:
descriptors `FD_*` and the files below /vm, which the jail binds.

Source: QEMU 10, qemu-system-x86_64(1) and docs/system/i386/microvm.rst; Linux 6.12,
Documentation/admin-guide/kernel-parameters.txt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

FD_MONITOR: Final = 3
FD_AGENT: Final = 4
FD_TAP: Final = 5

RAM_PATH: Final = "vm/ram"
DISK_PATH: Final = "vm/disk"
KERNEL_PATH: Final = "vm/kernel"
INITRD_PATH: Final = "vm/initrd"

CPU_MODEL: Final = "max"
AGENT_PORT: Final = "microvm.agent"
GUEST_MAC: Final = "02:6d:76:6d:00:02"  # locally administered; each VM's network is a namespace of its own

TRANSLATION_CACHE_MIB: Final = 128
"""TCG's code buffer. QEMU's default is an eighth of the host's memory up to 1 GiB, which no admission counts;
sizes made no difference to wakes, and 19 000 blocks of a wake take about 10 MiB."""

_LABEL: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Machine:
    """What QEMU's command line depends on.

    Attributes:
        label: Shown in the process list; letters, digits, "_", ".", "-".
        accelerator: "kvm" or "tcg".
        has_kernel: Boots /vm/kernel and /vm/initrd with `cmdline`; otherwise waits for a checkpoint.
        has_tap: Has a network device on descriptor `FD_TAP`.
    """

    label: str
    accelerator: str
    memory_mib: int
    vcpus: int
    has_kernel: bool
    has_tap: bool
    cmdline: str = ""


def encode_argv(binary: str, machine: Machine) -> list[str]:
    """The arguments that start one QEMU with the vCPUs stopped."""
    assert _LABEL.fullmatch(machine.label), machine.label
    argv = [
        binary,
        *("-name", machine.label),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-L", "/usr/share/qemu"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *_machine(machine),
        *_memory(machine.memory_mib),
        *_monitor_and_console(),
        *_devices(has_tap=machine.has_tap),
        "-S",
    ]
    if machine.has_kernel:
        argv += ["-kernel", f"/{KERNEL_PATH}", "-initrd", f"/{INITRD_PATH}", "-append", machine.cmdline]
    else:
        argv += ["-incoming", "defer"]
    return argv


def _machine(machine: Machine) -> list[str]:
    accelerator = machine.accelerator
    if accelerator == "tcg":
        accelerator += f",thread=multi,tb-size={TRANSLATION_CACHE_MIB}"
    # ACPI on: Debian's kernel finds virtio-mmio devices only there. PIT on: the clock before the TSC is
    # known.
    # qboot: with SeaBIOS an initrd of a 2048 MiB machine lies under memory that the BIOS keeps, and is
    # corrupted.
    return [
        *(
            "-M",
            "microvm,acpi=on,pit=on,pic=on,rtc=on,pcie=off,usb=off,isa-serial=on,mem-merge=off,memory-backend=ram",
        ),
        *("-accel", accelerator),
        *("-cpu", CPU_MODEL),
        *("-smp", str(machine.vcpus)),
        *("-bios", "qboot.rom"),
        *("-global", "virtio-mmio.force-legacy=false"),
    ]


def _memory(memory_mib: int) -> list[str]:
    # The name "ram" is in the migration stream: a checkpoint loads only where the block has the same one.
    backend = f"memory-backend-file,id=ram,share=on,prealloc=off,mem-path=/{RAM_PATH},size={memory_mib}M"
    return ["-m", f"{memory_mib}M", "-object", backend]


def _monitor_and_console() -> list[str]:
    return [
        *("-chardev", f"socket,id=monitor,fd={FD_MONITOR}"),
        *("-mon", "chardev=monitor,mode=control"),
        # The jail's stdout is the console's file, opened for appending; its stdin is /dev/null.
        *("-chardev", "stdio,id=console,signal=off"),
        *("-device", "isa-serial,chardev=console"),
    ]


def _devices(*, has_tap: bool) -> list[str]:
    # aio=threads: io_uring is switched off on many hosts. write-cache stays on: the guest flushes, and a
    # flush reaches the device, since cache.direct leaves nothing in the host's page cache.
    disk = f"driver=file,node-name=disk,filename=/{DISK_PATH},cache.direct=on,aio=threads,discard=unmap"
    devices = [
        *("-blockdev", disk),
        *("-device", "virtio-blk-device,id=blk0,drive=disk,werror=stop,rerror=report"),
        *("-chardev", f"socket,id=agent,fd={FD_AGENT}"),
        *("-device", "virtio-serial-device,id=serial0,max_ports=2"),
        *("-device", f"virtserialport,bus=serial0.0,chardev=agent,name={AGENT_PORT}"),
        *("-object", "rng-builtin,id=rng"),
        *("-device", "virtio-rng-device,rng=rng"),
    ]
    if has_tap:
        devices += [
            *("-netdev", f"tap,id=net0,fd={FD_TAP},vhost=off"),
            *("-device", f"virtio-net-device,netdev=net0,mac={GUEST_MAC}"),
        ]
    return devices


def encode_cmdline(tsc_khz: int, *, extra: str = "") -> str:
    """The guest kernel's command line.

    Args:
        tsc_khz: The host's TSC rate. Calibration against the emulated PIT fails on a busy host and the guest
            then hangs for ever; `tsc=reliable` keeps the clock source once it is known.
        extra: More parameters, such as "microvm.probe".
    """
    words = [
        "console=ttyS0",
        "loglevel=4",
        "init=/usr/lib/microvm/init",
        f"tsc_early_khz={tsc_khz}",
        "tsc=reliable",
        "no_timer_check",  # the check that the timer's interrupt arrives in time panics on a busy host
        "panic=-1",  # at once; QEMU exits with -no-reboot, and an exit is a failed VM
        # The guest has one tenant, whose jobs are one user. What mitigations keep apart there is not promised
        # apart, and they cost 4 to 8 % under TCG. The host's boundary is the VMM's jail.
        "mitigations=off",
        "nowatchdog",  # a guest whose vCPUs stood still while the host was busy has not locked up
        "rcupdate.rcu_cpu_stall_suppress=1",
        "net.ifnames=0",
        "edd=off",  # there is no BIOS to ask about disks
    ]
    if extra:
        words.append(extra)
    return " ".join(words)
