"""cgroup v2 groups for VMMs: born in, frozen, killed, limited, removed.

    <v2 mount>/<the daemon's own group>/microvm-<instance id>/<group>

Promises that only groups below the one that carries the instance's mark are ever touched, that every
write's error is raised, and that killing and freezing need the v2 core only, which works on every machine
with a v2 mount, also beside v1. Limits are written where v2 has the controllers, or refused. Must not
move foreign processes or change foreign groups. Neighbour: `process` has VMMs born in a group by its
descriptor.

Source: Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import trio

from microvm.errors import HostError
from microvm.host.files import host_errors, write_all

LimitsMode = Literal["v2", "none"]

CONTROLLERS: Final = frozenset({"cpu", "memory", "pids"})
"""What `limits = "v2"` needs."""

MARK: Final = "microvm-"
"""Begins the name of the directory that holds all groups of one instance."""

DAEMON_LEAF: Final = "daemon"
"""A group with controllers for its children may hold no processes itself (unless it is the root group), so
the daemon moves itself here."""

REMOVE_SECONDS: Final = 10.0
"""How long a killed group may take to become empty: 2 to 27 ms was seen; more means a process that hangs in
the kernel."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What a group may use; None is no bound.

    Attributes:
        memory_max_bytes: memory.max; page cache of the group's files counts.
        cpu_weight: cpu.weight, 1 to 10000, 100 by default.
        cpu_max_vcpus: cpu.max in whole and part processors.
        pids_max: Processes and threads.
    """

    memory_max_bytes: int | None = None
    cpu_weight: int | None = None
    cpu_max_vcpus: float | None = None
    pids_max: int | None = None


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The machine's v2 hierarchy and this process's place in it."""

    mount: Path
    own: Path
    controllers: frozenset[str]

    @property
    def own_path(self) -> Path:
        """The directory of this process's group."""
        return self.mount / self.own

    @property
    def lacks(self) -> frozenset[str]:
        """The controllers that `limits = "v2"` needs and that are not to be had."""
        return CONTROLLERS - self.controllers


def find_hierarchy(
    mountinfo: str = "/proc/self/mountinfo", membership: str = "/proc/self/cgroup"
) -> Hierarchy:
    """Finds the v2 mount (alone or beside v1) and the caller's group in it.

    Raises:
        HostError: There is no v2 mount.
    """
    mount, mount_root = _find_mount(mountinfo)
    group = "/"
    with host_errors("read", membership):
        for line in Path(membership).read_text("utf-8").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                group = path
    own = Path(os.path.relpath(group, mount_root))
    if ".." in own.parts:
        raise HostError(
            "find cgroup v2", str(mount), message="the daemon's own group lies outside this mount"
        )
    if own.name == DAEMON_LEAF and own.parent.name.startswith(MARK):
        own = own.parent.parent  # moved there by `prepare`, earlier in this process's life
    path = mount / own / "cgroup.controllers"
    with host_errors("read", path):
        controllers = frozenset(path.read_text("ascii").split())
    return Hierarchy(mount, own, controllers)


def _find_mount(mountinfo: str) -> tuple[Path, str]:
    with host_errors("read", mountinfo):
        lines = Path(mountinfo).read_text("utf-8").splitlines()
    for line in lines:
        fields = line.split(" ")
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4]), fields[3]
    raise HostError("find cgroup v2", message="no cgroup2 file system is mounted; mount one or boot with v2")


class Cgroup:
    """One group. Ownership: `CgroupTree.open_group` closes and removes it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path: Final = path
        self.fd: Final = fd

    @property
    def populated(self) -> bool:
        """Whether a process lives in it or below it; a zombie does not count."""
        return "populated 1" in self._read("cgroup.events")

    @property
    def frozen(self) -> bool:
        """Whether every process in it has come to rest."""
        return "frozen 1" in self._read("cgroup.events")

    @property
    def cpu_seconds(self) -> float:
        """Processor time used by all who were ever in it."""
        fields = dict(line.split(" ") for line in self._read("cpu.stat").splitlines())
        return int(fields["usage_usec"]) / 1e6

    def freeze(self) -> None:
        """Asks all processes to stop; they have when `frozen`. A frozen process still dies of a kill."""
        self.write("cgroup.freeze", "1")

    def thaw(self) -> None:
        """Lets all processes run."""
        self.write("cgroup.freeze", "0")

    def kill(self) -> None:
        """Kills everything in it and below, also what forks meanwhile."""
        self.write("cgroup.kill", "1")

    def limit(self, limits: GroupLimits) -> None:
        """Sets the bounds that are given. The tree's limits must be "v2"."""
        if limits.memory_max_bytes is not None:
            self.write("memory.max", str(limits.memory_max_bytes))
        if limits.cpu_weight is not None:
            self.write("cpu.weight", str(limits.cpu_weight))
        if limits.cpu_max_vcpus is not None:
            self.write("cpu.max", f"{round(limits.cpu_max_vcpus * 100_000)} 100000")
        if limits.pids_max is not None:
            self.write("pids.max", str(limits.pids_max))

    def write(self, file: str, value: str) -> None:
        """Writes one of the group's files; a refusal is a HostError."""
        _write(self.path / file, value)

    def _read(self, file: str) -> str:
        with host_errors("read", self.path / file):
            return (self.path / file).read_text("ascii")


