"""The daemon's store: one writer, and a reader for authentication.

Every write is one FULL commit in one thread call, one at a time and in the order asked for (a
`CapacityLimiter` of 1 is a queue). A cancelled call has not happened if it had not begun; one that has begun
is finished and reported. Reads of live state do not come here: `load` is for start-up, `authenticate` and
`workspace` are for each request.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import trio

from microvm.model import (
    Intent,
    JobId,
    JobRecord,
    Principal,
    Receipt,
    ReceiptState,
    VmId,
    VmRecord,
    Workspace,
    WorkspaceId,
)
from microvm.store import database, rows, writes
from microvm.store.rows import TemplateRow
from microvm.store.tokens import find_principal
from microvm.store.writes import Write

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything live, as of start-up. Jobs and receipts are oldest first."""

    workspaces: list[Workspace]
    vms: list[VmRecord]
    jobs: list[JobRecord]
    receipts: list[Receipt]
    open_intents: list[Intent]
    templates: list[TemplateRow]


class Store:
    """The metadata of a service; made by `open_store`.

    Raises (all methods): HostError when the file cannot be read or written; nothing was changed.
    """

    def __init__(
        self, writer: sqlite3.Connection, reader: sqlite3.Connection, clock: Callable[[], float]
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._limiter = trio.CapacityLimiter(1)
        self.instance_id = database.instance_id(reader)

    # ---- each request, synchronous ----

    def authenticate(self, secret: str) -> Principal | None:
        """Who presents `secret`; None for unknown, malformed, expired and revoked ones alike.

        Reads the file each time, since the command line issues and revokes beside a live daemon. Takes tens
        of microseconds in the calling thread, which must be the one that opened the store.
        """
        with database.translated("authenticate"):
            return find_principal(self._reader, secret, self._clock())

    def workspace(self, workspace_id: WorkspaceId) -> Workspace | None:
        """A workspace's policy as it is now; same costs and rules as `authenticate`."""
        with database.translated("read"):
            cursor = _cursor(self._reader)
            row = cursor.execute(
                "SELECT * FROM workspaces WHERE workspace_id = ?", (workspace_id,)
            ).fetchone()
        return None if row is None else rows.workspace_from(row)

    # ---- start-up ----

    async def load(self) -> Loaded:
        """Everything live."""
        return await self._run(_load)

    async def open_intents(self) -> list[Intent]:
        """Intents that were never closed, oldest first."""
        return await self._run(_open_intents)

    async def journal(self, vm_id: VmId) -> list[Intent]:
        """All that the journal still knows of a VM, oldest first; also after it is gone."""
        return await self._run(lambda db: _journal(db, vm_id))

    # ---- writes ----

    async def commit(self, *to_write: Write[Any]) -> list[Any]:
        """Writes everything, in order, as one FULL commit.

        Returns:
            What each write answers.

        Raises:
            RequestError: One of the writes was refused (`name_taken`); none was done.

        Cancellation: before the transaction began it did not happen; afterwards it is finished first.
        """

        def run(db: sqlite3.Connection) -> list[Any]:
            with database.transaction(db):
                return [write(db) for write in to_write]

        return await self._run(run)

    async def insert_vm(
        self, record: VmRecord, op: str = "create", args: Mapping[str, Any] | None = None, *also: Write[Any]
    ) -> int:
        """A new VM and the intent to make it; the answer is the intent's id.

        Raises:
            RequestError: `name_taken`; nothing was written.
        """
        answers = await self.commit(
            writes.insert_vm(record), writes.intent(record.vm_id, op, args, self._clock()), *also
        )
        return answers[1]

    async def update_vm(self, vm_id: VmId, **changes: Any) -> None:
        """New values for some fields of a VM's record."""
        await self.commit(writes.change_vm(vm_id, **changes))

    async def delete_vm(self, vm_id: VmId, intent_id: int | None = None) -> None:
        """Forgets a VM and its jobs, and closes the intent that led here."""
        closing = [] if intent_id is None else [writes.done(intent_id, "gone", self._clock())]
        await self.commit(writes.remove_vm(vm_id), *closing)

    async def journal_intent(
        self, vm_id: VmId, op: str, args: Mapping[str, Any] | None = None, **changes: Any
    ) -> int:
        """Says what is about to be done, and changes the record, in one commit; answers the intent's id."""
        answers = await self.commit(
            writes.change_vm(vm_id, **changes), writes.intent(vm_id, op, args, self._clock())
        )
        return answers[1]

    async def journal_step(
        self, intent_id: int, step: str, vm_id: VmId | None = None, **changes: Any
    ) -> None:
        """Says how far an intent has come (such as "spent"), with the record's change, in one commit."""
        changing = [] if vm_id is None else [writes.change_vm(vm_id, **changes)]
        assert vm_id is not None or not changes
        await self.commit(writes.step(intent_id, step, self._clock()), *changing)

    async def journal_done(
        self, intent_id: int, outcome: str = "done", vm_id: VmId | None = None, **changes: Any
    ) -> None:
        """Closes an intent, with the record's change, in one commit."""
        assert vm_id is not None or not changes
        changing = [] if vm_id is None else [writes.change_vm(vm_id, **changes)]
        await self.commit(writes.done(intent_id, outcome, self._clock()), *changing)

    async def prune_journal(self, older_than_s: float) -> int:
        """Forgets closed intents older than that; the answer is how many."""
        return (await self.commit(writes.prune_journal(self._clock() - older_than_s)))[0]

    async def put_jobs(self, *jobs: JobRecord) -> None:
        """Jobs as they are now, new or not."""
        await self.commit(*(writes.put_job(job) for job in jobs))

    async def delete_jobs(self, job_ids: Iterable[JobId]) -> None:
        """Forgets jobs."""
        await self.commit(writes.remove_jobs(job_ids))

    async def begin_receipt(self, receipt: Receipt, *also: Write[Any]) -> None:
        """Remembers a request before its work begins, with whatever else must be known from then on."""
        await self.commit(writes.put_receipt(receipt), *also)

    async def complete_receipt(self, receipt: Receipt, *also: Write[Any]) -> None:
        """Records the answer of a request, or that it is unknown; `receipt` is the completed one."""
        assert receipt.state is not ReceiptState.PENDING
        await self.commit(writes.put_receipt(receipt), *also)

    async def forget_receipts(self, workspace_id: WorkspaceId, request_ids: Iterable[str]) -> None:
        """Forgets requests: refused before any effect, evicted, or aged out."""
        await self.commit(writes.remove_receipts(workspace_id, request_ids))

    async def put_template(self, template: TemplateRow) -> None:
        """A template as it is now, new or not."""
        await self.commit(writes.put_template(template))

    async def delete_template(self, key: str) -> None:
        """Forgets a template."""
        await self.commit(writes.remove_template(key))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await trio.to_thread.run_sync(work, self._writer, limiter=self._limiter)

    async def aclose(self) -> None:
        """Closes both connections after the write under way; the last one out folds the log into the file."""
        with trio.CancelScope(shield=True):
            self._reader.close()
            await self._run(sqlite3.Connection.close)


@asynccontextmanager
async def open_store(state_dir: Path, clock: Callable[[], float] = time.time) -> AsyncGenerator[Store, None]:
    """The store of a state directory, made or migrated where needed.

    Args:
        state_dir: On another file system than RAM files and disks: a commit beside their fsyncs takes up to
            0.8 s.
        clock: Seconds since the epoch, UTC.

    Raises:
        HostError: The directory or file cannot be used, or the file is newer than this program.
    """
    writer = await trio.to_thread.run_sync(database.open_writer, state_dir, clock())
    try:
        reader = database.open_reader(state_dir)
    except BaseException:
        writer.close()
        raise
    store = Store(writer, reader, clock)
    try:
        yield store
    finally:
        await store.aclose()


def _cursor(db: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor


def _load(db: sqlite3.Connection) -> Loaded:
    cursor = _cursor(db)
    with database.translated("read"):
        db.execute("BEGIN")  # one snapshot, whatever the command line does meanwhile
        try:
            return Loaded(
                workspaces=[rows.workspace_from(r) for r in cursor.execute("SELECT * FROM workspaces")],
                vms=[rows.vm_from(r) for r in cursor.execute("SELECT * FROM vms ORDER BY created_at, vm_id")],
                jobs=[
                    rows.job_from(r) for r in cursor.execute("SELECT * FROM jobs ORDER BY started_at, job_id")
                ],
                receipts=[
                    rows.receipt_from(r)
                    for r in cursor.execute("SELECT * FROM receipts ORDER BY completed_at, created_at")
                ],
                open_intents=_open_intents(db),
                templates=[
                    rows.template_from(r) for r in cursor.execute("SELECT * FROM templates ORDER BY key")
                ],
            )
        finally:
            db.execute("COMMIT")


def _open_intents(db: sqlite3.Connection) -> list[Intent]:
    with database.translated("read"):
        found = _cursor(db).execute("SELECT * FROM journal WHERE done_at IS NULL ORDER BY intent_id")
        return [rows.intent_from(row) for row in found]


def _journal(db: sqlite3.Connection, vm_id: VmId) -> list[Intent]:
    with database.translated("read"):
        found = _cursor(db).execute("SELECT * FROM journal WHERE vm_id = ? ORDER BY intent_id", (vm_id,))
        return [rows.intent_from(row) for row in found]
