"""A whole fleet on the one fake: real store, real files on a reflink volume, real supervisors, no machine.

Promises that a fleet which a test left leaves nothing behind. It must not know what is tested. Neighbours:
`tests/fake` is the VMM; `tests/vm` has the same service with real guests.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from microvm.fleet import Fleet, FleetSettings, Image, Layout, open_fleet, place_base
from microvm.fleet.image import Part
from microvm.fleet.service import drain
from microvm.host.cgroup import CgroupTree, find_hierarchy
from microvm.model import (
    ExecSpec,
    JobRecord,
    OutputPage,
    Principal,
    Quota,
    SuspendMode,
    VmSpec,
    VmView,
    WorkspaceId,
)
from microvm.store import Store, checkpoint, open_registry, open_store
from tests.fake import FakeVmmKind

ALICE = Principal(WorkspaceId("alice"))
BOB = Principal(WorkspaceId("bob"))
OPERATOR = Principal(WorkspaceId("operator"), operator=True)
MEMORY_MIB = 128
DRAIN_S = 30.0


def no_progress(_done: float, _what: str) -> None:
    """Nobody listens."""


@dataclass
class House:
    """What outlives a run of the service: directories, image and script; `open` is one run.

    Attributes:
        kind: The VMMs and their script, over all runs.
        budget: The host's bounds in the next run.
        instance_id: The installation's, once it has run.
    """

    root: Path
    state_dir: Path
    image: Image
    kind: FakeVmmKind = field(default_factory=FakeVmmKind)
    budget: Quota = field(default_factory=lambda: Quota(max_memory_mib=64 * MEMORY_MIB))
    instance_id: str = "none"

    @property
    def layout(self) -> Layout:
        """Where the files are."""
        return Layout(self.state_dir, self.root)

    @contextlib.asynccontextmanager
    async def open(self, *, save: bool = True) -> AsyncGenerator[Rig]:
        """One run of the service.

        Args:
            save: Whether it ends as by SIGTERM; else it ends as by kill -9, but for the VMMs, which are gone.
        """
        places = self.layout
        places.prepare()
        with open_registry(self.state_dir) as registry:
            for principal in (ALICE, BOB):
                if registry.workspace(principal.workspace_id) is None:
                    registry.issue_token(principal.workspace_id)
        async with open_store(self.state_dir) as store:
            self.instance_id = store.instance_id
            place_base(self.image, places)
            cgroups = CgroupTree(find_hierarchy(), store.instance_id, "none")
            settings = FleetSettings(places, os.getuid(), self.budget, Quota())
            platform = checkpoint.Platform("fake", "0", "0" * 64, "tcg", "none", 0, self.image.digest)
            try:
                cgroups.prepare()
                async with open_fleet(settings, store, self.kind, cgroups, self.image, platform) as fleet:
                    yield Rig(fleet, store, cgroups)
                    if save:
                        fleet.draining.set()
                        await drain(fleet, DRAIN_S)
            finally:
                with trio.CancelScope(shield=True):
                    await cgroups.remove()


def make_house(directory: Path, state_dir: Path) -> House:
    """A house on a reflink volume, with the smallest image."""
    image_dir = directory / "image"
    image_dir.mkdir()
    parts: dict[str, Part] = {}
    for name in ("rootfs", "kernel", "initrd"):
        path = image_dir / name
        path.write_bytes(name.encode().ljust(65536, b"\0"))
        parts[name] = Part(path, hashlib.sha256(path.read_bytes()).hexdigest(), 65536)
    image = Image(
        directory=image_dir,
        digest="1" * 64,
        disk_gib=1,
        qemu_closure=image_dir,
        qemu_digest="0" * 64,
        qemu_version="0",
        qemu_binary="",
        **parts,
    )
    return House(directory / "vm", state_dir, image)


@dataclass
class Rig:
    """One run of the service, with the calls that tests make most."""

    fleet: Fleet
    store: Store
    cgroups: CgroupTree

    async def create(
        self,
        request_id: str = "c",
        *,
        who: Principal = ALICE,
        idle_seconds: float = 0.0,
        idle_mode: SuspendMode = SuspendMode.HIBERNATE,
        progress: Callable[[float, str], None] = no_progress,
    ) -> VmView:
        """A VM that never goes idle unless asked."""
        return await self.fleet.create(
            who,
            request_id,
            VmSpec(memory_mib=MEMORY_MIB),
            idle_seconds=idle_seconds,
            idle_mode=idle_mode,
            env={},
            description=None,
            arguments={"memory_mib": MEMORY_MIB},
            progress=progress,
        )

    async def exec(
        self,
        vm_id: str,
        command: str,
        request_id: str = "e",
        *,
        who: Principal = ALICE,
        wait_seconds: float = 30.0,
        **spec: Any,
    ) -> tuple[JobRecord, OutputPage | None]:
        """A command, waited for."""
        return await self.fleet.exec(
            who,
            vm_id,
            request_id,
            ExecSpec(command, **spec),
            wait_seconds=wait_seconds,
            arguments={"command": command},
            progress=no_progress,
        )

    async def stdout(self, vm_id: str, command: str, request_id: str = "e") -> str:
        """What a command prints."""
        job, page = await self.exec(vm_id, command, request_id)
        assert page is not None, job
        return page.data[0].decode()

    async def suspend(
        self, vm_id: str, mode: SuspendMode = SuspendMode.HIBERNATE, *, force: bool = False
    ) -> VmView:
        """Puts a VM to rest."""
        return await self.fleet.suspend(ALICE, vm_id, mode=mode, force=force, progress=no_progress)

    async def resume(self, vm_id: str, *, cold_boot: bool = False, discard_memory: bool = False) -> VmView:
        """Brings a VM to run."""
        return await self.fleet.resume(
            ALICE, vm_id, cold_boot=cold_boot, discard_memory=discard_memory, progress=no_progress
        )

    async def write(self, vm_id: str, path: str, content: bytes) -> tuple[int, str]:
        """Replaces a file."""
        return await self.fleet.write_file(
            ALICE, vm_id, path, content, offset=None, truncate=False, mode="0644", make_parents=True
        )

    async def read(self, vm_id: str, path: str) -> bytes:
        """A whole small file."""
        return (await self.fleet.read_file(ALICE, vm_id, path, offset=0, length=65536)).content

    def state(self, vm_id: str) -> str:
        """Where a VM is."""
        return self.fleet.status(ALICE, vm_id)[0].record.state
