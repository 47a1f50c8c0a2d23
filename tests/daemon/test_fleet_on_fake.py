"""The fleet on the one fake: what a workspace may expect of its VMs, without a machine under them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.errors import MicrovmError, RequestError, VmmError
from microvm.fleet.service import drain
from microvm.host.cgroup import find_hierarchy
from microvm.model import ExecSpec, JobState, Quota, SuspendMode, VmState
from microvm.policy import lifecycle
from tests.daemon.fleet_rig import ALICE, BOB, MEMORY_MIB, OPERATOR, House, Rig, make_house, no_progress

pytestmark = pytest.mark.root

LONG_S = 60.0
"""Bounds a test that hangs; nothing here takes seconds."""
CLIENTS = 20


@pytest.fixture
def house(reflink_directory: Path, state_dir: Path) -> Iterator[House]:
    house = make_house(reflink_directory, state_dir)
    yield house
    assert not list(find_hierarchy().own_path.glob(f"microvm-{house.instance_id}*")), "a cgroup is left"


async def refused(code: str, call: Awaitable[object]) -> MicrovmError:
    """Awaits a call that must be refused with `code`."""
    with pytest.raises(MicrovmError) as caught:
        await call
    assert caught.value.code == code, caught.value.message
    return caught.value


async def test_a_created_vm_runs_commands_and_keeps_files_until_it_is_destroyed(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            view = await rig.create()
            vm_id = view.record.vm_id
            assert view.record.state is VmState.RUNNING
            assert await rig.stdout(vm_id, "echo hi") == "hi\n"
            await rig.write(vm_id, "a/b", b"kept")
            assert await rig.read(vm_id, "a/b") == b"kept"
            await rig.fleet.destroy(ALICE, vm_id)
            assert rig.fleet.list_vms(ALICE, all_workspaces=False) == []
            assert list((house.root / "vms").iterdir()) == []
            assert list((house.state_dir / "vms").iterdir()) == []
            assert rig.fleet.parts.room.use().vms == 0


async def test_a_second_creation_boots_nothing(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            await rig.create("first")
            await rig.create("second")
            assert [machine.steps[1] for machine in house.kind.machines] == ["boot", "load", "load"]
        async with house.open() as rig:
            await rig.create("third")
        assert [machine.steps[1] for machine in house.kind.machines].count("boot") == 1


async def test_twenty_creations_with_one_request_id_make_one_vm(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            made: set[str] = set()

            async def ask() -> None:
                made.add((await rig.create("same")).record.vm_id)

            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(ask)
            assert len(made) == 1
            assert len(rig.fleet.list_vms(ALICE, all_workspaces=False)) == 1


async def test_twenty_commands_with_one_request_id_are_one_job(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            jobs: set[str] = set()

            async def ask() -> None:
                job, _ = await rig.exec(vm_id, "echo x >> count")
                jobs.add(job.job_id)

            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(ask)
            assert len(jobs) == 1
            assert await rig.read(vm_id, "count") == b"x\n"
            await refused("request_id_conflict", rig.exec(vm_id, "echo y >> count"))


async def test_a_receipt_outlives_the_service_and_the_vm(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            first = await rig.create("once")
            job, _ = await rig.exec(first.record.vm_id, "echo hi", "job")
        async with house.open() as rig:
            again = await rig.create("once")
            assert again.record.vm_id == first.record.vm_id
            same, page = await rig.exec(first.record.vm_id, "echo hi", "job")
            assert same.job_id == job.job_id
            assert page is not None
            assert page.data[0] == b"hi\n"
            await rig.fleet.destroy(ALICE, first.record.vm_id)
            gone = await rig.create("once")
            assert gone.record.vm_id == first.record.vm_id
            assert rig.fleet.list_vms(ALICE, all_workspaces=False) == []


async def test_a_paused_vm_has_its_processes_stand_still_and_wakes_by_work(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.exec(vm_id, "exec sleep 1000", "long", wait_seconds=0.0)
            await refused("jobs_active", rig.suspend(vm_id, SuspendMode.PAUSE))
            assert rig.state(vm_id) == "running"
            await rig.suspend(vm_id, SuspendMode.PAUSE, force=True)
            assert rig.fleet.status(ALICE, vm_id)[1][0].state is JobState.FROZEN
            assert await rig.stdout(vm_id, "echo awake") == "awake\n"
            assert rig.fleet.status(ALICE, vm_id)[1][0].state is JobState.RUNNING


async def test_a_hibernated_vm_wakes_by_work_and_finished_output_wakes_nothing(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.write(vm_id, "f", b"kept")
            job, _ = await rig.exec(vm_id, "echo out; echo err >&2")
            await rig.suspend(vm_id)
            assert rig.fleet.status(ALICE, vm_id)[0].pid is None
            page = await rig.fleet.job_output(
                ALICE, vm_id, job.job_id, cursor=(0, 0), max_bytes=100, wait_seconds=0.0
            )
            assert page.data == (b"out\n", b"err\n")
            assert rig.state(vm_id) == "hibernated"
            assert await rig.read(vm_id, "f") == b"kept"
            assert rig.state(vm_id) == "running"


async def test_somebody_elses_vm_is_one_that_never_existed(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            job, _ = await rig.exec(vm_id, "true")

            def calls(vm: str) -> list[Awaitable[object]]:
                fleet = rig.fleet
                return [
                    fleet.exec(
                        BOB, vm, "r", ExecSpec("true"), wait_seconds=0, arguments={}, progress=no_progress
                    ),
                    fleet.read_file(BOB, vm, "f", offset=0, length=1),
                    fleet.job_status(BOB, vm, job.job_id, wait_seconds=0),
                    fleet.job_cancel(BOB, vm, job.job_id),
                    fleet.destroy(BOB, vm),
                    fleet.resume(BOB, vm, cold_boot=False, discard_memory=False, progress=no_progress),
                ]

            for foreign, missing in zip(calls(vm_id), calls("vm_" + "z" * 20), strict=True):
                assert str(await refused("not_found", foreign)) == str(await refused("not_found", missing))
            assert rig.fleet.list_vms(BOB, all_workspaces=False) == []
            assert len(rig.fleet.list_vms(OPERATOR, all_workspaces=True)) == 1
            assert rig.fleet.status(OPERATOR, vm_id)[0].record.vm_id == vm_id
            await refused("not_found", rig.fleet.destroy(OPERATOR, vm_id))
            with pytest.raises(RequestError) as denied:
                rig.fleet.list_vms(BOB, all_workspaces=True)
            assert denied.value.code == "forbidden"


# ---- when something fails ----


async def test_a_creation_that_fails_leaves_nothing_and_its_request_id_is_free(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            await rig.create("template")
            for step in ("open", "connect", "load", "cont"):
                house.kind.fail(step)
                await refused("vm_failed", rig.create("again"))
                assert len(rig.fleet.list_vms(ALICE, all_workspaces=False)) == 1
                assert len(list((house.root / "vms").iterdir())) == 1
                assert rig.fleet.parts.room.use().live_vms == 1
            assert (await rig.create("again")).record.state is VmState.RUNNING


async def test_a_template_that_cannot_be_built_is_built_by_the_next_creation(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            for step in ("boot", "stop", "save"):
                house.kind.fail(step)
                error = await refused("internal", rig.create("a"))
                assert step in error.message
                assert list((house.root / "templates").iterdir()) == []
            assert (await rig.create("a")).record.state is VmState.RUNNING


async def test_a_suspension_that_fails_lets_the_guest_run_on(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.exec(vm_id, "while :; do echo x >> ticks; sleep 0.01; done", "ticks", wait_seconds=0.0)
            for mode, step in (("pause", "stop"), ("hibernate", "stop"), ("hibernate", "save")):
                house.kind.fail(step)
                await refused("vm_failed", rig.suspend(vm_id, SuspendMode(mode), force=True))
                assert rig.state(vm_id) == "running"
                assert rig.fleet.status(ALICE, vm_id)[1][0].state is JobState.RUNNING
                command = "rm ticks; until [ -s ticks ]; do :; done; echo on"
                assert await rig.stdout(vm_id, command, f"{mode}.{step}") == "on\n"
                assert {path.name for path in (house.root / "vms" / vm_id).iterdir()} == {"ram", "disk"}


async def test_a_wake_that_fails_before_the_checkpoint_is_spent_leaves_the_vm_and_its_jobs_asleep(
    house: House,
) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.exec(vm_id, "exec sleep 1000", "long", wait_seconds=0.0)
            await rig.suspend(vm_id, force=True)
            for step in ("open", "connect", "load"):
                house.kind.fail(step)
                await refused("vm_failed", rig.resume(vm_id))
                assert rig.state(vm_id) == "hibernated"
                assert rig.fleet.status(ALICE, vm_id)[1][0].state is JobState.FROZEN
            await rig.resume(vm_id)
            assert rig.state(vm_id) == "running"


async def test_a_wake_that_fails_after_it_fails_the_vm_whose_disk_can_be_booted(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.write(vm_id, "f", b"kept")
            await rig.suspend(vm_id)
            house.kind.fail("cont", VmmError("no processor today"))
            await refused("vm_failed", rig.resume(vm_id))
            view, _ = rig.fleet.status(ALICE, vm_id)
            assert view.record.state is VmState.FAILED
            assert view.record.reason == "no processor today"
            await refused("vm_failed", rig.exec(vm_id, "true"))
            await rig.resume(vm_id, cold_boot=True)
            assert await rig.read(vm_id, "f") == b"kept"


async def test_a_checkpoint_that_was_changed_is_not_loaded_and_says_so(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.suspend(vm_id)
            with (house.root / "vms" / vm_id / "ram").open("r+b") as ram:
                ram.write(b"changed")
            await refused("checkpoint_mismatch", rig.resume(vm_id))
            assert rig.state(vm_id) == "hibernated"
            await rig.resume(vm_id, cold_boot=True, discard_memory=True)
            assert rig.state(vm_id) == "running"


async def test_a_vmm_that_dies_fails_its_vm_at_once_and_whoever_waits_hears_of_it(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            job, _ = await rig.exec(vm_id, "exec sleep 1000", wait_seconds=0.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    refused,
                    "vm_failed",
                    rig.fleet.job_status(ALICE, vm_id, job.job_id, wait_seconds=30.0),
                )
                await wait_all_tasks_blocked()
                house.kind.machines[-1].die()
            await _until(rig, vm_id, VmState.FAILED)
            lost = rig.fleet.status(ALICE, vm_id)[1][0]
            assert lost.state is JobState.LOST
            assert lost.message
            assert rig.fleet.parts.room.use().live_vms == 0
            error = await refused("vm_failed", rig.exec(vm_id, "true", "other"))
            assert "cold_boot" in error.message


async def test_a_vm_that_was_stopped_for_want_of_space_runs_on_with_a_right_clock(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await house.kind.machines[-1].run_out_of_space()
            await _until(rig, vm_id, VmState.PAUSED)
            assert rig.fleet.status(ALICE, vm_id)[0].record.reason == lifecycle.NO_SPACE
            assert await rig.stdout(vm_id, "echo on") == "on\n"
            assert rig.fleet.status(ALICE, vm_id)[0].record.reason is None


async def _until(rig: Rig, vm_id: str, state: VmState) -> None:
    """Looks at every turn of the loop; the test's own bound ends it."""
    while rig.fleet.status(ALICE, vm_id)[0].record.state is not state:
        await trio.lowlevel.checkpoint()


