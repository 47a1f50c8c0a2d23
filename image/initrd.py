"""The initrd: a static shell, the kernel modules that reach the disk, and `initrd.sh`, as a cpio archive.

The archive is written here, byte by byte the same for the same inputs, because no tool that could do it is on
every machine and device nodes would need root. Uncompressed: under emulation unpacking is dearer than
reading. It must not know where its inputs come from; `build` hands it the extracted packages.

Source: Linux Documentation/driver-api/early-userspace/buffer-format.rst ("newc").
"""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.errors import ImageError

BUS_MODULE: Final = "virtio_mmio"
"""Found through ACPI (Debian's kernel has no virtio_mmio.device= argument), so the guest keeps ACPI on."""

DEVICE_MODULES: Final = {
    "0x0001": "virtio_net",
    "0x0002": "virtio_blk",
    "0x0004": "virtio_rng",
    "0x0013": "vmw_vsock_virtio_transport",
}
"""virtio device id → driver; only the drivers of devices that are there get loaded.

Source: Virtual I/O Device (VIRTIO) 1.2, section 5. The console and ext4 are built into the kernel.
"""

APPLETS: Final = ("insmod", "mkdir", "mount", "poweroff", "sh", "switch_root")

_ALIGN: Final = 4
_MAGIC: Final = "070701"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of the archive: name without a leading slash, full mode, contents or link target."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def build_initrd(modules: Path, busybox: bytes, init: bytes, epoch: int) -> bytes:
    """The whole initrd.

    Args:
        modules: A kernel's /lib/modules/<version> with its .ko or .ko.xz files.
        busybox: A statically linked busybox.
        init: What the kernel runs.
        epoch: Every member's time.

    Raises:
        ImageError: A driver is not among the modules.
    """
    return encode_cpio(plan_initrd(_index(modules), busybox, init), epoch)


def plan_initrd(modules: dict[str, Path], busybox: bytes, init: bytes) -> list[Entry]:
    """The members: /init, /bin, the console that it starts with, and modules by virtio device id."""
    entries = [Entry(name, stat.S_IFDIR | 0o755) for name in ("bin", "dev", "modules", "proc", "root", "sys")]
    entries.append(Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)))
    entries.append(Entry("init", stat.S_IFREG | 0o755, init))
    entries.append(Entry("bin/busybox", stat.S_IFREG | 0o755, busybox))
    entries.extend(Entry(f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox") for name in APPLETS)
    loaded: set[str] = set()
    for folder, driver in (("bus", BUS_MODULE), *DEVICE_MODULES.items()):
        entries.append(Entry(f"modules/{folder}", stat.S_IFDIR | 0o755))
        for rank, (name, contents) in enumerate(load_order(driver, modules)):
            if folder == "bus":
                loaded.add(name)
            elif name in loaded:
                continue
            entries.append(Entry(f"modules/{folder}/{rank:02}-{name}.ko", stat.S_IFREG | 0o644, contents))
    return sorted(entries, key=lambda entry: entry.name)


def load_order(driver: str, modules: dict[str, Path]) -> list[tuple[str, bytes]]:
    """A driver and what it depends on, dependencies first, as (name, decompressed module).

    Raises:
        ImageError: One of them is not there.
    """
    order: dict[str, bytes] = {}

    def visit(name: str) -> None:
        if name in order:
            return
        path = modules.get(name)
        if path is None:
            raise ImageError(f"the kernel has no module {name}: another kernel package needs another initrd")
        contents = _read_module(path)
        for dependency in dependencies_of(contents):
            visit(dependency)
        order[name] = contents

    visit(driver)
    return list(order.items())


def dependencies_of(module: bytes) -> list[str]:
    """The names in a module's `depends=` tag, '-' read as '_'.

    Source: Linux scripts/mod/modpost.c (add_depends); the tag is in the section .modinfo.
    """
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    if found is None:
        return []
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name]


def encode_cpio(entries: Iterable[Entry], epoch: int) -> bytes:
    """Members as a "newc" archive, owned by root, numbered in order."""
    return b"".join(_encode(entries, epoch))


def _encode(entries: Iterable[Entry], epoch: int) -> Iterator[bytes]:
    number = 0
    for number, entry in enumerate(entries, 1):
        yield _member(entry, number, epoch)
    yield _member(Entry("TRAILER!!!", 0), number + 1, 0)


def _member(entry: Entry, number: int, epoch: int) -> bytes:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (number, entry.mode, 0, 0, links, epoch, len(entry.data), 0, 0, *entry.device, len(name), 0)
    header = (_MAGIC + "".join(f"{field:08X}" for field in fields)).encode()
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGN)


def _index(modules: Path) -> dict[str, Path]:
    found = [path for pattern in ("*.ko", "*.ko.xz") for path in modules.rglob(pattern)]
    return {path.name.split(".")[0].replace("-", "_"): path for path in sorted(found)}


def _read_module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data
