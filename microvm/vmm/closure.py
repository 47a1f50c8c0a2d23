"""A VMM's closure on disk: the directory that becomes the root of its jail, opened and verified.

Promises that what is started is what the digest names: contents are hashed once, and later openings compare
every file's identity with what was hashed. Must not build or remove closures. Neighbour: `image.closure`
makes them and defines the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from image.closure import closure_digest
from microvm.errors import HostError


@dataclass(frozen=True, slots=True)
class Closure:
    """An open closure.

    Attributes:
        root_fd: The directory (O_PATH); whoever opened the closure closes it.
        digest: SHA-256 over names, modes and contents of everything in it.
        version: The VMM's own version.
        binary: The VMM's absolute path inside the closure.
    """

    root_fd: int
    digest: str
    version: str
    binary: str


@contextmanager
def open_closure(
    root: Path, digest: str, *, version: str, binary: str, verified_file: Path
) -> Generator[Closure]:
    """Opens a closure and verifies it; hashing 50 MB takes a tenth of a second and happens once.

    Args:
        root: The closure's directory.
        digest: What it must be.
        version: The VMM's own version, as the image's manifest says it.
        binary: The VMM's path inside the closure.
        verified_file: Where verifications are remembered; made, replaced, and of no loss.

    Raises:
        HostError: It is not there, cannot be read, or is not what the digest names.
    """
    try:
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise HostError("open the VMM's closure", str(root), error.errno or 0) from error
    try:
        try:
            _verify(root, digest, verified_file)
        except OSError as error:
            raise HostError("verify the VMM's closure", str(root), error.errno or 0) from error
        yield Closure(root_fd, digest, version, binary)
    finally:
        os.close(root_fd)


def _verify(root: Path, digest: str, verified_file: Path) -> None:
    stamp = _stamp(root)
    known = _read_known(verified_file)
    if known.get(digest) == stamp:
        return
    if closure_digest(root) != digest:
        raise HostError(
            "verify the VMM's closure", str(root), 0, "its contents have changed: build the image again"
        )
    _write_known(verified_file, {**known, digest: stamp})


def _stamp(root: Path) -> str:
    """Changes when anything is written, replaced or renamed: device, inode, size, mtime and ctime of all."""
    lines: list[str] = []
    for folder, folders, names in os.walk(root):
        for name in [".", *folders, *names]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            identity = (status.st_dev, status.st_ino, status.st_mode, status.st_size)
            lines.append(f"{path}\0{identity}\0{status.st_mtime_ns}\0{status.st_ctime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def _read_known(verified_file: Path) -> dict[str, Any]:
    try:
        known: Any = json.loads(verified_file.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", known) if isinstance(known, dict) else {}


def _write_known(verified_file: Path, known: dict[str, Any]) -> None:
    """Replaces the file; a failure costs the next start a tenth of a second, so it is none."""
    temporary = verified_file.with_suffix(".new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(known), "utf-8")
        temporary.replace(verified_file)
