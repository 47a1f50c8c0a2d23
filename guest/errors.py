"""What the supervisor answers when it cannot do what was asked; the codes are the service's public ones."""

from __future__ import annotations

import errno
import os

_CODE_OF_ERRNO = {
    errno.ENOENT: ("not_found", "there is no such file"),
    errno.ENOSPC: ("disk_full", "the guest's disk is full"),
    errno.EDQUOT: ("disk_full", "the guest's disk is full"),
    errno.EXDEV: ("invalid_argument", "the path leads out of /workspace"),
    errno.ELOOP: ("invalid_argument", "the path has a symbolic link where none may be followed"),
    errno.ENOTDIR: ("invalid_argument", "a part of the path is not a directory"),
    errno.EISDIR: ("invalid_argument", "the path is a directory"),
    errno.EACCES: ("invalid_argument", "permission denied for the guest's user"),
    errno.EPERM: ("invalid_argument", "operation not permitted for the guest's user"),
    errno.ENAMETOOLONG: ("invalid_argument", "the path is too long"),
    errno.EROFS: ("invalid_argument", "the file system is read-only"),
    errno.ETXTBSY: ("invalid_argument", "the file is being executed"),
    errno.EFBIG: ("invalid_argument", "the offset is beyond what the file system can hold"),
    errno.EINVAL: ("invalid_argument", "the path or offset is not valid"),
    errno.ENXIO: ("invalid_argument", "not a regular file"),
    errno.ENODEV: ("invalid_argument", "not a regular file"),
}


class OpError(Exception):
    """An operation that was refused or failed.

    Args:
        code: A public code ("not_found", "invalid_argument", …).
        message: One sentence for the caller.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def of_errno(cls, number: int, subject: str) -> OpError:
        """The error that errno `number` means for the caller's `subject`."""
        code, text = _CODE_OF_ERRNO.get(number, ("internal", os.strerror(number)))
        return cls(code, f"{subject}: {text}" if subject else text)
