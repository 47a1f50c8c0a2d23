"""Every transition of a VM, in one table, without I/O.

`decide(facts, event)` answers with a `Step` (next state and the effects to run), a `Refusal` (nothing
changes), or `LATER` (an effect is under way; ask again when it ends). A pair that is not in the table is
refused with the state in the message. The driver in `fleet` gathers the facts, runs the effects and feeds
every completion and failure back as an event; nothing else may change a VM's state. It is longer than most
because the table and its rules are one thing.

    creating  → running | failed | (gone)
    running   ⇄ paused
    running, paused → hibernating → hibernated      on failure before the commit back to the state before
    hibernated → resuming → running                 on failure before the checkpoint is spent back to
                                                    hibernated
    running, paused → stopping → stopped
    stopped, failed, hibernated → booting → running | failed
                                                    refused before anything was given up: the state before
    any with a VMM → failed
    any → destroying → (gone)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from microvm.model import SuspendMode, VmState

S = VmState


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision depends on.

    Attributes:
        state: Where the VM is.
        before: The settled state that a running effect left; where a failure before its commit leads back.
        active_jobs: Running main processes and what finished jobs left behind.
        uses: Calls that are in the guest at this moment.
        activity: Counter of activity; an idle deadline carries the value it was armed with.
        checkpoint: Whether a committed, unspent checkpoint exists.
        reason: Why the VM is in its state, for messages.
        draining: Whether the service ends: what was saved must not wake again.
    """

    state: VmState
    before: VmState | None = None
    active_jobs: int = 0
    uses: int = 0
    activity: int = 0
    checkpoint: bool = False
    reason: str | None = None
    draining: bool = False


# ---- events: requests ----


@dataclass(frozen=True, slots=True)
class Use:
    """A call needs a running guest."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Put the VM to rest; `force` freezes active jobs instead of refusing."""

    mode: SuspendMode = SuspendMode.HIBERNATE
    force: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Bring the VM to `running`; with `cold_boot` from its disk.

    Over a valid checkpoint a cold boot needs `discard_memory` too.
    """

    cold_boot: bool = False
    discard_memory: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Power off cleanly; the disk stays."""

    discard_memory: bool = False


@dataclass(frozen=True, slots=True)
class Destroy:
    """Remove the VM and everything it has."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle deadline that was armed at activity `seen` has passed."""

    seen: int
    mode: SuspendMode


@dataclass(frozen=True, slots=True)
class Drain:
    """The service ends: save what runs."""


# ---- events: completions ----


@dataclass(frozen=True, slots=True)
class Done:
    """The running effect ended well."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The running effect failed.

    Attributes:
        reason: The cause, for the VM's `reason`.
        committed: Whether its point of no return had passed (checkpoint committed, or spent).
        guest_lost: Whether the VMM is dead or the guest may not run on.
    """

    reason: str
    committed: bool = False
    guest_lost: bool = False


@dataclass(frozen=True, slots=True)
class VmmDied:
    """The VMM ended while no effect was under way; a running effect sees the death itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class OutOfSpace:
    """The VMM stopped the vCPUs before a store could fail."""


@dataclass(frozen=True, slots=True)
class LowSpace:
    """The volume is nearly full: what runs must stand still before a store fails."""


@dataclass(frozen=True, slots=True)
class Compact:
    """The memfile has so many extents that cloning and saving it get slow: write it anew."""


Event = (
    Use
    | Suspend
    | Resume
    | Stop
    | Destroy
    | Idle
    | Drain
    | Done
    | Failed
    | VmmDied
    | OutOfSpace
    | LowSpace
    | Compact
)


# ---- answers ----


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do; its completion comes back as `Done` or `Failed`.

    Attributes:
        name: A word for logs and the journal.
        settles_after: The step's state is entered when the effect has ended well, not before it starts: the
            state in between is the old one, and a failure that the guest survives changes nothing.
    """

    name: str
    settles_after: bool = False

    def __str__(self) -> str:
        return self.name


