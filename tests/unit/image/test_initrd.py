import lzma
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image.errors import ImageError
from image.initrd import (
    APPLETS,
    DEVICE_MODULES,
    Entry,
    build_initrd,
    dependencies_of,
    encode_cpio,
    load_order,
)


def module(name: str, *needs: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=" + name.encode() + b"\0"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    tree = {
        "virtio_mmio": (),
        "virtio_blk": (),
        "virtio-rng": (),
        "failover": (),
        "net_failover": ("failover",),
        "virtio_net": ("net_failover",),
        "vsock": (),
        "vmw_vsock_virtio_transport_common": ("vsock",),
        "vmw_vsock_virtio_transport": ("vmw_vsock_virtio_transport_common", "vsock"),
    }
    folder = tmp_path / "modules" / "kernel"
    folder.mkdir(parents=True)
    for name, needs in tree.items():
        (folder / f"{name}.ko.xz").write_bytes(lzma.compress(module(name, *needs)))
    return folder.parent


def read_cpio(data: bytes) -> dict[str, tuple[int, bytes]]:
    members: dict[str, tuple[int, bytes]] = {}
    position = 0
    while True:
        assert data[position : position + 6] == b"070701"
        fields = [int(data[position + 6 + 8 * i : position + 14 + 8 * i], 16) for i in range(13)]
        name = data[position + 110 : position + 110 + fields[11] - 1].decode()
        start = (position + 110 + fields[11] + 3) & ~3
        if name == "TRAILER!!!":
            return members
        members[name] = (fields[1], data[start : start + fields[6]])
        position = (start + fields[6] + 3) & ~3


def test_the_initrd_holds_init_the_shell_and_every_driver_after_what_it_needs(modules: Path):
    members = read_cpio(build_initrd(modules, b"BUSYBOX", b"#!/bin/sh\n", 7))
    assert members["init"] == (stat.S_IFREG | 0o755, b"#!/bin/sh\n")
    assert members["bin/busybox"] == (stat.S_IFREG | 0o755, b"BUSYBOX")
    assert stat.S_ISCHR(members["dev/console"][0])
    assert all(members[f"bin/{name}"] == (stat.S_IFLNK | 0o777, b"busybox") for name in APPLETS)
    assert [name for name in members if name.startswith("modules/0x0001/")] == [
        "modules/0x0001/00-failover.ko",
        "modules/0x0001/01-net_failover.ko",
        "modules/0x0001/02-virtio_net.ko",
    ]
    assert members["modules/0x0004/00-virtio_rng.ko"][1] == module("virtio-rng")
    assert {f"modules/{device}" for device in DEVICE_MODULES} <= members.keys()


def test_folders_come_before_what_is_in_them(modules: Path):
    names = list(read_cpio(build_initrd(modules, b"", b"", 7)))
    for name in names:
        if "/" in name:
            assert names.index(name.rsplit("/", 1)[0]) < names.index(name)


def test_two_initrds_of_the_same_inputs_are_the_same_bytes(modules: Path):
    assert build_initrd(modules, b"B", b"I", 7) == build_initrd(modules, b"B", b"I", 7)


def test_every_applet_that_init_uses_is_in_the_initrd():
    script = (Path(__file__).parents[3] / "image" / "initrd.sh").read_text()
    used = {word for word in ("insmod", "mount", "poweroff", "switch_root", "mkdir") if f"{word} " in script}
    assert used <= set(APPLETS)


def test_a_kernel_without_a_driver_is_refused(modules: Path):
    (modules / "kernel" / "virtio_blk.ko.xz").unlink()
    with pytest.raises(ImageError, match="virtio_blk"):
        build_initrd(modules, b"", b"", 7)


def test_dependencies_are_read_from_the_module_with_dashes_as_underscores():
    assert dependencies_of(module("a", "virtio-rng", "b")) == ["virtio_rng", "b"]
    assert dependencies_of(module("a")) == []
    assert dependencies_of(b"no tags at all") == []


def test_a_module_needed_twice_is_loaded_once(tmp_path: Path):
    for name, needs in {"a": ("b", "c"), "b": ("c",), "c": ()}.items():
        (tmp_path / f"{name}.ko").write_bytes(module(name, *needs))
    found = {path.stem: path for path in tmp_path.iterdir()}
    assert [name for name, _ in load_order("a", found)] == ["c", "b", "a"]


NAMES = st.text("abcdefghij", min_size=1, max_size=9)


@given(st.dictionaries(NAMES, st.binary(max_size=40), max_size=6))
def test_any_members_come_back_from_the_archive(files: dict[str, bytes]):
    entries = [Entry(name, stat.S_IFREG | 0o644, data) for name, data in files.items()]
    assert read_cpio(encode_cpio(entries, 1)) == {
        name: (stat.S_IFREG | 0o644, data) for name, data in files.items()
    }
