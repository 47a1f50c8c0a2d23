"""KVM is chosen where a guest boots under it; every other answer has its reason and is remembered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from microvm.errors import VmmError
from microvm.host.process import JailedProcess, JailSpec
from microvm.vmm import probe
from microvm.vmm.base import Accelerator
from microvm.vmm.closure import Closure
from microvm.vmm.probe import ProbeGuest, Wish, choose_accelerator
from tests.unit.vmm.fake_qemu import FakeQemu

CLOSURE = Closure(root_fd=99, digest="d" * 64, version="10.0.13", binary="/usr/bin/qemu")


class Host:
    """A host where a guest says `word` (or nothing) and QEMU ends with `status` (or never)."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self.word = b""
        self.status: int | None = 0
        self.starts = 0

    def launch(self, spec: JailSpec) -> JailedProcess:
        self.starts += 1
        assert spec.with_kvm
        qemu = FakeQemu(self._nursery)

        def boot(_: object) -> dict[str, str]:
            os.write(spec.log_fd, b"Linux version 6.12\n" + self.word)
            qemu.status = "running"
            return {}

        def end(_: object) -> dict[str, str] | None:
            if self.status is None:
                return {"status": "running"}
            qemu.die(self.status)
            return None

        qemu.answers = {"cont": boot, "query-status": end}
        return qemu.launch(spec)

    async def choose(self, wish: Wish = "auto", image_digest: str = "i") -> Accelerator:
        guest = ProbeGuest(98, 98, image_digest, self._folder, os.getuid(), 97, 2_600_000)
        remembered_file = self._folder / "accel.json"
        with trio.fail_after(5):
            return await choose_accelerator(
                wish, CLOSURE, guest, remembered_file, launcher=self.launch, deadline_s=0.1
            )


@pytest.fixture
def host(nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(probe, "KVM_DEVICE", os.devnull)
    yield Host(nursery, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"accel.json"}


async def test_a_guest_that_says_the_word_makes_it_kvm(host: Host) -> None:
    host.word = b"MICROVM-PROBE-OK\n"
    assert (await host.choose()).name == "kvm"
    assert (await host.choose("kvm")).name == "kvm"
    assert host.starts == 1


async def test_a_guest_that_hangs_makes_it_tcg_with_the_reason(host: Host) -> None:
    host.status = None
    found = await host.choose()
    assert found.name == "tcg"
    assert "did not boot in 0.1 s" in found.reason


async def test_a_guest_that_dies_makes_it_tcg_with_qemus_words(host: Host) -> None:
    host.status = 1
    host.word = b"KVM internal error. Suberror: 1\n"
    found = await host.choose()
    assert found.name == "tcg"
    assert "Suberror: 1" in found.reason


async def test_no_device_is_a_reason_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KVM_DEVICE", "/dev/there-is-none")
    found = await host.choose()
    assert found.name == "tcg"
    assert "No such file" in found.reason
    assert host.starts == 0


async def test_an_answer_is_remembered_for_the_image_it_was_found_with(host: Host) -> None:
    host.status = 1
    first = await host.choose()
    assert await host.choose() == first
    assert host.starts == 1
    await host.choose(image_digest="another")
    assert host.starts == 2


async def test_insisting_on_kvm_fails_with_the_reason(host: Host) -> None:
    host.status = None
    with pytest.raises(VmmError, match="did not boot"):
        await host.choose("kvm")


async def test_tcg_needs_no_probe(host: Host) -> None:
    assert (await host.choose("tcg")).name == "tcg"
    assert host.starts == 0


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"key": 1}'])
async def test_a_damaged_memory_only_costs_another_probe(host: Host, damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "accel.json").write_bytes(damage)
    host.word = b"MICROVM-PROBE-OK\n"
    assert (await host.choose()).name == "kvm"