CREATE: Final = Effect("create")
PAUSE: Final = Effect("pause", settles_after=True)
UNPAUSE: Final = Effect("unpause", settles_after=True)
HALT: Final = Effect("halt", settles_after=True)
"""Stop the vCPUs, after a freeze if the guest manages one in time."""
COMPACT: Final = Effect("compact", settles_after=True)
HIBERNATE: Final = Effect("hibernate")
WAKE: Final = Effect("wake")
BOOT: Final = Effect("boot")
POWER_OFF: Final = Effect("power_off")
REMOVE: Final = Effect("remove")
RELEASE: Final = Effect("release")
"""Give back what a live VM holds (VMM, cgroup, slot) after it was lost; never fails."""


@dataclass(frozen=True, slots=True)
class Step:
    """The VM goes to `state`; `effect` is run next. `gone` ends the VM."""

    state: VmState
    effect: Effect | None = None
    reason: str | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The event is refused; nothing changes."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Stay:
    """There already, or no event at all: the answer is the VM as it is."""


@dataclass(frozen=True, slots=True)
class Later:
    """Something is under way; ask again when it has ended."""


STAY: Final = Stay()
LATER: Final = Later()

Answer = Step | Refusal | Stay | Later

NO_SPACE: Final = "no_space"
"""The reason of a VM that was stopped before a store could fail."""

SETTLED: Final = frozenset({S.RUNNING, S.PAUSED, S.HIBERNATED, S.STOPPED, S.FAILED})
"""States without an effect under way."""


def decide(facts: Facts, event: Event) -> Answer:
    """What `event` does to a VM with `facts`.

    Args:
        facts: Gathered by the caller in the same synchronous step.
        event: A request or a completion.

    Returns:
        A `Step` to commit and run, `STAY` when the VM is there already, `LATER` when the request must wait
        for the effect under way, or a `Refusal` with the public code.
    """
    if facts.draining and isinstance(event, Use | Suspend | Resume | Stop | Idle):
        return Refusal("draining", "The service is shutting down; try again when it is back.")
    rule = _TABLE.get((facts.state, type(event)))
    if rule is not None:
        return rule(facts, event)
    if (
        facts.state not in SETTLED
        and facts.state is not S.DESTROYING
        and not isinstance(event, Done | Failed)
    ):
        return LATER
    return _refuse(facts, event)


def is_fulfilled(event: Event, state: VmState) -> bool:
    """Whether what `event` caused, having led to `state`, was all that it asked for.

    Asked again, a cold boot would be refused by the running VM that it made, and news would be news for ever.
    """
    if isinstance(event, Resume):
        return state is S.RUNNING
    return isinstance(event, VmmDied | OutOfSpace | LowSpace | Compact)


# ---- rules ----


def _refuse(facts: Facts, event: Event) -> Refusal:
    what = type(event).__name__.lower()
    if facts.state is S.FAILED:
        cause = facts.reason or "its VMM ended"
        return Refusal(
            "vm_failed",
            f"The VM failed: {cause}. Its disk is intact: vm_resume with cold_boot=true boots from it, "
            "vm_destroy removes it.",
        )
    if facts.state is S.DESTROYING:
        return Refusal("not_found", "There is no VM with this id.")
    if facts.state is S.STOPPED:
        return Refusal("invalid_state", f"Cannot {what}: the VM is stopped; vm_resume boots it.")
    return Refusal("invalid_state", f"Cannot {what} while the VM is {facts.state}.")


def _stay(_facts: Facts, _event: Event) -> Answer:
    return STAY


def _suspend(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Suspend)
    if facts.active_jobs and not event.force:
        return Refusal(
            "jobs_active",
            f"{facts.active_jobs} job(s) are active: wait, cancel them, or freeze them with force=true.",
        )
    if facts.uses:
        return LATER
    return _rest(event.mode)


def _rest(mode: SuspendMode) -> Step:
    if mode is SuspendMode.PAUSE:
        return Step(S.PAUSED, PAUSE)
    return Step(S.HIBERNATING, HIBERNATE)