async def test_a_caller_that_goes_away_ends_its_waiting_and_never_the_work(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            await rig.create("template")
            hold = house.kind.hold("load")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.create, "left")
                await hold.reached.wait()
                nursery.cancel_scope.cancel()
            hold.release.set()
            again = await rig.create("left")
            assert again.record.state is VmState.RUNNING
            assert len(rig.fleet.list_vms(ALICE, all_workspaces=False)) == 2


async def test_a_destroy_takes_over_from_a_wake_that_hangs_and_gives_everything_back(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            await rig.suspend(vm_id)
            hold = house.kind.hold("load")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused, "not_found", rig.read(vm_id, "f"))
                await hold.reached.wait()
                await rig.fleet.destroy(ALICE, vm_id)
            assert rig.fleet.parts.room.use().vms == 0
            assert list((house.root / "vms").iterdir()) == []


async def test_an_idle_vm_goes_to_rest_by_itself_and_polling_neither_delays_nor_wakes_it(
    house: House,
) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create(idle_seconds=0.5)).record.vm_id
            job, _ = await rig.exec(vm_id, "true")
            while rig.state(vm_id) != "hibernated":
                await trio.lowlevel.checkpoint()
                await rig.fleet.job_status(ALICE, vm_id, job.job_id, wait_seconds=0.0)
            await rig.fleet.job_status(ALICE, vm_id, job.job_id, wait_seconds=0.0)
            assert rig.state(vm_id) == "hibernated"
            assert rig.fleet.status(ALICE, vm_id)[0].hibernates_at is None
            assert await rig.stdout(vm_id, "echo on", "again") == "on\n"


