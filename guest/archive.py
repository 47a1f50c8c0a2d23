"""Whole directories as tar archives, by the guest's own tar, with the rights of the guest's user.

The directory is resolved beneath the workspace; tar runs in it and sees nothing of how it was found. What
comes in is unpacked into a hidden directory first, and only a whole archive is moved to its place: by one
rename where nothing was there, otherwise entry by entry. Each entry replaces a file of its name by a rename;
directories that exist keep what else is in them, and their modes. An entry that would take the place of a
directory, or put one in the place of something else, is refused before anything is moved. Runs in a file
worker (`worker`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
from collections.abc import Generator
from typing import Any, Final

from guest.errors import OpError
from guest.fileops import PACKET_BYTES, Body, Send, Workspace, number_of, relative_path, whole

_HIDDEN: Final = ".microvm-"
_HIDDEN_PATTERN: Final = _HIDDEN + "[0-9a-f]" * 16
"""What this package calls its temporary files; none of them belongs into an archive."""
_TAR: Final = ("/usr/bin/choom", "-n", "0", "--", "/usr/bin/tar")
"""The worker is protected from the OOM killer, and what it starts must not be; only after an exec may a
process of the user's say so of itself (proc(5), `oom_score_adj`; prctl(2), PR_SET_DUMPABLE)."""
_PACK: Final = (
    *_TAR,
    "--create",
    "--format=posix",  # keeps times below a second, which build tools compare
    "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime",  # and nothing that varies
    "--sparse",
    "--file=-",
    f"--exclude={_HIDDEN_PATTERN}",
    ".",
)
_UNPACK: Final = (
    *_TAR,
    "--extract",
    "--file=-",
    "--no-same-owner",
    "--same-permissions",
    "--delay-directory-restore",
)
_DEEPEST: Final = 200
"""Levels of directories that are merged: far beyond any tree of people's, and below Python's own limit."""
_CHANGED: Final = 1
"""Exit status of a tar that saw files change while it read them (tar(1)); its archive is whole."""
_SAID_BYTES: Final = 2000
"""How much of what tar says is kept: its last words name the cause."""
_ENV: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


class _Tar:
    """One run of tar in a directory, with one end of its input or output here.

    Args:
        words: The command.
        directory: Descriptor of where it runs; stays the caller's.
        feeds: Whether its standard input is fed from here; otherwise its output is read.
    """

    def __init__(self, words: tuple[str, ...], directory: int, *, feeds: bool) -> None:
        read_end, write_end = os.pipe()
        self._said_fd, said_end = os.pipe()
        self._fd, theirs = (write_end, read_end) if feeds else (read_end, write_end)
        self._said = bytearray()
        self._pid = os.fork()
        if self._pid == 0:
            _become(
                words, directory, stdin=theirs if feeds else -1, stdout=-1 if feeds else theirs, said=said_end
            )
        os.close(theirs)
        os.close(said_end)
        os.set_blocking(self._fd, False)
        self._poll = select.poll()
        self._poll.register(self._said_fd, select.POLLIN)
        self._poll.register(self._fd, select.POLLOUT if feeds else select.POLLIN)

    def _hear(self) -> None:
        """Takes some of what it says on standard error; at the end of that, closes it."""
        data = os.read(self._said_fd, 4096)
        self._said += data
        del self._said[:-_SAID_BYTES]
        if not data:
            self._poll.unregister(self._said_fd)
            os.close(self._said_fd)
            self._said_fd = -1

    def _wait_ready(self) -> None:
        while self._fd not in (ready := [fd for fd, _events in self._poll.poll()]):
            if self._said_fd in ready:
                self._hear()

    def read(self) -> bytes:
        """Some of its output; b"" at the end."""
        self._wait_ready()
        return os.read(self._fd, PACKET_BYTES)

    def write(self, data: bytes) -> None:
        """Feeds it; what it does not want any more is dropped, and `finish` says why."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                self._wait_ready()
                view = view[os.write(self._fd, view) :]

    def finish(self) -> None:
        """Closes our end and waits for its own.

        Raises:
            OpError: It failed; with its last words.
        """
        status = os.waitstatus_to_exitcode(self._end())
        if status in (0, _CHANGED):
            return
        words = self._said.decode("utf-8", "replace").strip()
        if "No space left on device" in words or "Wrote only" in words:
            raise OpError("disk_full", "the guest's disk is full")
        raise OpError("invalid_argument", f"tar failed ({status}): {words or 'without a word'}")

    def kill(self) -> None:
        """Ends it, whatever it is doing."""
        os.kill(self._pid, signal.SIGKILL)
        self._end()

    def _end(self) -> int:
        self._poll.unregister(self._fd)
        os.close(self._fd)
        while self._said_fd >= 0:
            self._hear()
        return os.waitpid(self._pid, 0)[1]


def _become(words: tuple[str, ...], directory: int, *, stdin: int, stdout: int, said: int) -> None:
    """In the child: another program, with nothing of the worker's but its rights; -1 is /dev/null."""
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the program
        os.fchdir(directory)
        null = os.open("/dev/null", os.O_RDWR)
        for number, fd in enumerate((stdin, stdout, said)):
            os.dup2(fd if fd >= 0 else null, number)
        os.closerange(3, 65536)
        os.execve(words[0], words, _ENV)  # noqa: S606 - programs run without a shell here
    finally:
        os._exit(127)


