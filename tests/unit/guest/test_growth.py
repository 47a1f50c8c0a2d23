"""Growth is told while somebody follows: soon, not too often, one message at a time, and never for nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from guest import growth
from guest.growth import FOLLOW_S, INTERVAL_S, Growth


@dataclass
class Timers:
    """The loop and the clock, moved on by hand."""

    now: float = 100.0
    due: list[tuple[float, Callable[[], None]]] = field(
        default_factory=list[tuple[float, Callable[[], None]]]
    )

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.due.append((self.now + delay_s, action))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for item in sorted(self.due, key=lambda item: item[0]):
            if item[0] <= self.now:
                self.due.remove(item)
                item[1]()


@dataclass
class Message:
    on_closed: Callable[[dict[str, Any]], None] | None = None
    on_abandoned: Callable[[], None] | None = None


@dataclass
class Capture:
    on_growth: Callable[[], None] | None = None


@dataclass
class Job:
    job_id: str = "job"
    completed: bool = False
    capture: Capture = field(default_factory=Capture)

    def write(self) -> None:
        if self.capture.on_growth is not None:
            self.capture.on_growth()


@dataclass
class Rig:
    timers: Timers
    growth: Any
    told: list[Message] = field(default_factory=list[Message])
    deaf: bool = False

    def tell(self, _job: Any) -> Any:
        if self.deaf:
            return None
        self.told.append(Message())
        return self.told[-1]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    timers = Timers()
    monkeypatch.setattr(growth.time, "monotonic", lambda: timers.now)
    rig = Rig(timers, None)
    rig.growth = Growth(timers, rig.tell)  # pyright: ignore[reportArgumentType]
    return rig


def test_the_first_growth_is_told_at_once_and_the_next_after_the_interval(rig: Rig) -> None:
    job = Job()
    rig.growth.follow(job)
    job.write()
    rig.timers.advance(0)
    assert len(rig.told) == 1
    assert rig.told[0].on_closed is not None
    rig.told[0].on_closed({})
    for _ in range(1000):
        job.write()
    rig.timers.advance(INTERVAL_S / 2)
    assert len(rig.told) == 1
    rig.timers.advance(INTERVAL_S / 2)
    assert len(rig.told) == 2


@pytest.mark.parametrize("ending", ["on_closed", "on_abandoned"])
def test_while_a_message_is_under_way_there_is_no_other(rig: Rig, ending: str) -> None:
    job = Job()
    rig.growth.follow(job)
    job.write()
    rig.timers.advance(0)
    job.write()
    rig.timers.advance(10 * INTERVAL_S)
    assert len(rig.told) == 1
    end = getattr(rig.told[0], ending)
    end({}) if ending == "on_closed" else end()
    rig.timers.advance(INTERVAL_S)
    assert len(rig.told) == 2


def test_nobody_is_told_of_what_nobody_follows(rig: Rig) -> None:
    job, other = Job(), Job("other")
    rig.growth.follow(job)
    other.write()
    rig.timers.advance(FOLLOW_S + 1)
    job.write()
    rig.timers.advance(INTERVAL_S)
    assert rig.told == []
    assert job.capture.on_growth is None


def test_following_on_lengthens_it(rig: Rig) -> None:
    job = Job()
    rig.growth.follow(job)
    rig.timers.advance(FOLLOW_S - 1)
    rig.growth.follow(job)
    rig.timers.advance(FOLLOW_S - 1)
    job.write()
    rig.timers.advance(0)
    assert len(rig.told) == 1


def test_the_end_of_a_job_ends_it(rig: Rig) -> None:
    job = Job()
    rig.growth.follow(job)
    job.write()
    job.completed = True
    rig.timers.advance(INTERVAL_S)
    job.write()
    assert rig.told == []
    rig.growth.follow(job)
    assert job.capture.on_growth is None


def test_what_cannot_be_told_now_is_told_with_the_next_growth(rig: Rig) -> None:
    job = Job()
    rig.growth.follow(job)
    rig.deaf = True
    job.write()
    rig.timers.advance(0)
    rig.deaf = False
    job.write()
    rig.timers.advance(INTERVAL_S)
    assert len(rig.told) == 1
