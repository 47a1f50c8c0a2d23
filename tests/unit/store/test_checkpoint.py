"""A checkpoint is loaded only where everything belongs together, and whoever asks hears what does not."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from microvm.store import checkpoint
from microvm.store.checkpoint import CheckpointMismatchError, FileMark, Manifest, Platform

HERE = Platform("qemu", "10.0.2", "c" * 64, "tcg", "max", 2_000_000, "i" * 64)
STATE = b"device state" * 100


class Saved:
    """A checkpoint on disk, and the descriptors that it is verified with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("ram", "disk"):
            (directory / name).write_bytes(name.encode() * 1000)
        (directory / "state.3").write_bytes(STATE)
        with self.opened() as (ram, disk):
            state_fd = os.open(directory / "state.3", os.O_RDONLY)
            sha256, size = checkpoint.sha256_of(state_fd)
            os.close(state_fd)
            self.manifest = Manifest(
                owner="vm_a",
                generation=3,
                memory_mib=256,
                vcpus=1,
                platform=HERE,
                ram=FileMark.of(ram),
                disk=FileMark.of(disk),
                state_file="state.3",
                state_bytes=size,
                state_sha256=sha256,
                facts={"spec": {"memory_mib": 256}},
            )
        checkpoint.commit(directory, self.manifest)

    @contextmanager
    def opened(self) -> Generator[tuple[int, int]]:
        fds = [os.open(self.directory / name, os.O_RDWR) for name in ("ram", "disk")]
        try:
            yield fds[0], fds[1]
        finally:
            for fd in fds:
                os.close(fd)

    def verify(self, owner: str = "vm_a", generation: int | None = 3, here: Platform = HERE) -> Manifest:
        with self.opened() as (ram, disk):
            return checkpoint.verify(
                self.directory, owner=owner, generation=generation, here=here, ram_fd=ram, disk_fd=disk
            )


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_what_was_committed_is_read_and_verified_as_it_was(saved: Saved) -> None:
    assert checkpoint.read(saved.directory) == saved.manifest
    assert saved.verify() == saved.manifest
    assert saved.verify(generation=None) == saved.manifest


def test_the_manifest_is_private(saved: Saved) -> None:
    assert (saved.directory / checkpoint.MANIFEST).stat().st_mode & 0o777 == 0o600


def test_a_checkpoint_of_another_owner_or_generation_is_refused(saved: Saved) -> None:
    with pytest.raises(CheckpointMismatchError, match="another VM"):
        saved.verify(owner="vm_b")
    with pytest.raises(CheckpointMismatchError, match="generation") as refused:
        saved.verify(generation=4)
    assert refused.value.detail == {"manifest": 3, "vm": 4}
    assert refused.value.code == "checkpoint_mismatch"
    assert refused.value.status == 409
    assert "cold_boot" in refused.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vmm", "firecracker"),
        ("closure", "d" * 64),
        ("accel", "kvm"),
        ("cpu", "host"),
        ("tsc_khz", 2_000_600),
    ],
)
def test_another_platform_is_refused_and_the_answer_says_what_differs(
    saved: Saved, field: str, value: str | int
) -> None:
    here = replace(HERE, **{field: value})
    with pytest.raises(CheckpointMismatchError, match="platform") as refused:
        saved.verify(here=here)
    assert refused.value.detail == {field: {"saved": getattr(HERE, field), "here": value}}


def test_what_people_only_read_and_small_drifts_of_the_clock_do_not_matter(saved: Saved) -> None:
    assert saved.verify(here=replace(HERE, version="10.0.3", image="j" * 64, tsc_khz=2_000_500))


def _replaced(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def _changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [_replaced, _changed, _truncated])
@pytest.mark.parametrize(("name", "said"), [("ram", "memory"), ("disk", "disk")])
def test_memory_and_disk_must_be_the_very_files_untouched(
    saved: Saved, name: str, said: str, damage: Callable[[Path], None]
) -> None:
    damage(saved.directory / name)
    with pytest.raises(CheckpointMismatchError, match=said):
        saved.verify()


@pytest.mark.parametrize("damage", [_changed, _truncated, Path.unlink])
def test_device_state_must_be_there_to_the_bit(saved: Saved, damage: Callable[[Path], None]) -> None:
    damage(saved.directory / "state.3")
    with pytest.raises(CheckpointMismatchError, match="device state"):
        saved.verify()


def test_device_state_is_never_read_through_a_link(saved: Saved) -> None:
    state = saved.directory / "state.3"
    state.rename(saved.directory / "elsewhere")
    state.symlink_to("elsewhere")
    with pytest.raises(CheckpointMismatchError, match="device state"):
        saved.verify()


@pytest.mark.parametrize("position", range(0, 1000, 37))
def test_one_flipped_bit_in_the_manifest_is_seen(saved: Saved, position: int) -> None:
    path = saved.directory / checkpoint.MANIFEST
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)
    found = checkpoint.read(saved.directory)
    assert found is None or found == saved.manifest  # a bit of the spaces between


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"format": 1}', b"[" * 20000, b"\xff\xfe", b"{}" + b" " * 70000],
)
def test_what_is_no_manifest_is_none(saved: Saved, content: bytes) -> None:
    (saved.directory / checkpoint.MANIFEST).write_bytes(content)
    assert checkpoint.read(saved.directory) is None
    with pytest.raises(CheckpointMismatchError, match="manifest"):
        saved.verify()


def test_a_manifest_of_another_format_is_none(saved: Saved) -> None:
    checkpoint.commit(saved.directory, replace(saved.manifest, format=checkpoint.FORMAT + 1))
    assert checkpoint.read(saved.directory) is None


def test_a_commit_that_fails_leaves_the_old_manifest(saved: Saved) -> None:
    with pytest.raises(TypeError):
        checkpoint.commit(saved.directory, replace(saved.manifest, facts={"x": object()}))
    assert checkpoint.read(saved.directory) == saved.manifest
    assert sorted(path.name for path in saved.directory.iterdir()) == [
        "disk",
        checkpoint.MANIFEST,
        "ram",
        "state.3",
    ]


def test_a_memfile_that_is_being_written_anew_is_known_by_both_its_files(saved: Saved) -> None:
    dense = saved.directory / "ram.new"
    dense.write_bytes((saved.directory / "ram").read_bytes())
    fd = os.open(dense, os.O_RDONLY)
    after = FileMark.of(fd)
    os.close(fd)
    checkpoint.commit(saved.directory, replace(saved.manifest, ram=after, ram_before=saved.manifest.ram))
    assert saved.verify().ram == after
    dense.rename(saved.directory / "ram")
    assert saved.verify().ram == after


def test_every_field_of_the_manifest_is_in_the_file(saved: Saved) -> None:
    written = json.loads((saved.directory / checkpoint.MANIFEST).read_bytes())
    assert {each.name for each in dataclasses.fields(Manifest)} | {"seal"} == set(written)