def _suspend_paused(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Suspend)
    return STAY if event.mode is SuspendMode.PAUSE else _drain(facts, event)


def _suspend_hibernated(_facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Suspend)
    if event.mode is SuspendMode.HIBERNATE:
        return STAY
    return Refusal(
        "invalid_state", "The VM is hibernated, which is more than paused; vm_resume wakes it first."
    )


def _idle(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Idle)
    if event.seen != facts.activity or facts.active_jobs or facts.uses:
        return STAY
    return _rest(event.mode)


def _resume_running(_facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Resume)
    if event.cold_boot:
        return Refusal(
            "invalid_state", "The VM is running; a cold boot needs it hibernated, stopped or failed."
        )
    return STAY


def _unpause(_facts: Facts, event: Event) -> Answer:
    if isinstance(event, Resume) and event.cold_boot:
        return Refusal(
            "invalid_state", "The VM is paused; a cold boot needs it hibernated, stopped or failed."
        )
    return Step(S.RUNNING, UNPAUSE)


def _resume_hibernated(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Resume)
    if not event.cold_boot:
        return Step(S.RESUMING, WAKE)
    if facts.checkpoint and not event.discard_memory:
        return Refusal(
            "invalid_state",
            "The VM is hibernated, and a cold boot discards its memory; pass discard_memory=true too.",
        )
    return Step(S.BOOTING, BOOT)


def _resume_failed(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Resume)
    if not event.cold_boot:
        return _refuse(facts, event)
    return Step(S.BOOTING, BOOT, reason=facts.reason)  # still true if it is refused


def _stop_hibernated(_facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Stop)
    # Unsynced writes live in the checkpoint's memory: a stop wakes the VM to write them out.
    return Step(S.STOPPED, RELEASE) if event.discard_memory else Step(S.RESUMING, WAKE)


def _stop_running(facts: Facts, _event: Event) -> Answer:
    return LATER if facts.uses else Step(S.STOPPING, POWER_OFF)


def _drain(facts: Facts, _event: Event) -> Answer:
    return Step(S.HIBERNATING, HIBERNATE, reason=facts.reason)  # still true if it fails


def _to(state: VmState) -> Callable[[Facts, Event], Answer]:
    return lambda _facts, _event: Step(state)


def _boot(_facts: Facts, _event: Event) -> Answer:
    return Step(S.BOOTING, BOOT)


def _destroy(_facts: Facts, _event: Event) -> Answer:
    return Step(S.DESTROYING, REMOVE)


def _lost(_facts: Facts, event: Event) -> Answer:
    assert isinstance(event, VmmDied | Failed)
    return Step(S.FAILED, RELEASE, reason=event.reason)


def _settled_effect_failed(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Failed)
    return _lost(facts, event) if event.guest_lost else STAY


def _hibernate_failed(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Failed)
    if event.committed:
        return Step(S.HIBERNATED)  # only forward: the checkpoint is whole, whatever went wrong after it
    if event.guest_lost or facts.before is None:
        return _lost(facts, event)
    return Step(facts.before, reason=facts.reason)


def _wake_failed(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Failed)
    return _lost(facts, event) if event.committed else Step(S.HIBERNATED)


def _boot_failed(facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Failed)
    if event.committed or event.guest_lost or facts.before is None:
        return _lost(facts, event)
    # refused for want of room: the checkpoint, if there was one, is still there
    return Step(facts.before, reason=facts.reason)


def _create_failed(_facts: Facts, event: Event) -> Answer:
    assert isinstance(event, Failed)
    # nothing of the caller's is in it yet: a failed creation leaves nothing behind
    return Step(S.DESTROYING, REMOVE, reason=event.reason)


def _halt(_facts: Facts, _event: Event) -> Answer:
    return Step(S.PAUSED, HALT, reason=NO_SPACE)


def _compact(_facts: Facts, _event: Event) -> Answer:
    return Step(S.HIBERNATED, COMPACT)


def _no_space(_facts: Facts, _event: Event) -> Answer:
    return Step(S.PAUSED, reason=NO_SPACE)


