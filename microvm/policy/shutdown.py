"""The order in which the service ends, and how long each part may take.

Serving ends first, then template builds are killed, then VMs are checkpointed a few at a time, then the
services go: from the inside out. Whatever is over its budget is killed, and its VM failed, so that the whole
always ends within the time that systemd allows. It must not know signals or tasks; `fleet` and `daemon` run
the effects. A second SIGTERM is not decided here: it ends the process where it arrives.

    serving ─Stop─► letting requests end ─5 s or all ended─► checkpointing ─all at rest, or budget─► ended
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from microvm.model import VmId

REQUESTS_S: Final = 5.0
"""Long polls and stalled readers never end by themselves (ruling 56)."""

CLOSING_S: Final = 5.0
"""Kept back at the end of the budget for kills, services and the store."""

PARALLEL: Final = 4
"""Checkpoints at once: they share one disk, and more of them make each slower without making all faster."""

MIN_VM_S: Final = 2.0
"""A checkpoint that would have less than this is not begun: its VM is killed at once."""


class Phase(enum.StrEnum):
    """How far the drain is."""

    SERVING = "serving"
    REQUESTS = "requests"
    CHECKPOINTS = "checkpoints"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Drain:
    """The drain.

    Attributes:
        budget_s: Seconds for the whole, `drain_seconds`; less than `TimeoutStopSec`.
        began_at: When `Stop` came, on a clock that is never set.
        waiting: VMs whose checkpoint has not begun.
        saving: VMs being checkpointed.
    """

    budget_s: float
    phase: Phase = Phase.SERVING
    began_at: float = 0.0
    waiting: tuple[VmId, ...] = ()
    saving: frozenset[VmId] = frozenset()

    @property
    def deadline(self) -> float:
        """When the last checkpoint must be over."""
        return self.began_at + max(self.budget_s - CLOSING_S, 0.0)

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick` if nothing happens before; None when there is nothing to wait for."""
        if self.phase is Phase.REQUESTS:
            return min(self.began_at + REQUESTS_S, self.deadline)
        return self.deadline if self.phase is Phase.CHECKPOINTS else None


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stop:
    """The service shall end: SIGTERM, or a service crashed and asks for it. Asking twice is asking once."""


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    """No request is left; `live` are the VMs that have a VMM now, those with active jobs first."""

    live: tuple[VmId, ...]


@dataclass(frozen=True, slots=True)
class Rested:
    """The VM has no VMM any more: hibernated, failed, stopped or gone."""

    vm_id: VmId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `live` as for `RequestsEnded`, used when the requests' time is over."""

    live: tuple[VmId, ...] = ()


Event = Stop | RequestsEnded | Rested | Tick


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopAccepting:
    """No new connection, no new request; readiness says no."""


@dataclass(frozen=True, slots=True)
class AnswerWaiters:
    """Whoever waits for something long gets `draining` now."""


@dataclass(frozen=True, slots=True)
class CancelBuilds:
    """Kill template builds, before anything else that has a VMM."""


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """What still serves is cancelled."""


@dataclass(frozen=True, slots=True)
class Save:
    """Hibernate the VM, active jobs included; `Rested` must follow."""

    vm_id: VmId


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the VM's VMM; it is failed for `reason`. Its `Rested` is not waited for."""

    vm_id: VmId
    reason: str


@dataclass(frozen=True, slots=True)
class StopServices:
    """End the services and close the store."""


Effect = StopAccepting | AnswerWaiters | CancelBuilds | CancelRequests | Save | Kill | StopServices
Decision = tuple[Drain, tuple[Effect, ...]]

_OVER: Final = "the service ended and its time for saving the VM was over"


def decide(drain: Drain, event: Event, now: float) -> Decision:
    """What `event` does to the drain.

    Args:
        drain: How far it is.
        event: What happened; events that come too late or too early change nothing.
        now: Seconds on a clock that is never set.
    """
    if isinstance(event, Stop) and drain.phase is Phase.SERVING:
        begun = replace(drain, phase=Phase.REQUESTS, began_at=now)
        return begun, (StopAccepting(), CancelBuilds(), AnswerWaiters())
    if drain.phase is Phase.REQUESTS:
        return _requests(drain, event, now)
    if drain.phase is Phase.CHECKPOINTS:
        return _checkpoints(drain, event, now)
    return drain, ()


def _requests(drain: Drain, event: Event, now: float) -> Decision:
    over = drain.wake_at is not None and now >= drain.wake_at
    if isinstance(event, RequestsEnded):
        effects: tuple[Effect, ...] = ()
    elif isinstance(event, Tick) and over:
        effects = (CancelRequests(),)
    else:
        return drain, ()
    after, more = _go_on(replace(drain, phase=Phase.CHECKPOINTS, waiting=event.live), now)
    return after, (*effects, *more)


def _checkpoints(drain: Drain, event: Event, now: float) -> Decision:
    if isinstance(event, Rested):
        waiting = tuple(each for each in drain.waiting if each != event.vm_id)
        return _go_on(replace(drain, waiting=waiting, saving=drain.saving - {event.vm_id}), now)
    if isinstance(event, Tick):
        return _go_on(drain, now)
    return drain, ()


def _go_on(drain: Drain, now: float) -> Decision:
    """Begins what may begin, gives up what cannot end in time, and ends when nothing is left."""
    effects: list[Effect] = []
    if now >= drain.deadline:
        effects += [Kill(vm_id, _OVER) for vm_id in sorted(drain.saving)]
        drain = replace(drain, saving=frozenset())
    if now > drain.deadline - MIN_VM_S:
        effects += [Kill(vm_id, _OVER) for vm_id in drain.waiting]
        drain = replace(drain, waiting=())
    begin = drain.waiting[: max(PARALLEL - len(drain.saving), 0)]
    effects += [Save(vm_id) for vm_id in begin]
    drain = replace(drain, waiting=drain.waiting[len(begin) :], saving=drain.saving | set(begin))
    if not drain.saving:
        return replace(drain, phase=Phase.ENDED), (*effects, StopServices())
    return drain, tuple(effects)
