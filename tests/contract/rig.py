"""What the contract suite is given: a kind of VMM, and files for its machines.

It must not know which kind it is. Neighbour: `vmm_contract` is the suite.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from microvm.host.reflink import reflink
from microvm.vmm.base import BootSource, VmmKind, VmmPlan

CLONED = ("ram", "disk", "state")


@dataclass(frozen=True, slots=True)
class Rig:
    """A kind under test.

    Attributes:
        kind: Starts the VMMs.
        folder: For machines' files; on a reflink volume where the kind works on real ones.
        disk_fd: The image's root file system, cloned for each machine; None: machines have empty disks.
        boot: What to boot.
        uid: Whom the VMM runs as.
        cgroup: The v2 group that VMMs are born in.
        keeps_memory: Whether processes outlive their VMM in a checkpoint. A fake may lack it (rulings 46);
            then exactly that is not asked of it.
    """

    kind: VmmKind
    folder: Path
    disk_fd: int | None
    boot: BootSource
    uid: int
    cgroup: Path
    keeps_memory: bool = True

    def make(self, label: str, memory_mib: int = 256, vcpus: int = 1) -> Machine:
        """A new machine's files, its disk the image's."""
        machine = self._open(label, memory_mib, vcpus)
        os.ftruncate(machine.fds["ram"], memory_mib << 20)
        if self.disk_fd is None:
            os.ftruncate(machine.fds["disk"], 1 << 20)
        else:
            reflink(self.disk_fd, machine.fds["disk"])
        return machine

    def clone(self, source: Machine, label: str) -> Machine:
        """A checkpoint's files again, as another machine's."""
        machine = self._open(label, source.memory_mib, source.vcpus)
        for name in CLONED:
            if self.disk_fd is None:
                shutil.copyfile(source.folder / name, machine.folder / name)
            else:
                reflink(source.fds[name], machine.fds[name])
        return machine

    def _open(self, label: str, memory_mib: int, vcpus: int) -> Machine:
        folder = self.folder / label
        folder.mkdir()
        fds = {name: os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in CLONED}
        fds["console"] = os.open(
            folder / "console", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fds["cgroup"] = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in ("ram", "disk"):
            os.fchown(fds[name], self.uid, self.uid)
        plan = VmmPlan(
            label=label,
            memory_mib=memory_mib,
            vcpus=vcpus,
            memfile_fd=fds["ram"],
            disk_fd=fds["disk"],
            uid=self.uid,
            cgroup_fd=fds["cgroup"],
            console_fd=fds["console"],
            boot=self.boot,
        )
        return Machine(folder, memory_mib, vcpus, fds, plan)

    @property
    def populated(self) -> bool:
        """Whether a process lives in the group."""
        return "populated 1" in (self.cgroup / "cgroup.events").read_text("ascii")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's files, open until `close`."""

    folder: Path
    memory_mib: int
    vcpus: int
    fds: dict[str, int]
    plan: VmmPlan

    @property
    def loading(self) -> VmmPlan:
        """The plan of a process that will load."""
        return replace(self.plan, boot=None)

    @property
    def state_fd(self) -> int:
        """The device state's file."""
        return self.fds["state"]

    def marks(self) -> dict[str, str]:
        """What changes when anything is written to RAM, disk or state.

        RAM and state by content, since stores through a mapping show late in a file's times; the disk, which
        is only ever written by system calls, by its times.
        """
        disk = os.fstat(self.fds["disk"])
        return {
            "ram": _digest(self.folder / "ram"),
            "state": _digest(self.folder / "state"),
            "disk": f"{disk.st_size} {disk.st_mtime_ns}",
        }

    def close(self) -> None:
        """Closes the files and removes them."""
        for fd in self.fds.values():
            os.close(fd)
        shutil.rmtree(self.folder)


def _digest(path: Path) -> str:
    """SHA-256 over where there is data, and the data; holes are skipped, RAM is mostly one."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start, size = 0, os.fstat(fd).st_size
        digest.update(f"{size}".encode())
        while start < size:
            try:
                start = os.lseek(fd, start, os.SEEK_DATA)
            except OSError:  # ENXIO: no data from here on
                break
            end = os.lseek(fd, start, os.SEEK_HOLE)
            while start < end and (data := os.pread(fd, min(1 << 20, end - start), start)):
                if data.count(0) != len(data):  # blocks of zeros are as good as holes
                    digest.update(f"@{start}".encode() + data)
                start += len(data)
    finally:
        os.close(fd)
    return digest.hexdigest()
