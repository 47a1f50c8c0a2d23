"""Publishing: parts under names of their own, then the manifest, by one rename, as the moment of truth.

Whoever is interrupted, at any step, leaves the image that was there. Plain names (rootfs.ext4, vmlinuz,
initrd.img, packages.txt) are links for people; programs take the names from the manifest.
It must not build anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from image.digest import canonical_json
from image.manifest import MANIFEST_FILE, Manifest, Part

PLAIN_NAMES: Final = {
    "rootfs": "rootfs.ext4",
    "kernel": "vmlinuz",
    "initrd": "initrd.img",
    "packages": "packages.txt",
}


def publish_part(directory: Path, name: str, built: Path, sha256: str) -> Part:
    """Make a built file of the same file system a part: durable, read-only, named by its digest."""
    plain = PLAIN_NAMES[name]
    file = f"{Path(plain).stem}-{sha256[:16]}{Path(plain).suffix}"
    built.chmod(0o444)
    with built.open("rb") as opened:
        os.fsync(opened.fileno())
    built.replace(directory / file)
    return Part(file, sha256, (directory / file).stat().st_size)


def publish_manifest(directory: Path, manifest: Manifest) -> None:
    """Make the image the one that the manifest describes, and remove the parts of the one before.

    Closures stay: a checkpoint made under an older image still needs its own.
    """
    _fsync(directory)
    temporary = directory / f".new-{MANIFEST_FILE}"
    with temporary.open("wb") as file:
        file.write(canonical_json(manifest.to_json()) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / MANIFEST_FILE)
    _fsync(directory)
    for name, part in manifest.parts.items():
        link = directory / f".new-{PLAIN_NAMES[name]}"
        link.unlink(missing_ok=True)
        link.symlink_to(part.file)
        link.replace(directory / PLAIN_NAMES[name])
    kept = {part.file for part in manifest.parts.values()} | {MANIFEST_FILE, *PLAIN_NAMES.values()}
    for path in directory.iterdir():
        if path.name not in kept and not path.is_dir():
            path.unlink()


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
