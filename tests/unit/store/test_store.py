"""The store keeps what it says it has written, whole, whoever else uses the file."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from microvm.errors import HostError, RequestError
from microvm.model import (
    AgentGeneration,
    Generation,
    JobRecord,
    JobState,
    Quota,
    Receipt,
    ReceiptState,
    SuspendMode,
    VmRecord,
    VmSpec,
    VmState,
    WorkspaceId,
)
from microvm.store import (
    Store,
    TemplateRow,
    new_job_id,
    new_vm_id,
    open_registry,
    open_store,
    writes,
)
from microvm.store.database import FILE_NAME, open_writer, transaction
from microvm.store.schema import SCHEMA_VERSION

ALICE = WorkspaceId("alice")


class Clock:
    """Seconds that move when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_vm(**changes: Any) -> VmRecord:
    record = VmRecord(
        vm_id=new_vm_id(),
        workspace_id=ALICE,
        state=VmState.CREATING,
        since=10.5,
        created_at=10.5,
        spec=VmSpec(memory_mib=512, vcpus=2, network=True, disk_gib=4, image_digest="d" * 64),
    )
    return record.with_(**changes)


def a_receipt(**changes: Any) -> Receipt:
    return Receipt(ALICE, "r-1", "vm_exec", "hash", ReceiptState.PENDING, 11.0).with_(**changes)


@asynccontextmanager
async def alices_store(state_dir: Path, clock: Clock | None = None) -> AsyncGenerator[Store, None]:
    with open_registry(state_dir) as registry:
        if registry.workspace(ALICE) is None:
            registry.issue_token(ALICE)
    async with open_store(state_dir, clock or Clock()) as store:
        yield store


async def test_every_field_of_every_record_survives_a_restart(tmp_path: Path) -> None:
    vm = a_vm(
        name="a-name",
        description="ünïcode\nand lines",
        ephemeral=False,
        idle_seconds=0.5,
        idle_mode=SuspendMode.PAUSE,
        reason="no_space",
        last_activity_at=12.25,
        checkpoint_generation=Generation(4),
        spent_generation=Generation(3),
        agent_generation=AgentGeneration(9),
        slot=255,
        vmm={"kind": "qemu", "accel": "tcg"},
        env={"SECRET": "v=\"'\\"},
        boot_ms=1.5,
        resume_ms=2.5,
        transitions_total=7,
    )
    job = JobRecord(
        job_id=new_job_id(),
        vm_id=vm.vm_id,
        state=JobState.COMPLETED,
        command="true",
        started_at=1.0,
        ended_at=2.0,
        exit_code=137,
        signal=9,
        timed_out=True,
        cancelled=True,
        truncated=True,
        totals=(2**40, 1),
        kept=(3, 4),
        run_seconds=0.25,
        background_processes=2,
        message="out of memory",
        output_cached=True,
    )
    receipt = a_receipt(
        state=ReceiptState.DONE, completed_at=12.0, answer={"ok": [1, "é"]}, vm_id=vm.vm_id, job_id=job.job_id
    )
    template = TemplateRow("k", "ready", 1.0, 2.0, {"digest": "d"})
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm, "create", {"from": None})
        await store.put_jobs(job)
        await store.begin_receipt(a_receipt())
        await store.complete_receipt(receipt)
        await store.put_template(template)
        instance_id = store.instance_id
    async with alices_store(tmp_path) as store:
        loaded = await store.load()
        assert store.instance_id == instance_id
    assert loaded.vms == [vm]
    assert loaded.jobs == [job]
    assert loaded.receipts == [receipt]
    assert loaded.templates == [template]
    assert [(each.vm_id, each.op, each.args) for each in loaded.open_intents] == [
        (vm.vm_id, "create", {"from": None})
    ]


async def test_a_change_of_each_field_is_what_is_loaded(tmp_path: Path) -> None:
    vm = a_vm()
    changes: dict[str, Any] = {
        "state": VmState.RUNNING,
        "spec": VmSpec(memory_mib=128),
        "env": {"A": "b"},
        "slot": 3,
        "ephemeral": False,
        "idle_mode": SuspendMode.PAUSE,
    }
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm)
        await store.update_vm(vm.vm_id, **changes)
        assert (await store.load()).vms == [vm.with_(**changes)]


