"""Files of the workspace, read and written with the rights of the guest's user; blocks as it likes.

Every path is resolved beneath the workspace by openat2; a symlink inside may be followed, a magic link never,
and a write never follows the last one. Only regular files are read or written. A file's *tag* names its very
content: another file of that name, or a change of this one, has another tag. Directories as a whole are
`archive`'s; `worker` calls both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from guest.errors import OpError

PACKET_BYTES: Final = 32768
"""Body bytes per packet: one stream's window."""
_FLUSH_BYTES: Final = 32 << 20
"""Written to the disk at a time: the end of a long body is then as near as that of a short one, and a guest
of little memory is not filled with dirty pages."""
_SYS_OPENAT2: Final = 437  # the same number on every architecture (openat2(2), Linux 5.6)
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_OPEN: Final = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK: opening a FIFO must not wait for its other end; what is not a regular file is refused after."""

Body = Iterator[bytes]
Send = Callable[[bytes], None]


class CallerGoneError(Exception):
    """Nobody waits for this call any more; what it did so far is taken back."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _find_sha256() -> Callable[[], _Hash]:
    """SHA-256 without OpenSSL, whose libraries would double a worker's memory, where Python has one."""
    for name in ("_sha2", "_sha256"):  # 3.12 on, 3.11
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).sha256
    return importlib.import_module("hashlib").sha256


_new_sha256: Final = _find_sha256()
"""Found before the fork: a worker may not have the right to read Python's own files."""


class Workspace:
    """The tree that calls work in.

    Args:
        fd: Its directory.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """A descriptor of `path`, resolved beneath the workspace.

        Raises:
            OSError: as openat2 answers it.
        """
        how = _OpenHow(flags, mode, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
        while True:
            fd = self._libc.syscall(
                _SYS_OPENAT2, self.fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how)
            )
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            if number != errno.EAGAIN:  # a rename raced with the resolution (openat2(2)); look again
                raise OSError(number, os.strerror(number), path)

    def open_parent(self, path: str, *, make: bool) -> int:
        """A descriptor of the directory that holds the last part of `path`, made on the way if `make`."""
        parent = os.path.dirname(path) or "."
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            return self.open(parent, flags)
        except FileNotFoundError:
            if not make:
                raise
        at = self.open(".", flags)
        walked = ""
        for part in filter(None, parent.split("/")):
            walked = f"{walked}/{part}" if walked else part
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=at)
                below = self.open(walked, flags)
            finally:
                os.close(at)
            at = below
        return at


def relative_path(path: object) -> str:
    """The path of a call, relative to the workspace.

    Raises:
        OpError: invalid_argument, for what can never name a file there.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise OpError("invalid_argument", "path: a non-empty text without NUL")
    if path == "/workspace" or path.startswith("/workspace/"):
        path = path[len("/workspace") :].lstrip("/") or "."
    elif path.startswith("/"):
        raise OpError("invalid_argument", "path: must lie below /workspace")
    return path


def number_of(args: dict[str, Any], name: str, *, default: int = 0) -> int:
    """A number from 0 among the arguments of a call.

    Raises:
        OpError: invalid_argument, when it is none.
    """
    value = args.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise OpError("invalid_argument", f"{name}: a number from 0")
    return value


def _mode_of(args: dict[str, Any]) -> int | None:
    text = args.get("mode")
    if text is None:
        return None
    if not isinstance(text, str) or not 1 <= len(text) <= 5 or text.strip("01234567"):
        raise OpError("invalid_argument", "mode: octal digits, as in 0644")
    return int(text, 8) & 0o7777


def _require_regular(fd: int) -> os.stat_result:
    facts = os.fstat(fd)
    if stat.S_ISDIR(facts.st_mode):
        raise OpError("invalid_argument", "path: is a directory")
    if not stat.S_ISREG(facts.st_mode):
        raise OpError("invalid_argument", "path: not a regular file")
    return facts


def _tag_of(facts: os.stat_result) -> str:
    return f"{facts.st_ino:x}-{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ctime_ns:x}"


def _require_tag(facts: os.stat_result, tag: object, message: str) -> None:
    if tag is not None and tag != _tag_of(facts):
        raise OpError("invalid_state", message)


