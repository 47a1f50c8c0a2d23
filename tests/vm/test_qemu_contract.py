"""QEMU against the contract of every VMM, with real guests; and what this kind promises besides."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from image.manifest import load_manifest
from microvm.host.cgroup import find_hierarchy
from microvm.host.clock import host_tsc_khz
from microvm.host.reflink import own_bytes
from microvm.vmm.base import Accelerator, BootSource
from microvm.vmm.closure import Closure, open_closure
from microvm.vmm.probe import ProbeGuest, choose_accelerator
from microvm.vmm.qemu import QemuKind
from tests.contract.rig import Machine, Rig
from tests.contract.vmm_contract import (
    BOOT_SECONDS,
    COUNTER,
    Clone,
    Make,
    VmmContract,
    booted,
    booting,
    checkpoint,
    loaded,
)

pytestmark = [pytest.mark.vm, pytest.mark.root]

UID = 64_321  # no account has it; the tests' own, so that a live service's slots are not met


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def folder(vm_volume: Path, stack: ExitStack) -> Path:
    folder = vm_volume / f"contract-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    stack.callback(shutil.rmtree, folder)
    return folder


@pytest.fixture(scope="module")
def cgroup(stack: ExitStack) -> Path:
    group = find_hierarchy().own_path / f"microvm-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    stack.callback(group.rmdir)
    return group


@pytest.fixture(scope="module")
def closure(image_dir: Path, folder: Path, stack: ExitStack) -> Closure:
    qemu = load_manifest(image_dir).vmm["qemu"]
    return stack.enter_context(
        open_closure(
            image_dir / qemu.closure,
            qemu.digest,
            version=qemu.version,
            binary=qemu.binary,
            verified_file=folder / "verified.json",
        )
    )


@pytest.fixture(scope="module")
def rig(image_dir: Path, folder: Path, cgroup: Path, closure: Closure, stack: ExitStack) -> Rig:
    manifest = load_manifest(image_dir)
    kind = QemuKind(closure, Accelerator("tcg", "runs everywhere"), host_tsc_khz())
    fds: list[int] = []
    for name in ("rootfs", "kernel", "initrd"):  # copies: an image that is built anew removes the old files
        copy_data(image_dir / manifest.parts[name].file, folder / name)
        fds.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
        stack.callback(os.close, fds[-1])
    return Rig(kind, folder, fds[0], BootSource(fds[1], fds[2], kind.cmdline()), UID, cgroup)


def copy_data(source: Path, copy: Path) -> None:
    """Copies a sparse file's data, and its holes as holes."""
    with source.open("rb") as read, copy.open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        start = end = 0
        os.ftruncate(write.fileno(), size)
        while end < size:
            try:
                start = os.lseek(read.fileno(), end, os.SEEK_DATA)
            except OSError:  # ENXIO: no data from here on
                break
            end = os.lseek(read.fileno(), start, os.SEEK_HOLE)
            os.lseek(write.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(write.fileno(), read.fileno(), start, end - start)


class TestQemu(VmmContract):
    """The whole contract, and more."""

    @pytest.mark.parametrize("memory_mib", [128, 256, 512, 1024, 2048, 4096])
    async def test_every_memory_size_boots_saves_and_runs_on(
        self, rig: Rig, make: Make, clone: Clone, memory_mib: int
    ) -> None:
        machine = make(f"size{memory_mib}", memory_mib)
        await checkpoint(rig, machine)
        async with loaded(rig, clone(machine, f"woken{memory_mib}")) as (vmm, guest):
            await vmm.cont()
            await guest.wake(2)
            facts, _ = await guest.call("stat", {})
            assert memory_mib * 0.6 <= facts["memory"]["total_kib"] / 1024 <= memory_mib
            assert (await guest.job("count"))["state"] == "running"

    async def test_device_state_does_not_grow_with_memory(self, rig: Rig, make: Make, saved: Machine) -> None:
        large = make("large", 1024)
        await checkpoint(rig, large)
        sizes = [os.fstat(machine.state_fd).st_size for machine in (saved, large)]
        assert max(sizes) < 1 << 20
        assert max(sizes) - min(sizes) < 16 << 10

    async def test_two_processors_survive_a_checkpoint(self, rig: Rig, make: Make, clone: Clone) -> None:
        machine = make("smp", vcpus=2)
        async with booted(rig, machine) as (vmm, guest):
            await guest.start_job("one", COUNTER)
            await guest.start_job("two", COUNTER)
            await vmm.stop()
            await vmm.save(machine.state_fd)
            await vmm.kill()
        async with loaded(rig, clone(machine, "smp2")) as (vmm, guest):
            await vmm.cont()
            await guest.wake(2)
            assert await guest.run("nproc", "nproc") == b"2\n"
            assert (await guest.job("two"))["state"] == "running"

    async def test_a_wake_and_two_commands_make_few_blocks_its_own(
        self, rig: Rig, saved: Machine, clone: Clone
    ) -> None:
        copy = clone(saved, "grown")
        async with loaded(rig, copy) as (vmm, guest):
            await vmm.cont()
            await guest.wake(2)
            for number in range(2):
                await guest.run(f"job{number}", "true")
            await vmm.stop()
            # Pages that huge folios would dirty make 50 MiB and more of it; 5 without them.
            assert own_bytes(copy.fds["ram"]) < 12 << 20

    async def test_the_process_has_no_privileges_and_sees_its_own_files_only(
        self, rig: Rig, make: Make
    ) -> None:
        async with booting(rig, make("jail")) as (vmm, _):
            process = Path(f"/proc/{vmm.pid}")
            status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
            assert set(status["Uid"].split()) == {str(UID)}
            assert {status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
            assert status["NoNewPrivs"].strip() == "1"
            assert status["Seccomp"].strip() == "2"
            mounted = {line.split()[4] for line in (process / "mountinfo").read_text().splitlines()}
            assert mounted == {"/", "/dev", "/vm/ram", "/vm/disk", "/vm/kernel", "/vm/initrd"}
            opened = {os.readlink(link) for link in (process / "fd").iterdir()}
            strange = {name for name in opened if name.startswith("/") and str(rig.folder) not in name}
            assert strange <= {"/dev/null", "/vm/disk", "/vm/ram"}

    async def test_a_failure_carries_the_end_of_the_console(self, rig: Rig, make: Make) -> None:
        machine = make("tail")
        os.write(machine.fds["console"], b"the last words\n")
        async with booting(rig, machine) as (vmm, _):
            await vmm.kill()
            with pytest.raises(Exception, match="cont") as caught:
                await vmm.cont()
        assert "the last words" in getattr(caught.value, "console_tail", "")


async def test_auto_finds_an_accelerator_that_runs_guests_and_says_why(
    rig: Rig, closure: Closure, image_dir: Path, folder: Path, cgroup: Path
) -> None:
    cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    guest = ProbeGuest(
        rig.boot.kernel_fd,
        rig.boot.initrd_fd,
        load_manifest(image_dir).digest,
        folder,
        UID,
        cgroup_fd,
        host_tsc_khz(),
    )
    try:
        with trio.fail_after(BOOT_SECONDS):
            found = await choose_accelerator("auto", closure, guest, folder / "accel.json")
            again = await choose_accelerator("auto", closure, guest, folder / "accel.json")
    finally:
        os.close(cgroup_fd)
    assert found.name in {"kvm", "tcg"}
    assert found.reason
    assert again == found
    assert not (folder / "probe").exists()
