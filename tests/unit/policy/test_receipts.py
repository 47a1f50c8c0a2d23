"""What a caller gets for a request id, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from microvm.model import JobId, ReceiptState, VmId, WorkspaceId
from microvm.policy import receipts
from microvm.policy.receipts import AGE_S, Begin, Complete, Deny, Join, Ledger, Replay, Work

ALICE = WorkspaceId("alice")
FIRST = Begin("r", "vm_exec", "h")


def after(*events: receipts.Event, now: float = 0.0) -> Ledger:
    ledger = Ledger(ALICE)
    for event in events:
        ledger, _ = receipts.decide(ledger, event, now)
    return ledger


def answer(ledger: Ledger, event: receipts.Event, now: float = 1.0) -> Any:
    return receipts.decide(ledger, event, now)[1][-1]


def test_the_first_request_works_and_a_duplicate_joins_it() -> None:
    assert isinstance(answer(Ledger(ALICE), FIRST), Work)
    assert isinstance(answer(after(FIRST), FIRST), Join)


def test_an_answered_request_is_replayed_with_what_it_made() -> None:
    done = answer(after(FIRST, Complete("r", {"ok": 1}, VmId("vm"), JobId("job"))), FIRST)
    assert isinstance(done, Replay)
    assert (done.receipt.answer, done.receipt.vm_id, done.receipt.job_id) == ({"ok": 1}, "vm", "job")


@pytest.mark.parametrize("other", [Begin("r", "vm_exec", "other"), Begin("r", "vm_create", "h")])
def test_other_arguments_or_another_tool_are_a_conflict_in_every_state(other: Begin) -> None:
    for ledger in (
        after(FIRST),
        after(FIRST, Complete("r", {})),
        after(FIRST, receipts.Lose("r")),
    ):
        denied = answer(ledger, other)
        assert isinstance(denied, Deny)
        assert denied.code == "request_id_conflict"


def test_a_lost_request_is_never_run_again_and_says_what_is_known() -> None:
    denied = answer(after(FIRST, receipts.Note("r", VmId("vm_1")), receipts.Lose("r")), FIRST)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.detail) == ("outcome_unknown", {"vm_id": "vm_1"})


def test_a_refused_request_leaves_no_trace() -> None:
    assert after(FIRST, receipts.Refuse("r")) == Ledger(ALICE)


def test_a_restart_makes_pending_requests_unknown_and_keeps_answers() -> None:
    pending = after(FIRST, Begin("done", "vm_exec", "h"), Complete("done", {})).receipts.values()
    ledger, effects = receipts.restart(ALICE, pending, 5.0)
    assert ledger.receipts["r"].state is ReceiptState.UNKNOWN
    assert ledger.receipts["done"].state is ReceiptState.DONE
    assert effects == (receipts.Save(ledger.receipts["r"]),)


def test_a_receipt_is_forgotten_a_day_after_its_completion() -> None:
    ledger = after(FIRST, Complete("r", {}), now=0.0)
    assert isinstance(answer(ledger, FIRST, AGE_S - 0.1), Replay)
    _, effects = receipts.decide(ledger, FIRST, AGE_S)
    assert isinstance(effects[0], receipts.Drop)
    assert isinstance(effects[-1], Work)
    assert receipts.decide(ledger, receipts.Tick(), AGE_S)[0] == Ledger(ALICE)


def test_pending_work_never_ages() -> None:
    assert isinstance(answer(after(FIRST), FIRST, 100 * AGE_S), Join)
