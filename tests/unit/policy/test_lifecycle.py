"""The table of a VM's life: what each event does in each state, and that it is the contract's diagram."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from microvm.errors import STATUS_OF_CODE
from microvm.model import SuspendMode, VmState
from microvm.policy import lifecycle
from microvm.policy.lifecycle import (
    LATER,
    NO_SPACE,
    SETTLED,
    STAY,
    Answer,
    Compact,
    Destroy,
    Done,
    Drain,
    Event,
    Facts,
    Failed,
    Idle,
    Later,
    LowSpace,
    OutOfSpace,
    Refusal,
    Resume,
    Stay,
    Step,
    Stop,
    Suspend,
    Use,
    VmmDied,
    decide,
)

S = VmState
BOOL = (False, True)

REQUESTS: tuple[Event, ...] = (
    Use(),
    *(Suspend(mode, force) for mode in SuspendMode for force in BOOL),
    *(Resume(cold, discard) for cold in BOOL for discard in BOOL),
    Stop(),
    Stop(discard_memory=True),
    Destroy(),
    Drain(),
)
COMPLETIONS: tuple[Event, ...] = (
    Done(),
    *(Failed("why", committed, lost) for committed in BOOL for lost in BOOL),
)
NEWS: tuple[Event, ...] = (
    *(Idle(seen, mode) for seen in (0, 1) for mode in SuspendMode),
    VmmDied("died"),
    OutOfSpace(),
    LowSpace(),
    Compact(),
)
EVENTS = (*REQUESTS, *COMPLETIONS, *NEWS)

DIAGRAM = {
    # creating → running | (gone); a failure that leaves something behind would be a VM that nobody asked for
    S.CREATING: {S.RUNNING, S.DESTROYING},
    # running ⇄ paused; running|paused → hibernating, stopping; any with a VMM → failed
    S.RUNNING: {S.PAUSED, S.HIBERNATING, S.STOPPING, S.FAILED, S.DESTROYING},
    S.PAUSED: {S.RUNNING, S.HIBERNATING, S.STOPPING, S.FAILED, S.DESTROYING},
    # on failure before the commit back to the state before
    S.HIBERNATING: {S.HIBERNATED, S.RUNNING, S.PAUSED, S.FAILED, S.DESTROYING},
    # stopped directly when its memory is thrown away: nothing is left to sync
    S.HIBERNATED: {S.RESUMING, S.BOOTING, S.STOPPED, S.DESTROYING},
    # on failure before the checkpoint is spent back to hibernated
    S.RESUMING: {S.RUNNING, S.HIBERNATED, S.FAILED, S.DESTROYING},
    # back where it was when there is no room: a refused wake changes nothing
    S.BOOTING: {S.RUNNING, S.FAILED, S.HIBERNATED, S.STOPPED, S.DESTROYING},
    S.STOPPING: {S.STOPPED, S.FAILED, S.DESTROYING},
    S.STOPPED: {S.BOOTING, S.DESTROYING},
    S.FAILED: {S.BOOTING, S.DESTROYING},
    S.DESTROYING: set[VmState](),  # → (gone)
}

BEFORE = {
    S.HIBERNATING: (S.RUNNING, S.PAUSED),
    S.BOOTING: (S.STOPPED, S.FAILED, S.HIBERNATED),
    S.RESUMING: (S.HIBERNATED,),
    S.STOPPING: (S.RUNNING, S.PAUSED),
}
"""The states that an effect can have left."""


def facts_in(state: VmState) -> Iterator[Facts]:
    for before, jobs, uses, checkpoint, draining in itertools.product(
        BEFORE.get(state, (None,)), (0, 2), (0, 1), BOOL, BOOL
    ):
        yield Facts(state, before, jobs, uses, 1, checkpoint, "a reason", draining)


def test_the_table_is_the_diagram() -> None:
    found: dict[VmState, set[VmState]] = {}
    for state in S:
        answers = [decide(facts, event) for facts in facts_in(state) for event in EVENTS]
        found[state] = {step.state for step in answers if isinstance(step, Step) and not step.gone} - {state}
    assert found == DIAGRAM


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_every_event_has_an_answer_in_every_state(state: VmState, event: Event) -> None:
    for facts in facts_in(state):
        answer = decide(facts, event)
        assert isinstance(answer, Step | Refusal | Stay | Later)
        assert decide(facts, event) == answer
        if isinstance(answer, Refusal):
            assert answer.code in STATUS_OF_CODE
            assert state in answer.message or answer.code != "invalid_state"
        if isinstance(event, Done | Failed) and state not in SETTLED:
            assert isinstance(answer, Step), "an effect's end decides what follows"


@pytest.mark.parametrize("state", set(S) - SETTLED - {S.DESTROYING})
def test_requests_wait_for_the_effect_under_way_but_for_a_destroy(state: VmState) -> None:
    for request in REQUESTS:
        expected = Step(S.DESTROYING, lifecycle.REMOVE) if isinstance(request, Destroy) else LATER
        assert decide(Facts(state), request) == expected


def test_asking_for_what_is_there_already_is_no_error() -> None:
    assert decide(Facts(S.RUNNING), Resume()) == STAY
    assert decide(Facts(S.PAUSED), Suspend(SuspendMode.PAUSE)) == STAY
    assert decide(Facts(S.HIBERNATED), Suspend(SuspendMode.HIBERNATE)) == STAY
    assert decide(Facts(S.STOPPED), Stop()) == STAY


def test_work_wakes_what_sleeps_and_is_refused_by_what_is_stopped_or_failed() -> None:
    assert decide(Facts(S.RUNNING), Use()) == STAY
    assert decide(Facts(S.PAUSED), Use()) == Step(S.RUNNING, lifecycle.UNPAUSE)
    assert decide(Facts(S.HIBERNATED), Use()) == Step(S.RESUMING, lifecycle.WAKE)
    stopped, failed = decide(Facts(S.STOPPED), Use()), decide(Facts(S.FAILED, reason="out of luck"), Use())
    assert isinstance(stopped, Refusal)
    assert stopped.code == "invalid_state"
    assert "vm_resume" in stopped.message
    assert isinstance(failed, Refusal)
    assert failed.code == "vm_failed"
    assert "out of luck" in failed.message


def test_a_hibernated_vm_cannot_be_paused() -> None:
    answer = decide(Facts(S.HIBERNATED), Suspend(SuspendMode.PAUSE, force=True))
    assert isinstance(answer, Refusal)
    assert answer.code == "invalid_state"


@pytest.mark.parametrize("mode", SuspendMode)
def test_active_jobs_refuse_a_suspension_unless_forced(mode: SuspendMode) -> None:
    refused = decide(Facts(S.RUNNING, active_jobs=1), Suspend(mode))
    assert isinstance(refused, Refusal)
    assert refused.code == "jobs_active"
    assert isinstance(decide(Facts(S.RUNNING, active_jobs=1), Suspend(mode, force=True)), Step)


def test_calls_in_the_guest_end_before_it_is_put_to_rest_or_stopped() -> None:
    for request in (Suspend(), Suspend(force=True), Stop()):
        assert decide(Facts(S.RUNNING, uses=1), request) == LATER
    assert decide(Facts(S.RUNNING, uses=1, activity=3), Idle(3, SuspendMode.HIBERNATE)) == STAY
    # nobody waits for a call when the service ends, or for one that destroys
    assert decide(Facts(S.RUNNING, uses=1), Drain()) == Step(S.HIBERNATING, lifecycle.HIBERNATE)
    assert decide(Facts(S.RUNNING, uses=1), Destroy()) == Step(S.DESTROYING, lifecycle.REMOVE)


def test_an_idle_deadline_counts_only_for_the_activity_it_was_armed_at() -> None:
    assert decide(Facts(S.RUNNING, activity=4), Idle(3, SuspendMode.HIBERNATE)) == STAY
    assert decide(Facts(S.RUNNING, activity=4, active_jobs=1), Idle(4, SuspendMode.HIBERNATE)) == STAY
    assert decide(Facts(S.RUNNING, activity=4), Idle(4, SuspendMode.PAUSE)) == Step(S.PAUSED, lifecycle.PAUSE)


def test_a_paused_vm_never_moves_on_by_itself() -> None:
    assert decide(Facts(S.PAUSED, activity=1), Idle(1, SuspendMode.HIBERNATE)) == STAY


def test_a_cold_boot_over_a_valid_checkpoint_must_say_that_memory_is_lost() -> None:
    with_memory = Facts(S.HIBERNATED, checkpoint=True)
    refused = decide(with_memory, Resume(cold_boot=True))
    assert isinstance(refused, Refusal)
    assert "discard_memory" in refused.message
    booted = Step(S.BOOTING, lifecycle.BOOT)
    assert decide(with_memory, Resume(cold_boot=True, discard_memory=True)) == booted
    assert decide(Facts(S.FAILED), Resume(cold_boot=True)) == booted
    assert decide(Facts(S.STOPPED), Resume()) == booted
    for state in (S.RUNNING, S.PAUSED):
        assert isinstance(decide(Facts(state), Resume(cold_boot=True, discard_memory=True)), Refusal)
    assert isinstance(decide(Facts(S.FAILED), Resume()), Refusal)


def test_stopping_a_hibernated_vm_wakes_it_to_write_its_disk_unless_memory_is_thrown_away() -> None:
    assert decide(Facts(S.HIBERNATED), Stop()) == Step(S.RESUMING, lifecycle.WAKE)
    assert decide(Facts(S.HIBERNATED), Stop(discard_memory=True)) == Step(S.STOPPED, lifecycle.RELEASE)


@pytest.mark.parametrize("before", [S.RUNNING, S.PAUSED])
def test_a_hibernation_goes_back_before_its_commit_and_only_forward_after_it(before: VmState) -> None:
    facts = Facts(S.HIBERNATING, before)
    assert decide(facts, Failed("why")) == Step(before)
    assert decide(facts, Failed("why", committed=True)) == Step(S.HIBERNATED)
    assert decide(facts, Failed("why", committed=True, guest_lost=True)) == Step(S.HIBERNATED)
    assert decide(facts, Failed("why", guest_lost=True)) == Step(S.FAILED, lifecycle.RELEASE, "why")


def test_a_wake_goes_back_until_its_checkpoint_is_spent_and_fails_after_it() -> None:
    facts = Facts(S.RESUMING, S.HIBERNATED)
    assert decide(facts, Failed("why")) == Step(S.HIBERNATED)
    assert decide(facts, Failed("why", guest_lost=True)) == Step(S.HIBERNATED)
    assert decide(facts, Failed("why", committed=True)) == Step(S.FAILED, lifecycle.RELEASE, "why")


@pytest.mark.parametrize("before", [S.STOPPED, S.HIBERNATED, S.FAILED])
def test_a_boot_that_finds_no_room_changes_nothing_and_one_that_began_fails(before: VmState) -> None:
    facts = Facts(S.BOOTING, before)
    back = decide(facts, Failed("full"))
    assert isinstance(back, Step)
    assert (back.state, back.effect) == (before, None)
    assert decide(facts, Failed("why", committed=True)) == Step(S.FAILED, lifecycle.RELEASE, "why")


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSED])
def test_a_pause_or_unpause_that_the_guest_survives_changes_nothing(state: VmState) -> None:
    assert decide(Facts(state), Failed("why")) == STAY
    assert decide(Facts(state), Failed("why", guest_lost=True)) == Step(S.FAILED, lifecycle.RELEASE, "why")


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSED])
def test_a_death_fails_the_vm_with_its_cause_and_gives_back_what_it_held(state: VmState) -> None:
    assert decide(Facts(state), VmmDied("signal 9")) == Step(S.FAILED, lifecycle.RELEASE, "signal 9")
    assert decide(Facts(state), OutOfSpace()) == Step(S.PAUSED, reason=NO_SPACE)


def test_a_full_volume_stops_what_runs_and_leaves_alone_what_does_not() -> None:
    assert decide(Facts(S.RUNNING), LowSpace()) == Step(S.PAUSED, lifecycle.HALT, NO_SPACE)
    for state in SETTLED - {S.RUNNING}:
        assert isinstance(decide(Facts(state), LowSpace()), Refusal)


@pytest.mark.parametrize("event", [Suspend(), Drain()])
def test_a_vm_without_space_that_cannot_be_saved_is_paused_for_the_same_reason(event: Event) -> None:
    saving = decide(Facts(S.PAUSED, reason=NO_SPACE), event)
    assert saving == Step(S.HIBERNATING, lifecycle.HIBERNATE, NO_SPACE)
    facts = Facts(S.HIBERNATING, before=S.PAUSED, reason=NO_SPACE)
    assert decide(facts, Failed("full")) == Step(S.PAUSED, reason=NO_SPACE)
    assert decide(facts, Done()) == Step(S.HIBERNATED)


def test_a_failed_vm_whose_cold_boot_is_refused_keeps_the_reason_of_its_failure() -> None:
    booting = decide(Facts(S.FAILED, reason="died"), Resume(cold_boot=True))
    assert booting == Step(S.BOOTING, lifecycle.BOOT, "died")
    facts = Facts(S.BOOTING, before=S.FAILED, reason="died")
    assert decide(facts, Failed("full")) == Step(S.FAILED, reason="died")


def test_only_a_sleeping_vm_has_its_memfile_written_anew() -> None:
    assert decide(Facts(S.HIBERNATED), Failed("full", guest_lost=True)) == STAY
    assert decide(Facts(S.HIBERNATED), Compact()) == Step(S.HIBERNATED, lifecycle.COMPACT)
    for state in SETTLED - {S.HIBERNATED}:
        assert isinstance(decide(Facts(state), Compact()), Refusal)


def test_a_failed_creation_leaves_nothing_behind() -> None:
    for failed in COMPLETIONS[1:]:
        answer = decide(Facts(S.CREATING), failed)
        assert answer == Step(S.DESTROYING, lifecycle.REMOVE, "why")


def test_destruction_only_goes_forward_and_a_failed_one_is_tried_again() -> None:
    for facts in facts_in(S.DESTROYING):
        for event in EVENTS:
            answer = decide(facts, event)
            assert not isinstance(answer, Step) or answer.state is S.DESTROYING
    assert decide(Facts(S.DESTROYING), Destroy()) == Step(S.DESTROYING, lifecycle.REMOVE)
    assert decide(Facts(S.DESTROYING), Done()) == Step(S.DESTROYING, gone=True)
    hidden = decide(Facts(S.DESTROYING), Use())
    assert isinstance(hidden, Refusal)
    assert hidden.code == "not_found"


@pytest.mark.parametrize("state", S)
def test_while_the_service_drains_nothing_wakes_and_everything_can_be_saved_or_destroyed(
    state: VmState,
) -> None:
    facts = Facts(state, draining=True)
    for request in (Use(), Suspend(), Resume(), Stop()):
        answer = decide(facts, request)
        assert isinstance(answer, Refusal)
        assert answer.code == "draining"
    assert not isinstance(decide(facts, Drain()), Refusal)
    assert not isinstance(decide(facts, Destroy()), Refusal)


def test_news_are_told_once_and_a_resume_is_fulfilled_by_a_running_vm_only() -> None:
    for state in S:
        assert lifecycle.is_fulfilled(Resume(cold_boot=True), state) is (state is S.RUNNING)
    assert not lifecycle.is_fulfilled(Stop(), S.RUNNING)
    for news in (VmmDied("why"), OutOfSpace(), LowSpace(), Compact()):
        assert lifecycle.is_fulfilled(news, S.PAUSED)


def test_the_documented_transitions_are_the_tables_keys() -> None:
    keys = lifecycle.transitions()
    assert len(keys) == len(set(keys))
    answered: list[Answer] = [decide(Facts(S.RUNNING), Use())]
    assert answered == [STAY]
    assert (S.RUNNING, "Use") in keys
