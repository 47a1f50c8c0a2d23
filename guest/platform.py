"""The machine under the supervisor: its clock, entropy, identity, mounts and power.

Behind one seam, so that the supervisor can run as an ordinary process: `HostPlatform` touches nothing of the
machine that it runs on and remembers what it was asked. `GuestPlatform` is for a virtual machine of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import signal
import socket
import struct
import time
import uuid
from typing import Final, Protocol

_RNDADDENTROPY: Final = 0x40085203  # _IOW('R', 0x03, int [2]), linux/random.h
_RNDRESEEDCRNG: Final = 0x5207  # _IO('R', 0x07)
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_REBOOT_POWER_OFF: Final = 0x4321FEDC  # LINUX_REBOOT_CMD_POWER_OFF, reboot(2)
_PR_SET_CHILD_SUBREAPER: Final = 36

MOUNTS: Final = (
    ("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
    ("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
    ("devtmpfs", "/dev", "devtmpfs", _MS_NOSUID, "mode=0755"),
    ("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777"),  # noqa: S108 - the guest's own
    ("tmpfs", "/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=16m"),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
)
"""Source, target, type, flags, options.

/tmp stays on the disk: what is written there must not eat the guest's memory. `favordynmods` (Linux 6.0)
keeps a process's entry into a job's cgroup from waiting for an RCU grace period, which took half of a short
command's time.
"""
_DEV_LINKS: Final = (
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
)
_IDENTITY: Final = "/run/microvm"
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_MACHINE_ID: Final = re.compile(r"[0-9a-f]{32}")
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})")


class Platform(Protocol):
    """What the supervisor does to the machine that it is in charge of."""

    def prepare(self) -> None:
        """Makes the machine fit to run jobs, once, at the start."""
        ...

    def set_realtime(self, realtime_ns: int) -> int:
        """Sets the wall clock; returns what it shows now, nanoseconds since the epoch."""
        ...

    def add_entropy(self, entropy: bytes) -> None:
        """Credits the kernel with `entropy` and makes every generator draw from it."""
        ...

    def become(self, machine_id: str, hostname: str) -> None:
        """Takes an identity: machine id, host name, boot id."""
        ...

    def available_bytes(self) -> int:
        """RAM that the kernel could give now, its caches included."""
        ...

    def threads_max(self) -> int:
        """How many tasks the kernel allows."""
        ...

    def power_off(self) -> None:
        """Ends the machine; everything is flushed already."""
        ...


def is_identity(machine_id: object, hostname: object) -> bool:
    """Whether these can be a machine id (machine-id(5)) and a host name (hostname(7))."""
    return (
        isinstance(machine_id, str)
        and isinstance(hostname, str)
        and bool(_MACHINE_ID.fullmatch(machine_id))
        and bool(_HOSTNAME.fullmatch(hostname))
    )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, as PID 1 is by nature (prctl(2))."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    result = _libc().mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _write_text(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read_text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def memory_facts() -> dict[str, int]:
    """Total and available memory in KiB."""
    facts: dict[str, int] = {}
    for line in _read_text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            facts["total_kib" if name == "MemTotal" else "available_kib"] = int(rest.split()[0])
    return facts


class GuestPlatform:
    """The virtual machine that this supervisor is PID 1 of."""

    def prepare(self) -> None:
        """Mounts, devices, loopback, protection from the OOM killer."""
        for source, target, kind, flags, options in MOUNTS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(target, 0o755)
            if os.path.ismount(target):
                continue
            _mount(source, target, kind, flags, options)
        for target, link in _DEV_LINKS:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, link)
        os.chmod("/tmp", 0o1777)  # noqa: S103, S108 - the guest's own, as every Debian has it
        _write_text("/proc/self/oom_score_adj", "-1000")
        _bring_up("lo")
        _make_identity()

    def set_realtime(self, realtime_ns: int) -> int:
        """See `Platform`."""
        time.clock_settime_ns(time.CLOCK_REALTIME, realtime_ns)
        return time.time_ns()

    def add_entropy(self, entropy: bytes) -> None:
        """See `Platform`. Source: random(4)."""
        fd = os.open("/dev/urandom", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _RNDADDENTROPY, struct.pack("<ii", len(entropy) * 8, len(entropy)) + entropy)
            fcntl.ioctl(fd, _RNDRESEEDCRNG)
        finally:
            os.close(fd)

    def become(self, machine_id: str, hostname: str) -> None:
        """See `Platform`."""
        socket.sethostname(hostname)
        _write_identity(machine_id, hostname)

    def available_bytes(self) -> int:
        """See `Platform`."""
        return memory_facts()["available_kib"] * 1024

    def threads_max(self) -> int:
        """See `Platform`."""
        return int(_read_text("/proc/sys/kernel/threads-max"))

    def power_off(self) -> None:
        """Remounts the disk read-only as far as it lets us, and powers off."""
        os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(OSError):
            _mount("", "/", "", _MS_REMOUNT | _MS_RDONLY, "")
        os.sync()
        _libc().reboot(_REBOOT_POWER_OFF)


def _make_identity() -> None:
    """Has the files that say who this is lie in memory, so that becoming somebody writes to no disk.

    A clone becomes somebody on its way to its first command: the first writes of a resumed guest to its disk
    took 0.1 s under emulation. The host says at every boot who this is. The kernel fixes its boot id at the
    first reading, so another file is mounted over it.
    """
    os.makedirs(_IDENTITY, 0o755, exist_ok=True)
    _write_identity("", "microvm")
    for name in ("machine-id", "hostname", "hosts"):
        path, target = f"/etc/{name}", f"..{_IDENTITY}/{name}"
        if os.path.islink(path) and os.readlink(path) == target:
            continue
        with contextlib.suppress(OSError):  # a disk that is full must not keep its machine from booting
            os.symlink(target, path + ".new")
            os.rename(path + ".new", path)
    if _BOOT_ID not in _read_text("/proc/self/mounts"):
        _mount(f"{_IDENTITY}/boot_id", _BOOT_ID, "", _MS_BIND, "")


def _write_identity(machine_id: str, hostname: str) -> None:
    """Writes over the files, which stay the same inodes."""
    _write_text(f"{_IDENTITY}/machine-id", machine_id + "\n")
    _write_text(f"{_IDENTITY}/hostname", hostname + "\n")
    _write_text(f"{_IDENTITY}/hosts", f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost\n")
    _write_text(f"{_IDENTITY}/boot_id", f"{uuid.uuid4()}\n")


def _bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH22x", interface.encode(), 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", interface.encode(), flags | _IFF_UP))


class HostPlatform:
    """An ordinary process on somebody's machine: nothing of the machine is touched.

    Attributes:
        realtime_offset_ns: By how much the clock would have been set.
    """

    def __init__(self) -> None:
        self.realtime_offset_ns = 0

    def prepare(self) -> None:
        """Only what concerns this process."""
        adopt_orphans()

    def set_realtime(self, realtime_ns: int) -> int:
        """See `Platform`."""
        self.realtime_offset_ns = realtime_ns - time.time_ns()
        return realtime_ns

    def add_entropy(self, entropy: bytes) -> None:
        """Nothing: the machine's generator is not ours."""

    def become(self, machine_id: str, hostname: str) -> None:
        """Nothing: the machine is somebody already."""

    def available_bytes(self) -> int:
        """See `Platform`."""
        return memory_facts()["available_kib"] * 1024

    def threads_max(self) -> int:
        """See `Platform`."""
        return int(_read_text("/proc/sys/kernel/threads-max"))

    def power_off(self) -> None:
        """The process ends; there is no machine to power off."""
        os._exit(0)


def find_port(name: str) -> str:
    """The device of the virtio-serial port of that name; udev is not there to make links.

    Raises:
        OSError: ENODEV, when the machine has no such port.
    """
    link = f"/dev/virtio-ports/{name}"
    if os.path.exists(link):
        return link
    base = "/sys/class/virtio-ports"
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.listdir(base)):
            with contextlib.suppress(OSError):
                if _read_text(f"{base}/{entry}/name").strip() == name:
                    return f"/dev/{entry}"
    raise OSError(errno.ENODEV, "no virtio-serial port", name)
