"""A request id has one effect: the first does the work, twins wait for it, retries get its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.errors import CapacityError, HostError, MicrovmError
from microvm.fleet.receipts import Begun, OutcomeUnknownError, Receipts, hash_arguments
from microvm.model import ReceiptState, WorkspaceId
from microvm.store import Store, open_registry, open_store

ALICE = WorkspaceId("alice")
LONG_S = 10.0
CLIENTS = 20


@asynccontextmanager
async def running(state_dir: Path) -> AsyncGenerator[tuple[Receipts, Store]]:
    """One run of a service that knows the receipts of the last."""
    with open_registry(state_dir) as registry:
        if registry.workspace(ALICE) is None:
            registry.issue_token(ALICE)
    with trio.fail_after(LONG_S):
        async with open_store(state_dir) as store, trio.open_nursery() as nursery:
            receipts = Receipts(store, nursery)
            await receipts.load((await store.load()).receipts)
            yield receipts, store


class Work:
    """Counts how often it is done."""

    def __init__(self, error: Exception | None = None, *, commits: bool = True) -> None:
        self.runs = 0
        self.go_on = trio.Event()
        self.error = error
        self.commits = commits

    async def __call__(self, begun: Begun) -> dict[str, Any]:
        self.runs += 1
        if self.commits:
            await begun.commit()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return {"run": self.runs}


def done(error: Exception | None = None, *, commits: bool = True) -> Work:
    work = Work(error, commits=commits)
    work.go_on.set()
    return work


async def test_twins_wait_for_the_one_that_works(state_dir: Path) -> None:
    work = Work()
    async with running(state_dir) as (receipts, _), trio.open_nursery() as nursery:
        answers: list[dict[str, Any]] = []
        fresh = 0

        async def ask() -> None:
            nonlocal fresh
            outcome = await receipts.once(ALICE, "r", "vm_exec", {"a": 1}, work)
            answers.append(outcome.answer)
            fresh += outcome.fresh

        for _ in range(CLIENTS):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        assert not answers
        work.go_on.set()
        while len(answers) < CLIENTS:
            await trio.lowlevel.checkpoint()
        assert answers == [{"run": 1}] * CLIENTS
        assert work.runs == fresh == 1


async def test_an_answer_outlives_the_service(state_dir: Path) -> None:
    work = done()
    async with running(state_dir) as (receipts, _):
        await receipts.once(ALICE, "r", "vm_exec", {"a": 1}, work)
    async with running(state_dir) as (receipts, _):
        again = await receipts.once(ALICE, "r", "vm_exec", {"a": 1}, work)
        assert again.answer == {"run": 1}
        assert not again.fresh
    assert work.runs == 1


@pytest.mark.parametrize(("tool", "arguments"), [("vm_exec", {"a": 2}), ("vm_create", {"a": 1})])
async def test_an_id_names_one_request(state_dir: Path, tool: str, arguments: dict[str, Any]) -> None:
    work = done()
    async with running(state_dir) as (receipts, _):
        await receipts.once(ALICE, "r", "vm_exec", {"a": 1}, work)
        with pytest.raises(MicrovmError) as refused:
            await receipts.once(ALICE, "r", tool, arguments, work)
        assert refused.value.code == "request_id_conflict"
        await receipts.once(WorkspaceId("operator"), "r", tool, arguments, work)
    assert work.runs == 2


@pytest.mark.parametrize("commits", [False, True])
async def test_a_refused_request_leaves_its_id_free(state_dir: Path, commits: bool) -> None:
    refusal = CapacityError("no_capacity", "full")
    async with running(state_dir) as (receipts, store):
        with pytest.raises(CapacityError) as refused:
            await receipts.once(ALICE, "r", "vm_exec", {}, done(refusal, commits=commits))
        assert refused.value is refusal
        await receipts.once(ALICE, "r", "vm_exec", {"other": True}, done())
    async with running(state_dir) as (_, store):
        assert [receipt.state for receipt in (await store.load()).receipts] == [ReceiptState.DONE]


async def test_twins_of_a_refused_request_are_refused_alike(state_dir: Path) -> None:
    work = Work(CapacityError("no_capacity", "full"))
    async with running(state_dir) as (receipts, _), trio.open_nursery() as nursery:
        codes: list[str] = []

        async def ask() -> None:
            with pytest.raises(CapacityError) as refused:
                await receipts.once(ALICE, "r", "vm_exec", {}, work)
            codes.append(refused.value.code)

        for _ in range(3):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        work.go_on.set()
    assert codes == ["no_capacity"] * 3
    assert work.runs == 1


async def test_work_whose_effect_nobody_knows_is_never_run_again(state_dir: Path) -> None:
    lost = OutcomeUnknownError(MicrovmError("guest_timeout", "no answer"))
    work = done(lost)
    async with running(state_dir) as (receipts, _):
        with pytest.raises(MicrovmError) as first:
            await receipts.once(ALICE, "r", "vm_exec", {}, work)
        assert first.value.code == "guest_timeout"
    async with running(state_dir) as (receipts, _):
        with pytest.raises(MicrovmError) as again:
            await receipts.once(ALICE, "r", "vm_exec", {}, work)
        assert again.value.code == "outcome_unknown"
    assert work.runs == 1


async def test_a_bug_in_the_work_is_not_repeated_and_its_twins_do_not_wait_for_ever(state_dir: Path) -> None:
    work = done(ValueError("a bug"))
    async with running(state_dir) as (receipts, _):
        with pytest.raises(ValueError, match="a bug"):
            await receipts.once(ALICE, "r", "vm_exec", {}, work)
        with pytest.raises(MicrovmError) as again:
            await receipts.once(ALICE, "r", "vm_exec", {}, work)
        assert again.value.code == "outcome_unknown"
    assert work.runs == 1


async def test_work_that_a_crash_cut_short_is_unknown_after_the_next_start(state_dir: Path) -> None:
    work = Work()
    async with running(state_dir) as (receipts, _), trio.open_nursery() as nursery:
        nursery.start_soon(receipts.once, ALICE, "r", "vm_exec", dict[str, Any](), work)
        while not work.runs:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with running(state_dir) as (receipts, _):
        with pytest.raises(MicrovmError) as refused:
            await receipts.once(ALICE, "r", "vm_exec", {}, done())
        assert refused.value.code == "outcome_unknown"


async def test_a_receipt_that_cannot_be_written_has_nothing_done(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(state_dir) as (receipts, store):

        async def fail(*_writes: object) -> list[Any]:
            raise HostError("commit to", "metadata", 28)

        with monkeypatch.context() as patch:
            patch.setattr(store, "commit", fail)
            with pytest.raises(HostError):
                await receipts.once(ALICE, "r", "vm_exec", {}, done())
        assert (await receipts.once(ALICE, "r", "vm_exec", {}, done())).fresh


def test_the_order_of_arguments_makes_no_other_request() -> None:
    assert hash_arguments({"a": 1, "b": [1, {"c": 2, "d": "ü"}]}) == hash_arguments(
        {"b": [1, {"d": "ü", "c": 2}], "a": 1}
    )
    assert hash_arguments({"a": 1}) != hash_arguments({"a": "1"})
    assert hash_arguments({"a": "\ud800"})  # not Unicode, and still an argument
