"""The manifest: what an image consists of, by name, size and SHA-256, and its own digest over all of that.

It must not read the parts themselves (`build` verifies them); the daemon and its templates key on `digest`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from image.digest import digest_of
from image.errors import ImageError

FORMAT: Final = 1
"""Raised when a reader of the old form would be misled."""

MANIFEST_FILE: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an image: its name in the image's directory, SHA-256 in hex, and size."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Closure:
    """A VMM with everything that it loads: a directory that is its jail's root.

    Attributes:
        closure: The directory, relative to the image's.
        digest: SHA-256 over names, modes and contents of all files in it.
        version: The VMM's own version.
        binary: The VMM's path inside the closure.
    """

    closure: str
    digest: str
    version: str
    binary: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole image. `parts` holds rootfs, kernel, initrd and packages; `vmm` holds qemu."""

    epoch: int
    disk_gib: int
    parts: dict[str, Part]
    vmm: dict[str, Closure]

    @property
    def digest(self) -> str:
        """The image's name: SHA-256 over the canonical JSON of parts and VMMs."""
        body = self.to_json_parts()
        return digest_of({"parts": body["parts"], "vmm": body["vmm"]})

    def to_json_parts(self) -> dict[str, Any]:
        """Everything but the digest, JSON-ready."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "disk_gib": self.disk_gib,
            "parts": {
                name: {"file": part.file, "sha256": part.sha256, "bytes": part.bytes}
                for name, part in sorted(self.parts.items())
            },
            "vmm": {
                name: {
                    "closure": vmm.closure,
                    "digest": vmm.digest,
                    "version": vmm.version,
                    "binary": vmm.binary,
                }
                for name, vmm in sorted(self.vmm.items())
            },
        }

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written: with its digest."""
        return {**self.to_json_parts(), "digest": self.digest}


def load_manifest(directory: Path) -> Manifest:
    """Read an image's manifest.

    Raises:
        ImageError: There is none, it is not of this format, or its digest is not that of its contents.
    """
    path = directory / MANIFEST_FILE
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ImageError(f"no image at {directory}: build one with 'microvm image build'") from error
    except ValueError as error:
        raise ImageError(f"{path} is not JSON: build the image again") from error
    return parse_manifest(fields)


def parse_manifest(fields: Any) -> Manifest:
    """Check a manifest's JSON.

    Raises:
        ImageError: It is not of this format, or its digest is not that of its contents.
    """
    if not isinstance(fields, dict):
        raise ImageError("the image's manifest is not a JSON object: build the image again")
    known = cast("dict[str, Any]", fields)
    if known.get("format") != FORMAT:
        raise ImageError(f"the image is not of format {FORMAT}: build it again")
    try:
        manifest = Manifest(
            epoch=int(known["epoch"]),
            disk_gib=int(known["disk_gib"]),
            parts={name: Part(**part) for name, part in known["parts"].items()},
            vmm={name: Closure(**vmm) for name, vmm in known["vmm"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ImageError("the image's manifest lacks a field: build the image again") from error
    if known.get("digest") != manifest.digest:
        raise ImageError("the image's manifest does not have the digest that it names: build the image again")
    return manifest
