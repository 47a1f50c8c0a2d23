"""A checkpoint that is not whole, or not this VM's, is never loaded; the disk boots instead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from microvm.store import checkpoint
from microvm.store.checkpoint import Manifest
from tests.vm.live_service import Client, Machine, Service, ToolError

pytestmark = [pytest.mark.vm, pytest.mark.root]

REMEMBER = "echo on-disk > note; sync; echo in-memory > /dev/shm/note"

Harm = Callable[[Path, Path], None]
"""Gets the VM's directory and that of another hibernated VM."""


def state_of(directory: Path) -> Path:
    """The file of the device state."""
    (state,) = directory.glob("state.*")
    return state


def edit_manifest(directory: Path, edit: Callable[[Manifest], Manifest]) -> None:
    """Writes it anew as if it had been committed so."""
    manifest = checkpoint.read(directory)
    assert manifest is not None
    checkpoint.commit(directory, edit(manifest))


def lose_manifest(mine: Path, _other: Path) -> None:
    (mine / "manifest.json").unlink()


def garble_manifest(mine: Path, _other: Path) -> None:
    (mine / "manifest.json").write_text("{")


def take_the_state_of_another(mine: Path, other: Path) -> None:
    shutil.copyfile(state_of(other), state_of(mine))
    shutil.copyfile(other / "manifest.json", mine / "manifest.json")


def take_an_older_generation(mine: Path, _other: Path) -> None:
    edit_manifest(mine, lambda manifest: replace(manifest, generation=manifest.generation - 1))


def come_from_another_host(mine: Path, _other: Path) -> None:
    def edit(manifest: Manifest) -> Manifest:
        return replace(manifest, platform=replace(manifest.platform, tsc_khz=manifest.platform.tsc_khz * 2))

    edit_manifest(mine, edit)


def lose_state(mine: Path, _other: Path) -> None:
    state_of(mine).unlink()


def cut_state(mine: Path, _other: Path) -> None:
    os.truncate(state_of(mine), state_of(mine).stat().st_size - 1)


def flip_a_bit_of_state(mine: Path, _other: Path) -> None:
    content = bytearray(state_of(mine).read_bytes())
    content[len(content) // 2] ^= 1
    state_of(mine).write_bytes(content)


def lose_memory(mine: Path, _other: Path) -> None:
    (mine / "ram").unlink()


def cut_memory(mine: Path, _other: Path) -> None:
    size = (mine / "ram").stat().st_size
    (mine / "ram").unlink()
    (mine / "ram").touch()
    os.truncate(mine / "ram", size // 2)


def take_the_memory_of_another(mine: Path, other: Path) -> None:
    (mine / "ram").unlink()
    os.link(other / "ram", mine / "ram")


def write_to_the_disk(mine: Path, _other: Path) -> None:
    facts = (mine / "disk").stat()
    os.utime(mine / "disk", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


HARMS: dict[str, Harm] = {
    "manifest missing": lose_manifest,
    "manifest damaged": garble_manifest,
    "state of another VM": take_the_state_of_another,
    "older generation": take_an_older_generation,
    "another host": come_from_another_host,
    "state missing": lose_state,
    "state cut": cut_state,
    "state flipped": flip_a_bit_of_state,
    "memory missing": lose_memory,
    "memory cut": cut_memory,
    "memory of another VM": take_the_memory_of_another,
    "disk written to": write_to_the_disk,
}


@contextmanager
def kept(directory: Path) -> Generator[None]:
    """Puts the very files back at the end: large ones by hard links, so that they stay the same inodes."""
    aside = directory.parent.with_name("kept-aside")
    aside.mkdir()
    times = (directory / "disk").stat()
    for path in directory.iterdir():
        if path.name in {"ram", "disk"}:
            os.link(path, aside / path.name)
        else:
            shutil.copy2(path, aside / path.name)
    try:
        yield
    finally:
        shutil.rmtree(directory)
        aside.rename(directory)
        os.utime(directory / "disk", ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture(scope="module")
def sleepers(client: Client) -> Iterator[tuple[Machine, Machine]]:
    """Two hibernated VMs, each with a note on its disk and one in its memory."""
    pair = client.create(), client.create()
    for vm in pair:
        vm.text(REMEMBER)
        vm.suspend()
    yield pair
    for vm in pair:
        vm.destroy()


def places(service: Service, *vms: Machine) -> list[Path]:
    return [service.vm_dir / "vms" / vm.vm_id for vm in vms]


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_harmed_checkpoint_is_refused_and_changes_nothing(
    service: Service, sleepers: tuple[Machine, Machine], harm: Harm
) -> None:
    vm = sleepers[0]
    mine, others = places(service, *sleepers)
    with kept(mine):
        harm(mine, others)
        for call in (lambda: vm.call("vm_resume"), lambda: vm.text("true")):
            with pytest.raises(ToolError, match="cold_boot") as refused:
                call()
            assert (refused.value.code, refused.value.status) == ("checkpoint_mismatch", 409)
            assert vm.state == "hibernated"


def test_a_checkpoint_that_is_whole_again_is_loaded(
    service: Service, sleepers: tuple[Machine, Machine]
) -> None:
    vm = sleepers[0]
    mine, others = places(service, *sleepers)
    for harm in HARMS.values():
        with kept(mine):
            harm(mine, others)
    assert vm.text("cat /dev/shm/note note") == "in-memory\non-disk\n"
    vm.suspend()


def test_a_vm_whose_checkpoint_does_not_fit_boots_from_its_disk_without_being_asked_twice(
    service: Service, client: Client
) -> None:
    vm = client.create()
    try:
        vm.text(REMEMBER)
        vm.suspend()
        flip_a_bit_of_state(*places(service, vm, vm))
        with pytest.raises(ToolError, match="cold_boot=true boots"):
            vm.call("vm_resume")
        assert vm.call("vm_resume", cold_boot=True)["state"] == "running"
        assert vm.run("cat /dev/shm/note")["exit_code"] == 1
        assert vm.text("cat note") == "on-disk\n"
        assert vm.suspend()["state"] == "hibernated"
        assert vm.text("cat note") == "on-disk\n"
    finally:
        vm.destroy()
