"""The image that VMs are made from: opened, verified, and its base disk placed on the reflink volume.

The image directory is what `python -m microvm image build` makes. This module reads it; it must not build it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from microvm.errors import HostError
from microvm.fleet import layout
from microvm.host.files import fsync_directory, host_errors, write_durably
from microvm.host.reflink import reflink
from microvm.vmm.base import BootSource, VmmKind

_HOW: Final = "build it with: python -m microvm image build"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the image."""

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Image:
    """A built image.

    Attributes:
        digest: SHA-256 over the manifest's parts; names the image everywhere.
        disk_gib: Size of the disks made from it.
    """

    directory: Path
    digest: str
    disk_gib: int
    rootfs: Part
    kernel: Part
    initrd: Part
    qemu_closure: Path
    qemu_digest: str
    qemu_version: str
    qemu_binary: str

    @contextlib.contextmanager
    def open_parts(self) -> Generator[tuple[int, int]]:
        """Descriptors of kernel and initrd for the time of the block."""
        with contextlib.ExitStack() as stack:
            fds: list[int] = []
            for part in (self.kernel, self.initrd):
                with host_errors("open", part.path):
                    fds.append(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
                stack.callback(os.close, fds[-1])
            yield fds[0], fds[1]

    @contextlib.contextmanager
    def open_boot(self, kind: VmmKind) -> Generator[BootSource]:
        """What a cold boot on `kind` starts from, for the time of the block."""
        with self.open_parts() as (kernel_fd, initrd_fd):
            yield BootSource(kernel_fd=kernel_fd, initrd_fd=initrd_fd, cmdline=kind.cmdline())


def open_image(directory: Path) -> Image:
    """Reads an image directory's manifest; the files' content is checked by `verify_image`.

    Raises:
        HostError: There is no image there, or its manifest is not of this version.
    """
    path = directory / "manifest.json"
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        if data["format"] != 1:
            raise ValueError(f"format {data['format']}")
        parts = {
            name: Part(directory / entry["file"], entry["sha256"], entry["bytes"])
            for name, entry in data["parts"].items()
        }
        qemu = data["vmm"]["qemu"]
        return Image(
            directory=directory,
            digest=data["digest"],
            disk_gib=data["disk_gib"],
            rootfs=parts["rootfs"],
            kernel=parts["kernel"],
            initrd=parts["initrd"],
            qemu_closure=directory / qemu["closure"],
            qemu_digest=qemu["digest"],
            qemu_version=qemu["version"],
            qemu_binary=qemu["binary"],
        )
    except OSError as error:
        raise HostError("read image manifest", str(path), error.errno or 0, _HOW) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(
            "read image manifest", str(path), 0, f"not a manifest of this version ({error}); {_HOW}"
        ) from error


def verify_image(image: Image, cache: Path) -> None:
    """Checks the SHA-256 of every part, remembering files that have not changed since the last check.

    A file counts as unchanged while device, inode, size, mtime and ctime are the same.

    Args:
        image: What to check.
        cache: A small private file that holds what was checked.

    Raises:
        HostError: A part is missing or is not what the manifest says.
    """
    known = _read_cache(cache)
    seen: dict[str, str] = {}
    for part in (image.rootfs, image.kernel, image.initrd):
        with host_errors("open", part.path):
            st = part.path.stat()
        mark = f"{st.st_dev}:{st.st_ino}:{st.st_size}:{st.st_mtime_ns}:{st.st_ctime_ns}"
        if known.get(mark) != part.sha256:
            found = _sha256(part.path)
            if found != part.sha256:
                raise HostError(
                    "verify image",
                    str(part.path),
                    0,
                    f"SHA-256 is {found}, the manifest says {part.sha256}; {_HOW}",
                )
        seen[mark] = part.sha256
    if seen != known:
        write_durably(cache, json.dumps(seen).encode("ascii"))


def _read_cache(path: Path) -> dict[str, str]:
    try:
        data: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, str]", data) if isinstance(data, dict) else {}


def _sha256(path: Path) -> str:
    with host_errors("read", path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def place_base(image: Image, places: layout.Layout) -> None:
    """Puts the image's rootfs on the reflink volume, once: by reflink if it is there already, else by a copy.

    Raises:
        HostError: Nothing half-made is left.
    """
    target = places.image(image.digest)
    if target.exists():
        return
    temporary = target.with_suffix(".copying")
    temporary.unlink(missing_ok=True)
    with host_errors("copy image", target):
        source_fd = os.open(image.rootfs.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            target_fd = layout.create_private(temporary)
            try:
                _reflink_or_copy(source_fd, target_fd)
                os.fsync(target_fd)
            finally:
                os.close(target_fd)
            os.rename(temporary, target)
            fsync_directory(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(source_fd)


def _reflink_or_copy(source_fd: int, target_fd: int) -> None:
    """Reflinks, or copies data extents and leaves holes as holes."""
    try:
        reflink(source_fd, target_fd)
        return
    except HostError:
        pass  # another file system: the one copy that is ever made of this image
    layout.copy_data(source_fd, target_fd)
