"""Room is marked in the step in which it is granted, and whoever waits for it hears of his own VM only."""

from __future__ import annotations

from pathlib import Path

import pytest

from microvm.errors import CapacityError, HostError, MicrovmError, RequestError
from microvm.fleet.room import Room
from microvm.model import Quota, VmId, VmRecord, VmSpec, VmState, Workspace, WorkspaceId
from microvm.policy import admission

ALICE, BOB = WorkspaceId("alice"), WorkspaceId("bob")
SPEC = VmSpec(memory_mib=256, disk_gib=1)
GIB = 1 << 30


class Fixture:
    """A room of two running VMs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *records: VmRecord, quota: Quota | None = None
    ) -> None:
        self.volume = admission.Volume(50 * GIB, 100 * GIB)

        def volume(_room: Room) -> admission.Volume:
            return self.volume

        monkeypatch.setattr(Room, "_volume", volume)
        self.workspaces = {ALICE: Workspace(ALICE, quota=quota or Quota())}
        self.rested: list[VmId] = []
        self.room = Room(
            Path("/nowhere"), Quota(max_memory_mib=512), Quota(max_vms=4), self.workspaces.get, records
        )
        self.room.put_to_rest = self.put_to_rest

    async def put_to_rest(self, vm_id: VmId) -> None:
        self.rested.append(vm_id)
        self.room.rest(vm_id)

    def create(self, name: str, workspace_id: WorkspaceId = ALICE) -> int:
        return self.room.create(VmId(name), workspace_id, SPEC)


def a_record(name: str, state: VmState, slot: int | None = None) -> VmRecord:
    return VmRecord(VmId(name), ALICE, state, 0.0, 0.0, SPEC, slot=slot)


def test_every_live_vm_has_a_slot_of_its_own_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch)
    slots = {here.create("a"), here.create("b")}
    assert len(slots) == 2
    with pytest.raises(CapacityError) as refused:
        here.create("c")
    assert refused.value.code == "no_capacity"
    assert refused.value.retry_after_s is not None
    here.room.rest(VmId("a"))
    assert here.create("c") in slots


def test_what_a_refused_creation_asked_for_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch)
    here.create("a")
    here.create("b")
    before = here.room.use()
    for _ in range(10):
        with pytest.raises(CapacityError):
            here.create("c")
    assert here.room.use() == before


def test_a_workspace_without_bounds_of_its_own_has_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch, *(a_record(f"old{n}", VmState.HIBERNATED) for n in range(4)))
    with pytest.raises(CapacityError) as refused:
        here.create("a")
    assert refused.value.code == "quota_exceeded"
    here.workspaces[ALICE] = Workspace(ALICE, quota=Quota(max_vms=5))
    here.create("a")  # as the command line has changed it meanwhile
    here.create("b", BOB)


def test_what_slept_over_a_restart_holds_storage_and_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch, a_record("asleep", VmState.HIBERNATED), a_record("failed", VmState.FAILED))
    use = here.room.use(ALICE)
    assert (use.vms, use.live_vms, use.memory_mib) == (2, 0, 0)
    assert use.storage_mib == 2 * (1024 + 256)
    here.room.release(VmId("failed"))
    assert here.room.use(ALICE).vms == 1


async def test_a_wake_puts_idle_vms_to_rest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch, a_record("asleep", VmState.HIBERNATED))
    here.create("a")
    here.create("b")
    here.room.idle = lambda: (VmId("b"), VmId("a"))
    await here.room.wake(VmId("asleep"), ALICE)
    assert here.rested == ["b"]
    assert here.room.use().live_vms == 2


@pytest.mark.parametrize(
    "error", [RequestError("jobs_active", "a secret of b"), MicrovmError("internal", "of b")], ids=str
)
async def test_a_wake_that_finds_no_room_says_so_and_nothing_of_the_vms_in_its_way(
    monkeypatch: pytest.MonkeyPatch, error: MicrovmError
) -> None:
    here = Fixture(monkeypatch, a_record("asleep", VmState.HIBERNATED))
    here.create("a", BOB)
    here.create("b", BOB)

    async def refuse(vm_id: VmId) -> None:
        raise error

    here.room.put_to_rest = refuse
    here.room.idle = lambda: (VmId("b"),)
    with pytest.raises(CapacityError) as refused:
        await here.room.wake(VmId("asleep"), ALICE)
    assert refused.value.code == "no_capacity"
    assert error.message not in f"{refused.value.message}{refused.value.detail}"
    assert here.room.use().live_vms == 2


def test_nothing_is_written_into_the_reserve_but_what_saves_a_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fixture(monkeypatch)
    here.room.check_write(GIB)
    assert not here.room.is_low
    here.volume = admission.Volume(4 * GIB, 100 * GIB)
    assert here.room.is_low
    with pytest.raises(CapacityError) as refused:
        here.room.check_write(1)
    assert refused.value.code == "no_capacity"
    here.room.check_write(GIB, saves=True)
    with pytest.raises(CapacityError):
        here.create("a")


def test_a_volume_that_cannot_be_looked_at_is_an_error_and_marks_nothing(tmp_path: Path) -> None:
    room = Room(tmp_path / "missing", Quota(), Quota(), lambda _workspace_id: None, [])
    with pytest.raises(HostError):
        room.create(VmId("a"), ALICE, SPEC)
    assert room.use().vms == 0
