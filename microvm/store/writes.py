"""What can be written, as values: `Store.commit` runs any number of them as one transaction.

A journal record and the change that it announces, or a receipt and the job behind it, belong into one commit,
so each of these is a function of a connection in an open transaction, and none begins or ends one. Rows that
ought to exist and do not are bugs, and assertions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from microvm.errors import RequestError
from microvm.model import JobRecord, Receipt, VmId, VmRecord, WorkspaceId
from microvm.store.rows import Columns, TemplateRow, columns_of, encode_json, record_columns

T = TypeVar("T")
Write = Callable[[sqlite3.Connection], T]
"""Something to write; what it returns is the commit's answer for it."""

_VM_FIELDS: Final = frozenset(each.name for each in fields(VmRecord))
_FIXED_VM_FIELDS: Final = frozenset({"vm_id", "workspace_id", "created_at"})


def insert_vm(record: VmRecord) -> Write[None]:
    """A new VM.

    Raises:
        RequestError: `name_taken`.
    """

    def write(db: sqlite3.Connection) -> None:
        with _names_guarded(record.name):
            _insert(db, "vms", record_columns(record))

    return write


def change_vm(vm_id: VmId, **changes: Any) -> Write[None]:
    """New values for some fields of a VM's record.

    Raises:
        RequestError: `name_taken`.
    """
    assert changes.keys() <= _VM_FIELDS - _FIXED_VM_FIELDS, changes.keys()

    def write(db: sqlite3.Connection) -> None:
        if not changes:
            return
        columns = columns_of(changes)
        assignments = ", ".join(f"{column} = ?" for column in columns)
        with _names_guarded(changes.get("name")):
            cursor = db.execute(
                f"UPDATE vms SET {assignments} WHERE vm_id = ?",  # noqa: S608 - columns are this package's
                (*columns.values(), vm_id),
            )
        assert cursor.rowcount == 1, vm_id

    return write


def remove_vm(vm_id: VmId) -> Write[None]:
    """Forgets a VM and its jobs; receipts and journal stay. Removing what is gone changes nothing."""

    def write(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM vms WHERE vm_id = ?", (vm_id,))

    return write


def intent(vm_id: VmId, op: str, args: Mapping[str, Any] | None, at: float) -> Write[int]:
    """Says what is about to be done; the answer is the intent's id."""

    def write(db: sqlite3.Connection) -> int:
        cursor = db.execute(
            "INSERT INTO journal (vm_id, op, args, intent_at) VALUES (?, ?, ?, ?)",
            (vm_id, op, encode_json(dict(args or {})), at),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    return write


def step(intent_id: int, name: str, at: float) -> Write[None]:
    """Says how far an open intent has come."""

    def write(db: sqlite3.Connection) -> None:
        cursor = db.execute(
            "UPDATE journal SET steps = json_insert(steps, '$[#]', json_array(?, ?))"
            " WHERE intent_id = ? AND done_at IS NULL",
            (name, at, intent_id),
        )
        assert cursor.rowcount == 1, intent_id

    return write


def done(intent_id: int, outcome: str, at: float) -> Write[None]:
    """Closes an open intent."""

    def write(db: sqlite3.Connection) -> None:
        cursor = db.execute(
            "UPDATE journal SET done_at = ?, outcome = ? WHERE intent_id = ? AND done_at IS NULL",
            (at, outcome, intent_id),
        )
        assert cursor.rowcount == 1, intent_id

    return write


def prune_journal(before: float) -> Write[int]:
    """Forgets closed intents that ended before `before`; the answer is how many."""

    def write(db: sqlite3.Connection) -> int:
        return db.execute("DELETE FROM journal WHERE done_at < ?", (before,)).rowcount

    return write


def put_job(job: JobRecord) -> Write[None]:
    """A job as it is now, new or not; of the command the first 200 characters are kept."""

    def write(db: sqlite3.Connection) -> None:
        _put(db, "jobs", record_columns(job), ("job_id",))

    return write


def remove_jobs(job_ids: Iterable[str]) -> Write[None]:
    """Forgets jobs."""
    rows = [(job_id,) for job_id in job_ids]

    def write(db: sqlite3.Connection) -> None:
        db.executemany("DELETE FROM jobs WHERE job_id = ?", rows)

    return write


def put_receipt(receipt: Receipt) -> Write[None]:
    """A receipt as it is now, new or not."""

    def write(db: sqlite3.Connection) -> None:
        _put(db, "receipts", record_columns(receipt), ("workspace_id", "request_id"))

    return write


def remove_receipts(workspace_id: WorkspaceId, request_ids: Iterable[str]) -> Write[None]:
    """Forgets receipts of a workspace."""
    rows = [(workspace_id, request_id) for request_id in request_ids]

    def write(db: sqlite3.Connection) -> None:
        db.executemany("DELETE FROM receipts WHERE workspace_id = ? AND request_id = ?", rows)

    return write


def put_template(template: TemplateRow) -> Write[None]:
    """A template as it is now, new or not."""

    def write(db: sqlite3.Connection) -> None:
        _put(db, "templates", record_columns(template), ("key",))

    return write


def remove_template(key: str) -> Write[None]:
    """Forgets a template."""

    def write(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM templates WHERE key = ?", (key,))

    return write


def _insert(db: sqlite3.Connection, table: str, columns: Columns) -> None:
    marks = ", ".join("?" for _ in columns)
    db.execute(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})",  # noqa: S608 - names are this package's
        tuple(columns.values()),
    )


def _put(db: sqlite3.Connection, table: str, columns: Columns, key: tuple[str, ...]) -> None:
    marks = ", ".join("?" for _ in columns)
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in key)
    db.execute(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 - names are this package's
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}",
        tuple(columns.values()),
    )


class _names_guarded:  # noqa: N801 - used as a statement, like contextlib's
    """Turns the violation of the index of names into `name_taken`."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, sqlite3.IntegrityError) and "vms.name" in str(error):
            raise RequestError(
                "name_taken", f"Another VM of this workspace is named {self._name!r}; choose another name."
            ) from error
