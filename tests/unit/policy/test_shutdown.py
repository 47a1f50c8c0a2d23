"""The service ends from the inside out, within its budget."""

from __future__ import annotations

from microvm.model import VmId
from microvm.policy import shutdown
from microvm.policy.shutdown import (
    PARALLEL,
    AnswerWaiters,
    CancelBuilds,
    CancelRequests,
    Drain,
    Kill,
    Phase,
    RequestsEnded,
    Rested,
    Save,
    Stop,
    StopAccepting,
    StopServices,
    Tick,
)

VMS = tuple(VmId(f"vm{n}") for n in range(6))


def begun(live: tuple[VmId, ...] = VMS) -> tuple[Drain, tuple[shutdown.Effect, ...]]:
    drain, _ = shutdown.decide(Drain(budget_s=60.0), Stop(), 100.0)
    return shutdown.decide(drain, RequestsEnded(live), 101.0)


def test_a_stop_ends_serving_first_and_kills_builds_and_tells_waiters() -> None:
    drain, effects = shutdown.decide(Drain(budget_s=60.0), Stop(), 100.0)
    assert effects == (StopAccepting(), CancelBuilds(), AnswerWaiters())
    assert shutdown.decide(drain, Stop(), 101.0) == (drain, ())


def test_requests_that_do_not_end_are_cancelled_after_five_seconds() -> None:
    drain, _ = shutdown.decide(Drain(budget_s=60.0), Stop(), 100.0)
    assert drain.wake_at == 105.0
    assert shutdown.decide(drain, Tick(VMS), 104.9) == (drain, ())
    _, effects = shutdown.decide(drain, Tick(VMS[:1]), 105.0)
    assert effects == (CancelRequests(), Save(VMS[0]))


def test_vms_are_saved_a_few_at_a_time_and_the_services_go_last() -> None:
    drain, effects = begun()
    assert effects == tuple(Save(vm_id) for vm_id in VMS[:PARALLEL])
    saved: list[shutdown.Effect] = []
    for vm_id in VMS:
        drain, effects = shutdown.decide(drain, Rested(vm_id), 110.0)
        saved.extend(effects)
    assert saved == [Save(VMS[4]), Save(VMS[5]), StopServices()]
    assert drain.phase is Phase.ENDED


def test_without_vms_the_services_go_at_once() -> None:
    assert begun(())[1] == (StopServices(),)


def test_what_is_over_the_budget_is_killed_and_the_service_ends() -> None:
    drain, _ = begun()
    assert drain.wake_at == drain.deadline == 155.0
    drain, effects = shutdown.decide(drain, Tick(), 155.0)
    assert {effect.vm_id for effect in effects if isinstance(effect, Kill)} == set(VMS)
    assert effects[-1] == StopServices()
    assert drain.phase is Phase.ENDED


def test_a_save_that_could_not_end_in_time_is_not_begun() -> None:
    drain, _ = begun()
    drain, effects = shutdown.decide(drain, Rested(VMS[0]), 154.0)
    assert [type(effect) for effect in effects] == [Kill, Kill]
    assert drain.saving == set(VMS[1:PARALLEL])


def test_a_vm_that_rests_by_itself_is_not_saved() -> None:
    drain, _ = begun()
    drain, _ = shutdown.decide(drain, Rested(VMS[4]), 102.0)
    _, effects = shutdown.decide(drain, Rested(VMS[0]), 103.0)
    assert effects == (Save(VMS[5]),)


def test_nothing_happens_before_the_stop_and_after_the_end() -> None:
    serving = Drain(budget_s=60.0)
    assert shutdown.decide(serving, Tick(VMS), 1.0) == (serving, ())
    ended, _ = begun(())
    for event in (Stop(), Tick(VMS), RequestsEnded(VMS), Rested(VMS[0])):
        assert shutdown.decide(ended, event, 1e9) == (ended, ())
