"""Whether there is room for a VM: reservations against quotas, RAM, slots and the volume's free space.

`Admission` is the ledger of what every retained VM holds. A grant and its mark are one step: the next request
is judged against it whatever happens meanwhile, and `Release` or `Rest` takes it back. Storage is reserved
for the worst case (whole disk and RAM file) as long as the VM exists; RAM and a slot as long as it has a VMM.
It must not look at disks or processes: free space comes in with the event. `fleet` makes a denial an
exception, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from microvm.model import LIVE_STATES, Quota, VmId, VmRecord, VmSpec, VmState, Workspace, WorkspaceId

SLOTS: Final = 256
"""A slot is an octet of the VM's two /30 networks (the service's contract, section 10)."""

RESERVE_BYTES: Final = 1 << 30
RESERVE_PERCENT: Final = 5
"""Below the larger of the two nothing is admitted: the volume's last blocks are for VMs that run already."""

RETRY_AFTER_S: Final = 5.0
"""A slot or RAM is free again when some VM goes idle or ends; nobody knows when."""


@dataclass(frozen=True, slots=True)
class Volume:
    """The file system of disks and RAM files, as of the moment of asking."""

    free_bytes: int
    total_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """What must stay free."""
        return max(RESERVE_BYTES, self.total_bytes * RESERVE_PERCENT // 100)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one retained VM holds; `slot` is None while it has no VMM."""

    workspace_id: WorkspaceId
    memory_mib: int
    disk_gib: int
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Sums over holdings."""

    vms: int = 0
    live_vms: int = 0
    memory_mib: int = 0
    storage_mib: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """The ledger.

    Attributes:
        budget: The host's; `max_vms` counts every retained VM.
        reserve_hibernated_memory: Counts the RAM of VMs without a VMM too, so that a wake never lacks it.
        ram_generations: RAM-sized files a VM may hold at once: 1 where the memfile is live, else 2.
    """

    budget: Quota = field(default_factory=Quota)
    reserve_hibernated_memory: bool = False
    ram_generations: int = 1
    holdings: Mapping[VmId, Holding] = field(default_factory=dict[VmId, Holding])


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """A new VM asks for storage and, unless `live` is False, for a slot and RAM.

    Attributes:
        workspace: The owner with its quota, as it is now.
        needs_bytes: What the creation writes at once, above blocks shared with its source.
        idle: VMs past their idle time, longest idle first, that may be hibernated to make room.
    """

    vm_id: VmId
    workspace: Workspace
    spec: VmSpec
    volume: Volume
    needs_bytes: int = 0
    live: bool = True
    idle: tuple[VmId, ...] = ()


@dataclass(frozen=True, slots=True)
class Wake:
    """A retained VM without a VMM asks for a slot and RAM.

    Attributes:
        idle: VMs past their idle time, longest idle first, that may be hibernated to make room.
    """

    vm_id: VmId
    workspace: Workspace
    volume: Volume
    needs_bytes: int = 0
    idle: tuple[VmId, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """An effect is about to write this much to the volume (a checkpoint, a snapshot); it reserves nothing.

    Attributes:
        saves: Whether it saves a VM that lives: the reserve is there for just that.
    """

    volume: Volume
    needs_bytes: int
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """The VM's VMM is gone; its files stay."""

    vm_id: VmId


@dataclass(frozen=True, slots=True)
class Release:
    """The VM is gone with its files; also for a creation that failed."""

    vm_id: VmId


Event = Create | Wake | Write | Rest | Release


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """Go ahead; what was asked for is marked. `slot` is None where none was asked for."""

    slot: int | None = None


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Hibernate these first, then ask again without `idle`; nothing is marked."""

    vm_ids: tuple[VmId, ...]


@dataclass(frozen=True, slots=True)
class Denied:
    """No room; nothing is marked."""

    code: str
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retry_after_s: float = RETRY_AFTER_S


Effect = Granted | MakeRoom | Denied
Decision = tuple[Admission, tuple[Effect, ...]]


def restart(admission: Admission, records: Iterable[VmRecord]) -> Admission:
    """The ledger as the service starts, from the VMs that recovery left."""
    holdings = {
        record.vm_id: Holding(
            record.workspace_id,
            record.spec.memory_mib,
            record.spec.disk_gib,
            record.slot if record.state in LIVE_STATES else None,
        )
        for record in records
        if record.state is not VmState.DESTROYING
    }
    return replace(admission, holdings=holdings)


def decide(admission: Admission, event: Event) -> Decision:
    """Grants or denies room, and marks what was granted, in one step.

    Returns:
        The next ledger, and exactly one of `Granted`, `MakeRoom` and `Denied` for `Create`, `Wake` and
        `Write`; nothing for `Rest` and `Release`, which may name a VM that holds nothing.
    """
    match event:
        case Create():
            return _create(admission, event)
        case Wake():
            return _wake(admission, event)
        case Write():
            denied = _space(event.volume, event.needs_bytes, into_reserve=event.saves)
            return admission, (denied or Granted(),)
        case Rest():
            holding = admission.holdings.get(event.vm_id)
            if holding is None:
                return admission, ()
            return _mark(admission, event.vm_id, replace(holding, slot=None)), ()
        case Release():
            rest = {vm_id: held for vm_id, held in admission.holdings.items() if vm_id != event.vm_id}
            return replace(admission, holdings=rest), ()


def bounded(quota: Quota, defaults: Quota) -> Quota:
    """A workspace's quota, with the service's default wherever it has no bound of its own."""
    return Quota(
        max_vms=defaults.max_vms if quota.max_vms is None else quota.max_vms,
        max_memory_mib=defaults.max_memory_mib if quota.max_memory_mib is None else quota.max_memory_mib,
        max_storage_gib=defaults.max_storage_gib if quota.max_storage_gib is None else quota.max_storage_gib,
    )


def use_of(admission: Admission, workspace_id: WorkspaceId | None = None) -> Use:
    """What a workspace's VMs, or all of them, hold now: what is reserved, not what is really used."""
    held = [
        holding
        for holding in admission.holdings.values()
        if workspace_id is None or holding.workspace_id == workspace_id
    ]
    charged = held if admission.reserve_hibernated_memory else [h for h in held if h.slot is not None]
    return Use(
        vms=len(held),
        live_vms=sum(holding.slot is not None for holding in held),
        memory_mib=sum(holding.memory_mib for holding in charged),
        storage_mib=sum(_storage_mib(admission, h.memory_mib, h.disk_gib) for h in held),
    )


def _create(admission: Admission, event: Create) -> Decision:
    assert event.vm_id not in admission.holdings, event.vm_id
    workspace_id, spec = event.workspace.workspace_id, event.spec
    denied = _create_denial(admission, event)
    if denied is not None:
        answer = _make_room(
            admission, event.idle, workspace_id, denied, lambda each: _create_denial(each, event)
        )
        return admission, (answer,)
    slot = _free_slot(admission) if event.live else None
    holding = Holding(workspace_id, spec.memory_mib, spec.disk_gib, slot)
    return _mark(admission, event.vm_id, holding), (Granted(slot),)


def _wake(admission: Admission, event: Wake) -> Decision:
    holding = admission.holdings[event.vm_id]
    if holding.slot is not None:
        return admission, (Granted(holding.slot),)
    denied = _wake_denial(admission, event, holding)
    if denied is not None:
        answer = _make_room(
            admission,
            event.idle,
            holding.workspace_id,
            denied,
            lambda then: _wake_denial(then, event, holding),
        )
        return admission, (answer,)
    slot = _free_slot(admission)
    return _mark(admission, event.vm_id, replace(holding, slot=slot)), (Granted(slot),)


def _make_room(
    admission: Admission,
    idle: tuple[VmId, ...],
    workspace_id: WorkspaceId,
    denied: Denied,
    denial: Callable[[Admission], Denied | None],
) -> MakeRoom | Denied:
    """The fewest of `idle`, from its front, whose rest would lift the denial; where none would, that."""
    chosen: list[VmId] = []
    emptier = admission
    for vm_id in idle:
        candidate = emptier.holdings.get(vm_id)
        if candidate is None or candidate.slot is None:
            continue
        if denied.code == "quota_exceeded" and candidate.workspace_id != workspace_id:
            continue  # another tenant's rest does not help against one's own quota
        emptier = _mark(emptier, vm_id, replace(candidate, slot=None))
        chosen.append(vm_id)
        if denial(emptier) is None:
            return MakeRoom(tuple(chosen))
    return denied


def _create_denial(admission: Admission, event: Create) -> Denied | None:
    spec = event.spec
    asked = Use(
        vms=1,
        live_vms=int(event.live),
        memory_mib=spec.memory_mib if event.live or admission.reserve_hibernated_memory else 0,
        storage_mib=_storage_mib(admission, spec.memory_mib, spec.disk_gib),
    )
    return _denial(admission, event.workspace, asked, event.volume, event.needs_bytes)


def _wake_denial(admission: Admission, event: Wake, holding: Holding) -> Denied | None:
    # Storage and count are reserved already, and with reserve_hibernated_memory so is RAM.
    charged = 0 if admission.reserve_hibernated_memory else holding.memory_mib
    asked = Use(live_vms=1, memory_mib=charged)
    return _denial(admission, event.workspace, asked, event.volume, event.needs_bytes)


def _denial(
    admission: Admission, workspace: Workspace, asked: Use, volume: Volume, needs_bytes: int
) -> Denied | None:
    denied = (
        _over(workspace.quota, use_of(admission, workspace.workspace_id), asked, host=False)
        or _over(admission.budget, use_of(admission), asked, host=True)
        or _space(volume, needs_bytes)
    )
    if denied is None and asked.live_vms and _free_slot(admission) is None:
        return _no_slot()
    return denied


def _over(bound: Quota, used: Use, asked: Use, *, host: bool) -> Denied | None:
    """The first bound that `asked` would break; a bound that nothing is asked of is never in the way."""
    checks = (
        ("max_vms", bound.max_vms, used.vms, asked.vms, 1),
        ("max_memory_mib", bound.max_memory_mib, used.memory_mib, asked.memory_mib, 1),
        ("max_storage_gib", bound.max_storage_gib, used.storage_mib, asked.storage_mib, 1024),
    )
    for name, limit, held, more, unit in checks:
        if limit is None or not more or held + more <= limit * unit:
            continue
        detail = {"limit": name, "max": limit, "reserved": held / unit, "asked": more / unit}
        if host:
            message = f"The host has no room: {name} is {limit}. Try again later."
            return Denied("no_capacity", message, detail)
        message = (
            f"The workspace's quota {name} is {limit}, {held / unit:g} of it reserved, "
            f"{more / unit:g} asked for; destroy or hibernate VMs, or ask the operator for more."
        )
        return Denied("quota_exceeded", message, detail)
    return None


def _space(volume: Volume, needs_bytes: int, *, into_reserve: bool = False) -> Denied | None:
    if volume.free_bytes - needs_bytes >= (0 if into_reserve else volume.reserve_bytes):
        return None
    return Denied(
        "no_capacity",
        "The volume of the VMs is nearly full; nothing more is admitted until something was destroyed.",
        {
            "limit": "free_bytes",
            "free_bytes": volume.free_bytes,
            "needs_bytes": needs_bytes,
            "reserve_bytes": volume.reserve_bytes,
        },
    )


def _no_slot() -> Denied:
    return Denied(
        "no_capacity",
        f"All {SLOTS} slots for live VMs are taken; try again when one has gone to rest.",
        {"limit": "slots", "max": SLOTS},
    )


def _free_slot(admission: Admission) -> int | None:
    taken = {holding.slot for holding in admission.holdings.values()}
    return next((slot for slot in range(SLOTS) if slot not in taken), None)


def _storage_mib(admission: Admission, memory_mib: int, disk_gib: int) -> int:
    return disk_gib * 1024 + memory_mib * admission.ram_generations


def _mark(admission: Admission, vm_id: VmId, holding: Holding) -> Admission:
    return replace(admission, holdings={**admission.holdings, vm_id: holding})