async def test_cancelling_a_frozen_job_wakes_its_vm_and_ends_it(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            vm_id = (await rig.create()).record.vm_id
            job, _ = await rig.exec(vm_id, "exec sleep 1000", wait_seconds=0.0)
            await rig.suspend(vm_id, SuspendMode.PAUSE, force=True)
            ended = await rig.fleet.job_cancel(ALICE, vm_id, job.job_id)
            assert ended.state is JobState.COMPLETED
            assert ended.cancelled
            assert rig.state(vm_id) == "running"


# ---- room ----


async def test_without_room_a_wake_and_a_boot_are_refused_and_change_nothing(house: House) -> None:
    house.budget = Quota(max_memory_mib=2 * MEMORY_MIB)
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            first = (await rig.create("a")).record.vm_id
            await rig.suspend(first)
            for request_id in ("b", "c"):
                await rig.create(request_id)
            await refused("no_capacity", rig.create("d"))
            await refused("no_capacity", rig.resume(first))
            await refused("no_capacity", rig.resume(first, cold_boot=True, discard_memory=True))
            view, _ = rig.fleet.status(ALICE, first)
            assert view.record.state is VmState.HIBERNATED
            assert view.record.spent_generation < view.record.checkpoint_generation
            for other in rig.fleet.list_vms(ALICE, all_workspaces=False)[1:]:
                await rig.fleet.destroy(ALICE, other.record.vm_id)
            await rig.resume(first)
            assert rig.state(first) == "running"


# ---- the service's end and its next beginning ----


async def test_what_runs_is_saved_by_a_drain_and_is_there_after_it(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            awake = (await rig.create("a")).record.vm_id
            await rig.write(awake, "f", b"kept")
            job, _ = await rig.exec(awake, "exec sleep 1000", wait_seconds=0.0)
            paused = (await rig.create("b")).record.vm_id
            await rig.suspend(paused, SuspendMode.PAUSE)
        async with house.open() as rig:
            assert rig.state(awake) == rig.state(paused) == "hibernated"
            assert rig.fleet.status(ALICE, awake)[1][0] == job.with_(state=JobState.FROZEN)
            assert await rig.read(awake, "f") == b"kept"
            assert rig.fleet.status(ALICE, awake)[1][0].job_id == job.job_id


async def test_a_drain_answers_whoever_waits_and_lets_nothing_wake_again(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open(save=False) as rig:
            vm_id = (await rig.create()).record.vm_id
            job, _ = await rig.exec(vm_id, "exec sleep 1000", wait_seconds=0.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    refused,
                    "draining",
                    rig.fleet.job_status(ALICE, vm_id, job.job_id, wait_seconds=30.0),
                )
                await wait_all_tasks_blocked()
                rig.fleet.draining.set()
            await drain(rig.fleet, LONG_S)
            assert rig.state(vm_id) == "hibernated"
            for call in (
                rig.read(vm_id, "f"),
                rig.resume(vm_id),
                rig.create("new"),
                rig.exec(vm_id, "true", "n"),
            ):
                await refused("draining", call)
            assert rig.state(vm_id) == "hibernated"


async def test_after_a_crash_what_slept_wakes_and_what_ran_has_failed_with_a_reason(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open(save=False) as rig:
            asleep = (await rig.create("a")).record.vm_id
            await rig.write(asleep, "f", b"kept")
            await rig.suspend(asleep)
            awake = (await rig.create("b")).record.vm_id
            await rig.write(awake, "f", b"on disk")
            await rig.exec(awake, "exec sleep 1000", wait_seconds=0.0)
        async with house.open() as rig:
            assert await rig.read(asleep, "f") == b"kept"
            view, jobs = rig.fleet.status(ALICE, awake)
            assert view.record.state is VmState.FAILED
            assert view.record.reason
            assert jobs[0].state is JobState.LOST
            assert jobs[0].message
            await rig.resume(awake, cold_boot=True)
            assert await rig.read(awake, "f") == b"on disk"
