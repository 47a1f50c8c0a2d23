"""Records ⇄ rows: which column holds which field, and nothing else.

Pure functions over the values of `model`; the SQL is in `writes` and `store`.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from microvm.model import (
    AgentGeneration,
    Generation,
    Intent,
    JobId,
    JobRecord,
    JobState,
    Quota,
    Receipt,
    ReceiptState,
    SuspendMode,
    VmId,
    VmRecord,
    VmSpec,
    VmState,
    Workspace,
    WorkspaceId,
)

Columns = dict[str, str | int | float | bytes | None]
"""Column name → value, ready for SQLite."""

_COMMAND_CHARACTERS: Final = 200
"""How much of a command is kept (the tool catalogue's JobSummary)."""


@dataclass(frozen=True, slots=True)
class TemplateRow:
    """A template as the store keeps it; `detail` is JSON-safe and the fleet's own."""

    key: str
    state: str
    created_at: float
    last_used_at: float
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


def encode_json(value: object) -> str:
    """Compact ASCII JSON, lone surrogates included; NaN and what JSON cannot say are bugs of the caller."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, sort_keys=True)


def _text(value: str) -> str:
    """`value` as SQLite can keep it: names and messages from outside may hold bytes that are not UTF-8."""
    return str(value) if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def _spec_columns(spec: VmSpec) -> Columns:
    return {
        "memory_mib": spec.memory_mib,
        "vcpus": spec.vcpus,
        "network": int(spec.network),
        "disk_gib": spec.disk_gib,
        "image_digest": spec.image_digest,
    }


def _pair(stem: str) -> Callable[[tuple[int, int]], Columns]:
    return lambda value: {f"{stem}_stdout": value[0], f"{stem}_stderr": value[1]}


_SPREAD: Final[Mapping[str, Callable[[Any], Columns]]] = {
    "spec": _spec_columns,
    "totals": _pair("total"),
    "kept": _pair("kept"),
    "vmm": lambda value: {"vmm": encode_json(value)},
    "env": lambda value: {"env": encode_json(value)},
    "args": lambda value: {"args": encode_json(value)},
    "steps": lambda value: {"steps": encode_json(value)},
    "detail": lambda value: {"detail": encode_json(value)},
    "answer": lambda value: {"answer": None if value is None else encode_json(value)},
    "command": lambda value: {"command": _text(value[:_COMMAND_CHARACTERS])},
}
"""Fields that are not one column of the same name and value."""


def columns_of(changes: Mapping[str, Any]) -> Columns:
    """The columns for some fields of a record."""
    columns: Columns = {}
    for name, value in changes.items():
        spread = _SPREAD.get(name)
        if spread is not None:
            columns |= spread(value)
        elif isinstance(value, bool):
            columns[name] = int(value)
        else:
            columns[name] = _text(value) if isinstance(value, str) else value
    return columns


def record_columns(record: VmRecord | JobRecord | Receipt | TemplateRow) -> Columns:
    """The columns for a whole record."""
    return columns_of({each.name: getattr(record, each.name) for each in dataclasses.fields(record)})


def vm_from(row: sqlite3.Row) -> VmRecord:
    """A row of `vms` as a record."""
    return VmRecord(
        vm_id=VmId(row["vm_id"]),
        workspace_id=WorkspaceId(row["workspace_id"]),
        state=VmState(row["state"]),
        since=row["since"],
        created_at=row["created_at"],
        spec=VmSpec(
            memory_mib=row["memory_mib"],
            vcpus=row["vcpus"],
            network=bool(row["network"]),
            disk_gib=row["disk_gib"],
            image_digest=row["image_digest"],
        ),
        name=row["name"],
        description=row["description"],
        ephemeral=bool(row["ephemeral"]),
        idle_seconds=row["idle_seconds"],
        idle_mode=SuspendMode(row["idle_mode"]),
        reason=row["reason"],
        last_activity_at=row["last_activity_at"],
        checkpoint_generation=Generation(row["checkpoint_generation"]),
        spent_generation=Generation(row["spent_generation"]),
        agent_generation=AgentGeneration(row["agent_generation"]),
        slot=row["slot"],
        vmm=json.loads(row["vmm"]),
        env=json.loads(row["env"]),
        boot_ms=row["boot_ms"],
        resume_ms=row["resume_ms"],
        transitions_total=row["transitions_total"],
    )


def job_from(row: sqlite3.Row) -> JobRecord:
    """A row of `jobs` as a record."""
    return JobRecord(
        job_id=JobId(row["job_id"]),
        vm_id=VmId(row["vm_id"]),
        state=JobState(row["state"]),
        command=row["command"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        timed_out=bool(row["timed_out"]),
        cancelled=bool(row["cancelled"]),
        truncated=bool(row["truncated"]),
        totals=(row["total_stdout"], row["total_stderr"]),
        kept=(row["kept_stdout"], row["kept_stderr"]),
        run_seconds=row["run_seconds"],
        background_processes=row["background_processes"],
        message=row["message"],
        output_cached=bool(row["output_cached"]),
    )


def receipt_from(row: sqlite3.Row) -> Receipt:
    """A row of `receipts` as a record."""
    return Receipt(
        workspace_id=WorkspaceId(row["workspace_id"]),
        request_id=row["request_id"],
        tool=row["tool"],
        args_hash=row["args_hash"],
        state=ReceiptState(row["state"]),
        created_at=row["created_at"],
        completed_at=row["completed_at"],
        answer=None if row["answer"] is None else json.loads(row["answer"]),
        vm_id=None if row["vm_id"] is None else VmId(row["vm_id"]),
        job_id=None if row["job_id"] is None else JobId(row["job_id"]),
    )


def intent_from(row: sqlite3.Row) -> Intent:
    """A row of `journal` as a record."""
    return Intent(
        intent_id=row["intent_id"],
        vm_id=VmId(row["vm_id"]),
        op=row["op"],
        args=json.loads(row["args"]),
        intent_at=row["intent_at"],
        steps=tuple((name, at) for name, at in json.loads(row["steps"])),
        done_at=row["done_at"],
        outcome=row["outcome"],
    )


def workspace_from(row: sqlite3.Row) -> Workspace:
    """A row of `workspaces` as a record; the operator scope is a token's, so it is False here."""
    return Workspace(
        workspace_id=WorkspaceId(row["workspace_id"]),
        allow_network=bool(row["allow_network"]),
        quota=quota_from(row),
        revoked=bool(row["revoked"]),
    )


def quota_from(row: sqlite3.Row) -> Quota:
    """The quota columns of a row of `workspaces`."""
    return Quota(
        max_vms=row["max_vms"], max_memory_mib=row["max_memory_mib"], max_storage_gib=row["max_storage_gib"]
    )


def template_from(row: sqlite3.Row) -> TemplateRow:
    """A row of `templates` as a record."""
    return TemplateRow(
        key=row["key"],
        state=row["state"],
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        detail=json.loads(row["detail"]),
    )
