"""Where a VM's files are, and how they are made.

RAM, disks and checkpoints live on `vm_dir`, the reflink volume; logs on `state_dir`, another file system, so
that a commit of metadata never waits behind a gigabyte's fsync. Files at rest are root's, 0600. This module
makes, clones and removes files; it must not know states or processes.

    vm_dir/owner                         the instance whose VMs these are
    vm_dir/images/<digest>.ext4          the base that disks are cloned from
    vm_dir/templates/<key>/              ram, disk, state.1, manifest.json
    vm_dir/vms/<vm_id>/                  ram, disk, state.<generation>, manifest.json
    state_dir/vms/<vm_id>/console.log    guest console and VMM messages
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from microvm.errors import HostError
from microvm.host.files import host_errors, write_durably
from microvm.host.reflink import extent_count, reflink
from microvm.model import VmId
from microvm.store.checkpoint import FileMark

RAM: Final = "ram"
DISK: Final = "disk"
CONSOLE: Final = "console.log"
OWNER: Final = "owner"
_CHUNK_BYTES: Final = 4 << 20
CONSOLE_LIMIT_BYTES: Final = 1 << 20  # console and VMM logs are cut at 1 MiB: a guest writes to them at will


@dataclass(frozen=True, slots=True)
class Layout:
    """The two directories and what is where in them."""

    state_dir: Path
    vm_dir: Path

    def prepare(self) -> None:
        """Makes the directories, private to root."""
        for path in (
            self.state_dir,
            self.state_dir / "vms",
            self.vm_dir / "images",
            self.vm_dir / "templates",
            self.vm_dir / "vms",
        ):
            with host_errors("make directory", path):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.chmod(0o700)

    def claim(self, instance_id: str, *, has_vms: bool = False) -> None:
        """Marks `vm_dir` as this instance's: VMs that an instance does not know are removed at its start.

        Args:
            instance_id: Whose it is from now on.
            has_vms: Whether the instance knows of VMs, whose files must then be there.

        Raises:
            HostError: It is another instance's, or not the volume that has the VMs, or cannot be used.
        """
        path = self.vm_dir / OWNER
        with host_errors("read", path):
            try:
                found = path.read_bytes()[:64].decode("ascii", "replace").strip()
            except FileNotFoundError:
                if has_vms:
                    raise HostError(
                        "use vm_dir",
                        str(self.vm_dir),
                        message="the service knows VMs and this is not the directory that has them: "
                        "is its volume mounted? (tools/quickstart mounts the one that it made)",
                    ) from None
                write_durably(path, f"{instance_id}\n".encode("ascii"))
                return
        if found != instance_id:
            raise HostError(
                "use vm_dir",
                str(self.vm_dir),
                message=f"it belongs to the instance {found!r}: give this one a directory of its own, or "
                f"remove {path} so that it takes over this one and deletes the VMs there",
            )

    def vm(self, vm_id: VmId) -> Path:
        """The directory of a VM's RAM, disk and checkpoint."""
        return self.vm_dir / "vms" / vm_id

    def logs(self, vm_id: VmId) -> Path:
        """The directory of a VM's logs."""
        return self.state_dir / "vms" / vm_id

    def image(self, digest: str) -> Path:
        """The base disk of an image."""
        return self.vm_dir / "images" / f"{digest}.ext4"

    def template(self, key: str) -> Path:
        """The directory of a template."""
        return self.vm_dir / "templates" / key


def open_rw(path: Path) -> int:
    """Opens an existing regular file for reading and writing, never through a symlink."""
    with host_errors("open", path):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def create_private(path: Path) -> int:
    """Makes a new empty file, root's, 0600. Raises HostError where the name exists."""
    with host_errors("create", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def open_console(directory: Path) -> int:
    """The VM's append-only console log, made when missing."""
    with host_errors("open", directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(
            directory / CONSOLE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )


def clone_file(source: Path, target: Path) -> None:
    """Makes `target` a reflink of `source`: no data is copied, whatever the size.

    Raises:
        HostError: `target` does not exist then.
    """
    with host_errors("open", source):
        source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        target_fd = create_private(target)
        try:
            reflink(source_fd, target_fd)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def make_ram(path: Path, memory_mib: int) -> None:
    """Makes an empty memfile of `memory_mib` MiB; its blocks are allocated as the guest touches them."""
    fd = create_private(path)
    try:
        with host_errors("truncate", path):
            os.ftruncate(fd, memory_mib << 20)
    finally:
        os.close(fd)


def copy_densely(source: Path, target: Path) -> FileMark:
    """Copies a memfile into few large extents, holes kept, and makes it durable.

    Raises:
        HostError: What was copied stays for the caller to remove.
    """
    source_fd = open_rw(source)
    try:
        target_fd = create_private(target)
        try:
            with host_errors("copy", target):
                copy_data(source_fd, target_fd)
                os.fsync(target_fd)
                return FileMark.of(target_fd)
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def copy_data(source_fd: int, target_fd: int) -> None:
    """Copies what is allocated and leaves holes as holes. OSError where it cannot."""
    size = os.fstat(source_fd).st_size
    os.ftruncate(target_fd, size)
    offset = 0
    while offset < size:
        try:
            start = os.lseek(source_fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # nothing but a hole from here to the end
        end = os.lseek(source_fd, start, os.SEEK_HOLE)
        offset = start
        while offset < end:
            offset += _copy(source_fd, target_fd, offset, min(_CHUNK_BYTES, end - offset))


def _copy(source_fd: int, target_fd: int, offset: int, count: int) -> int:
    data = os.pread(source_fd, count, offset)
    written = 0
    while written < len(data):
        written += os.pwrite(target_fd, memoryview(data)[written:], offset + written)
    return len(data)


def extents_of(path: Path) -> int:
    """How many extents a file has."""
    fd = open_rw(path)
    try:
        return extent_count(fd)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Removes a directory of ours and all in it; a missing one is fine."""
    with host_errors("remove", path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return


def used_bytes(*paths: Path) -> int:
    """Blocks that the files really hold, shared ones included; missing files count nothing."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def cut_console(directory: Path) -> None:
    """Empties a console log that has reached its limit; its writers append, and go on at the start."""
    path = directory / CONSOLE
    with host_errors("truncate", path), contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > CONSOLE_LIMIT_BYTES:
            os.truncate(path, 0)


def console_tail(directory: Path, limit: int = 2048) -> str:
    """The last `limit` bytes of a VM's console, as text; empty where there is none."""
    try:
        with (directory / CONSOLE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
