"""Retries: a request id has one effect, whatever the network does.

`Receipts.once` asks `policy.receipts`, writes the receipt before the work, and records how it ended. Twins
that arrive while the work runs wait for its answer. This module must not know what the work is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from microvm.errors import MicrovmError, RequestError
from microvm.fleet.log import log
from microvm.model import Receipt, WorkspaceId
from microvm.policy import receipts as policy
from microvm.policy.receipts import Complete, Deny, Drop, Effect, Join, Ledger, Lose, Refuse, Replay, Save
from microvm.store import Store, writes
from microvm.store.writes import Write

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request did: its answer, and whether it was done for this very call."""

    answer: Answer
    fresh: bool


class OutcomeUnknownError(Exception):
    """Raised by work whose effect may or may not have happened.

    Args:
        cause: What the caller is told.
    """

    def __init__(self, cause: MicrovmError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Begun:
    """Given to the work: it calls `commit` once, before its first effect.

    The receipt is written in one commit with whatever else must be known from then on.
    """

    def __init__(self, receipts: Receipts, pending: tuple[Effect, ...]) -> None:
        self._receipts = receipts
        self._pending = pending
        self.committed = False

    async def commit(self, *also: Write[Any]) -> list[Any]:
        """Writes the receipt and `also`; returns what those answer."""
        answers = await self._receipts.save(self._pending, *also)
        self.committed = True
        return answers[len(answers) - len(also) :]


Work = Callable[[Begun], Awaitable[Answer]]


@dataclass(slots=True)
class _Running:
    """Work under way, and those who wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    answer: Answer | None = None
    error: MicrovmError | None = None


class Receipts:
    """The receipts of all workspaces.

    Args:
        store: Where they are kept.
        known: What the store holds at start-up; pending ones become unknown.
        nursery: Writes completions, which no caller waits for.
    """

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self._store = store
        self._nursery = nursery
        self._ledgers: dict[WorkspaceId, Ledger] = {}
        self._running: dict[tuple[WorkspaceId, str], _Running] = {}

    async def load(self, known: Iterable[Receipt]) -> None:
        """Takes over what the store holds; for the start-up."""
        by_workspace: dict[WorkspaceId, list[Receipt]] = {}
        for receipt in known:
            by_workspace.setdefault(receipt.workspace_id, []).append(receipt)
        for workspace_id, receipts in by_workspace.items():
            self._ledgers[workspace_id], effects = policy.restart(workspace_id, receipts, time.time())
            if effects:
                await self.save(effects)

    async def once(
        self, workspace_id: WorkspaceId, request_id: str, tool: str, arguments: Mapping[str, Any], work: Work
    ) -> Outcome:
        """Does `work` unless it was done, or is being done, for this id.

        Args:
            workspace_id: Whose id it is.
            request_id: Unique in the workspace, over all tools.
            tool: What is asked for.
            work: Does it; calls its argument's `commit` before its first effect.
            arguments: Canonical and JSON-safe; whatever is no part of the request (a wait) is left out.

        Raises:
            RequestError: `request_id_conflict`, `outcome_unknown`, `receipt_limit`.
            MicrovmError: What the work raised; a refusal before its commit is forgotten.

        Cancellation: must not reach the work; callers run this in a nursery of the service.
        """
        key = (workspace_id, request_id)
        ledger = self._ledgers.get(workspace_id) or Ledger(workspace_id)
        event = policy.Begin(request_id, tool, hash_arguments(arguments))
        self._ledgers[workspace_id], effects = policy.decide(ledger, event, time.time())
        verdict = effects[-1]
        if isinstance(verdict, Deny):
            raise _denied(verdict)
        if isinstance(verdict, Replay):
            assert verdict.receipt.answer is not None
            return Outcome(verdict.receipt.answer, fresh=False)
        if isinstance(verdict, Join):
            return await self._join(self._running[key])
        return await self._work(key, effects, work)

    async def _join(self, running: _Running) -> Outcome:
        await running.done.wait()
        if running.error is not None:
            raise running.error
        assert running.answer is not None
        return Outcome(running.answer, fresh=False)

    async def _work(self, key: tuple[WorkspaceId, str], effects: tuple[Effect, ...], work: Work) -> Outcome:
        running = self._running[key] = _Running()
        begun = Begun(self, effects)
        request_id = key[1]
        event: policy.Event = Lose(request_id)  # for whatever ends this without a word
        try:
            running.answer = await work(begun)
            event = Complete(request_id, running.answer)
        except OutcomeUnknownError as unknown:
            running.error = unknown.cause
        except MicrovmError as error:
            running.error = error
            event = Refuse(request_id)
        finally:
            if running.answer is None and running.error is None:
                running.error = MicrovmError(
                    "outcome_unknown",
                    "The service was interrupted during this request; see vm_list and vm_status.",
                )
            self._end(key, event, stored=begun.committed)
            running.done.set()
        if running.error is not None:
            raise running.error
        return Outcome(running.answer, fresh=True)  # type: ignore[arg-type]

    def _end(self, key: tuple[WorkspaceId, str], event: policy.Event, *, stored: bool) -> None:
        del self._running[key]
        self._ledgers[key[0]], effects = policy.decide(self._ledgers[key[0]], event, time.time())
        if stored or not isinstance(event, Refuse):
            # Nobody waits for this commit: if it is lost the receipt stays pending, and a restart makes it
            # unknown.
            self._nursery.start_soon(self._save_later, effects)

    async def _save_later(self, effects: tuple[Effect, ...]) -> None:
        try:
            await self.save(effects)
        except MicrovmError as error:
            log.error("receipt not recorded", extra={"why": error.message})

    async def save(self, effects: Iterable[Effect], *also: Write[Any]) -> list[Any]:
        """Writes what the policy wants stored, and `also`, as one commit."""
        to_write: list[Write[Any]] = []
        for effect in effects:
            if isinstance(effect, Save):
                to_write.append(writes.put_receipt(effect.receipt))
            elif isinstance(effect, Drop):
                to_write.append(writes.remove_receipts(effect.workspace_id, effect.request_ids))
        return await self._store.commit(*to_write, *also)


def hash_arguments(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `arguments`."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _denied(verdict: Deny) -> RequestError:
    return RequestError(verdict.code, verdict.message, verdict.detail, retry_after_s=verdict.retry_after_s)
