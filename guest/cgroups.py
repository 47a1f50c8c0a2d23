"""The guest's cgroup v2 tree: one group per job below `jobs`, which is frozen and bounded as a whole.

    <root>/supervisor        the supervisor and its file workers, protected
    <root>/noop              the warm-up command, the service's own
    <root>/jobs              memory.max and pids.max; cgroup.freeze for a suspension
    <root>/jobs/<job>        one job and everything that it ever started

Where a controller is missing (a host without memory in v2, when the supervisor runs as a test's process) its
files are absent and the limits with them; freezing and killing are core and always there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from typing import Final

_MIB: Final = 1 << 20
_RESERVE_MIN: Final = 16 * _MIB
_RESERVE_MAX: Final = 64 * _MIB
"""Memory that is free once the supervisor runs and that jobs cannot have: its pages in the cache, a file
worker, slab.

An eighth of what is free, between the bounds. Without it the kernel runs out before the jobs' group does: it
then evicts the supervisor's own code and takes half a minute to kill somebody.
"""
_IDLE_GROUPS: Final = 4
_PIDS_RESERVE: Final = 64
_PIDS_CEILING: Final = 32768
"""Linux's default kernel.pid_max."""


def write_knob(path: str, value: str) -> None:
    """Writes one value to a control file.

    Raises:
        OSError: as the kernel answers it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def read_knob(path: str) -> str:
    """The text of a control file; empty when it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 65536).decode()
    finally:
        os.close(fd)


def _number_in(text: str, key: str) -> int:
    """The value of `key` in a flat-keyed control file; 0 when it is absent."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


class Group:
    """One cgroup of a job (or the warm-up's).

    Attributes:
        fd: Its directory, for a process to be born in it.
        events_fd: Its event file, readable out of band (POLLPRI) when that changed since `populated` looked.
    """

    def __init__(self, path: str, pids_max: int | None) -> None:
        self.path = path
        self.killed = False
        os.mkdir(path, 0o755)
        try:
            if pids_max is not None:
                with contextlib.suppress(FileNotFoundError):
                    write_knob(f"{path}/pids.max", str(pids_max))
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.events_fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError:
            os.rmdir(path)
            raise

    def pids(self) -> list[int]:
        """Its processes, the children of its children included; groups that jobs cannot make do not exist."""
        try:
            with open(f"{self.path}/cgroup.procs", "rb") as file:
                return [int(line) for line in file.read().split()]
        except OSError:
            return []

    def populated(self) -> bool:
        """Whether a live process is in it."""
        return b"populated 1" in os.pread(self.events_fd, 4096, 0)

    def terminate(self) -> None:
        """SIGTERM to every process."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every process at once, forks in flight included.

        Afterwards the kernel may kill what is born into the group from outside, too (Linux 6.18 does: it
        compares the kill counters of two groups), so that no other job gets it.
        """
        self.killed = True
        with contextlib.suppress(FileNotFoundError):
            write_knob(f"{self.path}/cgroup.kill", "1")

    def oom_kills(self) -> int:
        """How many of its processes the kernel killed for want of memory."""
        return _number_in(read_knob(f"{self.path}/memory.events"), "oom_kill")

    def pid_refusals(self) -> int:
        """How often a fork failed because there were too many processes."""
        return _number_in(read_knob(f"{self.path}/pids.events"), "max")

    def remove(self) -> None:
        """Removes it; it must be empty."""
        os.close(self.events_fd)
        os.close(self.fd)
        os.rmdir(self.path)


class Tree:
    """The supervisor's whole cgroup tree.

    Args:
        root: A cgroup v2 directory that is ours alone (in a guest the mount's root).
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.jobs_path = f"{root}/jobs"
        self.pids_max: int | None = None
        self._notes: dict[int, bytes] = {}
        self._troubled = False
        self._idle: list[Group] = []
        self._numbers = itertools.count(1)

    def prepare(self, *, available_bytes: int, threads_max: int) -> None:
        """Makes the tree, moves this process into `supervisor`, sets the limits of `jobs`."""
        available = read_knob(f"{self.root}/cgroup.controllers").split()
        wanted = [name for name in ("memory", "pids") if name in available]
        for name in ("supervisor", "jobs"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{self.root}/{name}", 0o755)
        write_knob(f"{self.root}/supervisor/cgroup.procs", "0")
        for name in wanted:
            write_knob(f"{self.root}/cgroup.subtree_control", f"+{name}")
            write_knob(f"{self.jobs_path}/cgroup.subtree_control", f"+{name}")
        if "memory" in wanted:
            reserve = min(max(available_bytes // 8, _RESERVE_MIN), _RESERVE_MAX)
            write_knob(f"{self.jobs_path}/memory.max", str(available_bytes - reserve))
            write_knob(f"{self.root}/supervisor/memory.min", str(reserve))
        if "pids" in wanted:
            whole = min(threads_max, _PIDS_CEILING) - _PIDS_RESERVE
            write_knob(f"{self.jobs_path}/pids.max", str(whole))
            self.pids_max = whole - _PIDS_RESERVE
        for name in wanted:
            fd = os.open(f"{self.jobs_path}/{name}.events", os.O_RDONLY | os.O_CLOEXEC)
            self._notes[fd] = os.pread(fd, 4096, 0)

    def had_trouble(self) -> bool:
        """Whether memory or pids ever ran out in any job; as long as not, no job's own files need a look."""
        if not self._troubled:
            self._troubled = any(os.pread(fd, 4096, 0) != noted for fd, noted in self._notes.items())
        return self._troubled

    def take_group(self) -> Group:
        """An empty group for a job."""
        if self._idle:
            return self._idle.pop()
        return Group(f"{self.jobs_path}/{next(self._numbers)}", self.pids_max)

    def give_back(self, group: Group) -> None:
        """Takes a group that is empty; a few are kept, since making one costs a tenth of a short command."""
        if group.killed or self._troubled or len(self._idle) >= _IDLE_GROUPS:
            group.remove()  # also for its counters, which begin at 0 in another
        else:
            self._idle.append(group)

    @functools.cached_property
    def noop_group(self) -> Group:
        """The group for the warm-up command, outside of what a freeze stops."""
        return Group(f"{self.root}/noop", None)

    def set_frozen(self, frozen: bool) -> None:  # noqa: FBT001 - the value of the knob
        """Asks the kernel to freeze or thaw all jobs; `jobs_frozen` says when a freeze is done."""
        write_knob(f"{self.jobs_path}/cgroup.freeze", "1" if frozen else "0")

    def jobs_frozen(self) -> bool:
        """Whether every process of every job stands still."""
        return _number_in(read_knob(f"{self.jobs_path}/cgroup.events"), "frozen") != 0

    def open_jobs_events(self) -> int:
        """A descriptor of the jobs' event file (see `Group.open_events`)."""
        fd = os.open(f"{self.jobs_path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 4096)
        return fd

    def kill_jobs(self) -> None:
        """SIGKILL to every process of every job."""
        write_knob(f"{self.jobs_path}/cgroup.kill", "1")
