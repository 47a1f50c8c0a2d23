"""Who holds what of the host: `policy.admission`'s ledger, kept for the whole service.

Asking, granting and marking are one synchronous step; the only awaits are for others to go to rest first. A
slot is held by a live VM only. This module must not know what is done with the room.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from microvm.errors import CapacityError, MicrovmError
from microvm.fleet.log import log
from microvm.host.files import host_errors
from microvm.model import Quota, VmId, VmRecord, VmSpec, Workspace, WorkspaceId
from microvm.policy import admission
from microvm.policy.admission import Admission, Denied, Granted, MakeRoom, Use, Volume

BUILD_SLOT: Final = admission.SLOTS
"""Template builds run one at a time, on a slot of their own beyond those of VMs."""

CHECKPOINT_BYTES: Final = 16 << 20
"""What a hibernation writes beside RAM, which has its blocks: device state (63 to 88 KB) and metadata."""


class Room:
    """The ledger of one service.

    Args:
        vm_dir: The volume whose free space counts.
        budget: The host's bounds.
        workspace_defaults: A workspace's bounds where it has none of its own.
        workspaces: A workspace's policy as it is now.
        records: The VMs that exist.
    """

    def __init__(
        self,
        vm_dir: Path,
        budget: Quota,
        workspace_defaults: Quota,
        workspaces: Callable[[WorkspaceId], Workspace | None],
        records: Iterable[VmRecord],
    ) -> None:
        self._vm_dir = vm_dir
        self._defaults = workspace_defaults
        self._workspaces = workspaces
        self._ledger = admission.restart(Admission(budget), records)
        self.idle: Callable[[], tuple[VmId, ...]] = tuple
        self.put_to_rest: Callable[[VmId], Awaitable[None]] | None = None

    def create(self, vm_id: VmId, workspace_id: WorkspaceId, spec: VmSpec) -> int:
        """Room for a new VM; answers with its slot.

        Raises:
            CapacityError: `quota_exceeded` or `no_capacity`; nothing is marked.
        """
        event = admission.Create(vm_id, self._workspace(workspace_id), spec, self._volume())
        return self._granted(self._decide(event))

    async def wake(self, vm_id: VmId, workspace_id: WorkspaceId) -> int:
        """Room for a VM to be live again; others that are past their idle time are put to rest for it.

        Raises:
            CapacityError: There is none; nothing is marked.
        """
        answer = self._wake(vm_id, workspace_id, self.idle())
        if isinstance(answer, MakeRoom):
            assert self.put_to_rest is not None
            for other in answer.vm_ids:
                try:
                    await self.put_to_rest(other)
                except MicrovmError as error:  # somebody else's VM: no business of whoever waits here
                    log.warning("not put to rest", extra={"vm_id": other, "why": error.message})
            answer = self._wake(vm_id, workspace_id, ())
        return self._granted(answer)

    def check_write(self, needs_bytes: int, *, saves: bool = False) -> None:
        """Refuses an effect that would write into the volume's reserve, or beyond it where it `saves` a VM.

        Raises:
            CapacityError: `no_capacity`.
        """
        self._granted(self._decide(admission.Write(self._volume(), needs_bytes, saves)), slotless=True)

    @property
    def is_low(self) -> bool:
        """Whether the volume's free space is in the reserve: what runs must stand still."""
        volume = self._volume()
        return volume.free_bytes < volume.reserve_bytes

    def rest(self, vm_id: VmId) -> None:
        """The VM has no VMM any more."""
        self._ledger, _ = admission.decide(self._ledger, admission.Rest(vm_id))

    def release(self, vm_id: VmId) -> None:
        """The VM is gone."""
        self._ledger, _ = admission.decide(self._ledger, admission.Release(vm_id))

    def use(self, workspace_id: WorkspaceId | None = None) -> Use:
        """What a workspace holds, or all of them."""
        return admission.use_of(self._ledger, workspace_id)

    def _wake(self, vm_id: VmId, workspace_id: WorkspaceId, idle: tuple[VmId, ...]) -> object:
        return self._decide(admission.Wake(vm_id, self._workspace(workspace_id), self._volume(), idle=idle))

    def _decide(self, event: admission.Event) -> object:
        self._ledger, (answer,) = admission.decide(self._ledger, event)
        return answer

    def _granted(self, answer: object, *, slotless: bool = False) -> int:
        if isinstance(answer, Denied):
            raise CapacityError(
                answer.code, answer.message, answer.detail, retry_after_s=answer.retry_after_s
            )
        assert isinstance(answer, Granted), answer
        assert answer.slot is not None or slotless
        return answer.slot or 0

    def _workspace(self, workspace_id: WorkspaceId) -> Workspace:
        found = self._workspaces(workspace_id) or Workspace(workspace_id)
        return replace(found, quota=admission.bounded(found.quota, self._defaults))

    def _volume(self) -> Volume:
        with host_errors("statvfs", self._vm_dir):
            found = os.statvfs(self._vm_dir)
        return Volume(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