async def test_an_intent_its_steps_and_its_end_are_journaled_with_the_changes_they_announce(
    tmp_path: Path,
) -> None:
    clock = Clock()
    vm = a_vm(state=VmState.HIBERNATED, checkpoint_generation=Generation(1))
    async with alices_store(tmp_path, clock) as store:
        await store.journal_done(await store.insert_vm(vm))
        intent = await store.journal_intent(vm.vm_id, "wake", {"generation": 1}, state=VmState.RESUMING)
        clock.now = 1001.0
        await store.journal_step(intent, "spent", vm.vm_id, spent_generation=Generation(1))
        (found,) = await store.open_intents()
        assert (found.op, found.args, found.intent_at) == ("wake", {"generation": 1}, 1000.0)
        assert found.steps == (("spent", 1001.0),)
        (record,) = (await store.load()).vms
        assert (record.state, record.spent_generation) == (VmState.RESUMING, 1)
        await store.journal_done(intent, "done", vm.vm_id, state=VmState.RUNNING)
        assert await store.open_intents() == []
        assert [each.outcome for each in await store.journal(vm.vm_id)] == ["done", "done"]


async def test_a_refused_write_takes_the_whole_commit_with_it(tmp_path: Path) -> None:
    vm = a_vm(name="taken")
    other = a_vm(name="taken")
    async with alices_store(tmp_path) as store:
        await store.journal_done(await store.insert_vm(vm))
        with pytest.raises(RequestError) as caught:
            await store.insert_vm(other, "create", None, writes.put_receipt(a_receipt()))
        assert caught.value.code == "name_taken"
        loaded = await store.load()
        assert (loaded.vms, loaded.receipts, loaded.open_intents) == ([vm], [], [])


async def test_a_rename_to_a_taken_name_is_refused_and_a_destroyed_name_is_free(tmp_path: Path) -> None:
    first, second = a_vm(name="one"), a_vm(name="two")
    async with alices_store(tmp_path) as store:
        await store.insert_vm(first)
        await store.insert_vm(second)
        with pytest.raises(RequestError, match="one"):
            await store.update_vm(second.vm_id, name="one")
        await store.journal_intent(first.vm_id, "destroy", state=VmState.DESTROYING)
        await store.update_vm(second.vm_id, name="one")


async def test_names_are_unique_within_a_workspace_only(tmp_path: Path) -> None:
    with open_registry(tmp_path) as registry:
        registry.issue_token("bob")
    async with alices_store(tmp_path) as store:
        await store.insert_vm(a_vm(name="same"))
        await store.insert_vm(a_vm(name="same", workspace_id=WorkspaceId("bob")))
        assert len((await store.load()).vms) == 2


async def test_a_deleted_vm_takes_its_jobs_along_and_leaves_receipts_and_journal(tmp_path: Path) -> None:
    vm = a_vm()
    async with alices_store(tmp_path) as store:
        await store.journal_done(await store.insert_vm(vm))
        await store.put_jobs(JobRecord(new_job_id(), vm.vm_id, JobState.RUNNING, "true", 1.0))
        await store.begin_receipt(a_receipt(vm_id=vm.vm_id))
        intent = await store.journal_intent(vm.vm_id, "destroy", state=VmState.DESTROYING)
        await store.delete_vm(vm.vm_id, intent)
        loaded = await store.load()
        assert (loaded.vms, loaded.jobs, loaded.open_intents) == ([], [], [])
        assert [each.vm_id for each in loaded.receipts] == [vm.vm_id]
        assert [each.outcome for each in await store.journal(vm.vm_id)] == ["done", "gone"]


async def test_a_spent_generation_beyond_the_checkpoint_is_refused_by_the_file_itself(tmp_path: Path) -> None:
    vm = a_vm()
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm)
        with pytest.raises(HostError, match="CHECK"):
            await store.update_vm(vm.vm_id, spent_generation=Generation(1))


async def test_of_a_command_200_characters_are_kept(tmp_path: Path) -> None:
    vm = a_vm()
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm)
        await store.put_jobs(JobRecord(new_job_id(), vm.vm_id, JobState.RUNNING, "é" * 300, 1.0))
        assert (await store.load()).jobs[0].command == "é" * 200


async def test_text_that_is_not_unicode_is_kept_as_far_as_it_can_be(tmp_path: Path) -> None:
    vm = a_vm(reason="cannot open \udcff", env={"A": "\ud800"})
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm)
        await store.put_jobs(JobRecord(new_job_id(), vm.vm_id, JobState.RUNNING, "echo \udcff\0!", 1.0))
        loaded = await store.load()
    assert loaded.vms == [vm.with_(reason="cannot open ?")]
    assert loaded.jobs[0].command == "echo ?\0!"


async def test_jobs_and_receipts_are_forgotten_by_id(tmp_path: Path) -> None:
    vm = a_vm()
    jobs = [JobRecord(new_job_id(), vm.vm_id, JobState.RUNNING, "true", float(n)) for n in range(3)]
    async with alices_store(tmp_path) as store:
        await store.insert_vm(vm)
        await store.put_jobs(*jobs)
        await store.delete_jobs([jobs[0].job_id, jobs[2].job_id])
        for n in range(3):
            await store.begin_receipt(a_receipt(request_id=f"r{n}"))
        await store.forget_receipts(ALICE, ["r0", "r2"])
        loaded = await store.load()
        assert loaded.jobs == [jobs[1]]
        assert [each.request_id for each in loaded.receipts] == ["r1"]


