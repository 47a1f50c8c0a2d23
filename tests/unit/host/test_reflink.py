"""Clones on a real XFS volume, and every refusal that can be had."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import pytest

from microvm._native import lib
from microvm.errors import HostError
from microvm.host import reflink as reflink_module
from microvm.host.files import flush
from microvm.host.reflink import (
    ReflinkError,
    ReflinkRefusal,
    extent_count,
    extents,
    own_bytes,
    reflink,
    shares_extents,
)

BLOCK = 4096


def make_file(directory: Path, content: bytes = b"") -> int:
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        os.unlink(file.name)
        os.write(file.fileno(), content)
        return os.dup(file.fileno())


@pytest.mark.root
def test_a_clone_has_the_content_and_shares_every_block(reflink_directory: Path) -> None:
    content = os.urandom(1 << 20)
    source, clone = make_file(reflink_directory, content), make_file(reflink_directory)
    reflink(source, clone)
    assert os.pread(clone, len(content), 0) == content
    assert shares_extents(source)
    assert shares_extents(clone)
    assert own_bytes(clone) == 0


@pytest.mark.root
def test_writing_to_a_clone_unshares_what_was_written_and_nothing_else(reflink_directory: Path) -> None:
    source, clone = make_file(reflink_directory, os.urandom(1 << 20)), make_file(reflink_directory)
    reflink(source, clone)
    before = os.pread(source, 1 << 20, 0)
    os.pwrite(clone, b"x", 10 * BLOCK)
    assert not shares_extents(clone)
    assert own_bytes(clone) == BLOCK
    assert os.pread(source, 1 << 20, 0) == before


@pytest.mark.root
def test_a_clone_holds_stores_through_a_mapping_that_nobody_flushed(reflink_directory: Path) -> None:
    source, clone = make_file(reflink_directory, bytes(64 * BLOCK)), make_file(reflink_directory)
    with mmap.mmap(source, 64 * BLOCK) as memory:
        memory[17 * BLOCK : 17 * BLOCK + 5] = b"early"
        reflink(source, clone)
        memory[18 * BLOCK : 18 * BLOCK + 4] = b"late"
    assert os.pread(clone, 5, 17 * BLOCK) == b"early"
    assert os.pread(clone, 4, 18 * BLOCK) == bytes(4)


@pytest.mark.root
def test_holes_stay_holes(reflink_directory: Path) -> None:
    source, clone = make_file(reflink_directory), make_file(reflink_directory)
    os.ftruncate(source, 1 << 30)
    reflink(source, clone)
    assert os.fstat(clone).st_size == 1 << 30
    assert list(extents(clone)) == []
    assert not shares_extents(clone)


@pytest.mark.root
def test_extents_are_all_counted_also_beyond_one_call(reflink_directory: Path) -> None:
    source = make_file(reflink_directory)
    os.ftruncate(source, 2200 * BLOCK)  # XFS allocates ahead only when a file grows
    for index in range(1100):
        os.pwrite(source, b"x", 2 * index * BLOCK)
    flush(source)
    found = list(extents(source))
    assert len(found) == 1100
    assert [extent.logical for extent in found] == [2 * index * BLOCK for index in range(1100)]
    assert extent_count(source) == 1100


def refused(source: int, destination: int) -> ReflinkRefusal:
    with pytest.raises(ReflinkError) as caught:
        reflink(source, destination)
    return caught.value.reason


@pytest.mark.root
def test_refusals_are_told_apart(reflink_directory: Path, tmp_path: Path) -> None:
    source, other = make_file(reflink_directory, b"content"), make_file(tmp_path, b"content")
    read_only = os.open(f"/proc/self/fd/{source}", os.O_RDONLY)
    appending = os.open(f"/proc/self/fd/{source}", os.O_WRONLY | os.O_APPEND)
    directory = os.open(reflink_directory, os.O_RDONLY)
    memory = os.memfd_create("memory")
    assert refused(other, make_file(tmp_path)) is ReflinkRefusal.NOT_SUPPORTED
    assert refused(other, make_file(reflink_directory)) is ReflinkRefusal.CROSS_DEVICE
    assert refused(memory, make_file(reflink_directory)) is ReflinkRefusal.CROSS_DEVICE
    assert refused(make_file(reflink_directory), read_only) is ReflinkRefusal.BAD_DESCRIPTOR
    assert refused(make_file(reflink_directory), appending) is ReflinkRefusal.BAD_DESCRIPTOR
    assert refused(4000, source) is ReflinkRefusal.BAD_DESCRIPTOR
    assert refused(directory, source) is ReflinkRefusal.IS_DIRECTORY
    assert refused(source, source) is ReflinkRefusal.SAME_FILE_OR_RANGE
    assert os.pread(source, 7, 0) == b"content"


def test_every_error_number_has_its_reason_and_a_full_volume_its_public_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        error = 0

        def mvm_ficlone(self, destination_fd: int, source_fd: int) -> int:
            return self.error

    refusing = Refusing()
    monkeypatch.setattr(reflink_module, "lib", refusing)
    for number, reason in reflink_module._REFUSALS.items():  # pyright: ignore[reportPrivateUsage]
        refusing.error = number
        assert refused(0, 1) is reason
    refusing.error = 999
    assert refused(0, 1) is ReflinkRefusal.OTHER
    refusing.error = 28
    with pytest.raises(ReflinkError) as caught:
        reflink(0, 1)
    assert caught.value.code == "disk_full"
    assert lib.mvm_ficlone(-1, -1) == 9


def test_a_file_system_without_extents_is_an_error() -> None:
    with pytest.raises(HostError, match="fiemap"):
        extent_count(os.memfd_create("memory"))
    with pytest.raises(HostError, match="EBADF"):
        extent_count(4000)
