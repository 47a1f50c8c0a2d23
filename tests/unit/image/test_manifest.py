import json
from pathlib import Path
from typing import Any

import pytest

from image import ImageError, Manifest, Part, load_manifest
from image.digest import canonical_json
from image.manifest import Closure, parse_manifest
from image.publish import publish_manifest, publish_part


def manifest(rootfs: str = "ab" * 32, disk_gib: int = 3) -> Manifest:
    parts = {"rootfs": Part("rootfs-abab.ext4", rootfs, 10), "kernel": Part("vmlinuz-cd", "cd" * 32, 5)}
    return Manifest(
        1, disk_gib, parts, {"qemu": Closure("closures/ef", "ef" * 32, "10.0.1", "/usr/bin/qemu")}
    )


def test_a_manifest_survives_its_json():
    assert parse_manifest(json.loads(canonical_json(manifest().to_json()))) == manifest()


def test_the_digest_covers_parts_and_vmm_and_not_their_order():
    first = manifest()
    turned = Manifest(1, 3, dict(reversed(first.parts.items())), first.vmm)
    assert turned.digest == first.digest
    assert manifest(rootfs="00" * 32).digest != first.digest
    vmm = {"qemu": Closure("closures/ef", "ef" * 32, "10.0.2", "/usr/bin/qemu")}
    assert Manifest(1, 3, first.parts, vmm).digest != first.digest


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"digest": "00" * 32},
        {"parts": {"rootfs": {"file": "x"}}},
        {"parts": []},
        {"epoch": None},
        {"vmm": {"qemu": {"closure": "x", "digest": "y", "version": "z", "binary": "b", "more": 1}}},
    ],
)
def test_a_manifest_that_is_not_ours_or_was_changed_is_refused(change: dict[str, Any]):
    with pytest.raises(ImageError, match="build"):
        parse_manifest({**manifest().to_json(), **change})


@pytest.mark.parametrize("text", ["[]", "{", "null"])
def test_a_manifest_file_that_is_no_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ImageError, match="build the image again"):
        load_manifest(tmp_path)


def test_no_image_says_how_to_build_one(tmp_path: Path):
    with pytest.raises(ImageError, match="microvm image build"):
        load_manifest(tmp_path)


def publish(directory: Path, contents: bytes) -> Manifest:
    parts: dict[str, Part] = {}
    for name, digest in (("rootfs", contents.hex() * 32), ("kernel", "cd" * 32)):
        built = directory / f".built-{name}"
        built.write_bytes(contents)
        parts[name] = publish_part(directory, name, built, digest[:64])
    published = Manifest(1, 3, parts, {})
    publish_manifest(directory, published)
    return published


def test_publishing_leaves_exactly_the_new_parts_and_every_closure(tmp_path: Path):
    (tmp_path / "closures" / "old").mkdir(parents=True)
    publish(tmp_path, b"1")
    second = publish(tmp_path, b"2")
    assert load_manifest(tmp_path) == second
    names = {part.file for part in second.parts.values()}
    assert {path.name for path in tmp_path.iterdir()} == names | {
        "closures",
        "manifest.json",
        "rootfs.ext4",
        "vmlinuz",
    }
    assert (tmp_path / "rootfs.ext4").read_bytes() == b"2"
    assert (tmp_path / "closures" / "old").is_dir()


def test_parts_published_without_a_manifest_leave_the_image_before_intact(tmp_path: Path):
    first = publish(tmp_path, b"1")
    built = tmp_path / ".built"
    built.write_bytes(b"2")
    publish_part(tmp_path, "rootfs", built, "22" * 32)
    assert load_manifest(tmp_path) == first
    assert (tmp_path / first.parts["rootfs"].file).read_bytes() == b"1"
