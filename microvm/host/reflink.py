"""Shares blocks between files (FICLONE), and proves that they are shared (FIEMAP).

Promises a typed error for every way in which a clone can be refused, and never copies instead. It must
not open files by path: descriptors come from the caller. Neighbours: `native/file.c` makes the call,
`volume` asks whether a directory can do it at all.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from microvm._native import lib
from microvm.errors import HostError

FS_IOC_FIEMAP: Final = 0xC020660B  # linux/fiemap.h: _IOWR('f', 11, struct fiemap)
FIEMAP_FLAG_SYNC: Final = 0x1
FIEMAP_EXTENT_LAST: Final = 0x1
FIEMAP_EXTENT_SHARED: Final = 0x2000
_HEADER: Final = struct.Struct("=QQLLLL")  # start, length, flags, mapped, count, reserved
_EXTENT: Final = struct.Struct("=QQQQQLLLL")  # logical, physical, length, 2 reserved, flags, 3 reserved
_EXTENTS_PER_CALL: Final = 512
_WHOLE_FILE: Final = 2**64 - 1


class ReflinkRefusal(enum.Enum):
    """Why a clone was refused; the values are words for logs."""

    NOT_SUPPORTED = "the file system cannot share blocks"
    CROSS_DEVICE = "source and destination are on different file systems"
    NO_SPACE = "the volume is full"
    READ_ONLY = "the file system is read-only"
    BAD_DESCRIPTOR = "source must be readable, destination writable and not append-only"
    IS_DIRECTORY = "source or destination is a directory"
    SAME_FILE_OR_RANGE = "source and destination are one file, or of kinds that cannot be cloned"
    NOT_PERMITTED = "the destination may not be changed (immutable, sealed, or a swap file)"
    BUSY = "source or destination is a swap file or busy"
    IO = "the storage failed"
    OTHER = "the kernel gave another reason"


_REFUSALS: Final = {
    errno.EOPNOTSUPP: ReflinkRefusal.NOT_SUPPORTED,
    errno.ENOTTY: ReflinkRefusal.NOT_SUPPORTED,
    errno.ENOSYS: ReflinkRefusal.NOT_SUPPORTED,
    errno.EXDEV: ReflinkRefusal.CROSS_DEVICE,
    errno.ENOSPC: ReflinkRefusal.NO_SPACE,
    errno.EDQUOT: ReflinkRefusal.NO_SPACE,
    errno.EFBIG: ReflinkRefusal.NO_SPACE,
    errno.EROFS: ReflinkRefusal.READ_ONLY,
    errno.EBADF: ReflinkRefusal.BAD_DESCRIPTOR,
    errno.EISDIR: ReflinkRefusal.IS_DIRECTORY,
    errno.EINVAL: ReflinkRefusal.SAME_FILE_OR_RANGE,
    errno.EPERM: ReflinkRefusal.NOT_PERMITTED,
    errno.ETXTBSY: ReflinkRefusal.BUSY,
    errno.EBUSY: ReflinkRefusal.BUSY,
    errno.EIO: ReflinkRefusal.IO,
}
"""Source: ioctl_ficlone(2), and what ext4, tmpfs, XFS and Btrfs were seen to answer."""


class ReflinkError(HostError):
    """A clone was refused; the destination is as it was."""

    def __init__(self, errno_: int) -> None:
        self.reason = _REFUSALS.get(errno_, ReflinkRefusal.OTHER)
        super().__init__("reflink", "", errno_, self.reason.value)


class Extent(NamedTuple):
    """A run of a file's blocks; offsets and lengths in bytes."""

    logical: int
    physical: int
    length: int
    flags: int

    @property
    def shared(self) -> bool:
        """Whether another file has these blocks too."""
        return bool(self.flags & FIEMAP_EXTENT_SHARED)


def reflink(source_fd: int, destination_fd: int) -> None:
    """Makes the destination's whole content the source's, sharing all blocks.

    Takes time by the source's extents and unflushed pages (0.01 ms to over a second): in a worker thread.

    Args:
        source_fd: A regular file, open for reading.
        destination_fd: Another on the same file system, open for writing.

    Raises:
        ReflinkError: Refused; nothing has changed.
    """
    error = lib.mvm_ficlone(destination_fd, source_fd)
    if error:
        raise ReflinkError(error)


def extents(fd: int, *, flush: bool = True) -> Iterator[Extent]:
    """The file's extents, in order.

    Args:
        fd: A regular file.
        flush: Write dirty pages first; without it, data that has no blocks yet is reported as it is now.

    Raises:
        HostError: The file system has no FIEMAP, or reading failed.
    """
    start = 0
    flags = FIEMAP_FLAG_SYNC if flush else 0
    while True:
        buffer = bytearray(_HEADER.size + _EXTENTS_PER_CALL * _EXTENT.size)
        mapped = _fiemap(fd, buffer, start, flags, _EXTENTS_PER_CALL)
        for index in range(mapped):
            fields = _EXTENT.unpack_from(buffer, _HEADER.size + index * _EXTENT.size)
            yield Extent(fields[0], fields[1], fields[2], fields[5])
            start = fields[0] + fields[2]
            if fields[5] & FIEMAP_EXTENT_LAST:
                return
        if mapped == 0:
            return


def extent_count(fd: int) -> int:
    """How many extents the file has now, without flushing it: FICLONE takes time by this.

    Raises:
        HostError: As for `extents`.
    """
    return _fiemap(fd, bytearray(_HEADER.size), 0, 0, 0)


def shares_extents(fd: int) -> bool:
    """Whether every block of the file is also another file's; False for a file without blocks.

    Raises:
        HostError: As for `extents`.
    """
    shared = [extent.shared for extent in extents(fd)]
    return bool(shared) and all(shared)


def own_bytes(fd: int) -> int:
    """Bytes in blocks that belong to this file alone.

    Raises:
        HostError: As for `extents`.
    """
    return sum(extent.length for extent in extents(fd) if not extent.shared)


def _fiemap(fd: int, buffer: bytearray, start: int, flags: int, count: int) -> int:
    _HEADER.pack_into(buffer, 0, start, _WHOLE_FILE - start, flags, 0, count, 0)
    try:
        fcntl.ioctl(fd, FS_IOC_FIEMAP, buffer, True)
    except OSError as error:
        name = f"inode {os.fstat(fd).st_ino}" if error.errno != errno.EBADF else ""
        raise HostError("fiemap", name, error.errno or 0) from error
    return int(_HEADER.unpack_from(buffer)[3])
