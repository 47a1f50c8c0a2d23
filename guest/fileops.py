"""What a file worker does, with the rights of the guest's user: reads, writes and syncs, each one call long.

Every path is resolved beneath the workspace by openat2; a symlink inside may be followed, a magic link never,
and a write never follows the last one. Only regular files are read or written. Runs in a child process that
blocks as it likes; `files` is the supervisor's end of its socket. Messages (one packet each) begin with a
letter:

    to the worker    C call (JSON)   D bytes of the body   E end of the body   X the caller is gone
    from the worker  D bytes of the body   O done (JSON)   F failed (JSON)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from guest.errors import OpError

PACKET_BYTES: Final = 32768
"""Body bytes per packet: one stream's window."""
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


def _number(args: dict[str, Any], name: str, *, default: int) -> int:
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


def read(workspace: Workspace, args: dict[str, Any], send: Send) -> dict[str, Any]:
    """Sends the bytes of a file from `offset`, at most `length`."""
    path = relative_path(args.get("path"))
    offset = _number(args, "offset", default=0)
    left = _number(args, "length", default=0)
    fd = workspace.open(path, os.O_RDONLY | _OPEN)
    try:
        facts = _require_regular(fd)
        at = offset
        while left > 0:
            data = os.pread(fd, min(left, PACKET_BYTES), at)
            if not data:
                break
            send(data)
            at += len(data)
            left -= len(data)
        return {
            "offset": offset,
            "size": facts.st_size,
            "mode": f"{stat.S_IMODE(facts.st_mode):04o}",
            "modified_at_ns": facts.st_mtime_ns,
            "eof": at >= facts.st_size,
        }
    finally:
        os.close(fd)


def write(workspace: Workspace, args: dict[str, Any], body: Body) -> dict[str, Any]:
    """Replaces a file atomically, or writes into it at `offset`."""
    path = relative_path(args.get("path"))
    mode = _mode_of(args)
    name = os.path.basename(path)
    if name in ("", ".", ".."):
        raise OpError("invalid_argument", "path: does not name a file")
    parent = workspace.open_parent(path, make=bool(args.get("make_parents")))
    try:
        if args.get("offset") is None:
            return _replace(parent, name, mode, body)
        offset = _number(args, "offset", default=0)
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


def _copy(fd: int, at: int, body: Body) -> tuple[int, str]:
    """Writes the whole body at `at`; returns its size and SHA-256."""
    digest = _new_sha256()
    size = 0
    for data in body:
        digest.update(data)
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, at + size)
            size += count
            view = view[count:]
    return size, digest.hexdigest()


def _sync_directory(parent: int) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def serve(workspace: Workspace, receive: Callable[[], bytes], send: Send) -> None:
    """Answers calls until the supervisor closes the socket."""
    while packet := receive():
        call = json.loads(packet[1:])
        try:
            answer = b"O" + json.dumps(_run(workspace, call, receive, send)).encode()
        except OpError as error:
            answer = _failure(error)
        except CallerGoneError:
            answer = _failure(OpError("internal", "the caller is gone"))
        except OSError as error:
            answer = _failure(OpError.of_errno(error.errno or 0, "path"))
        except (ValueError, OverflowError) as error:
            answer = _failure(OpError("invalid_argument", str(error)))
        send(answer)


def _failure(error: OpError) -> bytes:
    return b"F" + json.dumps({"code": error.code, "message": error.message}).encode()


def _run(
    workspace: Workspace, call: dict[str, Any], receive: Callable[[], bytes], send: Send
) -> dict[str, Any]:
    op, args = call["op"], call["args"]
    if op == "read_file":
        return read(workspace, args, lambda data: send(b"D" + data))
    if op == "write_file":
        body = _Body(receive)
        try:
            return write(workspace, args, iter(body))
        finally:
            body.discard_rest()
    os.sync()
    return {}


class _Body:
    """The body of a call, as packets, read to its end whatever happens: the next call begins clean."""

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        while not self._ended:
            packet = self._receive()
            if packet[:1] == b"D":
                yield packet[1:]
                continue
            self._ended = True
            if packet[:1] != b"E":
                raise CallerGoneError

    def discard_rest(self) -> None:
        with contextlib.suppress(CallerGoneError):
            for _ in self:
                pass
