"""The driver's side of the journal: a mutation's intent, steps and end, each in one commit with the record.

Nothing here decides; `policy.recovery` reads what this leaves behind.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from microvm.model import VmRecord
from microvm.store import Store

_CHANGING: Final = tuple(
    each.name for each in fields(VmRecord) if each.name not in {"vm_id", "workspace_id", "created_at"}
)


def _changes(record: VmRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _CHANGING}


class VmJournal:
    """Commits what happens to VMs.

    Raises (all methods): HostError when the store cannot be written; nothing changed then.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def intent(self, record: VmRecord, op: str) -> int:
        """The start of a mutation, with the record as it is from now on; the answer is the intent's id."""
        return await self._store.journal_intent(record.vm_id, op, **_changes(record))

    async def step(self, intent: int, record: VmRecord, name: str) -> None:
        """A point of no return within a mutation."""
        await self._store.journal_step(intent, name, record.vm_id, **_changes(record))

    async def done(self, intent: int, record: VmRecord, outcome: str) -> None:
        """The end of a mutation."""
        await self._store.journal_done(intent, outcome, record.vm_id, **_changes(record))

    async def gone(self, intent: int, record: VmRecord) -> None:
        """The end of a VM."""
        await self._store.delete_vm(record.vm_id, intent)
