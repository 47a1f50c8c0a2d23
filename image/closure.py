"""The VMM's closure: QEMU, every library that it loads, and its microvm machine's firmware, as a directory.

The directory is the root of every VMM's jail, named by the digest of what is in it, never changed and never
removed here: a checkpoint may need it (rulings 55). It must not run a VMM beyond asking its version.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from image.digest import digest_file, digest_of
from image.errors import ImageError
from image.manifest import Closure
from image.tree import LIBRARIES, linked, linker, run

BINARY: Final = "/usr/bin/qemu-system-x86_64"

MODULES: Final = ("accel-tcg-x86_64.so",)
"""QEMU's loadable modules, which its list of libraries does not show; none of them where TCG is built in."""

FIRMWARE: Final = ("qboot.rom", "bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin")
"""What `-M microvm` reads from /usr/share/qemu: a BIOS, two ways to start a kernel, the APIC's ROM."""

_FIRMWARE_FROM: Final = ("usr/share/qemu", "usr/share/seabios")
_LINKER_AT: Final = "usr/lib64/ld-linux-x86-64.so.2"
_LINKS: Final = {"lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS: Final = ("dev", "vm")
_TARGETS: Final = ("vm/ram", "vm/disk", "vm/kernel", "vm/initrd")
"""Empty files on which a jail binds the VM's memory and disk, and for a cold boot what QEMU opens by path."""


def build_closure(tools: Path, closures: Path) -> Closure:
    """Put the closure together under `closures`, named by its digest.

    Args:
        tools: An unpacked tree with QEMU's packages.
        closures: A directory on the image's file system; a closure that is there already is kept as it is.

    Raises:
        ImageError: A library or firmware is missing, or the binary is not a QEMU.
    """
    staging = closures / ".new"
    if staging.exists():
        remove_tree(staging)
    staging.mkdir(parents=True)
    for name, source in _members(tools):
        _place(source, staging / name)
    for name in _FOLDERS:
        (staging / name).mkdir()
    for name in _TARGETS:
        (staging / name).touch()
    for name, target in _LINKS.items():
        (staging / name).symlink_to(target)
    _seal(staging)
    digest = closure_digest(staging)
    target = closures / digest
    if target.exists():
        remove_tree(staging)
    else:
        staging.rename(target)
    return Closure(f"closures/{digest}", digest, _version(tools), BINARY)


def closure_digest(root: Path, digest: Callable[[Path], str] = digest_file) -> str:
    """SHA-256 over the sorted names, modes and contents of everything in a closure; `digest` reads a file."""
    return digest_of([list(line) for line in sorted(_describe(root, digest))])


def remove_tree(root: Path) -> None:
    """Remove a closure, which is sealed against writing."""
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o700)
    shutil.rmtree(root)


def parse_libraries(listing: str) -> list[str]:
    """The paths in what `ld.so --list` printed, the linker itself left out.

    Raises:
        ImageError: A library was not found.
    """
    missing = re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)
    if missing:
        raise ImageError(f"the VMM's library {missing[0]} is not among the packages")
    found = re.findall(r"^\s*(\S+) => (/\S+) \(0x", listing, re.MULTILINE)
    return [path for name, path in found if "/" not in name]


def _members(tools: Path) -> Iterator[tuple[str, Path]]:
    """Names in the closure and the files that they come from; libraries under the name they are loaded by."""
    yield BINARY[1:], tools / BINARY[1:]
    yield _LINKER_AT, tools / LIBRARIES / "ld-linux-x86-64.so.2"
    loaded = [BINARY[1:]]
    for module in MODULES:
        name = f"{LIBRARIES}/qemu/{module}"
        if (tools / name).exists():
            yield name, tools / name
            loaded.append(name)
    libraries: set[Path] = set()
    for program in loaded:
        listing = run([*linker(tools.absolute()), "--list", str(tools.absolute() / program)])
        libraries.update(Path(path) for path in parse_libraries(listing))
    for library in sorted(libraries):
        if not library.is_relative_to(tools.absolute()):
            raise ImageError(f"the VMM's library {library.name} is not among the packages")
        yield str(library.relative_to(tools.absolute())), library
    for name in FIRMWARE:
        places = [tools / place / name for place in _FIRMWARE_FROM if (tools / place / name).is_file()]
        if not places:
            raise ImageError(f"the VMM's firmware {name} is not among the packages")
        yield f"usr/share/qemu/{name}", places[0]


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o555 if os.access(source, os.X_OK) else 0o444)


def _seal(root: Path) -> None:
    """No write bits for anybody, and everything the same age."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        os.chmod(folder, 0o555)  # noqa: S103 (a jail's root: read and entered by every slot's UID)


def _describe(root: Path, digest: Callable[[Path], str]) -> Iterator[tuple[str, str, str]]:
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(folder, name)
            inside = str(path.relative_to(root))
            if path.is_symlink():
                yield inside, "link", os.readlink(path)
            elif path.is_dir():
                yield inside, "folder", ""
            else:
                yield inside, f"{path.stat().st_mode & 0o777:o}", digest(path)


def _version(tools: Path) -> str:
    said = run(linked(tools.absolute(), BINARY[1:], ["-version"]))
    found = re.search(r"QEMU emulator version (\d+\.\d+\.\d+)", said)
    if found is None:
        raise ImageError("the VMM does not tell its version")
    return found[1]
