"""No sequence of requests, answers, losses, restarts and time makes the same request run twice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from microvm.model import Receipt, ReceiptState, WorkspaceId
from microvm.policy import receipts
from microvm.policy.receipts import AGE_S, EVICTABLE_AFTER_S, MAX_RECEIPTS

ALICE = WorkspaceId("alice")

Op = tuple[str, Any]

_IDS = st.sampled_from(["a", "b", "c"])
_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.tuples(_IDS, st.sampled_from(["h1", "h2"]))),
        st.tuples(st.just("complete"), _IDS),
        st.tuples(st.just("lose"), _IDS),
        st.tuples(st.just("refuse"), _IDS),
        st.tuples(st.just("note"), _IDS),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("tick"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([1.0, EVICTABLE_AFTER_S, AGE_S])),
    ),
    max_size=60,
)


class Disk:
    """The receipts as a store would have them after the effects."""

    def __init__(self) -> None:
        self.receipts: dict[str, Receipt] = {}

    def run(self, effects: tuple[receipts.Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, receipts.Save):
                self.receipts[effect.receipt.request_id] = effect.receipt
            elif isinstance(effect, receipts.Drop):
                for request_id in effect.request_ids:
                    del self.receipts[request_id]


@given(_OPS)
def test_receipts_never_run_a_request_twice_and_the_store_agrees_with_the_ledger(ops: list[Op]) -> None:
    now = 0.0
    disk = Disk()
    ledger, _ = receipts.restart(ALICE, [], now)
    last_run: dict[
        str, tuple[str, float | None]
    ] = {}  # id → hash of the last work, when it ended (None: it has not)
    for name, value in ops:
        if name == "wait":
            now += value
            continue
        event = _event(name, value)
        if isinstance(event, receipts.Begin):
            ledger, effects = receipts.decide(ledger, event, now)
            outcome = effects[-1]
            ran = last_run.get(event.request_id)
            if isinstance(outcome, receipts.Work):
                # only what nobody has done, or what ended a day ago
                assert ran is None or (ran[1] is not None and now - ran[1] >= AGE_S)
                last_run[event.request_id] = (event.args_hash, None)
                assert isinstance(effects[-2], receipts.Save)  # on disk before it acts
            elif isinstance(outcome, receipts.Join | receipts.Replay):
                assert ran is not None
                assert ran[0] == event.args_hash
            else:
                assert isinstance(outcome, receipts.Deny)
                assert outcome.code in {"request_id_conflict", "outcome_unknown"}
        elif event is None:
            ledger, effects = receipts.restart(ALICE, disk.receipts.values(), now)
            last_run = {k: (h, now if at is None else at) for k, (h, at) in last_run.items()}
        elif isinstance(event, receipts.Tick):
            ledger, effects = receipts.decide(ledger, event, now)
        else:
            known = ledger.receipts.get(event.request_id)
            if known is None or known.state is not ReceiptState.PENDING:
                continue
            ledger, effects = receipts.decide(ledger, event, now)
            if isinstance(event, receipts.Refuse):
                del last_run[event.request_id]
            elif isinstance(event, receipts.Complete | receipts.Lose):
                last_run[event.request_id] = (last_run[event.request_id][0], now)
        disk.run(effects)
        assert disk.receipts == dict(ledger.receipts)


def _event(name: str, value: Any) -> receipts.Event | None:
    match name:
        case "begin":
            return receipts.Begin(value[0], "vm_exec", value[1])
        case "complete":
            return receipts.Complete(value, {"ok": {}})
        case "lose":
            return receipts.Lose(value)
        case "refuse":
            return receipts.Refuse(value)
        case "note":
            return receipts.Note(value)
        case "tick":
            return receipts.Tick()
        case _:
            return None


@given(
    st.lists(
        st.tuples(st.sampled_from(ReceiptState), st.floats(0, 2 * AGE_S)),
        min_size=1,
        max_size=40,
    )
)
def test_under_pressure_only_old_done_receipts_go_and_the_one_that_ended_first(
    some: list[tuple[ReceiptState, float]],
) -> None:
    now = 2 * AGE_S
    crowd = [_receipt(f"young{n}", ReceiptState.DONE, now) for n in range(MAX_RECEIPTS - len(some))]
    mixed = [_receipt(f"m{n}", state, ended) for n, (state, ended) in enumerate(some)]
    ledger = receipts.Ledger(ALICE, {each.request_id: each for each in _by_end([*mixed, *crowd])})
    after, effects = receipts.decide(ledger, receipts.Begin("new", "vm_exec", "h"), now)
    ended = {each.request_id: each.completed_at for each in mixed if each.completed_at is not None}
    aged = {name for name, at in ended.items() if now - at >= AGE_S}
    evictable = {
        each.request_id: each.completed_at
        for each in mixed
        if each.state is ReceiptState.DONE
        and each.completed_at is not None
        and now - each.completed_at > EVICTABLE_AFTER_S
    }
    dropped = {name for effect in effects if isinstance(effect, receipts.Drop) for name in effect.request_ids}
    if aged:
        assert dropped == aged
    elif evictable:
        (gone,) = dropped
        assert evictable[gone] == min(evictable.values())
    else:
        assert not dropped
        assert after is ledger
        assert isinstance(effects[-1], receipts.Deny)
        assert effects[-1].code == "receipt_limit"
        return
    assert isinstance(effects[-1], receipts.Work)
    assert len(after.receipts) <= MAX_RECEIPTS


def _receipt(request_id: str, state: ReceiptState, ended: float) -> Receipt:
    pending = state is ReceiptState.PENDING
    return Receipt(
        ALICE,
        request_id,
        "vm_exec",
        "h",
        state,
        0.0,
        None if pending else ended,
        {} if state is ReceiptState.DONE else None,
    )


def _by_end(some: list[Receipt]) -> list[Receipt]:
    return sorted(some, key=lambda each: (each.completed_at is not None, each.completed_at or 0.0))
