"""A checkpoint's manifest: what belongs together, and whether it may be loaded here.

A checkpoint is memfile + vmstate + disk + manifest, bound by one generation number; nothing in a VMM checks
that they belong together, so this does. The small file (vmstate) is covered by SHA-256; memfile and disk are
covered
by inode, size and modification time as they were after their fsync, not by a hash: bit rot inside gigabytes
is not seen, and the documentation says so. The manifest's rename is a hibernation's commit point. This module
reads and writes files and must not know VMMs, guests or tables.

Source: the contract's rulings on manifests and their order (§8 storage, §3 states).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from microvm.errors import RequestError
from microvm.host.files import write_durably

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
TSC_TOLERANCE_PPM: Final = 250  # beyond it a guest's clock runs visibly fast or slow for ever
_MAX_MANIFEST_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class FileMark:
    """What identifies a large file without reading it."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> FileMark:
        """The mark of an open file; take it after the fsync."""
        st = os.fstat(fd)
        return cls(st.st_ino, st.st_size, st.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Platform:
    """What must be the same where a checkpoint is loaded as where it was saved.

    Attributes:
        vmm: Kind of VMM.
        version: The VMM's version, for people; `closure` decides.
        closure: SHA-256 over the VMM's whole closure.
        accel: "tcg" or "kvm".
        cpu: The CPU model given to the VMM.
        tsc_khz: The host's TSC rate; compared within `TSC_TOLERANCE_PPM`.
        image: Digest of the image (kernel, initrd, rootfs).
    """

    vmm: str
    version: str
    closure: str
    accel: str
    cpu: str
    tsc_khz: int
    image: str

    def differences(self, here: Platform) -> dict[str, dict[str, Any]]:
        """Field → {saved, here} for everything that forbids loading."""
        out: dict[str, dict[str, Any]] = {}
        for name in ("vmm", "closure", "accel", "cpu"):
            if getattr(self, name) != getattr(here, name):
                out[name] = {"saved": getattr(self, name), "here": getattr(here, name)}
        if abs(self.tsc_khz - here.tsc_khz) * 1_000_000 > TSC_TOLERANCE_PPM * max(self.tsc_khz, 1):
            out["tsc_khz"] = {"saved": self.tsc_khz, "here": here.tsc_khz}
        return out


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    owner: str  # the VM's id, or the template's key: a foreign checkpoint is refused
    generation: int
    memory_mib: int
    vcpus: int
    platform: Platform
    ram: FileMark
    disk: FileMark
    state_file: str
    state_bytes: int
    state_sha256: str
    format: int = FORMAT
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ram_before: FileMark | None = None  # the memfile that `ram` is about to replace, equal in content


class CheckpointMismatchError(RequestError):
    """A checkpoint that must not be loaded here; the detail says what differs."""

    def __init__(self, why: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(
            "checkpoint_mismatch",
            f"The checkpoint cannot be loaded: {why}. The disk is intact: vm_resume with cold_boot=true "
            "boots from it.",
            detail,
        )


def state_name(generation: int) -> str:
    """The file that holds the device state of `generation`."""
    return f"state.{generation}"


def sha256_of(fd: int) -> tuple[str, int]:
    """SHA-256 and size of a small open file, read from its start."""
    digest = hashlib.sha256()
    offset = 0
    while chunk := os.pread(fd, 1 << 20, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest(), offset


def commit(directory: Path, manifest: Manifest) -> None:
    """Publishes `manifest`; when this returns it survives a power loss. Everything it names must be fsynced.

    Raises:
        HostError: It may have been published and not be durable; whoever goes on as if it were not calls
            `withdraw`.
    """
    body = asdict(manifest)
    text = json.dumps({**body, "seal": _seal(body)}, indent=1, sort_keys=True).encode()
    write_durably(directory / MANIFEST, text, mode=0o600)


def withdraw(directory: Path) -> None:
    """Removes a manifest whose publication failed half-way, as well as it can."""
    with contextlib.suppress(OSError):
        (directory / MANIFEST).unlink(missing_ok=True)


def _seal(body: Mapping[str, Any]) -> str:
    """SHA-256 over a manifest's content: a flipped bit must not bind the wrong files together."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read(directory: Path) -> Manifest | None:
    """The manifest in `directory`, or None where there is none that is whole and of a known format."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            raw = file.read(_MAX_MANIFEST_BYTES + 1)
        if len(raw) > _MAX_MANIFEST_BYTES:
            return None
        data: dict[str, Any] = json.loads(raw)
        if data.pop("seal") != _seal(data) or data["format"] != FORMAT:
            return None
        data["platform"] = Platform(**data["platform"])
        data["ram"] = FileMark(**data["ram"])
        data["disk"] = FileMark(**data["disk"])
        data["ram_before"] = FileMark(**data["ram_before"]) if data["ram_before"] else None
        return Manifest(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def verify(
    directory: Path, *, owner: str, generation: int | None, here: Platform, ram_fd: int, disk_fd: int
) -> Manifest:
    """The manifest of a checkpoint that may be loaded now.

    Args:
        directory: Holds the manifest and the state file.
        owner: Who the checkpoint must belong to.
        generation: Which generation it must be; None takes any.
        here: What this host would load it with.
        ram_fd: The open memfile.
        disk_fd: The open disk.

    Raises:
        CheckpointMismatchError: Something is missing, truncated, foreign, changed, or does not fit this host.
    """
    manifest = read(directory)
    if manifest is None:
        raise CheckpointMismatchError("its manifest is missing or damaged")
    if manifest.owner != owner:
        raise CheckpointMismatchError("it belongs to another VM", {"owner": manifest.owner})
    if generation is not None and manifest.generation != generation:
        raise CheckpointMismatchError(
            "its generation is not the VM's", {"manifest": manifest.generation, "vm": generation}
        )
    if differences := manifest.platform.differences(here):
        raise CheckpointMismatchError("it was made by another platform", differences)
    for name, fd, marks in (
        ("memory", ram_fd, (manifest.ram, manifest.ram_before)),
        ("disk", disk_fd, (manifest.disk,)),
    ):
        if FileMark.of(fd) not in marks:
            raise CheckpointMismatchError(f"the {name} file was replaced or changed since it was saved")
    try:
        state_fd = os.open(directory / manifest.state_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointMismatchError("its device state is missing") from error
    try:
        found = sha256_of(state_fd)
    finally:
        os.close(state_fd)
    if found != (manifest.state_sha256, manifest.state_bytes):
        raise CheckpointMismatchError("its device state is damaged")
    return manifest
