"""When a VM has been idle long enough: activity is counted, and a deadline names the count it was armed at.

A deadline that fires after anything happened is no event, so a timer never takes a VM away from a call that
came in between; the final word is the lifecycle table's, in the same step. Activity is a tool that touches
the guest, and an active job, whatever it left behind included. Polling is none, and neither are daemons in
the guest. It must not know clocks or timers: `fleet` keeps one timer for each VM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microvm.model import SuspendMode


@dataclass(frozen=True, slots=True)
class Idle:
    """What one VM's idleness depends on.

    Attributes:
        idle_seconds: From the last activity to rest; 0 for never.
        mode: How it is put to rest.
        activity: Counts what happened; never goes back.
        uses: Calls that are in the guest now.
        active_jobs: Jobs that run, or whose descendants do.
        awake: Whether the VM runs.
        last_activity_at: Seconds since the epoch.
    """

    idle_seconds: float
    mode: SuspendMode = SuspendMode.HIBERNATE
    activity: int = 0
    uses: int = 0
    active_jobs: int = 0
    awake: bool = False
    last_activity_at: float = 0.0

    @property
    def deadline(self) -> float | None:
        """When the VM goes to rest if nothing happens; None while something does, or never."""
        if not self.awake or self.idle_seconds == 0 or self.uses or self.active_jobs:
            return None
        return self.last_activity_at + self.idle_seconds


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """A call that touches the guest has come; also one that still waits for the wake."""


@dataclass(frozen=True, slots=True)
class Left:
    """Such a call has ended, however."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The number of active jobs is now this."""

    active: int


@dataclass(frozen=True, slots=True)
class Woke:
    """The VM runs."""


@dataclass(frozen=True, slots=True)
class Rested:
    """The VM does not run any more."""


@dataclass(frozen=True, slots=True)
class Fired:
    """The deadline that was armed at activity `seen` has passed."""

    seen: int


Event = Entered | Left | Jobs | Woke | Rested | Fired


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """Replace the VM's timer: send `Fired(seen)` at `at`."""

    at: float
    seen: int


@dataclass(frozen=True, slots=True)
class Disarm:
    """Drop the VM's timer, if it has one."""


@dataclass(frozen=True, slots=True)
class PutToRest:
    """Give the lifecycle its idle event, with the activity that it holds for."""

    mode: SuspendMode
    seen: int


Effect = Arm | Disarm | PutToRest


def decide(idle: Idle, event: Event, now: float) -> tuple[Idle, tuple[Effect, ...]]:
    """What `event` does to a VM's idleness.

    Args:
        idle: The VM's.
        event: What happened; `Left` only after as many `Entered`.
        now: Seconds since the epoch.

    Returns:
        The next state, and at most one effect.
    """
    match event:
        case Fired():
            return idle, _fired(idle, event, now)
        case Entered():
            after = _active(replace(idle, uses=idle.uses + 1), now)
        case Left():
            assert idle.uses > 0
            after = _active(replace(idle, uses=idle.uses - 1), now)
        case Jobs():
            assert event.active >= 0
            if event.active == idle.active_jobs:
                return idle, ()
            after = _active(replace(idle, active_jobs=event.active), now)
        case Woke():
            after = _active(replace(idle, awake=True), now)
        case Rested():
            after = replace(idle, awake=False)
    deadline = after.deadline
    if deadline is not None:
        return after, (Arm(deadline, after.activity),)
    return after, (Disarm(),) if idle.deadline is not None else ()


def _fired(idle: Idle, event: Fired, now: float) -> tuple[Effect, ...]:
    deadline = idle.deadline
    if deadline is None or event.seen != idle.activity:
        return ()  # something happened since, and armed a timer of its own
    if now < deadline:  # the clock was set back, or the timer is coarse
        return (Arm(deadline, idle.activity),)
    return (PutToRest(idle.mode, idle.activity),)


def _active(idle: Idle, now: float) -> Idle:
    return replace(idle, activity=idle.activity + 1, last_activity_at=max(now, idle.last_activity_at))
