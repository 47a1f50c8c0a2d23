"""The volume for RAM and disks: asks whether it can share blocks, and makes one where none can.

Promises that a loop volume's space is really there (its backing file is allocated, also after somebody
trimmed it), that making it again does nothing, and that a half-made one is never mounted. Must not decide
where volumes lie. Everything blocks; programs run without a shell. Neighbour: `reflink` does the cloning.
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from microvm.errors import HostError
from microvm.host.files import fsync_directory, host_errors, write_all
from microvm.host.reflink import ReflinkError, reflink, shares_extents

LOOP_MAJOR: Final = 7  # Documentation/admin-guide/devices.txt
MIN_VOLUME_BYTES: Final = 300 << 20  # mkfs.xfs refuses less since xfsprogs 5.19
MOUNT_OPTIONS: Final = "loop,rw,nosuid,nodev,noexec,noatime"
TOOL_SECONDS: Final = 300.0

HOW_TO_GET_ONE: Final = (
    "put vm_dir on XFS (mkfs.xfs -m reflink=1) or Btrfs, or run tools/quickstart, which makes an XFS volume "
    "in a file and after a reboot mounts it again"
)


def check_reflink(directory: str | Path) -> None:
    """Proves by a real clone that files in `directory` can share blocks; leaves nothing behind.

    A full volume proves nothing and is let pass: its service must start for anything on it to be destroyed,
    and whatever would need a clone is refused for want of space.

    Raises:
        HostError: They cannot; the message says how to get a volume that can.
    """
    try:
        _clone_in(directory)
    except HostError as error:
        if error.errno != errno.ENOSPC:
            raise


def _clone_in(directory: str | Path) -> None:
    with host_errors("open", directory), tempfile.TemporaryFile(dir=directory) as source:
        write_all(source.fileno(), b"microvm\n" * 8192)
        with tempfile.TemporaryFile(dir=directory) as clone:
            try:
                reflink(source.fileno(), clone.fileno())
            except ReflinkError as error:
                message = f"{error.reason.value}; {HOW_TO_GET_ONE}"
                raise HostError("reflink", str(directory), error.errno, message) from error
            if not shares_extents(clone.fileno()):
                raise HostError("reflink", str(directory), message=f"blocks were copied; {HOW_TO_GET_ONE}")


def free_bytes(directory: str | Path) -> int:
    """Bytes that can still be written on the directory's file system by the service."""
    with host_errors("statvfs", directory):
        facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def total_bytes(directory: str | Path) -> int:
    """Size of the directory's file system in bytes."""
    with host_errors("statvfs", directory):
        facts = os.statvfs(directory)
    return facts.f_blocks * facts.f_frsize


def make_loop_volume(file: str | Path, mountpoint: str | Path, size_bytes: int) -> bool:
    """Makes sure that an XFS volume with reflinks, kept in `file`, is mounted at `mountpoint`.

    Idempotent: makes the file only where there is none, mounts only what is not mounted (after a reboot).
    An existing volume keeps its size and content, whatever `size_bytes` says.

    Args:
        file: The backing file; its directory exists.
        mountpoint: Made when absent (0700).
        size_bytes: Of a new volume, at least MIN_VOLUME_BYTES; allocated at once.

    Returns:
        Whether anything was done.

    Raises:
        HostError: No room, no mkfs.xfs, something else is mounted there, …; a half-made file is gone.
    """
    file, mountpoint = Path(file).resolve(), Path(mountpoint)
    with host_errors("make directory", mountpoint):
        mountpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
    mountpoint = mountpoint.resolve()
    backing = mounted_file(mountpoint)
    if backing is not None and backing == file:
        return False
    if os.path.ismount(mountpoint):
        raise HostError("mount", str(mountpoint), message=f"{backing or 'something else'} is mounted there")
    if not file.exists():
        _make_backing_file(file, size_bytes)
    _fill_holes(file)
    _run(["mount", "-t", "xfs", "-o", MOUNT_OPTIONS, "--", str(file), str(mountpoint)])
    with host_errors("chmod", mountpoint):
        mountpoint.chmod(0o700)
    return True


def remove_loop_volume(mountpoint: str | Path) -> None:
    """Unmounts the volume, which frees its loop device; the backing file stays. Nothing if not mounted."""
    if os.path.ismount(mountpoint):
        _run(["umount", "--", str(mountpoint)])


def mounted_file(mountpoint: Path) -> Path | None:
    """The backing file of the loop volume that is mounted exactly here; None where there is none."""
    if not os.path.ismount(mountpoint):
        return None
    with host_errors("stat", mountpoint):
        device = mountpoint.stat().st_dev
    if os.major(device) != LOOP_MAJOR:
        return None
    facts = Path(f"/sys/dev/block/{LOOP_MAJOR}:{os.minor(device)}/loop/backing_file")
    with host_errors("read", facts):
        return Path(os.fsdecode(facts.read_bytes().rstrip(b"\n")))


def _make_backing_file(file: Path, size_bytes: int) -> None:
    assert size_bytes >= MIN_VOLUME_BYTES, size_bytes
    room = free_bytes(file.parent)
    if room < size_bytes:
        raise HostError(
            "allocate", str(file), message=f"{size_bytes >> 20} MiB are needed, {room >> 20} MiB are free"
        )
    temporary = file.with_name(f".{file.name}.new")
    try:
        with host_errors("allocate", temporary):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
            finally:
                os.close(fd)
        _run(["mkfs.xfs", "-q", "-K", "-m", "reflink=1", str(temporary)])
        with host_errors("fsync", temporary):
            fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(file.parent)


def _fill_holes(file: Path) -> None:
    """Allocates what `fstrim` (weekly on many systems) may have punched out since; quick when nothing was."""
    with host_errors("allocate", file):
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)


def _run(argv: Sequence[str]) -> None:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise HostError(argv[0], message="not installed (Debian: xfsprogs, mount)") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(argv[0], argv[-1], message=str(error)) from error
    if done.returncode:
        output = os.fsdecode(done.stderr or done.stdout).strip()[-500:]
        raise HostError(argv[0], argv[-1], message=output or f"exit status {done.returncode}")