class CgroupTree:
    """All groups of one instance, below one directory that carries its mark.

    Args:
        hierarchy: Where the daemon is.
        instance_id: The service's own id; the mark is `microvm-<instance id>`.
        limits: Whether groups are limited ("v2") or only killed and frozen ("none", trials).
    """

    def __init__(self, hierarchy: Hierarchy, instance_id: str, limits: LimitsMode) -> None:
        mark = f"{MARK}{instance_id}"
        assert _NAME.fullmatch(mark), mark
        self.hierarchy: Final = hierarchy
        self.limits: Final = limits
        self.path: Final = hierarchy.own_path / mark

    def prepare(self) -> None:
        """Makes the directory and, with limits, hands the controllers down to it. Idempotent.

        Raises:
            HostError: A controller is missing, or the daemon's own group is not its to divide (under systemd:
                `Delegate=yes`).
        """
        if self.limits == "v2" and self.hierarchy.lacks:
            missing = ", ".join(sorted(self.hierarchy.lacks))
            raise HostError(
                "limit",
                str(self.hierarchy.own_path),
                message=f'cgroup v2 lacks the controllers {missing}; set limits = "none" for a trial',
            )
        with host_errors("make cgroup", self.path):
            self.path.mkdir(mode=0o755, exist_ok=True)
        if self.limits == "v2":
            self._hand_down_controllers()

    def _hand_down_controllers(self) -> None:
        own = self.hierarchy.own_path
        if own != self.hierarchy.mount:  # the root group may hold processes and children both
            _refuse_foreign_processes(own)
            leaf = self.path / DAEMON_LEAF
            with host_errors("make cgroup", leaf):
                leaf.mkdir(mode=0o755, exist_ok=True)
            _write(leaf / "cgroup.procs", str(os.getpid()))
        wanted = " ".join(f"+{name}" for name in sorted(CONTROLLERS))
        for path in (own, self.path):
            _write(path / "cgroup.subtree_control", wanted)

    @contextlib.asynccontextmanager
    async def open_group(self, name: str, limits: GroupLimits | None = None) -> AsyncGenerator[Cgroup]:
        """Makes a group for the block; at its end everything in it is killed and it is removed.

        Args:
            name: Unique among the living groups of this instance.
            limits: Applied when the tree's limits are "v2", ignored otherwise.

        Cancellation: the removal is shielded, at most REMOVE_SECONDS.
        """
        group = self.create_group(name, limits)
        try:
            yield group
        finally:
            with trio.CancelScope(shield=True):
                await self.remove_group(group)

    def create_group(self, name: str, limits: GroupLimits | None = None) -> Cgroup:
        """Makes a group; the caller ends it with `remove_group`.

        Raises:
            HostError: It exists (`errno` EEXIST), or a limit was refused; then there is none.
        """
        assert _NAME.fullmatch(name), name
        assert name != DAEMON_LEAF, name
        path = self.path / name
        with host_errors("make cgroup", path):
            path.mkdir(mode=0o755)
        fd = -1
        try:
            with host_errors("open cgroup", path):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            group = Cgroup(path, fd)
            if limits is not None and self.limits == "v2":
                group.limit(limits)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            path.rmdir()
            raise
        return group

    async def remove_group(self, group: Cgroup) -> None:
        """Kills what is in the group, closes it and removes it.

        Raises:
            HostError: It is not empty after REMOVE_SECONDS.
        """
        os.close(group.fd)
        await _remove(group.path)

    async def sweep(self) -> list[str]:
        """Kills and removes every group of this instance that is there, and nothing else.

        For the start, before any group is made, and for the end. The daemon's own leaf stays.

        Returns:
            Names of the groups that were removed.
        """
        if not self.path.is_dir():
            return []
        removed: list[str] = []
        for child in _children(self.path):
            if child.name != DAEMON_LEAF:
                await _remove(child)
                removed.append(child.name)
        return removed

    async def remove(self) -> None:
        """Sweeps and removes the instance's directory too, where the daemon does not live in it."""
        await self.sweep()
        if self.path.is_dir() and not (self.path / DAEMON_LEAF).is_dir():
            await _remove(self.path)


def _refuse_foreign_processes(group: Path) -> None:
    with host_errors("read", group):
        pids = [int(pid) for pid in (group / "cgroup.procs").read_text("ascii").split()]
    foreign = [pid for pid in pids if pid != os.getpid()]
    if foreign:
        raise HostError(
            "limit",
            str(group),
            message=f"other processes ({foreign[:3]}) live in the daemon's cgroup; start it in one of its "
            'own with Delegate=yes, or set limits = "none"',
        )


def _children(path: Path) -> list[Path]:
    with host_errors("list", path):
        return sorted(child for child in path.iterdir() if child.is_dir())


def _depth_first(path: Path) -> Iterator[Path]:
    for child in _children(path):
        yield from _depth_first(child)
    yield path


async def _remove(path: Path) -> None:
    """Kills and removes a group and all below it.

    There is no event that a task could await (cgroup.events is always readable), so it asks again, more
    slowly each time.
    """
    _write(path / "cgroup.kill", "1")
    deadline = trio.current_time() + REMOVE_SECONDS
    pause_s = 0.001
    while True:
        try:
            for group in _depth_first(path):
                group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or trio.current_time() > deadline:
                raise HostError("remove cgroup", str(path), error.errno or 0) from error
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _write(path: Path, value: str) -> None:
    # Not pathlib: a buffered write reports the kernel's refusal only at close, if at all.
    with host_errors("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(fd, value.encode("ascii"))
        finally:
            os.close(fd)
