"""Files that must survive a power cut, and locks that must not survive their holder.

Promises: temporary → fsync → rename → fsync of the directory, in that order; an error of any of them is
raised and never retried, since the kernel reports a failed write-back once. Everything blocks: in a
worker thread when the file is large. Must not know what is in the files. Neighbour: `reflink`, for files
that share blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from microvm._native import lib
from microvm.errors import HostError


@contextlib.contextmanager
def host_errors(operation: str, path: str | Path = "") -> Generator[None]:
    """Turns an OSError of its block into a HostError with this operation and path."""
    try:
        yield
    except OSError as error:
        raise HostError(operation, str(path), error.errno or 0) from error


def write_all(fd: int, data: bytes) -> None:
    """Writes all of `data` at the descriptor's position; OSError when it cannot."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def fsync_fd(fd: int, path: str | Path = "") -> None:
    """Makes a file's data and size durable.

    Args:
        fd: Any descriptor of the file; errors are reported to one that was open when they happened.
        path: For the message only.

    Raises:
        HostError: Whatever is on the device now is unknown. A second call may answer "done" and lie.
    """
    with host_errors("fsync", path):
        os.fsync(fd)


def fsync_directory(path: str | Path) -> None:
    """Makes the names in a directory durable."""
    with host_errors("fsync directory", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def flush(fd: int) -> None:
    """Writes dirty pages and waits, without making anything durable: what fsync or a reflink would wait for.

    Raises:
        HostError: A page could not be written.
    """
    error = lib.mvm_flush(fd)
    if error:
        raise HostError("sync_file_range", "", error)


def drop_pages(fd: int) -> None:
    """Lets the kernel forget the file's clean pages. A hint: dirty ones stay."""
    with host_errors("fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def write_durably(path: str | Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replaces or makes the file; after a crash it has the old content or the new, never a part.

    Args:
        path: In an existing directory that only the service writes to.
        data: The whole content.
        mode: Permission bits, whatever the umask.

    Raises:
        HostError: The old content stands (only after "fsync directory" either may).
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.new")
    with host_errors("write", target):
        # The name is fixed: what a crash left is overwritten, not collected.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode)
            write_all(fd, data)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, target)
    fsync_directory(target.parent)


def rename_durably(source: str | Path, target: str | Path) -> None:
    """Renames within one directory and makes it durable; the file's content must have been fsynced."""
    with host_errors("rename", target):
        os.rename(source, target)
    fsync_directory(Path(target).parent)


def unlink_durably(path: str | Path) -> None:
    """Removes the name durably; nothing when it is not there."""
    with host_errors("unlink", path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
    fsync_directory(Path(path).parent)


@contextlib.contextmanager
def hold_lock(path: str | Path) -> Generator[int]:
    """Holds an exclusive lock on a file (made when absent) for the block; it ends with the process.

    Yields:
        The descriptor. Children do not inherit it.

    Raises:
        HostError: Somebody holds it (`errno` EWOULDBLOCK), or the file cannot be opened.
    """
    with host_errors("open lock", path):
        # Read-only: a volume can be made read-only while its service runs, whose VMs all sleep.
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = error.errno == errno.EWOULDBLOCK
            message = "another process holds it" if held else ""
            raise HostError("lock", str(path), error.errno or 0, message) from error
        yield fd
    finally:
        os.close(fd)