async def test_only_old_closed_intents_are_pruned(tmp_path: Path) -> None:
    clock = Clock()
    vm = a_vm()
    async with alices_store(tmp_path, clock) as store:
        await store.journal_done(await store.insert_vm(vm))
        await store.journal_intent(vm.vm_id, "hibernate")
        clock.now += 100.0
        await store.journal_done(await store.journal_intent(vm.vm_id, "pause"))
        assert await store.prune_journal(50.0) == 1
        assert [each.op for each in await store.journal(vm.vm_id)] == ["hibernate", "pause"]


async def test_many_writers_at_once_are_all_written(tmp_path: Path) -> None:
    vms = [a_vm() for _ in range(20)]
    async with alices_store(tmp_path) as store:

        async def insert(vm: VmRecord) -> None:
            await store.insert_vm(vm)

        async with trio.open_nursery() as nursery:
            for vm in vms:
                nursery.start_soon(insert, vm)
        assert {each.vm_id for each in (await store.load()).vms} == {each.vm_id for each in vms}


async def test_a_cancelled_write_has_not_happened(tmp_path: Path) -> None:
    vm = a_vm()
    async with alices_store(tmp_path) as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.insert_vm(vm)
        assert scope.cancelled_caught
        assert (await store.load()).vms == []


async def test_the_state_directory_and_the_file_are_the_owners_alone(tmp_path: Path) -> None:
    state_dir = tmp_path / "deep" / "state"
    old = os.umask(0)
    try:
        async with open_store(state_dir):
            for name in os.listdir(state_dir):
                assert stat.S_IMODE((state_dir / name).stat().st_mode) == 0o600, name
    finally:
        os.umask(old)
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700


async def test_a_file_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    async with open_store(tmp_path):
        pass
    db = sqlite3.connect(tmp_path / FILE_NAME)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(HostError, match="newer"):
        async with open_store(tmp_path):
            pass


async def test_a_file_that_is_no_database_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(HostError, match=FILE_NAME):
        async with open_store(tmp_path):
            pass


def test_commits_are_full_and_write_ahead(tmp_path: Path) -> None:
    db = open_writer(tmp_path, 0.0)
    try:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)
    finally:
        db.close()


def test_a_full_disk_is_disk_full_and_changes_nothing(tmp_path: Path) -> None:
    db = open_writer(tmp_path, 0.0)
    try:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(HostError) as caught, transaction(db):
            db.execute("INSERT INTO meta VALUES ('big', ?)", ("x" * 1_000_000,))
        assert caught.value.code == "disk_full"
        assert db.execute("SELECT count(*) FROM meta WHERE key = 'big'").fetchone() == (0,)
        with transaction(db):
            db.execute("INSERT INTO meta VALUES ('small', 'x')")
    finally:
        db.close()


async def test_what_was_reported_as_written_survives_a_kill(tmp_path: Path) -> None:
    reported = _insert_until_killed(tmp_path, at_least=20)
    async with open_store(tmp_path) as store:
        loaded = await store.load()
    found = {vm.vm_id for vm in loaded.vms}
    assert reported <= found
    assert {each.vm_id for each in loaded.open_intents} == found


_INSERT_FOR_EVER = """
import sys, trio
from pathlib import Path
from microvm.model import *
from microvm.store import *

async def main():
    with open_registry(Path(sys.argv[1])) as registry:
        registry.issue_token("alice")
    async with open_store(Path(sys.argv[1])) as store:
        while True:
            vm = VmRecord(new_vm_id(), WorkspaceId("alice"), VmState.CREATING, 1.0, 1.0, VmSpec())
            await store.insert_vm(vm)
            print(vm.vm_id, flush=True)

trio.run(main)
"""


def _insert_until_killed(state_dir: Path, at_least: int) -> set[str]:
    """The VMs that a process had reported as written when it was killed while writing more."""
    child = subprocess.Popen(
        [sys.executable, "-c", _INSERT_FOR_EVER, str(state_dir)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        lines = [child.stdout.readline() for _ in range(at_least)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    return {line.strip() for line in lines if line.endswith("\n")}


async def test_quotas_set_beside_a_live_daemon_hold_from_the_next_look(tmp_path: Path) -> None:
    async with alices_store(tmp_path) as store:
        with open_registry(tmp_path) as registry:
            registry.set_workspace(ALICE, max_vms=2, allow_network=True)
        workspace = store.workspace(ALICE)
        assert workspace is not None
        assert (workspace.quota, workspace.allow_network) == (Quota(max_vms=2), True)
        assert store.workspace(WorkspaceId("nobody")) is None
