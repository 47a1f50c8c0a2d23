"""The driver of a VM, on scripted effects and a scripted journal: one writer, every call answered."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.errors import GuestError, HostError, MicrovmError
from microvm.fleet import driver as driver_module
from microvm.fleet.driver import VmDriver
from microvm.model import JobState, SuspendMode, VmState
from microvm.policy.lifecycle import Destroy, Drain, Event, Resume, Stop, Suspend
from tests.daemon.scripted import JOB, Rig, a_job, a_record, running

S = VmState
LONG_S = 3.0
"""Bounds a test that hangs; nothing here waits for anything but other tasks."""


@asynccontextmanager
async def served(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[trio.Nursery]:
    monkeypatch.setattr(driver_module, "time", rig.time)
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.driver.serve)
            yield nursery
            nursery.cancel_scope.cancel()


class Call:
    """A request in a task of its own, and how it ended."""

    def __init__(self, nursery: trio.Nursery, driver: VmDriver, event: Event | None) -> None:
        self.scope = trio.CancelScope()
        self.entered = trio.Event()
        self.leave = trio.Event()
        self.ended = trio.Event()
        self.error: MicrovmError | None = None
        nursery.start_soon(self._run, driver, event)

    async def _run(self, driver: VmDriver, event: Event | None) -> None:
        with self.scope:
            try:
                if event is not None:
                    await driver.submit(event)
                else:
                    async with driver.use():
                        assert driver.record.state is S.RUNNING
                        self.entered.set()
                        await self.leave.wait()
            except MicrovmError as error:
                self.error = error
        self.ended.set()


async def test_identical_requests_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    async with served(rig, monkeypatch) as nursery:
        calls = [Call(nursery, rig.driver, Resume()) for _ in range(5)]
        for call in calls:
            await call.ended.wait()
        assert [call.error for call in calls] == [None] * 5
        assert rig.effects.begun == ["wake"]
        assert rig.state is S.RUNNING


async def test_a_call_wakes_the_vm_and_keeps_it_awake_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    async with served(rig, monkeypatch) as nursery:
        call = Call(nursery, rig.driver, None)
        await call.entered.wait()
        rest = Call(nursery, rig.driver, Suspend())
        await wait_all_tasks_blocked()
        late = Call(nursery, rig.driver, None)
        await wait_all_tasks_blocked()
        assert rig.state is S.RUNNING
        assert not late.entered.is_set(), "who came after the suspension waits behind it"
        call.leave.set()
        await rest.ended.wait()
        await late.entered.wait()
        assert rig.effects.begun == ["wake", "hibernate", "wake"]


async def test_a_destroy_goes_first_and_takes_over_from_an_effect_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.effects.script.extend(["hang"])
    rig.effects.kill = lambda: None  # type: ignore[method-assign]  # not even its death ends the wait
    async with served(rig, monkeypatch) as nursery:
        waking = Call(nursery, rig.driver, Resume())
        working = Call(nursery, rig.driver, None)
        await rig.effects.hanging.wait()
        destroying = [Call(nursery, rig.driver, Destroy()) for _ in range(2)]
        for call in (*destroying, waking, working):
            await call.ended.wait()
        assert [call.error for call in destroying] == [None, None]
        for call in (waking, working):
            assert call.error is not None
            assert call.error.code == "not_found"
        assert rig.journal.stored is None
        with pytest.raises(MicrovmError, match="no VM"):
            await rig.driver.submit(Resume())


async def test_a_call_that_loses_its_guest_to_a_destroy_hears_that_there_is_no_vm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    async with served(rig, monkeypatch):

        async def call() -> None:
            async with rig.driver.use():
                await rig.driver.submit(Destroy())
                raise GuestError("guest_unreachable", "the link was closed")

        with pytest.raises(MicrovmError, match="no VM"):
            await call()


@pytest.mark.parametrize("when", ["waiting", "granted", "inside"])
async def test_a_caller_that_goes_away_gives_its_lease_back(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rig = Rig()
    rig.effects.script.extend(["hang"])
    async with served(rig, monkeypatch) as nursery:
        call = Call(nursery, rig.driver, None)
        await rig.effects.hanging.wait()
        if when == "waiting":
            call.scope.cancel()
            await call.ended.wait()
        rig.effects.hold.set()
        if when == "inside":
            await call.entered.wait()
        if when == "granted":  # in the very step in which the grant comes
            while not rig.driver.hibernates_at and rig.state is not S.RUNNING:
                await trio.lowlevel.checkpoint()
        call.scope.cancel()
        await call.ended.wait()
        await rig.driver.submit(Suspend())
        assert rig.state is S.HIBERNATED


async def test_a_request_that_nobody_waits_for_any_more_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.effects.script.extend(["hang"])
    async with served(rig, monkeypatch) as nursery:
        call = Call(nursery, rig.driver, Resume())
        await rig.effects.hanging.wait()
        call.scope.cancel()
        await call.ended.wait()
        rig.effects.hold.set()
        await rig.driver.submit(Resume())
        assert rig.effects.begun == ["wake"]


async def test_a_death_fails_the_vm_and_tells_whoever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(None, a_job())
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        rig.driver.vmm_died("signal 9")
        with pytest.raises(MicrovmError, match="signal 9") as refused:
            async with rig.driver.use():
                pass
        assert refused.value.code == "vm_failed"
        assert rig.state is S.FAILED
        assert rig.effects.live is None
        assert rig.table.get(JOB).state is JobState.LOST
        await rig.driver.submit(Resume(cold_boot=True))
        assert rig.state is S.RUNNING


async def test_a_call_that_is_let_in_as_the_vmm_dies_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        rig.effects.live = None
        with pytest.raises(MicrovmError) as refused:
            async with rig.driver.use():
                pass
        assert refused.value.code == "guest_unreachable"
        await rig.driver.submit(Destroy())


@pytest.mark.parametrize("event", [Resume(), None], ids=["resume", "use"])
async def test_a_wake_that_fails_is_told_to_all_who_wait_for_it_and_leaves_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, event: Event | None
) -> None:
    rig = Rig()
    rig.effects.script.extend(["hang then refused"])
    async with served(rig, monkeypatch) as nursery:
        before = rig.driver.record
        calls = [Call(nursery, rig.driver, event) for _ in range(3)]
        await rig.effects.hanging.wait()
        await wait_all_tasks_blocked()
        rig.effects.hold.set()
        for call in calls:
            await call.ended.wait()
            assert call.error is not None
            assert call.error.code == "no_capacity"
        assert rig.effects.begun == ["wake"]
        assert rig.state is S.HIBERNATED
        assert rig.driver.record.spent_generation == before.spent_generation
        async with rig.driver.use():
            assert rig.state is S.RUNNING


# ---- idleness ----


async def test_an_idle_vm_goes_to_rest_and_activity_begins_its_time_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(running())
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        rig.pass_time(9)
        await wait_all_tasks_blocked()
        async with rig.driver.use():
            pass
        rig.pass_time(9)
        await wait_all_tasks_blocked()
        assert rig.state is S.RUNNING
        rig.pass_time(2)
        await wait_all_tasks_blocked()
        assert rig.state is S.HIBERNATED
        assert rig.driver.hibernates_at is None


async def test_an_idle_deadline_never_takes_the_vm_from_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(running())
    async with served(rig, monkeypatch) as nursery:
        await rig.driver.submit(Resume())
        await wait_all_tasks_blocked()
        rig.pass_time(11)
        call = Call(nursery, rig.driver, None)  # both in one step of the driver
        await call.entered.wait()
        rig.pass_time(100)
        await wait_all_tasks_blocked()
        assert rig.state is S.RUNNING
        call.leave.set()


async def test_jobs_that_slept_over_a_restart_keep_the_vm_awake_once_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(running(), a_job(JobState.FROZEN))
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        rig.pass_time(100)
        await wait_all_tasks_blocked()  # and the driver does not spin
        assert rig.state is S.RUNNING
        assert rig.driver.hibernates_at is None
        rig.table.lose(JOB, "over")
        rig.driver.jobs_changed()
        await wait_all_tasks_blocked()
        rig.pass_time(11)
        await wait_all_tasks_blocked()
        assert rig.state is S.HIBERNATED


@pytest.mark.parametrize("mode", SuspendMode)
@pytest.mark.parametrize("why", ["effect", "journal"])
async def test_a_vm_that_cannot_be_put_to_rest_is_left_alone_for_another_idle_time(
    monkeypatch: pytest.MonkeyPatch, mode: SuspendMode, why: str
) -> None:
    rig = Rig(running(idle_mode=mode))
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        await wait_all_tasks_blocked()
        if why == "effect":
            rig.effects.script.append("refused")
        else:
            rig.journal.fail.add(rig.journal.calls + 1)
        rig.pass_time(11)
        await wait_all_tasks_blocked()
        assert rig.state is S.RUNNING
        calls = rig.journal.calls
        rig.pass_time(9)
        await wait_all_tasks_blocked()
        assert rig.journal.calls == calls
        rig.pass_time(2)
        await wait_all_tasks_blocked()
        assert rig.state in {S.PAUSED, S.HIBERNATED}


# ---- when nothing can be written down ----


@pytest.mark.parametrize("event", [Resume(), Stop(), Destroy(), None], ids=repr)
async def test_what_cannot_be_announced_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, event: Event | None
) -> None:
    rig = Rig(fail=frozenset({1}))
    async with served(rig, monkeypatch) as nursery:
        before = rig.driver.record
        call = Call(nursery, rig.driver, event)
        await call.ended.wait()
        assert isinstance(call.error, HostError)
        assert rig.driver.record == before
        assert rig.effects.begun == []
        await rig.driver.submit(Resume())
        assert rig.state is S.RUNNING


@pytest.mark.parametrize(
    ("event", "state"),
    [(Suspend(), S.HIBERNATED), (Suspend(SuspendMode.PAUSE), S.PAUSED), (Stop(), S.STOPPED)],
    ids=repr,
)
async def test_what_was_done_is_true_though_its_end_cannot_be_written_down(
    monkeypatch: pytest.MonkeyPatch, event: Event, state: VmState
) -> None:
    rig = Rig()
    async with served(rig, monkeypatch) as nursery:
        await rig.driver.submit(Resume())
        rig.journal.fail.add(rig.journal.calls + 2)
        call = Call(nursery, rig.driver, event)
        await call.ended.wait()
        assert isinstance(call.error, HostError)
        assert rig.state is state
        await rig.driver.submit(event)
        await rig.driver.submit(Resume())
        assert rig.state is S.RUNNING
        assert rig.journal.stored == rig.driver.record


async def test_a_death_that_cannot_be_written_down_fails_the_vm_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    async with served(rig, monkeypatch):
        await rig.driver.submit(Resume())
        rig.journal.fail |= set(range(rig.journal.calls + 1, rig.journal.calls + 10))
        rig.driver.vmm_died("signal 9")
        await wait_all_tasks_blocked()
        assert rig.state is S.FAILED
        assert rig.effects.live is None


async def test_a_creation_that_cannot_be_written_down_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(a_record(S.CREATING), fail=frozenset({2}))
    monkeypatch.setattr(driver_module, "time", rig.time)
    with trio.fail_after(LONG_S):
        intent = await rig.journal.intent(rig.driver.record, "create")
        async with trio.open_nursery() as nursery:
            call = Call(nursery, rig.driver, Resume())
            await rig.driver.serve(create_intent=intent)
            await call.ended.wait()
        assert call.error is not None
        assert rig.effects.begun == ["create", "remove"]
        assert rig.journal.stored is None


async def test_a_removal_that_failed_is_tried_again_by_the_next_destroy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.effects.script.extend(["refused", "crash"])
    async with served(rig, monkeypatch) as nursery:
        for expected in ("no_capacity", "internal", None):
            call = Call(nursery, rig.driver, Destroy())
            await call.ended.wait()
            assert (call.error.code if call.error else None) == expected
        assert rig.journal.stored is None


# ---- bugs ----


async def test_a_bug_in_an_effect_fails_the_vm_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(None, a_job(JobState.FROZEN))
    async with served(rig, monkeypatch) as nursery:
        rig.effects.script.append("hang then crash")
        calls: list[Call] = []
        for event in (Resume(), Resume(), None):
            calls.append(Call(nursery, rig.driver, event))
            await wait_all_tasks_blocked()
        rig.effects.hold.set()
        for call in calls:
            await call.ended.wait()
        assert [call.error.code for call in calls if call.error] == ["internal", "internal", "vm_failed"]
        assert rig.state is S.FAILED
        assert rig.table.get(JOB).state is JobState.LOST
        await rig.driver.submit(Destroy())


async def test_a_driver_that_crashed_is_buried_and_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(driver_module, "time", rig.time)
    rig.effects.script.append("hang")
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            serving = trio.CancelScope()

            async def crash() -> None:
                with serving:
                    await rig.driver.serve()
                await rig.driver.bury("a test wants it")

            nursery.start_soon(crash)
            calls = [Call(nursery, rig.driver, event) for event in (Resume(), None, Stop())]
            await rig.effects.hanging.wait()
            serving.cancel()
            for call in calls:
                await call.ended.wait()
                assert call.error is not None
                assert call.error.code == "internal"
    assert rig.state is S.FAILED
    with pytest.raises(MicrovmError, match="a test wants it"):
        await rig.driver.submit(Resume())


# ---- the end of the service ----


@pytest.mark.parametrize("forced", [False, True])
async def test_a_drain_saves_the_vm_and_refuses_all_who_would_wake_it_again(
    monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    rig = Rig(None, *([a_job(JobState.FROZEN)] if forced else []))
    async with served(rig, monkeypatch) as nursery:
        inside = Call(nursery, rig.driver, None)
        await inside.entered.wait()
        rest = Call(nursery, rig.driver, Suspend(force=True))
        await wait_all_tasks_blocked()
        waiting = [Call(nursery, rig.driver, event) for event in (None, Stop(), None)]
        await wait_all_tasks_blocked()
        rig.effects.may_cut = True
        rig.driver.begin_drain()
        await rig.driver.submit(Drain())
        assert rig.state is S.HIBERNATED
        late = Call(nursery, rig.driver, None)
        for call in (rest, *waiting, late):
            await call.ended.wait()
            assert call.error is not None
            assert call.error.code == "draining"
            assert call.error.retry_after_s is not None
        inside.leave.set()
        await wait_all_tasks_blocked()
        assert rig.state is S.HIBERNATED
        assert not rig.driver.active


@pytest.mark.parametrize("state", [S.HIBERNATED, S.STOPPED, S.FAILED])
async def test_a_drain_leaves_alone_what_is_at_rest(monkeypatch: pytest.MonkeyPatch, state: VmState) -> None:
    rig = Rig(a_record(state))
    async with served(rig, monkeypatch):
        rig.driver.begin_drain()
        with contextlib.suppress(MicrovmError):
            await rig.driver.submit(Drain())
        assert rig.state is state
        assert rig.effects.begun == []
