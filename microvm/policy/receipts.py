"""Whether a request id is new, under way, answered, or lost: no retry ever has a second effect.

A ledger holds the receipts of one workspace. `decide(ledger, event, now)` answers with the next ledger and
what to do; the caller stores `Save` and `Drop` before it acts on `Work`, and runs waiting duplicates off the
first one's completion. It must not know tools or answers: both are opaque. `store` keeps the receipts,
`fleet` hashes the arguments.

    (no receipt) ─Begin─► pending ─Complete─► done ─24 h─► (forgotten)
                             ├────Refuse────► (forgotten)   refused before any effect
                             └─Lose / restart─► unknown ─24 h─► (forgotten)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from microvm.model import JobId, Receipt, ReceiptState, VmId, WorkspaceId

MAX_RECEIPTS: Final = 4096
"""Per workspace (the service's contract, section 7)."""

AGE_S: Final = 24 * 3600.0
"""A completed receipt is forgotten this long after its completion."""

EVICTABLE_AFTER_S: Final = 15 * 60.0
"""Under pressure a done receipt goes after this: 4096 in 24 h would be 2.8 commands a minute."""

RETRY_AFTER_S: Final = 60.0
"""When the next receipt is likely to become evictable is not worth computing; a minute is polite."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The receipts of one workspace, those that ended last at the end."""

    workspace_id: WorkspaceId
    receipts: Mapping[str, Receipt] = field(default_factory=dict[str, Receipt])


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """A request with an id has come and is valid so far."""

    request_id: str
    tool: str
    args_hash: str


@dataclass(frozen=True, slots=True)
class Note:
    """The pending work now has a VM or a job, for whoever must reconcile later."""

    request_id: str
    vm_id: VmId | None = None
    job_id: JobId | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """The work has an answer, good or bad, that a retry must get too."""

    request_id: str
    answer: Mapping[str, Any]
    vm_id: VmId | None = None
    job_id: JobId | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request was refused before any effect; a retry is a new request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Lose:
    """The work was interrupted and nobody can say what it did."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Begin | Note | Complete | Refuse | Lose | Tick


# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Do the work: this request is the first with its id."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the work under way and give its answer."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Replay:
    """Give the recorded answer."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Deny:
    """Refuse with this code; nothing changes."""

    code: str
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Store the receipt; the effects after it only when that is done."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget these receipts in the store."""

    workspace_id: WorkspaceId
    request_ids: tuple[str, ...]


Effect = Work | Join | Replay | Deny | Save | Drop
Decision = tuple[Ledger, tuple[Effect, ...]]


def restart(workspace_id: WorkspaceId, receipts: Iterable[Receipt], now: float) -> Decision:
    """The ledger of a workspace as the service starts: what was pending is unknown from here on.

    Args:
        workspace_id: Whose.
        receipts: All of the workspace's, in any order.
        now: Seconds since the epoch.
    """
    lost: list[Effect] = []
    settled: list[Receipt] = []
    for receipt in receipts:
        assert receipt.workspace_id == workspace_id
        if receipt.state is ReceiptState.PENDING:
            receipt = receipt.with_(state=ReceiptState.UNKNOWN, completed_at=now)
            lost.append(Save(receipt))
        settled.append(receipt)
    settled.sort(key=_ended_at)
    ledger = Ledger(workspace_id, {receipt.request_id: receipt for receipt in settled})
    ledger, dropped = decide(ledger, Tick(), now)
    return ledger, (*lost, *dropped)


def decide(ledger: Ledger, event: Event, now: float) -> Decision:
    """What `event` does to a workspace's receipts.

    Args:
        ledger: The workspace's.
        event: `Begin` of any id; the others of a pending one, or `Tick`.
        now: Seconds since the epoch, never less than at the ledger's last event.

    Returns:
        The next ledger and the effects, in the order in which to run them. `Begin` yields exactly one of
        `Work`, `Join`, `Replay` and `Deny`, as the last effect.
    """
    match event:
        case Begin():
            return _begin(ledger, event, now)
        case Tick():
            return _drop(ledger, [r for r in ledger.receipts.values() if _aged(r, now)])
        case Note():
            receipt = _pending(ledger, event.request_id)
            receipt = receipt.with_(vm_id=event.vm_id or receipt.vm_id, job_id=event.job_id or receipt.job_id)
            return _put(ledger, receipt), (Save(receipt),)
        case Complete():
            receipt = _pending(ledger, event.request_id)
            receipt = receipt.with_(
                state=ReceiptState.DONE,
                completed_at=now,
                answer=dict(event.answer),
                vm_id=event.vm_id or receipt.vm_id,
                job_id=event.job_id or receipt.job_id,
            )
            return _put(ledger, receipt), (Save(receipt),)
        case Lose():
            receipt = _pending(ledger, event.request_id)
            receipt = receipt.with_(state=ReceiptState.UNKNOWN, completed_at=now)
            return _put(ledger, receipt), (Save(receipt),)
        case Refuse():
            return _drop(ledger, [_pending(ledger, event.request_id)])


def _begin(ledger: Ledger, event: Begin, now: float) -> Decision:
    known = ledger.receipts.get(event.request_id)
    freed: tuple[Effect, ...] = ()
    if known is not None and _aged(known, now):
        ledger, freed = _drop(ledger, [known])
        known = None
    if known is not None:
        return ledger, (_meet(known, event),)
    if len(ledger.receipts) >= MAX_RECEIPTS:
        ledger, evicted = _evict(ledger, now)
        freed += evicted
        if len(ledger.receipts) >= MAX_RECEIPTS:
            return ledger, (*freed, _full())
    receipt = Receipt(
        workspace_id=ledger.workspace_id,
        request_id=event.request_id,
        tool=event.tool,
        args_hash=event.args_hash,
        state=ReceiptState.PENDING,
        created_at=now,
    )
    return _put(ledger, receipt), (*freed, Save(receipt), Work(receipt))


def _meet(known: Receipt, event: Begin) -> Join | Replay | Deny:
    if (known.tool, known.args_hash) != (event.tool, event.args_hash):
        return Deny(
            "request_id_conflict",
            f"The request id was used for {known.tool} with other arguments; new work needs a new id.",
        )
    if known.state is ReceiptState.PENDING:
        return Join(known)
    if known.state is ReceiptState.DONE:
        return Replay(known)
    found = {
        name: value for name, value in (("vm_id", known.vm_id), ("job_id", known.job_id)) if value is not None
    }
    return Deny(
        "outcome_unknown",
        "The service was interrupted during this request and cannot say whether it took effect; it is not "
        "run again. vm_list and vm_status show what exists; use a new request_id to go on.",
        found,
    )


def _full() -> Deny:
    return Deny(
        "receipt_limit",
        f"The workspace has {MAX_RECEIPTS} recent requests on record; wait until older ones have aged out.",
        retry_after_s=RETRY_AFTER_S,
    )


def _evict(ledger: Ledger, now: float) -> Decision:
    """Makes room: all that is aged, else the done receipt that ended first, if that was long enough ago."""
    aged: list[Receipt] = []
    oldest: Receipt | None = None
    for receipt in ledger.receipts.values():  # in the order of ending: what is still young ends the search
        if receipt.completed_at is None:
            continue
        if _aged(receipt, now):
            aged.append(receipt)
            continue
        if aged or now - receipt.completed_at <= EVICTABLE_AFTER_S:
            break
        if receipt.state is ReceiptState.DONE:  # an unknown one must never run again, so pressure spares it
            oldest = receipt
            break
    return _drop(ledger, aged or ([oldest] if oldest is not None else []))


def _aged(receipt: Receipt, now: float) -> bool:
    return receipt.completed_at is not None and now - receipt.completed_at >= AGE_S


def _ended_at(receipt: Receipt) -> float:
    return receipt.created_at if receipt.completed_at is None else receipt.completed_at


def _pending(ledger: Ledger, request_id: str) -> Receipt:
    receipt = ledger.receipts[request_id]
    assert receipt.state is ReceiptState.PENDING, receipt
    return receipt


def _put(ledger: Ledger, receipt: Receipt) -> Ledger:
    receipts = dict(ledger.receipts)
    if receipt.completed_at is not None:
        receipts.pop(receipt.request_id, None)  # to the end: the mapping's order is the order of ending
    receipts[receipt.request_id] = receipt
    return Ledger(ledger.workspace_id, receipts)


def _drop(ledger: Ledger, gone: list[Receipt]) -> Decision:
    if not gone:
        return ledger, ()
    ids = tuple(receipt.request_id for receipt in gone)
    lost = frozenset(ids)
    rest = {name: receipt for name, receipt in ledger.receipts.items() if name not in lost}
    return Ledger(ledger.workspace_id, rest), (Drop(ledger.workspace_id, ids),)
