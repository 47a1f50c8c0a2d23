"""What a job writes: two pipes drained at once, a bounded beginning kept, everything counted.

The command is never blocked by us: what is beyond the limit goes from the pipe to /dev/null inside the
kernel. Little output stays in memory; more goes to files that only root can read, on the guest's disk. A full
disk cuts the output and says so. After the main process has ended, what its children write is drained and
neither kept nor counted.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import termios
from collections.abc import Callable
from typing import Final

from guest.loop import READ, Loop

STDOUT: Final = 0
STDERR: Final = 1
_MEMORY_BYTES: Final = 16384
"""Output of one job that stays in memory: 256 remembered jobs then hold at most 4 MiB."""
_READ_BYTES: Final = 65536
"""A pipe's default capacity."""
_SPLICE_BYTES: Final = 1 << 20
_DROPPED_PIPE_BYTES: Final = 1 << 18
_REST_S: Final = 0.002
"""Dropped output: a command can write 128 MiB/s, and wakes the supervisor 500 times a second at most."""
_SPLICE_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Capture:
    """The output of one job.

    Attributes:
        totals: Bytes written to (stdout, stderr) until the main process ended, kept or not.
        kept: Bytes retained of each.
        truncated: Whether something was dropped.
        message: Why, when it was not the limit.
        on_growth: Called when more is kept than before.
    """

    def __init__(self, loop: Loop, spool: str, limit_bytes: int, null_fd: int) -> None:
        self.totals = [0, 0]
        self.kept = [0, 0]
        self.truncated = False
        self.message = ""
        self.on_growth: Callable[[], None] | None = None
        self._loop = loop
        self._spool = spool
        self._limit = limit_bytes
        self._null_fd = null_fd
        self._memory: list[bytearray] | None = [bytearray(), bytearray()]
        self._pipes = [-1, -1]
        self._files = [-1, -1]
        self._counting = True

    def open_pipes(self) -> tuple[int, int]:
        """The write ends for a command's stdout and stderr; the caller closes them after the spawn."""
        ends: list[int] = []
        for which in (STDOUT, STDERR):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            self._pipes[which] = read_end
            self._loop.watch(read_end, READ, self._reader(which))
            ends.append(write_end)
        return ends[0], ends[1]

    def _reader(self, which: int) -> Callable[[int], None]:
        def read(_events: int) -> None:
            dropping = self._dropping
            if self._drain(which) > 0 and dropping:
                self._rest(which)

        return read

    @property
    def _dropping(self) -> bool:
        """Whether nothing more is kept."""
        return not self._counting or sum(self.kept) >= self._limit

    def _rest(self, which: int) -> None:
        """Leaves a pipe alone for a moment, so that it is not emptied a few kilobytes at a time."""
        fd = self._pipes[which]
        self._loop.forget(fd)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _DROPPED_PIPE_BYTES)

        def resume() -> None:
            if self._pipes[which] == fd:
                self._loop.watch(fd, READ, self._reader(which))

        self._loop.after(_REST_S, resume)

    def _drain(self, which: int) -> int:
        """Takes what one read gives; returns its size, 0 at the end, -1 when nothing is there."""
        fd = self._pipes[which]
        if fd < 0:
            return 0
        room = self._limit - self.kept[0] - self.kept[1]
        try:
            if self._counting and room > 0:
                data = os.read(fd, _READ_BYTES)
                taken = len(data)
                self._keep(which, data if taken <= room else data[:room])
                if taken and self.on_growth is not None:
                    self.on_growth()
            else:
                taken = os.splice(fd, self._null_fd, _SPLICE_BYTES, flags=_SPLICE_FLAGS)
        except BlockingIOError:
            return -1
        if not taken:
            self._close_pipe(which)
            return 0
        if self._counting:
            self.totals[which] += taken
            if taken > room:
                self.truncated = True
        return taken

    def finish(self) -> None:
        """The main process has ended: takes what lies in the pipes at this moment, and counts no more."""
        for which in (STDOUT, STDERR):
            left = self._pending(which)
            while left > 0:
                taken = self._drain(which)
                if taken <= 0:
                    break
                left -= taken
        self._counting = False
        for which, fd in enumerate(self._files):
            if fd >= 0:
                os.close(fd)
                self._files[which] = -1

    def _pending(self, which: int) -> int:
        if self._pipes[which] < 0:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._pipes[which], termios.FIONREAD, count)
        return count[0]

    def _keep(self, which: int, data: bytes) -> None:
        if self._memory is not None:
            if sum(self.kept) + len(data) <= _MEMORY_BYTES:
                self._memory[which] += data
                self.kept[which] += len(data)
                return
            if not self._spill():
                return
        self._write(which, data)

    def _spill(self) -> bool:
        """Moves what is in memory to files; False, and it stays, when the disk does not take it."""
        assert self._memory is not None
        memory = self._memory
        try:
            for which in (STDOUT, STDERR):
                self._files[which] = os.open(
                    self._path(which), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
                )
                _write_all(self._files[which], memory[which])
        except OSError as error:
            self._cut(error)
            self._remove_files()
            return False
        self._memory = None
        return True

    def _write(self, which: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._files[which], view)
                self.kept[which] += written
                view = view[written:]
        except OSError as error:
            self._cut(error)

    def _cut(self, error: OSError) -> None:
        """The disk takes no more: what is kept so far is all that will be."""
        self._limit = self.kept[0] + self.kept[1]
        self.truncated = True
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.message = "the output was cut: " + (
            "the guest's disk is full" if full else os.strerror(error.errno or 0)
        )

    def read(self, which: int, offset: int, length: int) -> bytes:
        """The retained bytes at `offset`, at most `length`; b"" at the end.

        Raises:
            OSError: when the file that holds them cannot be read.
        """
        if self._memory is not None:
            return bytes(self._memory[which][offset : offset + length])
        fd = os.open(self._path(which), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, max(0, min(length, self.kept[which] - offset)), offset)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Deletes what was kept; draining goes on for processes that still write."""
        self._remove_files()
        if self._memory is not None:
            self._memory = [bytearray(), bytearray()]

    def close(self) -> None:
        """Closes the pipes; a process that still writes gets SIGPIPE. For jobs that nothing is left of."""
        for which in (STDOUT, STDERR):
            self._close_pipe(which)

    def _close_pipe(self, which: int) -> None:
        fd, self._pipes[which] = self._pipes[which], -1
        if fd >= 0:
            self._loop.forget(fd)
            os.close(fd)

    def _path(self, which: int) -> str:
        return f"{self._spool}.{'err' if which else 'out'}"

    def _remove_files(self) -> None:
        for which in (STDOUT, STDERR):
            if self._files[which] >= 0:
                os.close(self._files[which])
                self._files[which] = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(which))


def _write_all(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
