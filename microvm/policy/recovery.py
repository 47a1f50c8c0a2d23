"""What a VM is after the service died, from what is found of it at start-up.

Every VMM dies with the service, so a VM is what its record and its files say: as before the interrupted
effect, as after it, or failed with the reason; never silently rolled back. It must not read files or
journals: `fleet` looks, asks, and runs the answers before it listens.

    destroying                        → removed; destruction only goes forward
    creating                          → removed; nobody has worked in it, and its receipt is unknown
    hibernating, manifest g+1 whole   → hibernated at g+1; the manifest was the commit
    resuming, generation not spent    → hibernated; the guest has not run on
    hibernated, stopped, failed       → kept
    anything else                     → failed; its memory is gone, its disk is not
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from microvm.model import Generation, JobState, VmId, VmRecord, VmState

S = VmState


@dataclass(frozen=True, slots=True)
class Found:
    """A VM as the service finds it.

    Attributes:
        record: As the store has it.
        disk: Whether its disk is there.
        manifest: The generation of the newest manifest that is whole; None where there is none.
    """

    record: VmRecord
    disk: bool
    manifest: Generation | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """The VM stays as it is; an open intent of it is closed as not done."""

    vm_id: VmId


@dataclass(frozen=True, slots=True)
class RollForward:
    """The checkpoint was committed: the VM is hibernated with it; a leftover VMM is killed first."""

    vm_id: VmId
    generation: Generation


@dataclass(frozen=True, slots=True)
class RollBack:
    """The wake had not spent the checkpoint: the VM is hibernated as before."""

    vm_id: VmId


@dataclass(frozen=True, slots=True)
class Fail:
    """The VM is failed: disk, logs and job records stay."""

    vm_id: VmId
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """The VM's files go, then its record."""

    vm_id: VmId
    reason: str


Outcome = Keep | RollForward | RollBack | Fail | Remove

_SETTLED: Final = frozenset({S.HIBERNATED, S.STOPPED, S.FAILED})


def decide(found: Found) -> Outcome:
    """What becomes of a VM; asked again after a crash in the middle of its answer, it answers alike."""
    record = found.record
    vm_id = record.vm_id
    if record.state is S.DESTROYING:
        return Remove(vm_id, "its destruction had begun")
    if record.state is S.CREATING:
        return Remove(vm_id, "the service ended while it was being created")
    if record.state is S.FAILED:
        return Keep(vm_id)
    if not found.disk:
        return Fail(vm_id, "its disk is missing")
    if record.state in _SETTLED:
        return Keep(vm_id)
    if record.state is S.HIBERNATING:
        return _hibernating(found)
    if record.state is S.RESUMING and record.checkpoint_generation > record.spent_generation:
        return RollBack(vm_id)
    return Fail(vm_id, f"the service ended while the VM was {record.state}")


def job_state_after(settled: VmState, state: JobState) -> JobState:
    """What a job is in a VM that recovery left in `settled`.

    A job that had ended stays as it ended. One that had not sleeps in the checkpoint, whatever the store
    last heard of it, or is lost.
    """
    if state in {JobState.COMPLETED, JobState.LOST}:
        return state
    return JobState.FROZEN if settled is S.HIBERNATED else JobState.LOST


def _hibernating(found: Found) -> Outcome:
    record = found.record
    written = Generation(record.checkpoint_generation + 1)
    if found.manifest == written:
        return RollForward(record.vm_id, written)
    return Fail(
        record.vm_id, "the service ended while the VM was hibernating, before its checkpoint was whole"
    )
