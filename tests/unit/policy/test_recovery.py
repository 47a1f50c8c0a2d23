"""After a crash a VM is as before, as after, or failed with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from microvm.model import Generation, JobState, VmId, VmRecord, VmSpec, VmState, WorkspaceId
from microvm.policy import recovery
from microvm.policy.recovery import Fail, Found, Keep, Remove, RollBack, RollForward

VM = VmId("vm")


def found(state: VmState, *, disk: bool = True, manifest: int | None = None, **changes: Any) -> Found:
    record = VmRecord(VM, WorkspaceId("alice"), state, 0.0, 0.0, VmSpec()).with_(**changes)
    return Found(record, disk, None if manifest is None else Generation(manifest))


@pytest.mark.parametrize("state", [VmState.HIBERNATED, VmState.STOPPED, VmState.FAILED])
def test_what_was_at_rest_stays(state: VmState) -> None:
    assert recovery.decide(found(state)) == Keep(VM)


@pytest.mark.parametrize("state", [VmState.RUNNING, VmState.PAUSED, VmState.BOOTING, VmState.STOPPING])
def test_what_had_a_vmm_has_failed_and_says_so(state: VmState) -> None:
    outcome = recovery.decide(found(state))
    assert isinstance(outcome, Fail)
    assert state in outcome.reason


@pytest.mark.parametrize("disk", [True, False])
def test_destruction_goes_on_and_an_unfinished_creation_leaves_nothing(disk: bool) -> None:
    assert isinstance(recovery.decide(found(VmState.DESTROYING, disk=disk)), Remove)
    assert isinstance(recovery.decide(found(VmState.CREATING, disk=disk)), Remove)


def test_a_hibernation_is_done_exactly_when_its_own_manifest_is_whole() -> None:
    def outcome(manifest: int | None) -> recovery.Outcome:
        return recovery.decide(
            found(VmState.HIBERNATING, manifest=manifest, checkpoint_generation=3, spent_generation=3)
        )

    assert outcome(4) == RollForward(VM, Generation(4))
    for other in (None, 3, 5):
        assert isinstance(outcome(other), Fail), other


def test_a_wake_is_undone_exactly_when_the_checkpoint_is_not_spent() -> None:
    assert recovery.decide(
        found(VmState.RESUMING, checkpoint_generation=3, spent_generation=2, manifest=3)
    ) == RollBack(VM)
    assert isinstance(
        recovery.decide(found(VmState.RESUMING, checkpoint_generation=3, spent_generation=3, manifest=3)),
        Fail,
    )


@pytest.mark.parametrize("state", set(VmState) - {VmState.CREATING, VmState.DESTROYING, VmState.FAILED})
def test_a_vm_without_its_disk_has_failed(state: VmState) -> None:
    assert recovery.decide(
        found(state, disk=False, manifest=4, checkpoint_generation=4 - (state is VmState.HIBERNATING))
    ) == Fail(VM, "its disk is missing")


@pytest.mark.parametrize("state", VmState)
def test_recovery_ends_at_rest_and_asking_again_changes_nothing(state: VmState) -> None:
    start = found(state, manifest=1)
    match recovery.decide(start):
        case Remove():
            return
        case Keep():
            record = start.record
        case RollForward(_, generation):
            record = start.record.with_(state=VmState.HIBERNATED, checkpoint_generation=generation)
        case RollBack():
            record = start.record.with_(state=VmState.HIBERNATED)
        case Fail(_, reason):
            record = start.record.with_(state=VmState.FAILED, reason=reason)
    assert record.state in {VmState.HIBERNATED, VmState.STOPPED, VmState.FAILED}
    assert recovery.decide(Found(record, disk=True, manifest=Generation(1))) == Keep(VM)


@pytest.mark.parametrize("active", [JobState.STARTING, JobState.RUNNING, JobState.FROZEN])
def test_a_job_that_had_not_ended_sleeps_in_a_checkpoint_or_is_lost(active: JobState) -> None:
    assert recovery.job_state_after(VmState.HIBERNATED, active) is JobState.FROZEN
    assert recovery.job_state_after(VmState.STOPPED, active) is JobState.LOST
    assert recovery.job_state_after(VmState.FAILED, active) is JobState.LOST


@pytest.mark.parametrize("settled", [VmState.HIBERNATED, VmState.STOPPED, VmState.FAILED])
@pytest.mark.parametrize("ended", [JobState.COMPLETED, JobState.LOST])
def test_a_job_that_had_ended_stays_as_it_ended(settled: VmState, ended: JobState) -> None:
    assert recovery.job_state_after(settled, ended) is ended
