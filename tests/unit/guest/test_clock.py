"""Run time stands still while frozen, whatever the monotonic clock does meanwhile."""

from __future__ import annotations

import pytest

from guest.clock import RunClock
from guest.loop import Loop


class Monotonic:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def clock(monotonic: Monotonic) -> RunClock:
    return RunClock(Loop(), monotonic)


def test_it_starts_frozen_at_zero(clock: RunClock, monotonic: Monotonic) -> None:
    monotonic.now += 50
    assert clock.frozen
    assert clock.now() == 0


def test_it_counts_from_the_thaw(clock: RunClock, monotonic: Monotonic) -> None:
    clock.thaw()
    monotonic.now += 2.5
    assert clock.now() == 2.5


@pytest.mark.parametrize("jump", [0.0, 3600.0, -400.0])
def test_a_suspension_takes_no_run_time(clock: RunClock, monotonic: Monotonic, jump: float) -> None:
    clock.thaw()
    monotonic.now += 3
    clock.freeze()
    monotonic.now += jump
    assert clock.now() == 3
    clock.thaw()
    assert clock.now() == 3
    monotonic.now += 1
    assert clock.now() == 4


def test_freezing_or_thawing_twice_is_once(clock: RunClock, monotonic: Monotonic) -> None:
    clock.thaw()
    monotonic.now += 1
    clock.thaw()
    assert clock.now() == 1
    clock.freeze()
    monotonic.now += 1
    clock.freeze()
    assert clock.now() == 1


def test_a_timer_keeps_its_remaining_budget_over_a_freeze(monotonic: Monotonic) -> None:
    loop = Loop()
    clock = RunClock(loop, monotonic)
    clock.thaw()
    fired: list[float] = []
    pending = clock.after(10, lambda: fired.append(clock.now()))
    monotonic.now += 4
    clock.freeze()
    monotonic.now += 100
    assert pending.timer is None
    clock.thaw()
    assert pending.timer is not None
    assert pending.at - clock.now() == 6
    assert not fired


def test_a_due_timer_fires_on_the_loop_and_a_cancelled_one_does_not() -> None:
    loop = Loop()
    clock = RunClock(loop)
    clock.thaw()
    fired: list[str] = []
    clock.cancel(clock.after(0, lambda: fired.append("cancelled")))
    clock.after(0, lambda: fired.append("due"))
    while not fired:
        loop.turn()
    assert fired == ["due"]