def _run(words: tuple[str, ...], directory: int) -> bool:
    """Runs a program in a directory, unheard; returns whether it succeeded."""
    pid = os.fork()
    if pid == 0:
        _become(words, directory, stdin=-1, stdout=-1, said=-1)
    return os.waitpid(pid, 0)[1] == 0


def _open_directory(workspace: Workspace, path: str) -> int:
    return workspace.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read(workspace: Workspace, args: dict[str, Any], send: Send) -> dict[str, Any]:
    """Sends a directory as a tar archive; its names begin with `./`."""
    directory = _open_directory(workspace, relative_path(args.get("path")))
    try:
        if args.get("look"):
            return {}
        tar = _Tar(_PACK, directory, feeds=False)
        size = 0
        try:
            while data := tar.read():
                send(data)
                size += len(data)
        except BaseException:
            tar.kill()
            raise
        tar.finish()
        return {"size": size}
    finally:
        os.close(directory)


def write(workspace: Workspace, args: dict[str, Any], body: Body) -> dict[str, Any]:
    """Puts what an archive holds into a directory, which is made where there is none.

    With a `size`, a body of another length changes nothing.
    """
    path = relative_path(args.get("path")).rstrip("/") or "."
    if args.get("size") is not None:
        body = whole(body, number_of(args, "size"))
    try:
        target = _open_directory(workspace, path)
    except FileNotFoundError:
        return _write_new(workspace, path, body)
    try:
        with _hidden_directory(target) as (_, unpacked):
            size = _unpack(unpacked, body)
            _check(unpacked, target, _DEEPEST)
            os.sync()
            _merge(unpacked, target)
        os.fsync(target)
        return {"size": size}
    finally:
        os.close(target)


def _write_new(workspace: Workspace, path: str, body: Body) -> dict[str, Any]:
    """The directory is not there: it appears whole."""
    name = os.path.basename(path)
    if name in ("", ".", ".."):
        raise OpError("invalid_argument", "path: does not name a directory")
    above = workspace.open_parent(path, make=True)
    try:
        parent = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    try:
        with _hidden_directory(parent) as (hidden, unpacked):
            size = _unpack(unpacked, body)
            os.sync()
            with _writable(hidden, parent):
                os.rename(hidden, name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)
        return {"size": size}
    finally:
        os.close(parent)


@contextlib.contextmanager
def _hidden_directory(parent: int) -> Generator[tuple[str, int], None, None]:
    """A new directory beside the others of `parent`; what is in it at the end goes."""
    name = _HIDDEN + os.urandom(8).hex()
    os.mkdir(name, 0o755, dir_fd=parent)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            yield name, fd
        finally:
            os.close(fd)
    finally:
        _remove(name, parent)


def _unpack(directory: int, body: Body) -> int:
    """Has tar unpack the whole body; returns its length."""
    tar = _Tar(_UNPACK, directory, feeds=True)
    size = 0
    try:
        for data in body:
            size += len(data)
            tar.write(data)
    except BaseException:
        tar.kill()
        raise
    tar.finish()
    return size


def _is_directory(name: str, parent: int) -> bool | None:
    """Whether `name` is a directory itself; None where there is nothing."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _in_both(name: str, source: int, target: int) -> Generator[tuple[int, int], None, None]:
    """The directories of that name in both; they can be changed inside the block, whatever their modes."""
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for parent in (source, target):
            stack.enter_context(_writable(name, parent))
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(name, flags, dir_fd=parent))
            stack.callback(os.close, fds[-1])
        yield fds[0], fds[1]


def _check(source: int, target: int, levels: int) -> None:
    """Refuses what `_merge` could not do."""
    if not levels:
        raise OpError("invalid_argument", f"directories that exist here nest deeper than {_DEEPEST} levels")
    for name in os.listdir(source):
        there = _is_directory(name, target)
        if there is None:
            continue
        here = _is_directory(name, source)
        if here is not there:
            kind = "is a directory" if there else "is not a directory"
            raise OpError("invalid_argument", f"{name!r} {kind} here and the other way round in the archive")
        if here:
            with _in_both(name, source, target) as (inner, outer):
                if not os.access(name, os.W_OK | os.X_OK, dir_fd=target):
                    raise OpError("invalid_argument", f"the guest's user may not write in {name!r}")
                _check(inner, outer, levels - 1)


def _merge(source: int, target: int) -> None:
    """Moves every entry of `source` into `target`."""
    os.fchmod(source, 0o700)
    for name in os.listdir(source):
        if _is_directory(name, source) and _is_directory(name, target):
            with _in_both(name, source, target) as (inner, outer):
                _merge(inner, outer)
        elif _is_directory(name, source):
            with _writable(name, source):
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        else:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


@contextlib.contextmanager
def _writable(name: str, parent: int) -> Generator[None, None, None]:
    """Lets a directory be opened and moved, whatever its mode: a move changes its entry `..` (rename(2))."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    if mode & 0o700 == 0o700:
        yield
        return
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    handle = f"/proc/self/fd/{fd}"
    try:
        os.chmod(handle, mode | 0o700)
        try:
            yield
        finally:
            os.chmod(handle, mode)
    finally:
        os.close(fd)


def _remove(name: str, parent: int) -> None:
    """Removes what is left of a directory; programs do it, since a tree may be deeper than Python's stack."""
    if _is_directory(name, parent) and not _run(("/bin/rm", "-rf", "--", name), parent):
        _run(("/bin/chmod", "-R", "u+rwx", "--", name), parent)
        _run(("/bin/rm", "-rf", "--", name), parent)