def read(workspace: Workspace, args: dict[str, Any], send: Send) -> dict[str, Any]:
    """Sends the bytes of a file from `offset`, at most `length`.

    With a `tag`, only of the file that has it, and the answer is an error when it changed in the meantime.
    """
    path = relative_path(args.get("path"))
    offset = number_of(args, "offset")
    left = number_of(args, "length")
    tag = args.get("tag")
    fd = workspace.open(path, os.O_RDONLY | _OPEN)
    try:
        facts = _require_regular(fd)
        _require_tag(facts, tag, "the file has changed since it was looked at")
        at = offset
        while left > 0:
            data = os.pread(fd, min(left, PACKET_BYTES), at)
            if not data:
                break
            send(data)
            at += len(data)
            left -= len(data)
        _require_tag(os.fstat(fd), tag, "the file changed while it was read")
        return {
            "offset": offset,
            "size": facts.st_size,
            "tag": _tag_of(facts),
            "mode": f"{stat.S_IMODE(facts.st_mode):04o}",
            "modified_at_ns": facts.st_mtime_ns,
            "eof": at >= facts.st_size,
        }
    finally:
        os.close(fd)


def write(workspace: Workspace, args: dict[str, Any], body: Body) -> dict[str, Any]:
    """Replaces a file atomically, or writes into it at `offset`.

    With a `size`, a body of another length changes nothing.
    """
    path = relative_path(args.get("path"))
    mode = _mode_of(args)
    if args.get("size") is not None:
        body = whole(body, number_of(args, "size"))
    name = os.path.basename(path)
    if name in ("", ".", ".."):
        raise OpError("invalid_argument", "path: does not name a file")
    parent = workspace.open_parent(path, make=bool(args.get("make_parents")))
    try:
        if args.get("offset") is None:
            return _replace(parent, name, mode, body)
        offset = number_of(args, "offset")
        return _write_at(parent, name, offset, mode, truncate=bool(args.get("truncate")), body=body)
    finally:
        os.close(parent)


def _existing_mode(parent: int, name: str) -> int | None:
    """The permissions of the file that is to be replaced; None when there is none."""
    try:
        facts = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(facts.st_mode):
        raise OpError("invalid_argument", "path: is a symbolic link, which a write does not follow")
    if not stat.S_ISREG(facts.st_mode):
        raise OpError("invalid_argument", "path: not a regular file")
    return stat.S_IMODE(facts.st_mode)


def _replace(parent: int, name: str, mode: int | None, body: Body) -> dict[str, Any]:
    """Temporary name, fsync, rename, fsync of the directory: a reader sees the whole old file or the new."""
    old_mode = _existing_mode(parent, name)
    temporary = f".microvm-{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        try:
            size, digest = _copy(fd, 0, body)
            os.fchmod(fd, mode if mode is not None else old_mode if old_mode is not None else 0o644)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise
    _sync_directory(parent)
    return {"size": size, "sha256": digest}


def _write_at(
    parent: int, name: str, offset: int, mode: int | None, *, truncate: bool, body: Body
) -> dict[str, Any]:
    flags = os.O_WRONLY | os.O_NOFOLLOW | _OPEN
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if offset:
            raise
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=parent)
    try:
        old_size = _require_regular(fd).st_size
        try:
            written, digest = _copy(fd, offset, body)
            if truncate:
                os.ftruncate(fd, offset + written)
            if mode is not None:
                os.fchmod(fd, mode)
            os.fsync(fd)
        except BaseException:
            # What was overwritten in place cannot come back; a file that grew is as long as before.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, old_size)
            raise
        return {"size": os.fstat(fd).st_size, "sha256": digest}
    finally:
        os.close(fd)


def whole(body: Body, size: int) -> Body:
    """The body, which must be `size` bytes long.

    Raises:
        OpError: invalid_argument, at its end, where it is not.
    """
    seen = 0
    for data in body:
        seen += len(data)
        yield data
    if seen != size:
        raise OpError("invalid_argument", f"the body has {seen} bytes of {size}")


def _copy(fd: int, at: int, body: Body) -> tuple[int, str]:
    """Writes the whole body at `at`; returns its size and SHA-256."""
    digest = _new_sha256()
    size = flushed = 0
    for data in body:
        digest.update(data)
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, at + size)
            size += count
            view = view[count:]
        if size - flushed >= _FLUSH_BYTES:
            flushed = size
            os.fdatasync(fd)
    return size, digest.hexdigest()


def _sync_directory(parent: int) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