def _gone(_facts: Facts, _event: Event) -> Answer:
    return Step(S.DESTROYING, gone=True)


_Rule = Callable[[Facts, Event], Answer]

_TABLE: Final[Mapping[tuple[VmState, type[Event]], _Rule]] = {
    (S.CREATING, Done): _to(S.RUNNING),
    (S.CREATING, Failed): _create_failed,
    (S.CREATING, Destroy): _destroy,
    (S.RUNNING, Use): _stay,
    (S.RUNNING, Suspend): _suspend,
    (S.RUNNING, Idle): _idle,
    (S.RUNNING, Resume): _resume_running,
    (S.RUNNING, Stop): _stop_running,
    (S.RUNNING, Destroy): _destroy,
    (S.RUNNING, Drain): _drain,
    (S.RUNNING, Failed): _settled_effect_failed,
    (S.RUNNING, VmmDied): _lost,
    (S.RUNNING, OutOfSpace): _no_space,
    (S.RUNNING, LowSpace): _halt,
    (S.PAUSED, Use): _unpause,
    (S.PAUSED, Resume): _unpause,
    (S.PAUSED, Suspend): _suspend_paused,
    (S.PAUSED, Idle): _stay,
    (S.PAUSED, Stop): _stop_running,
    (S.PAUSED, Destroy): _destroy,
    (S.PAUSED, Drain): _drain,
    (S.PAUSED, Failed): _settled_effect_failed,
    (S.PAUSED, VmmDied): _lost,
    (S.PAUSED, OutOfSpace): _no_space,
    (S.HIBERNATING, Done): _to(S.HIBERNATED),
    (S.HIBERNATING, Failed): _hibernate_failed,
    (S.HIBERNATING, Destroy): _destroy,
    (S.HIBERNATED, Use): lambda _f, _e: Step(S.RESUMING, WAKE),
    (S.HIBERNATED, Suspend): _suspend_hibernated,
    (S.HIBERNATED, Idle): _stay,
    (S.HIBERNATED, Resume): _resume_hibernated,
    (S.HIBERNATED, Stop): _stop_hibernated,
    (S.HIBERNATED, Destroy): _destroy,
    (S.HIBERNATED, Drain): _stay,
    (S.HIBERNATED, Compact): _compact,
    (S.HIBERNATED, Failed): _stay,  # a rewrite: whichever memfile has the name is known to the manifest
    (S.RESUMING, Done): _to(S.RUNNING),
    (S.RESUMING, Failed): _wake_failed,
    (S.RESUMING, Destroy): _destroy,
    (S.BOOTING, Done): _to(S.RUNNING),
    (S.BOOTING, Failed): _boot_failed,
    (S.BOOTING, Destroy): _destroy,
    (S.STOPPING, Done): _to(S.STOPPED),
    (S.STOPPING, Failed): _lost,
    (S.STOPPING, Destroy): _destroy,
    (S.STOPPED, Resume): _boot,
    (S.STOPPED, Stop): _stay,
    (S.STOPPED, Destroy): _destroy,
    (S.STOPPED, Drain): _stay,
    (S.STOPPED, Idle): _stay,
    (S.FAILED, Resume): _resume_failed,
    (S.FAILED, Destroy): _destroy,
    (S.FAILED, Drain): _stay,
    (S.FAILED, Idle): _stay,
    (S.FAILED, VmmDied): _stay,
    (S.DESTROYING, Destroy): _destroy,  # asked only when a removal has failed: it is tried again
    (S.DESTROYING, Drain): _stay,
    (S.DESTROYING, Idle): _stay,
    (S.DESTROYING, Done): _gone,
    (S.DESTROYING, Failed): lambda _f, _e: Step(S.DESTROYING),
    (S.DESTROYING, VmmDied): _stay,
}
"""(state, kind of event) → rule. A missing entry is a refusal, or `LATER` while an effect is under way."""


def transitions() -> list[tuple[VmState, str]]:
    """The table's keys, for the tests and the documentation."""
    return [(state, event.__name__) for state, event in _TABLE]
