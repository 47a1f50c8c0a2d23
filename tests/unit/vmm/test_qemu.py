"""The QEMU driver: every step is checked, and whatever the process does, a call ends with a `VmmError`."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio

from microvm.errors import VmmError
from microvm.vmm import qemu
from microvm.vmm.base import Accelerator, BootSource, VmmPlan
from microvm.vmm.closure import Closure
from microvm.vmm.qemu import QemuKind, QemuVmm
from tests.unit.vmm.fake_qemu import FakeQemu, RefuseError

UID = 20_001


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[VmmPlan]:
    names = ("ram", "disk", "console", "kernel", "initrd", "group")
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) for name in names]
    ram, disk, console, kernel, initrd, group = fds
    os.ftruncate(disk, 1 << 20)
    try:
        yield VmmPlan("vm", 128, 1, ram, disk, UID, group, console, BootSource(kernel, initrd, "quiet"))
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture
def state_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "state", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def fake(nursery: trio.Nursery) -> FakeQemu:
    return FakeQemu(nursery)


def kind_of(fake: FakeQemu) -> QemuKind:
    closure = Closure(root_fd=99, digest="d" * 64, version="10.0.13", binary="/usr/bin/qemu")
    return QemuKind(closure, Accelerator("tcg", "a test"), 2_600_000, launcher=fake.launch)


def start(fake: FakeQemu, plan: VmmPlan) -> AbstractAsyncContextManager[QemuVmm]:
    @asynccontextmanager
    async def bounded() -> AsyncGenerator[QemuVmm]:
        with trio.fail_after(5):
            async with kind_of(fake).open_vmm(plan) as vmm:
                yield vmm

    return bounded()


async def test_the_jail_gets_the_plans_files_and_nothing_else(fake: FakeQemu, plan: VmmPlan) -> None:
    async with start(fake, plan):
        spec = fake.spec
        assert spec is not None
        assert plan.boot is not None
        assert spec.binds == (
            (plan.memfile_fd, "vm/ram"),
            (plan.disk_fd, "vm/disk"),
            (plan.boot.kernel_fd, "vm/kernel"),
            (plan.boot.initrd_fd, "vm/initrd"),
        )
        assert (spec.uid, spec.gid, spec.cgroup_fd, spec.log_fd) == (
            UID,
            UID,
            plan.cgroup_fd,
            plan.console_fd,
        )
        assert len(spec.fds) == 2
        assert not spec.with_kvm
        assert (128 << 20) <= spec.limit_fsize_bytes < (1 << 30)


async def test_a_tap_is_the_third_descriptor(fake: FakeQemu, plan: VmmPlan) -> None:
    async with start(fake, replace(plan, tap_fd=plan.cgroup_fd)):
        assert fake.spec is not None
        assert fake.spec.fds[2] == plan.cgroup_fd


async def test_capabilities_are_set_before_anything_can_be_asked(fake: FakeQemu, plan: VmmPlan) -> None:
    async with start(fake, plan):
        assert fake.commands == ["qmp_capabilities", "migrate-set-capabilities"]


async def test_a_boot_a_save_and_going_on(fake: FakeQemu, plan: VmmPlan, state_fd: int) -> None:
    os.write(state_fd, b"an older and longer state")
    async with start(fake, plan) as vmm:
        await vmm.boot()
        await vmm.stop()
        await vmm.save(state_fd)
        assert os.pread(state_fd, 100, 0) == b"state"
        await vmm.cont()
        assert fake.status == "running"
        assert not vmm.stopped_by_itself.is_set()
    assert vmm.exit_status == -signal.SIGKILL


async def test_a_load_reads_from_the_beginning_whatever_the_offset(
    fake: FakeQemu, plan: VmmPlan, state_fd: int
) -> None:
    os.write(state_fd, b"device state")
    async with start(fake, replace(plan, boot=None)) as vmm:
        await vmm.load(state_fd)
        assert fake.loaded == b"device state"
        assert fake.status == "paused"


async def test_a_save_is_over_only_when_qemu_says_postmigrate(
    fake: FakeQemu, plan: VmmPlan, state_fd: int
) -> None:
    seen = iter(["paused", "finish-migrate", "finish-migrate", "postmigrate"])
    async with start(fake, plan) as vmm:
        await vmm.boot()
        await vmm.stop()
        fake.answers["query-status"] = lambda _: {"status": next(seen)}
        await vmm.save(state_fd)
        assert next(seen, None) is None


async def test_a_save_while_running_is_refused_unasked(fake: FakeQemu, plan: VmmPlan, state_fd: int) -> None:
    async with start(fake, plan) as vmm:
        await vmm.boot()
        with pytest.raises(VmmError, match="running"):
            await vmm.save(state_fd)
        assert "migrate" not in fake.commands


@pytest.mark.parametrize("status", ["internal-error", "running", 7, None, ["paused"], {"x": 1}])
async def test_a_status_that_should_not_be_is_an_error(fake: FakeQemu, plan: VmmPlan, status: Any) -> None:
    async with start(fake, plan) as vmm:
        await vmm.boot()
        fake.answers["query-status"] = lambda _: {"status": status}
        with pytest.raises(VmmError, match="stop"):
            await vmm.stop()


async def test_a_refusal_is_an_error_with_qemus_words_and_the_console(fake: FakeQemu, plan: VmmPlan) -> None:
    def refuse(_: dict[str, Any]) -> NoReturn:
        raise RefuseError("the moon is wrong")

    fake.answers["cont"] = refuse
    os.write(plan.console_fd, b"x" * 9000 + b"\nKernel panic \xff\n")
    async with start(fake, plan) as vmm:
        with pytest.raises(VmmError, match="the moon is wrong") as caught:
            await vmm.boot()
    assert caught.value.exit_status is None
    assert caught.value.console_tail.endswith("Kernel panic \\xff\n")
    assert len(caught.value.console_tail) <= qemu.TAIL_BYTES + 3


async def test_a_failed_migration_names_the_reason(fake: FakeQemu, plan: VmmPlan, state_fd: int) -> None:
    fake.answers["query-migrate"] = lambda _: {"status": "failed", "error-desc": "disk on fire"}
    async with start(fake, plan) as vmm:
        with pytest.raises(VmmError, match="disk on fire"):
            await vmm.save(state_fd)


async def test_death_ends_a_waiting_call_at_once_with_the_exit_status(
    fake: FakeQemu, plan: VmmPlan, state_fd: int
) -> None:
    def die(_: dict[str, Any]) -> None:
        fake.die(-11)

    fake.answers["migrate"] = die
    async with start(fake, plan) as vmm:
        with pytest.raises(VmmError, match="status -11") as caught:
            await vmm.save(state_fd)
        assert vmm.exited.is_set()
        with pytest.raises(VmmError):
            await vmm.cont()
        await vmm.kill()
    assert caught.value.exit_status == -11


async def test_a_process_that_dies_before_its_greeting_is_an_error(fake: FakeQemu, plan: VmmPlan) -> None:
    fake.dies_at_start_with = 1
    with pytest.raises(VmmError, match="start") as caught:
        async with start(fake, plan):
            pytest.fail("it must not start")
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("garbage", [b"hello\n", b"{}\n", b"[" * 100 + b"\n", b'{"return": 1, "id": 99}\n'])
async def test_a_vmm_that_breaks_the_protocol_is_killed(
    fake: FakeQemu, plan: VmmPlan, garbage: bytes
) -> None:
    async with start(fake, plan) as vmm:
        await fake.raw(garbage)
        await vmm.exited.wait()
        with pytest.raises(VmmError, match="broke the protocol") as caught:
            await vmm.boot()
        assert caught.value.exit_status == -signal.SIGKILL


async def test_a_vmm_that_closes_its_monitor_and_lives_is_killed(
    fake: FakeQemu, plan: VmmPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qemu, "DYING_SECONDS", 0.01)
    async with start(fake, plan) as vmm:
        fake.monitor.close()
        await vmm.exited.wait()
    assert vmm.exit_status == -signal.SIGKILL


async def test_an_exit_of_its_own_is_told_by_its_own_status(fake: FakeQemu, plan: VmmPlan) -> None:
    async with start(fake, plan) as vmm:
        fake.die(0)
        await vmm.exited.wait()
    assert vmm.exit_status == 0


async def test_silence_is_an_error_after_the_deadline(
    fake: FakeQemu, plan: VmmPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(fake, plan) as vmm:
        fake.answers["cont"] = lambda _: None
        monkeypatch.setattr(qemu, "ANSWER_SECONDS", 0.01)
        with pytest.raises(VmmError, match="did not answer"):
            await vmm.boot()


async def test_a_full_disk_shows_as_stopped_by_itself_until_the_next_cont(
    fake: FakeQemu, plan: VmmPlan
) -> None:
    async with start(fake, plan) as vmm:
        await vmm.boot()
        await fake.event("BLOCK_IO_ERROR", action="stop", nospace=True, reason="No space left on device")
        await vmm.stopped_by_itself.wait()
        fake.status = "io-error"
        await vmm.stop()
        await vmm.cont()
        assert not vmm.stopped_by_itself.is_set()


async def test_an_error_that_is_only_reported_stops_nothing(fake: FakeQemu, plan: VmmPlan) -> None:
    async with start(fake, plan) as vmm:
        await vmm.boot()
        await fake.event("BLOCK_IO_ERROR", action="report", nospace=False, reason="I/O error")
        await vmm.stop()
        assert not vmm.stopped_by_itself.is_set()


async def test_the_agent_port_is_connected_from_the_start_and_to_be_had_once(
    fake: FakeQemu, plan: VmmPlan
) -> None:
    async with start(fake, plan) as vmm:
        stream = await vmm.connect()
        await stream.send_all(b"to the guest")
        assert fake.agent.recv(100) == b"to the guest"
        fake.agent.send(b"to the host")
        assert await stream.receive_some(100) == b"to the host"
        with pytest.raises(VmmError):
            await vmm.connect()
    assert await stream.receive_some(100) == b""
    await stream.aclose()


async def test_an_error_in_the_body_comes_out_as_itself(fake: FakeQemu, plan: VmmPlan) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with start(fake, plan):
            raise KeyError("mine")
    assert fake.process.exit_status == -signal.SIGKILL


async def test_leaving_by_cancellation_kills_the_process(fake: FakeQemu, plan: VmmPlan) -> None:
    with trio.CancelScope() as scope:
        async with start(fake, plan):
            scope.cancel()
            await trio.sleep_forever()
    assert fake.process.exit_status == -signal.SIGKILL
