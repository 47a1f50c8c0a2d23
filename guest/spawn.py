"""The way in which a command comes to life: in the job's cgroup, with the job's rights, by the launcher.

A fork of this interpreter would cost more than everything else under emulation, hence the small process that
is kept for it (`launch.c`) and makes children of the supervisor's own. This module asks it and says how it
went; `jobs` knows what a job is.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from guest.cgroups import Group
from guest.errors import OpError
from guest.loop import READ, Loop

INLINE_COMMAND_BYTES: Final = 96 * 1024
"""A longer command runs from a descriptor: Linux takes at most 128 KiB in one argument (MAX_ARG_STRLEN)."""
_COMMAND_FD: Final = 9
"""Where the launcher puts the descriptor of a long command; the command's own first words close it."""
_REQUEST: Final = struct.Struct("=IIIII")
_OUTCOME: Final = struct.Struct("=Iii20s")
_FORKED: Final = struct.Struct("=Ii")
_SLOTS: Final = 64
"""More than commands can be on their way at once."""
_TEXT_MAX: Final = 128 * 1024
"""MAX_ARG_STRLEN: one argument or variable, its NUL included (execve(2))."""
_TEXTS_MAX: Final = 1536 * 1024
"""All of them: a quarter of the usual 8 MiB stack, less what their pointers take."""

Outcome = Callable[[int, "OpError | None"], None]


@dataclass(frozen=True, slots=True)
class Host:
    """What every launch shares.

    Attributes:
        launcher: Path of the static launcher.
        uid, gid: What commands run as; -1 keeps the supervisor's own.
        workspace_fd: The directory that every working directory lies beneath.
    """

    launcher: str
    uid: int
    gid: int
    workspace_fd: int


def bash_argv(command: bytes) -> tuple[list[bytes], int]:
    """The arguments that run `command`, and the descriptor that it needs open, -1 for none."""
    if len(command) <= INLINE_COMMAND_BYTES:
        return [b"/bin/bash", b"-c", b"--", command], -1  # a command may begin with a hyphen
    fd = os.memfd_create("command", os.MFD_CLOEXEC)
    # On the command's first line, so that the line numbers of bash's messages are the caller's.
    with os.fdopen(os.dup(fd), "wb") as out:
        out.write(b"exec %d<&-;" % _COMMAND_FD)
        out.write(command)
        out.write(b"\n")
    os.lseek(fd, 0, os.SEEK_SET)
    return [b"/bin/bash", b"-c", b". /proc/self/fd/%d" % _COMMAND_FD], fd


