"""What `doctor` looks at before and while a service runs: one function per check.

Promises to change nothing on the host but one scratch file for the reflink check, and to end each check
with what it saw and, unless all is well, how to mend it. It must not start a VMM. Neighbour: `settings`,
which says where to look; the wiring refuses on its own what must not be started.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import pwd
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from microvm.daemon.settings import SLOTS, Settings
from microvm.errors import HostError

MIB: Final = 2**20
GIB: Final = 2**30

KVM_DEVICE: Final = Path("/dev/kvm")

# cgroup.kill is 5.14; clone3 into a cgroup (5.7) and move_mount (5.2) are older.
OLDEST_KERNEL: Final = (5, 14)
RESERVE_SHARE: Final = 0.05  # below 5 % and 1 GiB nothing is admitted (rulings 50)
SMALLEST_RESERVE: Final = GIB


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome.

    Attributes:
        name: What was looked at.
        status: Whether it will do.
        seen: What was found.
        mend: What to do about it; empty when nothing needs doing.
    """

    name: str
    status: Status
    seen: str
    mend: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as a JSON object; `mend` only where there is something to do."""
        facts: dict[str, Any] = {"name": self.name, "status": self.status.value, "seen": self.seen}
        return {**facts, "mend": self.mend} if self.mend else facts


def examine(settings: Settings) -> list[Check]:
    """Every check, in the order in which one would mend them."""
    return [check(settings) for check in CHECKS]


def check_machine(settings: Settings) -> Check:
    """Processor, kernel and Python."""
    del settings
    release = platform.release()
    seen = f"{platform.machine()}, Linux {release}, Python {platform.python_version()}"
    if platform.machine() != "x86_64":
        return Check("machine", Status.FAIL, seen, "run the service on x86_64")
    if _kernel_version(release) < OLDEST_KERNEL:
        return Check(
            "machine", Status.FAIL, seen, f"install Linux {'.'.join(map(str, OLDEST_KERNEL))} or newer"
        )
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("machine", Status.WARN, seen, "use Python 3.11, 3.12 or 3.13")
    return Check("machine", Status.OK, seen)


def _kernel_version(release: str) -> tuple[int, int]:
    numbers = release.split("-", 1)[0].split(".")
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 and numbers[1].isdigit() else 0


def check_user(settings: Settings) -> Check:
    """Root, which jails need."""
    del settings
    uid = os.geteuid()
    if uid != 0:
        return Check("user", Status.FAIL, f"uid {uid}", "run as root: every VMM gets a UID of its own")
    return Check("user", Status.OK, "root")


def check_uids(settings: Settings) -> Check:
    """The slots' UIDs belong to nobody else."""
    first, last = settings.uid_base, settings.uid_base + SLOTS - 1
    taken = sorted(entry.pw_uid for entry in pwd.getpwall() if first <= entry.pw_uid <= last)
    seen = f"{first} to {last}"
    if taken:
        return Check(
            "uid_base", Status.FAIL, f"{seen}; user {taken[0]} exists", "choose a range without users"
        )
    return Check("uid_base", Status.OK, f"{seen} are free")


def check_state_dir(settings: Settings) -> Check:
    """The directory of metadata is ours alone."""
    path = settings.state_dir
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        return Check("state_dir", Status.WARN, f"{path} does not exist", "`microvm serve` creates it")
    except OSError as error:
        return Check("state_dir", Status.FAIL, f"{path}: {error.strerror}", "make it readable for root")
    if mode & 0o077:
        return Check("state_dir", Status.FAIL, f"{path} has mode {mode:04o}", f"chmod 0700 {path}")
    return Check("state_dir", Status.OK, str(path))


def check_vm_dir(settings: Settings) -> Check:
    """The volume of disks and RAM makes reflinks and is not the metadata's."""
    from microvm.host.volume import check_reflink

    path = settings.vm_dir
    if not path.is_dir():
        return Check(
            "vm_dir",
            Status.FAIL,
            f"{path} does not exist",
            "run tools/quickstart, or mount XFS or Btrfs there",
        )
    try:
        check_reflink(path)
    except HostError as error:
        return Check("vm_dir", Status.FAIL, f"{path} makes no reflinks", error.message)
    if settings.state_dir.is_dir() and settings.state_dir.stat().st_dev == path.stat().st_dev:
        return Check(
            "vm_dir",
            Status.WARN,
            f"{path} makes reflinks and is on the file system of state_dir",
            "put state_dir elsewhere: each commit waits for an fsync of RAM beside it",
        )
    return Check("vm_dir", Status.OK, f"{path} makes reflinks")


