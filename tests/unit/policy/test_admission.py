"""Room is granted once, denied with the bound that is in the way, and there again when it is given back."""

from __future__ import annotations

import pytest

from microvm.model import Quota, VmId, VmRecord, VmSpec, VmState, Workspace, WorkspaceId
from microvm.policy import admission
from microvm.policy.admission import (
    Admission,
    Create,
    Denied,
    Granted,
    Holding,
    MakeRoom,
    Release,
    Rest,
    Volume,
    Wake,
    Write,
)

GIB = 1 << 30
ALICE = Workspace(WorkspaceId("alice"))
ROOMY = Volume(500 * GIB, 1000 * GIB)
SPEC = VmSpec(memory_mib=1024, disk_gib=3)


def grown(ledger: Admission, *vm_ids: str, workspace: Workspace = ALICE) -> Admission:
    for vm_id in vm_ids:
        ledger, (granted,) = admission.decide(ledger, Create(VmId(vm_id), workspace, SPEC, ROOMY))
        assert isinstance(granted, Granted)
    return ledger


def ask(ledger: Admission, event: admission.Event) -> admission.Effect:
    after, (effect,) = admission.decide(ledger, event)
    assert isinstance(effect, Granted) or after is ledger
    return effect


def another(workspace: Workspace = ALICE, volume: Volume = ROOMY, *, live: bool = True) -> Create:
    return Create(VmId("another"), workspace, SPEC, volume, live=live)


@pytest.mark.parametrize(
    ("bound", "limit"),
    [
        (Quota(max_vms=2), "max_vms"),
        (Quota(max_memory_mib=3071), "max_memory_mib"),
        (Quota(max_storage_gib=11), "max_storage_gib"),
    ],
)
def test_a_bound_in_the_way_is_named_as_the_workspaces_or_the_hosts(bound: Quota, limit: str) -> None:
    host = ask(grown(Admission(bound), "a", "b"), another())
    assert isinstance(host, Denied)
    assert (host.code, host.detail["limit"]) == ("no_capacity", limit)
    mine = ask(grown(Admission(), "a", "b"), another(Workspace(ALICE.workspace_id, quota=bound)))
    assert isinstance(mine, Denied)
    assert (mine.code, mine.detail["limit"]) == ("quota_exceeded", limit)
    assert mine.retry_after_s > 0


@pytest.mark.parametrize(
    "bound", [Quota(max_vms=3), Quota(max_memory_mib=3072), Quota(max_storage_gib=12), Quota()]
)
def test_exactly_what_fits_fits(bound: Quota) -> None:
    assert isinstance(ask(grown(Admission(bound), "a", "b"), another()), Granted)


def test_a_workspaces_quota_does_not_count_other_workspaces() -> None:
    ledger = grown(Admission(), "a", "b", workspace=Workspace(WorkspaceId("bob")))
    assert isinstance(ask(ledger, another(Workspace(ALICE.workspace_id, quota=Quota(max_vms=1)))), Granted)


def test_rest_gives_back_ram_and_slot_and_keeps_storage_and_count() -> None:
    ledger = grown(Admission(), "a", "b")
    rested, effects = admission.decide(ledger, Rest(VmId("a")))
    assert effects == ()
    assert admission.use_of(ledger) == admission.Use(2, 2, 2048, 8192)
    assert admission.use_of(rested) == admission.Use(2, 1, 1024, 8192)
    assert ask(rested, another()) == Granted(0)
    gone, _ = admission.decide(rested, Release(VmId("a")))
    assert admission.use_of(gone) == admission.Use(1, 1, 1024, 4096)


def test_hibernated_memory_can_be_reserved_so_that_a_wake_needs_none() -> None:
    strict = Admission(Quota(max_memory_mib=2048), reserve_hibernated_memory=True)
    rested, _ = admission.decide(grown(strict, "a", "b"), Rest(VmId("a")))
    assert isinstance(ask(rested, another()), Denied)
    assert isinstance(ask(rested, Wake(VmId("a"), ALICE, ROOMY)), Granted)


def test_two_ram_generations_are_reserved_where_a_checkpoint_needs_them() -> None:
    assert admission.use_of(grown(Admission(ram_generations=2), "a")).storage_mib == 3 * 1024 + 2048


