"""Whatever is asked for in whatever order, no bound is ever passed and no slot is held twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microvm.model import Quota, VmId, VmSpec, Workspace, WorkspaceId
from microvm.policy import admission
from microvm.policy.admission import Admission, Create, Granted, Release, Rest, Volume, Wake

_IDS = st.sampled_from([VmId(f"vm{n}") for n in range(6)])
_BOUNDS = st.builds(
    Quota,
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 4096),
    st.none() | st.integers(0, 20),
)
_OPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "wake", "rest", "release"]),
        _IDS,
        st.sampled_from(["alice", "bob"]),
        st.sampled_from([128, 1024, 2048]),
        st.booleans(),
        st.lists(_IDS, max_size=3).map(tuple),
    ),
    max_size=40,
)
_VOLUME = Volume(1 << 40, 1 << 40)


@given(_BOUNDS, _BOUNDS, st.booleans(), _OPS)
def test_admission_never_passes_a_bound(
    host: Quota,
    own: Quota,
    strict: bool,
    ops: list[tuple[str, VmId, str, int, bool, tuple[VmId, ...]]],
) -> None:
    ledger = Admission(host, reserve_hibernated_memory=strict)
    owner: dict[VmId, WorkspaceId] = {}
    for op, vm_id, name, memory_mib, live, idle in ops:
        if (op == "create") == (vm_id in ledger.holdings):
            continue
        workspace = Workspace(owner.get(vm_id, WorkspaceId(name)), quota=own)
        event: admission.Event
        match op:
            case "create":
                spec = VmSpec(memory_mib=memory_mib)
                event = Create(vm_id, workspace, spec, _VOLUME, live=live, idle=idle)
            case "wake":
                event = Wake(vm_id, workspace, _VOLUME, idle=idle)
            case "rest":
                event = Rest(vm_id)
            case _:
                event = Release(vm_id)
        after, effects = admission.decide(ledger, event)
        if isinstance(event, Create | Wake):
            (effect,) = effects
            assert isinstance(effect, Granted) or after is ledger
            owner.setdefault(vm_id, workspace.workspace_id)
            if isinstance(effect, admission.MakeRoom):
                rested = ledger
                for each in effect.vm_ids:
                    rested, _ = admission.decide(rested, Rest(each))
                _, (again,) = admission.decide(rested, event)
                assert isinstance(again, Granted)  # it is told to make room only where that helps
        ledger = after
        if event.__class__ is Release:
            owner.pop(vm_id, None)
        _check(ledger, host, own)


def _check(ledger: Admission, host: Quota, own: Quota) -> None:
    slots = [held.slot for held in ledger.holdings.values() if held.slot is not None]
    assert len(slots) == len(set(slots))
    workspaces = {held.workspace_id for held in ledger.holdings.values()}
    for bound, use in [
        (host, admission.use_of(ledger)),
        *((own, admission.use_of(ledger, each)) for each in workspaces),
    ]:
        assert bound.max_vms is None or use.vms <= bound.max_vms
        assert bound.max_memory_mib is None or use.memory_mib <= bound.max_memory_mib
        assert bound.max_storage_gib is None or use.storage_mib <= bound.max_storage_gib * 1024
