"""Files of VMs are root's, private, and gone when they are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from microvm.errors import HostError
from microvm.fleet import layout
from microvm.fleet.layout import Layout
from microvm.model import VmId

VM = VmId("vm_" + "a" * 20)
MIB = 1 << 20


def test_directories_are_private_whatever_they_were(tmp_path: Path) -> None:
    places = Layout(tmp_path / "state", tmp_path / "vm")
    (tmp_path / "state").mkdir(mode=0o755)
    places.prepare()
    places.prepare()
    for path in (tmp_path / "state", tmp_path / "state/vms", tmp_path / "vm/vms", tmp_path / "vm/templates"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert places.vm(VM).parent == tmp_path / "vm/vms"
    assert places.logs(VM).parent == tmp_path / "state/vms"


def test_a_file_is_made_new_and_private_or_not_at_all(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        os.close(layout.create_private(tmp_path / "f"))
        os.close(layout.open_console(tmp_path / "logs"))
    finally:
        os.umask(old_mask)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "logs" / layout.CONSOLE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(HostError) as refused:
        layout.create_private(tmp_path / "f")
    assert refused.value.operation == "create"


def test_no_file_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / layout.CONSOLE).symlink_to("target")
    for attempt in (
        lambda: layout.open_rw(tmp_path / "link"),
        lambda: layout.create_private(tmp_path / "link"),
        lambda: layout.open_console(tmp_path),
    ):
        with pytest.raises(HostError):
            attempt()


@pytest.mark.root
def test_a_clone_has_the_content_and_none_of_the_blocks_of_its_own(reflink_directory: Path) -> None:
    source = reflink_directory / "source"
    source.write_bytes(os.urandom(MIB))
    layout.clone_file(source, reflink_directory / "clone")
    assert (reflink_directory / "clone").read_bytes() == source.read_bytes()


def test_a_clone_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 65536)  # no reflinks here
    with pytest.raises(HostError):
        layout.clone_file(tmp_path / "source", tmp_path / "clone")
    assert not (tmp_path / "clone").exists()
    with pytest.raises(HostError):
        layout.clone_file(tmp_path / "missing", tmp_path / "clone")
    assert not (tmp_path / "clone").exists()


def test_empty_memory_has_its_size_and_no_blocks(tmp_path: Path) -> None:
    layout.make_ram(tmp_path / "ram", 128)
    assert (tmp_path / "ram").stat().st_size == 128 * MIB
    assert layout.used_bytes(tmp_path / "ram", tmp_path / "missing") == 0


def test_a_dense_copy_has_the_content_and_the_holes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    layout.make_ram(source, 32)
    with source.open("r+b") as file:
        for at in range(0, 16 * MIB, 2 * MIB):
            file.seek(at)
            file.write(b"page" * 1024)
    mark = layout.copy_densely(source, tmp_path / "dense")
    assert (tmp_path / "dense").read_bytes() == source.read_bytes()
    assert layout.used_bytes(tmp_path / "dense") < MIB
    assert mark.inode == (tmp_path / "dense").stat().st_ino
    assert mark.size == 32 * MIB


def test_removing_is_removing_all_and_what_is_missing_is_fine(tmp_path: Path) -> None:
    (tmp_path / "vm/jobs/a").mkdir(parents=True)
    (tmp_path / "vm/jobs/a/stdout").touch()
    layout.remove_tree(tmp_path / "vm")
    layout.remove_tree(tmp_path / "vm")
    assert list(tmp_path.iterdir()) == []


def test_a_console_is_emptied_beyond_its_limit_and_its_writer_goes_on(tmp_path: Path) -> None:
    fd = layout.open_console(tmp_path)
    try:
        os.write(fd, b"x" * layout.CONSOLE_LIMIT_BYTES)
        layout.cut_console(tmp_path)
        assert (tmp_path / layout.CONSOLE).stat().st_size == layout.CONSOLE_LIMIT_BYTES
        os.write(fd, b"y")
        layout.cut_console(tmp_path)
        os.write(fd, b"\xffafter")
        assert (tmp_path / layout.CONSOLE).read_bytes() == b"\xffafter"
        assert layout.console_tail(tmp_path) == "�after"
        assert layout.console_tail(tmp_path, 3) == "ter"
    finally:
        os.close(fd)
    layout.cut_console(tmp_path / "missing")
    assert layout.console_tail(tmp_path / "missing") == ""
