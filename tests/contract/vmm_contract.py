"""What every kind of VMM promises, as one suite: a subclass of `VmmContract` with a fixture `rig` runs it.

Real guests pass it under QEMU; the fake passes it or is the bug (rulings 46, 62). Each test boots for itself
or loads clones of one checkpoint, so that none depends on another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Final

import pytest
import trio

from microvm.errors import VmmError
from microvm.vmm.base import Vmm
from tests.contract.guest_client import Guest
from tests.contract.rig import Machine, Rig

BOOT_SECONDS: Final = 120  # 4 to 8 s here; the machine may be busy
STEP_SECONDS: Final = 60

COUNTER: Final = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
"""A process whose state is in memory alone: it goes on counting, or it does not."""

Make = Callable[..., Machine]
Clone = Callable[[Machine, str], Machine]


class VmmContract:
    """The suite. `rig` is a subclass's fixture; class scope suits it."""

    @pytest.fixture
    def make(self, rig: Rig) -> Iterator[Make]:
        """`rig.make`, its machines' files removed after the test."""
        with ExitStack() as stack:

            def make(label: str, memory_mib: int = 256, vcpus: int = 1) -> Machine:
                machine = rig.make(label, memory_mib, vcpus)
                stack.callback(machine.close)
                return machine

            yield make
        assert not rig.populated, "a process outlived its VMM's context"

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, rig: Rig) -> Iterator[Machine]:
        """A checkpoint of a guest with a counting job, its process dead; only to be cloned."""
        machine = rig.make("saved", 128)
        try:
            trio.run(checkpoint, rig, machine)
            yield machine
        finally:
            machine.close()

    @pytest.fixture
    def clone(self, rig: Rig) -> Iterator[Clone]:
        """`rig.clone`, likewise."""
        with ExitStack() as stack:

            def clone(source: Machine, label: str) -> Machine:
                machine = rig.clone(source, label)
                stack.callback(machine.close)
                return machine

            yield clone
        assert not rig.populated, "a process outlived its VMM's context"

    # ---- start, boot, stop, end
    # ------------------------------------------------------------------------------

    async def test_a_boot_answers_a_hello_that_was_said_before_it(self, rig: Rig, make: Make) -> None:
        async with booting(rig, make("boot")) as (vmm, guest):
            await guest.send_hello(7)
            await vmm.boot()
            answer = await guest.hear_hello(7)
            assert answer["protocol"] == 1
            assert not vmm.exited.is_set()
            assert vmm.exit_status is None
            assert rig.populated

    async def test_nothing_of_a_guest_runs_before_the_boot(self, rig: Rig, make: Make) -> None:
        async with booting(rig, make("quiet")) as (vmm, guest):
            await guest.send_hello(1)
            with trio.move_on_after(0.5) as scope:
                await guest.hear_hello(1)
            assert scope.cancelled_caught
            assert not vmm.stopped_by_itself.is_set()

    async def test_a_stopped_guest_is_silent_and_goes_on_where_it_was(self, rig: Rig, make: Make) -> None:
        async with booted(rig, make("pause")) as (vmm, guest):
            await guest.start_job("count", COUNTER)
            await vmm.stop()
            await vmm.stop()  # already there is no error
            await guest.send_hello(2)
            with trio.move_on_after(0.5) as scope:
                await guest.hear_hello(2)
            assert scope.cancelled_caught
            await vmm.cont()
            await guest.hear_hello(2)
            assert (await guest.job("count"))["state"] == "running"

    async def test_a_kill_is_at_once_and_every_later_call_is_an_error(self, rig: Rig, make: Make) -> None:
        machine = make("kill")
        before = descriptors()
        async with booting(rig, machine) as (vmm, _):
            await vmm.boot()
            await vmm.kill()
            assert vmm.exited.is_set()
            assert vmm.exit_status == -signal.SIGKILL
            assert not rig.populated
            await vmm.kill()
            for step in (vmm.cont, vmm.stop, lambda: vmm.save(machine.state_fd)):
                with pytest.raises(VmmError) as caught:
                    await step()
                assert caught.value.exit_status == -signal.SIGKILL
        assert descriptors() == before, "the plan's stay open, all others are closed"

    async def test_a_death_from_outside_is_noticed(self, rig: Rig, make: Make) -> None:
        async with booting(rig, make("murder")) as (vmm, _):
            await vmm.boot()
            os.kill(vmm.pid, signal.SIGKILL)
            await vmm.exited.wait()
            assert vmm.exit_status == -signal.SIGKILL
            with pytest.raises(VmmError):
                await vmm.stop()

    async def test_a_power_off_in_the_guest_ends_the_process_in_order(self, rig: Rig, make: Make) -> None:
        async with booted(rig, make("poweroff")) as (vmm, guest):
            await guest.call("poweroff", {})
            await vmm.exited.wait()
            assert vmm.exit_status == 0

    async def test_cancelling_the_context_leaves_no_process(self, rig: Rig, make: Make) -> None:
        machine = make("cancel")
        seen: list[Vmm] = []
        before = descriptors()
        with trio.CancelScope() as scope:
            async with booting(rig, machine) as (vmm, _):
                seen.append(vmm)
                await vmm.boot()
                scope.cancel()
                await trio.sleep_forever()
        assert seen[0].exited.is_set()
        assert not rig.populated
        assert descriptors() == before

    async def test_the_channels_end_follows_the_process(self, rig: Rig, make: Make) -> None:
        async with rig.kind.open_vmm(make("eof").plan) as vmm:
            stream = await vmm.connect()
            await vmm.boot()
            await vmm.kill()
            with trio.fail_after(STEP_SECONDS):
                await drain(stream)
            await stream.aclose()

    # ---- save and load
    # ---------------------------------------------------------------------------------------

    async def test_a_saved_machine_stays_stopped_and_goes_on_with_cont(self, rig: Rig, make: Make) -> None:
        machine = make("fork")
        async with booted(rig, machine) as (vmm, guest):
            await guest.start_job("count", COUNTER)
            for generation in (2, 3):  # again and again, as a source of forks does
                await vmm.stop()
                await vmm.save(machine.state_fd)
                assert os.fstat(machine.state_fd).st_size > 0
                await vmm.cont()
                if not rig.kind.traits.channel_survives_save:
                    guest = Guest(await vmm.connect())
                await guest.hello(generation)
                assert (await guest.job("count"))["state"] == "running"
            assert not vmm.stopped_by_itself.is_set()

    async def test_a_checkpoint_runs_on_in_another_process(self, rig: Rig, make: Make, clone: Clone) -> None:
        machine = make("first")
        async with booted(rig, machine) as (vmm, guest):
            await guest.start_job("count", COUNTER)
            await guest.run("write", "echo kept > kept; sync")
            await vmm.stop()
            await vmm.save(machine.state_fd)
            await vmm.kill()
        second = clone(machine, "second")
        async with loaded(rig, second) as (vmm, guest):
            await vmm.cont()
            await guest.wake(2)
            assert await guest.run("read", "cat kept") == b"kept\n"
            if rig.keeps_memory:
                assert (await guest.output("count")).startswith(b"1\n2\n")
                assert (await guest.job("count"))["state"] == "running"

    async def test_a_checkpoint_can_be_loaded_in_many_machines(
        self, rig: Rig, saved: Machine, clone: Clone
    ) -> None:
        before = saved.marks()
        for number in range(3):
            copy = clone(saved, f"copy{number}")
            async with loaded(rig, copy) as (vmm, guest):
                await vmm.cont()
                await guest.wake(2 + number)
        assert saved.marks() == before

    async def test_a_load_leaves_the_files_as_they_are_until_cont(
        self, rig: Rig, saved: Machine, clone: Clone
    ) -> None:
        copy = clone(saved, "loaded")
        before = copy.marks()
        async with loaded(rig, copy) as (vmm, guest):
            await guest.send_hello(2)
            assert copy.marks() == before
            await vmm.kill()
        assert copy.marks() == before

    @pytest.mark.parametrize("damage", ["empty", "noise", "half"])
    async def test_a_state_that_cannot_be_loaded_is_an_error_and_changes_nothing(
        self, rig: Rig, saved: Machine, clone: Clone, damage: str
    ) -> None:
        copy = clone(saved, "broken")
        size = os.fstat(copy.state_fd).st_size
        if damage == "noise":
            os.pwrite(copy.state_fd, b"\xa5" * size, 0)
        else:
            os.ftruncate(copy.state_fd, 0 if damage == "empty" else size // 2)
        before = copy.marks()
        with trio.fail_after(STEP_SECONDS):
            async with rig.kind.open_vmm(copy.loading) as vmm:
                with pytest.raises(VmmError):
                    await vmm.load(copy.state_fd)
        assert copy.marks() == before

    async def test_a_running_machine_is_not_saved(self, rig: Rig, make: Make) -> None:
        machine = make("running")
        async with booting(rig, machine) as (vmm, _):
            await vmm.boot()
            with pytest.raises(VmmError):
                await vmm.save(machine.state_fd)

    async def test_what_the_guest_was_sending_at_the_save_does_not_hang_it(
        self, rig: Rig, make: Make, clone: Clone
    ) -> None:
        machine = make("talking")
        async with rig.kind.open_vmm(machine.plan) as vmm:
            stream = await vmm.connect()
            guest = Guest(stream)
            await vmm.boot()
            with trio.fail_after(BOOT_SECONDS):
                await guest.wake(1)
                await guest.run("noise", "head -c 900000 /dev/zero")
            for _ in range(20):  # asked, and not listened to: the port fills in both directions
                await guest.ask(
                    "job_output", {"job_id": "noise", "stream": "stdout", "offset": 0, "length": 900000}
                )
            await trio.sleep(0.2)
            await vmm.stop()
            await vmm.save(machine.state_fd)
            await vmm.kill()
            await drain(stream)
            await stream.aclose()
        async with loaded(rig, clone(machine, "listening")) as (vmm, guest):
            await vmm.cont()
            await guest.wake(2)


@asynccontextmanager
async def booting(rig: Rig, machine: Machine) -> AsyncGenerator[tuple[Vmm, Guest]]:
    """A VMM that may boot, and its channel."""
    with trio.fail_after(BOOT_SECONDS):
        async with rig.kind.open_vmm(machine.plan) as vmm, await vmm.connect() as stream:
            yield vmm, Guest(stream)


@asynccontextmanager
async def booted(rig: Rig, machine: Machine) -> AsyncGenerator[tuple[Vmm, Guest]]:
    """A guest that runs jobs."""
    async with booting(rig, machine) as (vmm, guest):
        await vmm.boot()
        await guest.wake(1)
        yield vmm, guest


@asynccontextmanager
async def loaded(rig: Rig, machine: Machine) -> AsyncGenerator[tuple[Vmm, Guest]]:
    """A VMM that has loaded the machine's state, its channel connected before that."""
    with trio.fail_after(STEP_SECONDS):
        async with rig.kind.open_vmm(machine.loading) as vmm, await vmm.connect() as stream:
            await vmm.load(machine.state_fd)
            yield vmm, Guest(stream)


async def checkpoint(rig: Rig, machine: Machine) -> None:
    """Boots the machine, starts its job `count`, saves it and ends it."""
    async with booted(rig, machine) as (vmm, guest):
        await guest.start_job("count", COUNTER)
        await vmm.stop()
        await vmm.save(machine.state_fd)
        await vmm.kill()


def descriptors() -> set[str]:
    """What this process has open."""
    return set(os.listdir("/proc/self/fd"))


async def drain(stream: trio.abc.ReceiveStream) -> None:
    """Reads to the end; a reset, where the process died with unread data, is one."""
    try:
        while await stream.receive_some(65536):
            pass
    except trio.BrokenResourceError:
        pass
