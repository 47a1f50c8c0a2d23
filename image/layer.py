"""The guest's layer: the supervisor, compiled by the image's own Python, and its launcher, by its GCC.

A tar on top of the package tree, the same bytes for the same sources and compilers. It must not know how the
tree was made or what the file system will be; `rootfs` puts both together.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Final

from image.errors import ImageError
from image.tree import rooted, run

HOME: Final = "usr/lib/microvm"

LAUNCHER: Final = f"{HOME}/launch"
PID1: Final = f"{HOME}/init"

_GCC: Final = ("/usr/bin/gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-s", "-o")

_COMPILE: Final = (
    "/usr/bin/python3",
    "-I",
    "-m",
    "compileall",
    "-q",
    "-f",
    "--invalidation-mode",
    "unchecked-hash",
)
"""Unchecked: nobody but a rebuild changes the sources, and the supervisor's start need not read them."""


def guest_sources(guest: Path) -> dict[str, bytes]:
    """The guest package's Python files and launch.c, by path below it, tests and caches aside.

    Raises:
        ImageError: The package or the launcher is not there.
    """
    names = sorted(path for path in guest.rglob("*.py") if "__pycache__" not in path.parts)
    sources = {str(path.relative_to(guest)): path.read_bytes() for path in [*names, *guest.glob("launch.c")]}
    if not {"launch.c", "supervisor.py"} <= sources.keys():
        raise ImageError(f"{guest} is not the guest's package: it has no supervisor or no launch.c")
    return sources


def build_layer(compilers: Path, sources: dict[str, bytes], pid1: bytes, epoch: int, output: Path) -> None:
    """Compile the guest inside a tree and pack what the guest gets.

    Args:
        compilers: An unpacked package tree with Python and GCC; its /usr/lib/microvm is made anew.
        sources: From `guest_sources`.
        pid1: The script that is PID 1.
        epoch: Every member's time.
        output: The tar to write.

    Raises:
        ImageError: A compiler refused.
    """
    home = compilers / HOME
    shutil.rmtree(home, ignore_errors=True)
    for name, contents in sources.items():
        path = home / "guest" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    source = home / "guest" / "launch.c"
    (compilers / "tmp").mkdir(exist_ok=True)
    environment = {"PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": str(epoch)}
    run(rooted(compilers, [*_GCC, f"/{LAUNCHER}", f"/{HOME}/guest/launch.c"]), environment)
    source.unlink()
    run(rooted(compilers, [*_COMPILE, f"/{HOME}/guest"]), environment)
    (compilers / PID1).write_bytes(pid1)
    pack(home, HOME, {LAUNCHER, PID1}, epoch, output)


def pack(directory: Path, prefix: str, programs: set[str], epoch: int, output: Path) -> None:
    """Write a directory as a tar: sorted, owned by root, of one age; only `programs` are executable."""
    with tarfile.open(output, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directory.rglob("*")):
            name = f"{prefix}/{path.relative_to(directory)}"
            member = tarfile.TarInfo(f"./{name}")
            member.mtime = epoch
            member.mode = 0o755 if path.is_dir() or name in programs else 0o644
            member.type = tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE
            data = b"" if path.is_dir() else path.read_bytes()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