class Launcher:
    """The process that starts commands; one that dies is replaced with the next command."""

    def __init__(self, loop: Loop, host: Host) -> None:
        self._loop = loop
        self._host = host
        self._sock: socket.socket | None = None
        self._outcomes = -1
        self._ids = itertools.count(1)
        self._waiting: dict[int, Outcome] = {}
        self._table = mmap.mmap(-1, _SLOTS * _FORKED.size)  # replaced by one that is shared

    @property
    def busy(self) -> bool:
        """Whether a command was asked for whose outcome is not known yet."""
        return bool(self._waiting)

    def prepare(self) -> None:
        """Starts it, so that the first command does not wait for that.

        Raises:
            OSError: when no process could be made.
        """
        if self._sock is not None:
            return
        ours, theirs = socket.socketpair()
        outcomes, outcomes_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(outcomes, False)
        host = self._host
        table = os.memfd_create("forked", os.MFD_CLOEXEC)
        os.ftruncate(table, _SLOTS * _FORKED.size)
        self._table = mmap.mmap(table, _SLOTS * _FORKED.size)
        given = (theirs.fileno(), host.workspace_fd, outcomes_end, table)
        # Upwards first, so that none is overwritten before it was copied.
        aside = max(*given, 2 + len(given)) + 1
        actions = [(os.POSIX_SPAWN_DUP2, fd, aside + index) for index, fd in enumerate(given)]
        actions += [(os.POSIX_SPAWN_DUP2, aside + index, 3 + index) for index in range(len(given))]
        words = [host.launcher, str(host.uid), str(host.gid)]
        try:
            os.posix_spawn(host.launcher, words, {}, file_actions=actions)
        except OSError:
            ours.close()
            os.close(outcomes)
            raise
        finally:
            theirs.close()
            os.close(outcomes_end)
            os.close(table)
        self._sock = ours
        self._outcomes = outcomes
        self._loop.watch(outcomes, READ, lambda _events: self.take_outcomes())

    def launch(
        self,
        group: Group,
        argv: Sequence[bytes],
        *,
        env: Mapping[bytes, bytes],
        cwd: str,
        stdio: tuple[int, int, int],
        kept_fd: int,
        on_outcome: Outcome,
    ) -> None:
        """Asks for `argv` to be started in `group`.

        Args:
            group: The job's cgroup.
            argv: The command, its program by absolute path.
            env: The whole environment.
            cwd: Relative to the workspace.
            stdio: Become 0, 1 and 2; all descriptors stay the caller's.
            kept_fd: One more for the command; -1 for none.
            on_outcome: Called once: with the pid of the command that begins, or with the pid (-1 for none)
                and the error. A pid is this process's child, whose exit may have been collected already.

        Raises:
            OpError: when it cannot be started, by its size.
            OSError: when the launcher cannot be reached.
        """
        texts = [*argv, *(name + b"=" + value for name, value in env.items())]
        if max(map(len, texts)) >= _TEXT_MAX or sum(map(len, texts)) > _TEXTS_MAX:
            raise OpError("invalid_argument", "the environment is too large for Linux")
        body = b"\0".join([cwd.encode(), *texts]) + b"\0"
        number = next(self._ids) & 0xFFFFFFFF
        kept = () if kept_fd < 0 else (kept_fd,)
        request = _REQUEST.pack(number, len(body), len(argv), len(env), len(kept)) + body
        self.prepare()
        assert self._sock is not None
        try:
            sent = socket.send_fds(self._sock, [request], [*stdio, group.fd, *kept])
            self._sock.sendall(memoryview(request)[sent:])
        except OSError:
            self._lose()
            raise
        self._waiting[number] = on_outcome

    def take_outcomes(self) -> None:
        """Hands outcomes to who waits for them.

        A second one of the same command says that its exec failed after all; its exit, 127, says that too.
        """
        try:
            data = os.read(self._outcomes, _OUTCOME.size * _SLOTS)
        except BlockingIOError:
            return
        if not data:
            self._lose()
            return
        for number, pid, error, operation in _OUTCOME.iter_unpack(data):
            on_outcome = self._waiting.pop(number, None)
            if on_outcome is not None:
                on_outcome(pid, _error_of(operation.rstrip(b"\0").decode(), error) if error else None)

    def forget_dead(self, pid: int) -> None:
        """Fails the command whose process has ended without an outcome, if `pid` was one's."""
        for number in self._waiting:
            if _FORKED.unpack_from(self._table, number % _SLOTS * _FORKED.size) == (number, pid):
                self._waiting.pop(number)(pid, OpError("internal", "the command was killed before it began"))
                return

    def _lose(self) -> None:
        """The launcher has died: whatever it was asked for fails."""
        if self._sock is None:
            return
        self._sock.close()
        self._sock = None
        self._loop.forget(self._outcomes)
        os.close(self._outcomes)
        waiting, self._waiting = self._waiting, {}
        for on_outcome in waiting.values():
            on_outcome(-1, OpError("internal", "the launcher was killed in the guest; try again"))


def _error_of(operation: str, number: int) -> OpError:
    """What an outcome means to the caller."""
    if operation == "cwd":
        return OpError.of_errno(number, "cwd")
    if operation == "fork":
        return OpError("internal", f"the guest cannot start a process: {os.strerror(number)}")
    return OpError("internal", f"{operation}: {os.strerror(number)}")
