"""A VM goes to rest after its idle time, and never under a call, a job, or an old timer."""

from __future__ import annotations

import pytest

from microvm.model import SuspendMode
from microvm.policy import idle
from microvm.policy.idle import Arm, Disarm, Entered, Fired, Idle, Jobs, Left, PutToRest, Rested, Woke


def after(*events: idle.Event, idle_seconds: float = 300.0, now: float = 0.0) -> Idle:
    state = Idle(idle_seconds, SuspendMode.PAUSE)
    for event in events:
        state, _ = idle.decide(state, event, now)
    return state


def test_a_wake_arms_the_timer_and_its_firing_puts_to_rest_in_the_vms_way() -> None:
    state, effects = idle.decide(after(), Woke(), 10.0)
    assert effects == (Arm(310.0, state.activity),)
    assert idle.decide(state, Fired(state.activity), 310.0) == (
        state,
        (PutToRest(SuspendMode.PAUSE, state.activity),),
    )


def test_a_timer_armed_before_any_activity_is_no_event() -> None:
    old = after(Woke())
    for event in (Entered(), Jobs(1)):
        state, _ = idle.decide(old, event, 5.0)
        assert idle.decide(state, Fired(old.activity), 1e9) == (state, ())
    state, _ = idle.decide(idle.decide(old, Entered(), 299.99)[0], Left(), 299.995)
    assert idle.decide(state, Fired(old.activity), 300.0) == (state, ())
    assert state.deadline == 599.995


def test_a_timer_that_fires_early_is_armed_again() -> None:
    state = after(Woke())
    assert idle.decide(state, Fired(state.activity), 299.0) == (state, (Arm(300.0, state.activity),))


@pytest.mark.parametrize(
    "events",
    [
        (Woke(), Entered()),
        (Woke(), Jobs(2), Jobs(1)),
        (Woke(), Entered(), Entered(), Left()),
        (Woke(), Rested()),
        (Entered(), Left()),
    ],
)
def test_there_is_no_deadline_while_something_happens_or_the_vm_sleeps(
    events: tuple[idle.Event, ...],
) -> None:
    state = after(*events)
    assert state.deadline is None
    assert idle.decide(state, Fired(state.activity), 1e9) == (state, ())


def test_the_first_activity_disarms_and_the_last_end_arms() -> None:
    state = after(Woke())
    state, effects = idle.decide(state, Entered(), 1.0)
    assert effects == (Disarm(),)
    state, effects = idle.decide(state, Jobs(1), 2.0)
    assert effects == ()
    state, effects = idle.decide(state, Left(), 3.0)
    assert effects == ()
    state, effects = idle.decide(state, Jobs(0), 4.0)
    assert effects == (Arm(304.0, state.activity),)


def test_the_same_number_of_jobs_is_no_activity() -> None:
    state = after(Woke())
    assert idle.decide(state, Jobs(0), 100.0) == (state, ())


def test_an_idle_time_of_zero_is_never() -> None:
    state = after(Woke(), idle_seconds=0.0)
    assert state.deadline is None
    assert idle.decide(state, Fired(state.activity), 1e9) == (state, ())


def test_a_clock_set_back_never_takes_activity_back() -> None:
    state = after(Woke(), now=100.0)
    state, _ = idle.decide(state, Entered(), 50.0)
    assert state.last_activity_at == 100.0