def test_below_the_reserve_of_the_volume_nothing_is_admitted() -> None:
    small = Volume(free_bytes=GIB, total_bytes=10 * GIB)
    assert isinstance(ask(Admission(), another(volume=small)), Granted)
    assert isinstance(ask(Admission(), another(volume=Volume(GIB - 1, 10 * GIB))), Denied)
    big = Volume(free_bytes=50 * GIB, total_bytes=1000 * GIB)
    assert isinstance(ask(Admission(), Write(big, 0)), Granted)
    denied = ask(Admission(), Write(big, 1))
    assert isinstance(denied, Denied)
    assert (denied.code, denied.detail["limit"]) == ("no_capacity", "free_bytes")


def test_the_reserve_may_be_used_for_saving_a_vm_and_no_more_than_it() -> None:
    low = Volume(free_bytes=GIB // 2, total_bytes=10 * GIB)
    assert isinstance(ask(Admission(), Write(low, GIB // 2, saves=True)), Granted)
    assert isinstance(ask(Admission(), Write(low, GIB // 2 + 1, saves=True)), Denied)
    assert isinstance(ask(Admission(), Write(low, 0)), Denied)


def test_the_257th_live_vm_has_no_slot_and_a_stopped_one_needs_none() -> None:
    ledger = grown(Admission(), *(f"vm{n}" for n in range(256)))
    assert {holding.slot for holding in ledger.holdings.values()} == set(range(256))
    denied = ask(ledger, another())
    assert isinstance(denied, Denied)
    assert (denied.code, denied.detail["limit"]) == ("no_capacity", "slots")
    assert ask(ledger, another(live=False)) == Granted(None)


def test_without_room_a_wake_names_the_fewest_idle_vms_longest_idle_first() -> None:
    ledger = grown(Admission(Quota(max_memory_mib=3072)), "sleeper")
    ledger, _ = admission.decide(ledger, Rest(VmId("sleeper")))
    ledger = grown(ledger, "a", "b", "c")
    wake = Wake(VmId("sleeper"), ALICE, ROOMY, idle=(VmId("b"), VmId("a")))
    assert ask(ledger, wake) == MakeRoom((VmId("b"),))
    assert isinstance(ask(ledger, Wake(VmId("sleeper"), ALICE, ROOMY)), Denied)


def test_other_tenants_are_not_put_to_rest_for_ones_own_quota() -> None:
    bob = Workspace(WorkspaceId("bob"))
    ledger = grown(grown(Admission(), "mine"), "bobs", workspace=bob)
    tight = Workspace(ALICE.workspace_id, quota=Quota(max_memory_mib=1024))
    create = Create(VmId("another"), tight, SPEC, ROOMY, idle=(VmId("bobs"),))
    assert isinstance(ask(ledger, create), Denied)
    both = Create(VmId("another"), tight, SPEC, ROOMY, idle=(VmId("bobs"), VmId("mine")))
    assert ask(ledger, both) == MakeRoom((VmId("mine"),))


def test_no_rest_of_others_helps_against_a_bound_on_storage() -> None:
    ledger = grown(Admission(Quota(max_storage_gib=4)), "a")
    create = Create(VmId("another"), ALICE, SPEC, ROOMY, idle=(VmId("a"),))
    assert isinstance(ask(ledger, create), Denied)


def test_waking_what_is_awake_grants_what_it_holds() -> None:
    ledger = grown(Admission(), "a", "b")
    after, effects = admission.decide(ledger, Wake(VmId("b"), ALICE, ROOMY))
    assert (after, effects) == (ledger, (Granted(1),))


def test_a_restart_holds_what_recovery_left() -> None:
    def record(vm_id: str, state: VmState) -> VmRecord:
        return VmRecord(VmId(vm_id), ALICE.workspace_id, state, 0.0, 0.0, SPEC, slot=9)

    ledger = admission.restart(
        Admission(), [record("a", VmState.HIBERNATED), record("b", VmState.DESTROYING)]
    )
    assert ledger.holdings == {"a": Holding(ALICE.workspace_id, 1024, 3, None)}


def test_a_workspace_without_bounds_of_its_own_gets_the_default_ones() -> None:
    own = Quota(max_vms=0, max_storage_gib=5)
    assert admission.bounded(own, Quota(7, 8, 9)) == Quota(0, 8, 5)
