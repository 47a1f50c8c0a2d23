"""The image is what its manifest says, is hashed once, and is copied to the volume once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from microvm.errors import HostError
from microvm.fleet import image as image_module
from microvm.fleet.image import Image, open_image, place_base, verify_image
from microvm.fleet.layout import Layout

MIB = 1 << 20


def a_manifest(directory: Path, **changes: Any) -> dict[str, Any]:
    """Writes an image of three small parts and its manifest."""
    parts: dict[str, Any] = {}
    for name in ("rootfs", "kernel", "initrd"):
        path = directory / name
        path.write_bytes(name.encode() * 1000)
        parts[name] = {
            "file": name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
    data = {
        "format": 1,
        "digest": "d" * 64,
        "epoch": 0,
        "disk_gib": 3,
        "parts": parts,
        "vmm": {"qemu": {"closure": "closures/c", "digest": "c", "version": "10", "binary": "/qemu"}},
        **changes,
    }
    (directory / "manifest.json").write_text(json.dumps(data))
    return data


def test_a_manifest_is_read(tmp_path: Path) -> None:
    a_manifest(tmp_path)
    image = open_image(tmp_path)
    assert image.digest == "d" * 64
    assert image.disk_gib == 3
    assert image.kernel.path == tmp_path / "kernel"
    assert image.qemu_closure == tmp_path / "closures/c"
    with image.open_parts() as (kernel_fd, initrd_fd):
        assert os.read(kernel_fd, 6) == b"kernel"
        assert os.read(initrd_fd, 6) == b"initrd"
    for fd in (kernel_fd, initrd_fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("changes", [{"format": 2}, {"parts": {}}, {"vmm": {}}, {"parts": None}], ids=str)
def test_a_manifest_of_another_version_says_how_to_get_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    a_manifest(tmp_path, **changes)
    with pytest.raises(HostError, match="image build"):
        open_image(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_what_is_no_manifest_says_how_to_get_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(HostError, match="image build"):
        open_image(tmp_path)
    with pytest.raises(HostError, match="image build"):
        open_image(tmp_path / "missing")


class Hashes:
    """Counts what is hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        digest = hashlib.file_digest

        def count(file: Any, name: str) -> Any:
            self.seen.append(Path(file.name).name)
            return digest(file, name)

        monkeypatch.setattr(image_module.hashlib, "file_digest", count)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    directory = tmp_path / "image"
    directory.mkdir()
    a_manifest(directory)
    return open_image(directory)


def test_unchanged_parts_are_hashed_once(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = Hashes(monkeypatch)
    cache = tmp_path / "verified.json"
    verify_image(image, cache)
    verify_image(image, cache)
    assert hashes.seen == ["rootfs", "kernel", "initrd"]


def test_a_touched_part_is_hashed_again_though_its_size_and_mtime_are_the_old_ones(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "verified.json"
    verify_image(image, cache)
    before = image.kernel.path.stat()
    content = bytearray(image.kernel.path.read_bytes())
    content[0] ^= 1
    image.kernel.path.write_bytes(content)
    os.utime(image.kernel.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hashes = Hashes(monkeypatch)
    with pytest.raises(HostError, match="SHA-256") as refused:
        verify_image(image, cache)
    assert str(image.kernel.path) in refused.value.message
    assert hashes.seen == ["kernel"]


def test_a_cache_that_is_damaged_is_no_cache(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "verified.json"
    for content in (b"", b"{", b"[]", b'{"x": 1}'):
        cache.write_bytes(content)
        hashes = Hashes(monkeypatch)
        verify_image(image, cache)
        assert len(hashes.seen) == 3
        monkeypatch.undo()


def test_a_missing_part_is_an_error(image: Image, tmp_path: Path) -> None:
    image.initrd.path.unlink()
    with pytest.raises(HostError, match="initrd"):
        verify_image(image, tmp_path / "verified.json")


@pytest.mark.root
def test_the_base_disk_is_placed_once_whole_and_with_its_holes(
    image: Image, tmp_path: Path, reflink_directory: Path
) -> None:
    with image.rootfs.path.open("r+b") as rootfs:
        rootfs.truncate(64 * MIB)
        rootfs.seek(32 * MIB)
        rootfs.write(b"in the middle")
    places = Layout(tmp_path / "state", reflink_directory)
    places.prepare()
    place_base(image, places)
    base = places.image(image.digest)
    assert base.read_bytes() == image.rootfs.path.read_bytes()
    assert base.stat().st_blocks * 512 < MIB
    assert base.stat().st_mode & 0o777 == 0o600
    inode = base.stat().st_ino
    place_base(image, places)
    assert base.stat().st_ino == inode


@pytest.mark.root
def test_a_placement_that_fails_leaves_nothing_and_what_a_crash_left_is_overwritten(
    image: Image, tmp_path: Path, reflink_directory: Path
) -> None:
    places = Layout(tmp_path / "state", reflink_directory)
    places.prepare()
    images = reflink_directory / "images"
    (images / f"{image.digest}.copying").write_bytes(b"half")
    rootfs = image.rootfs.path.rename(tmp_path / "elsewhere")
    with pytest.raises(HostError):
        place_base(image, places)
    assert not places.image(image.digest).exists()
    rootfs.rename(image.rootfs.path)
    place_base(image, places)
    assert [path.name for path in images.iterdir()] == [f"{image.digest}.ext4"]