def check_space(settings: Settings) -> Check:
    """The volume has more than the reserve below which nothing is admitted."""
    path = settings.vm_dir
    if not path.is_dir():
        return Check("space", Status.WARN, "unknown", "vm_dir first")
    usage = shutil.disk_usage(path)
    reserve = max(SMALLEST_RESERVE, int(usage.total * RESERVE_SHARE))
    seen = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free <= reserve:
        mend = f"free some: below {reserve / GIB:.1f} GiB nothing is admitted and running VMs are paused"
        return Check("space", Status.FAIL, seen, mend)
    return Check("space", Status.OK, seen)


def check_image(settings: Settings) -> Check:
    """The guest image and its VMM are there."""
    from image import ImageError, load_manifest

    try:
        manifest = load_manifest(settings.image)
    except (ImageError, OSError) as error:
        return Check("image", Status.FAIL, f"{settings.image}: {error}", "microvm image build")
    return Check("image", Status.OK, f"{settings.image}, digest {manifest.digest[:16]}")


def check_accelerator(settings: Settings) -> Check:
    """Hardware virtualisation; without it guests run several times slower."""
    if settings.accel == "tcg":
        return Check("accelerator", Status.OK, "tcg, as configured")
    device = KVM_DEVICE
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        seen = f"{device}: {error.strerror}"
        if settings.accel == "kvm":
            return Check("accelerator", Status.FAIL, seen, 'enable virtualisation, or set accel = "auto"')
        return Check(
            "accelerator", Status.WARN, f"{seen}; guests run by translation (tcg)", "enable virtualisation"
        )
    name, reason = _remembered_accelerator(settings.state_dir / "accelerator.json")
    if name == "tcg":
        return Check(
            "accelerator", Status.WARN, f"tcg: {reason}", 'mend what QEMU says, or set accel = "tcg"'
        )
    if name is None:
        return Check(
            "accelerator", Status.OK, f"{device} opens; `serve` proves by a boot whether it runs guests"
        )
    return Check("accelerator", Status.OK, f"{name}: {reason}")


def _remembered_accelerator(file: Path) -> tuple[str | None, str]:
    """What `serve` found at its last start."""
    try:
        fields = json.loads(file.read_bytes())
        return str(fields["name"]), str(fields["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def check_cgroups(settings: Settings) -> Check:
    """Version 2 of cgroups for freezing and killing; its controllers for limits."""
    from microvm.host.cgroup import find_hierarchy

    try:
        hierarchy = find_hierarchy()
    except HostError as error:
        return Check("cgroups", Status.FAIL, error.message, "mount -t cgroup2 none /sys/fs/cgroup")
    seen = f"v2 at {hierarchy.mount}, controllers: {' '.join(sorted(hierarchy.controllers)) or 'none'}"
    if settings.limits == "none":
        return Check(
            "cgroups", Status.WARN, f'{seen}; limits = "none"', "for trials only: VMMs are not limited"
        )
    if hierarchy.lacks:
        missing = ", ".join(sorted(hierarchy.lacks))
        mend = f'boot with systemd.unified_cgroup_hierarchy=1 for {missing}, or set limits = "none"'
        return Check("cgroups", Status.FAIL, seen, mend)
    return Check("cgroups", Status.OK, seen)


def check_memory(settings: Settings) -> Check:
    """The budget for VMs fits the machine."""
    total_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    budget = settings.max_memory_mib
    if budget is None:
        return Check("memory", Status.OK, f"{total_mib} MiB, three quarters of it for VMs")
    if budget > total_mib:
        return Check(
            "memory",
            Status.WARN,
            f"max_memory_mib = {budget} of {total_mib} MiB",
            "lower it",
        )
    return Check("memory", Status.OK, f"{budget} of {total_mib} MiB for VMs")


def check_listener(settings: Settings) -> Check:
    """The address is free, or a service answers on it."""
    seen = f"{settings.host}:{settings.port}"
    if settings.warnings:
        return Check(
            "listen", Status.WARN, settings.warnings[0], "list the names of this service in allowed_hosts"
        )
    try:
        with socket.create_connection((settings.host, settings.port), timeout=2):
            return Check("listen", Status.OK, f"something answers on {seen}")
    except ConnectionRefusedError:
        return Check("listen", Status.OK, f"{seen} is free")
    except OSError as error:
        return Check(
            "listen", Status.FAIL, f"{seen}: {error.strerror or error}", "choose an address of this host"
        )


CHECKS: Final[tuple[Callable[[Settings], Check], ...]] = (
    check_machine,
    check_user,
    check_uids,
    check_memory,
    check_cgroups,
    check_accelerator,
    check_state_dir,
    check_vm_dir,
    check_space,
    check_image,
    check_listener,
)
