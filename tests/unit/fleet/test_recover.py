"""Start-up puts in order whatever the last run left: rows, files and jobs agree afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from microvm.fleet import layout
from microvm.fleet.layout import Layout
from microvm.fleet.recover import recover
from microvm.model import (
    Generation,
    JobId,
    JobRecord,
    JobState,
    VmId,
    VmRecord,
    VmSpec,
    VmState,
    WorkspaceId,
)
from microvm.store import Store, checkpoint, new_vm_id, open_registry, open_store
from microvm.store.checkpoint import FileMark, Manifest, Platform

ALICE = WorkspaceId("alice")
S = VmState


class Ruin:
    """What a service that died has left."""

    def __init__(self, store: Store, places: Layout) -> None:
        self.store = store
        self.places = places

    async def vm(
        self, state: VmState, *, manifest: int | None = None, disk: bool = True, **changes: Any
    ) -> VmId:
        """A VM in `state`, with its files and a running job."""
        record = VmRecord(new_vm_id(), ALICE, S.CREATING, 1.0, 1.0, VmSpec(), slot=3)
        await self.store.insert_vm(record)
        await self.store.update_vm(record.vm_id, state=state, **changes)
        for directory in (self.places.vm(record.vm_id), self.places.logs(record.vm_id)):
            directory.mkdir()
        directory = self.places.vm(record.vm_id)
        layout.make_ram(directory / layout.RAM, 1)
        if disk:
            (directory / layout.DISK).write_bytes(b"disk")
        if manifest is not None:
            self.write_manifest(record.vm_id, manifest)
        job = JobRecord(JobId(f"job_{record.vm_id[3:]}"), record.vm_id, JobState.RUNNING, "true", 1.0)
        await self.store.put_jobs(job)
        return record.vm_id

    def write_manifest(self, vm_id: VmId, generation: int, owner: str | None = None) -> None:
        directory = self.places.vm(vm_id)
        (directory / checkpoint.state_name(generation)).write_bytes(b"state")
        checkpoint.commit(
            directory,
            Manifest(
                owner=owner or vm_id,
                generation=generation,
                memory_mib=1,
                vcpus=1,
                platform=Platform("qemu", "10", "c", "tcg", "max", 0, "i"),
                ram=FileMark(1, 1, 1),
                disk=FileMark(1, 1, 1),
                state_file=checkpoint.state_name(generation),
                state_bytes=5,
                state_sha256="",
            ),
        )

    async def recover(self) -> dict[VmId, tuple[VmRecord, list[JobRecord]]]:
        """Recovers; what is kept is what the store has from then on, and doing it again changes nothing."""
        kept = await recover(self.store, await self.store.load(), self.places)
        loaded = await self.store.load()
        assert loaded.open_intents == []
        assert sorted(loaded.vms, key=_by_id) == sorted((record for record, _ in kept), key=_by_id)
        assert {job.job_id: job for job in loaded.jobs} == {
            job.job_id: job for _, jobs in kept for job in jobs
        }
        again = await recover(self.store, loaded, self.places)
        assert sorted((r for r, _ in again), key=_by_id) == sorted((r for r, _ in kept), key=_by_id)
        assert [jobs for _, jobs in again] == [jobs for _, jobs in kept]
        return {record.vm_id: (record, jobs) for record, jobs in kept}


def _by_id(record: VmRecord) -> str:
    return record.vm_id


@pytest.fixture
async def ruin(tmp_path: Path) -> AsyncGenerator[Ruin]:
    async with _open(tmp_path) as ruin:
        yield ruin


@asynccontextmanager
async def _open(directory: Path) -> AsyncGenerator[Ruin]:
    places = Layout(directory / "state", directory / "vm")
    places.prepare()
    with open_registry(places.state_dir) as registry:
        registry.issue_token(ALICE)
    async with open_store(places.state_dir) as store:
        yield Ruin(store, places)


@pytest.mark.parametrize("state", [S.CREATING, S.DESTROYING])
async def test_unfinished_creations_and_destructions_are_gone_with_all_they_had(
    ruin: Ruin, state: VmState
) -> None:
    vm_id = await ruin.vm(state)
    assert await ruin.recover() == {}
    assert not ruin.places.vm(vm_id).exists()
    assert not ruin.places.logs(vm_id).exists()


@pytest.mark.parametrize("state", [S.RUNNING, S.PAUSED, S.BOOTING, S.STOPPING])
async def test_what_ran_has_failed_with_the_reason_and_keeps_its_disk_and_logs(
    ruin: Ruin, state: VmState
) -> None:
    vm_id = await ruin.vm(state)
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is S.FAILED
    assert record.reason is not None
    assert state in record.reason
    assert record.slot is None
    assert jobs[0].state is JobState.LOST
    assert jobs[0].message
    assert jobs[0].ended_at is not None
    assert (ruin.places.vm(vm_id) / layout.DISK).read_bytes() == b"disk"
    assert ruin.places.logs(vm_id).exists()


async def test_a_hibernation_whose_manifest_is_whole_was_done_and_its_jobs_sleep(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.HIBERNATING, manifest=5, checkpoint_generation=4, spent_generation=4)
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is S.HIBERNATED
    assert record.checkpoint_generation == Generation(5)
    assert record.spent_generation == Generation(4)
    assert jobs[0].state is JobState.FROZEN
    assert jobs[0].ended_at is None


@pytest.mark.parametrize("found", ["nothing", "half", "older", "another's"])
async def test_a_hibernation_without_its_own_whole_manifest_has_failed(ruin: Ruin, found: str) -> None:
    vm_id = await ruin.vm(S.HIBERNATING, checkpoint_generation=4, spent_generation=4)
    if found == "half":
        (ruin.places.vm(vm_id) / checkpoint.MANIFEST).write_bytes(b'{"format": 1, "gener')
    elif found == "older":
        ruin.write_manifest(vm_id, 4)
    elif found == "another's":
        ruin.write_manifest(vm_id, 5, owner="vm_other")
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is S.FAILED
    assert jobs[0].state is JobState.LOST


async def test_a_wake_that_had_not_spent_its_checkpoint_is_undone(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.RESUMING, manifest=4, checkpoint_generation=4, spent_generation=3)
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is S.HIBERNATED
    assert (record.checkpoint_generation, record.spent_generation) == (4, 3)
    assert jobs[0].state is JobState.FROZEN
    assert (ruin.places.vm(vm_id) / "state.4").exists()


async def test_a_wake_that_had_spent_it_has_failed(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.RESUMING, manifest=4, checkpoint_generation=4, spent_generation=4)
    record, _ = (await ruin.recover())[vm_id]
    assert record.state is S.FAILED


async def test_what_slept_sleeps_on_whatever_was_last_written_of_its_jobs(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.HIBERNATED, manifest=4, checkpoint_generation=4, spent_generation=3)
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is S.HIBERNATED
    assert record.since == 1.0
    assert jobs[0].state is JobState.FROZEN


@pytest.mark.parametrize("state", [S.STOPPED, S.FAILED])
async def test_what_was_at_rest_without_memory_stays_and_its_jobs_are_lost(
    ruin: Ruin, state: VmState
) -> None:
    vm_id = await ruin.vm(state, reason="as it was" if state is S.FAILED else None)
    record, jobs = (await ruin.recover())[vm_id]
    assert record.state is state
    assert record.reason == ("as it was" if state is S.FAILED else None)
    assert jobs[0].state is JobState.LOST


async def test_a_vm_without_its_disk_has_failed(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.STOPPED, disk=False)
    record, _ = (await ruin.recover())[vm_id]
    assert record.state is S.FAILED
    assert record.reason == "its disk is missing"


async def test_a_job_that_had_ended_stays_as_it_ended(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.RUNNING)
    (job,) = (await ruin.store.load()).jobs
    ended = job.with_(state=JobState.COMPLETED, exit_code=3, ended_at=2.0, background_processes=2)
    await ruin.store.put_jobs(ended)
    _, jobs = (await ruin.recover())[vm_id]
    assert jobs == [replace(ended, background_processes=0)]


async def test_intents_of_vms_that_are_gone_are_closed(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.RUNNING)
    await ruin.store.delete_vm(vm_id)
    assert await ruin.recover() == {}
    (intent,) = await ruin.store.journal(vm_id)
    assert intent.outcome == "recovered: gone"


async def test_files_that_nobody_knows_are_swept_and_nothing_else(ruin: Ruin) -> None:
    vm_id = await ruin.vm(S.HIBERNATED, manifest=4, checkpoint_generation=4, spent_generation=3)
    places = ruin.places
    foreign = places.vm_dir / "not-ours"
    foreign.mkdir()
    template, image = places.template("k"), places.image("d")
    template.mkdir()
    image.touch()
    scratch = [
        places.vm(VmId("vm_gone")),
        places.logs(VmId("vm_gone")),
        template.with_name("k.building"),
        image.with_suffix(".copying"),
        places.vm(vm_id) / "ram.new",
        places.vm(vm_id) / "state.5",
    ]
    for path in scratch[:3]:
        path.mkdir()
        (path / "file").touch()
    for path in scratch[3:]:
        path.touch()
    await ruin.recover()
    assert [path for path in scratch if path.exists()] == []
    for path in (foreign, template, image):
        assert path.exists()
    assert {path.name for path in places.vm(vm_id).iterdir()} == {"ram", "disk", "manifest.json", "state.4"}


@pytest.mark.root
async def test_files_at_rest_are_roots_whoever_ran_the_vm_last(ruin: Ruin) -> None:
    import os

    vm_id = await ruin.vm(S.RUNNING)
    for name in (layout.RAM, layout.DISK):
        os.chown(ruin.places.vm(vm_id) / name, 54321, 54321)
    await ruin.recover()
    for name in (layout.RAM, layout.DISK):
        assert (ruin.places.vm(vm_id) / name).stat().st_uid == 0


async def test_what_was_half_made_is_removed_and_what_a_damaged_manifest_may_name_is_kept(ruin: Ruin) -> None:
    scratch = {"ram.new", f".{checkpoint.MANIFEST}.new", checkpoint.state_name(2)}
    ran, slept = await ruin.vm(S.RUNNING), await ruin.vm(S.HIBERNATED, manifest=1)
    damaged = await ruin.vm(S.HIBERNATED, manifest=1)
    (ruin.places.vm(damaged) / checkpoint.MANIFEST).write_bytes(b"{")
    for vm_id in (ran, slept, damaged):
        for name in scratch:
            (ruin.places.vm(vm_id) / name).write_bytes(b"half")
    await ruin.recover()
    found = {
        vm_id: {path.name for path in ruin.places.vm(vm_id).iterdir()} for vm_id in (ran, slept, damaged)
    }
    whole = {layout.RAM, layout.DISK, checkpoint.MANIFEST, checkpoint.state_name(1)}
    assert found == {ran: {layout.RAM, layout.DISK}, slept: whole, damaged: whole | scratch}
