"""A volume without room, and one that cannot be written: a documented refusal, and everything as it was.

All on a small volume of its own. A running VM holds its files open for writing and the kernel refuses to
make such a volume read-only, so that what meets a read-only volume is what sleeps and what is to be made.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.hooked_service import HookedService, check_disk
from tests.fault.small_volume import SmallVolume, open_small_volume
from tests.vm.live_service import Machine, ToolError
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

MIB = 1 << 20
BELOW_RESERVE_BYTES = 900 * MIB
"""The reserve is 1 GiB."""
REMEMBER = "echo on-disk > note; sync; echo in-memory > /dev/shm/note"

WRITTEN_MIB = 48
WRITER = f"""
import os, random
noise = random.Random(2604)
with open("written", "wb", buffering=0) as file:
    for number in range({WRITTEN_MIB}):
        file.write(noise.randbytes(1 << 20))
        os.fsync(file.fileno())
        print(number, flush=True)
"""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallVolume]:
    with open_small_volume(tmp_path_factory.mktemp("small")) as small:
        yield small


@pytest.fixture(scope="module")
def cramped(image_dir: Path, volume: SmallVolume) -> Iterator[HookedService]:
    """A service on the small volume, its template built."""
    one = HookedService(image_dir, volume.path)
    try:
        one.start()
        one.owner.create().destroy()
        yield one
    finally:
        volume.empty()
        one.remove()


@pytest.fixture
def room(volume: SmallVolume, cramped: HookedService) -> Iterator[SmallVolume]:
    """The volume; its room is back after the test, and no VM is left."""
    yield volume
    volume.empty()
    cramped.clear()


@pytest.fixture
def sleeping(cramped: HookedService, room: SmallVolume) -> Machine:
    """A hibernated VM."""
    vm = make(cramped)
    vm.suspend()
    return vm


@pytest.fixture
def running(cramped: HookedService, room: SmallVolume) -> Machine:
    """A running VM."""
    return make(cramped)


def make(service: HookedService) -> Machine:
    vm = service.owner.create(idle_seconds=0)
    vm.text(REMEMBER)
    return vm


def refused(vm: Machine, tool: str, code: str, **arguments: object) -> ToolError:
    """The refusal of a call that must be refused."""
    with pytest.raises(ToolError) as error:
        vm.client.call(tool, **arguments)
    assert error.value.code == code, error.value
    if code == "no_capacity":
        assert error.value.status == 503
        assert int(error.value.retry_after or "0") > 0
    return error.value


async def check_cause(service: HookedService, error: ToolError, cause: str) -> None:
    """The operator finds the cause in the log, under what the caller was told, a moment later at most."""
    told = error.detail["trace_id"]
    await until(lambda: any(told in line and cause in line for line in service.log.splitlines()))


def files(service: HookedService) -> set[str]:
    """Every file below the volume's directory of VMs."""
    return {str(path) for path in (service.vm_dir / "vms").rglob("*")}


async def until_room(volume: SmallVolume) -> None:
    """XFS gives an unlinked file's blocks back a moment later."""
    await until(lambda: volume.free_bytes > BELOW_RESERVE_BYTES + 256 * MIB)


async def test_a_guest_that_writes_while_the_volume_fills_stands_still_and_loses_nothing(
    cramped: HookedService, room: SmallVolume, running: Machine
) -> None:
    running.write("writer.py", WRITER.encode())
    job_id = running.start("exec python3 -u writer.py")
    running.wait_output(job_id, b"3\n")
    room.fill(BELOW_RESERVE_BYTES)
    await until(lambda: running.state == "paused")
    status = running.status
    assert status["reason"] == "no_space"
    assert running.call("vm_job_status", job_id=job_id)["state"] == "frozen"
    for tool, more in (
        ("vm_resume", {}),
        ("vm_exec", {"command": "true"}),
        ("vm_read_file", {"path": "note"}),
    ):
        refused(running, tool, "no_capacity", vm_id=running.vm_id, **more)
        now = running.status
        assert (now["state"], now["reason"]) == ("paused", "no_space"), (tool, now)
    room.empty()
    await until_room(room)
    assert running.call("vm_resume")["state"] == "running"
    assert running.wait(job_id)["exit_code"] == 0
    written = random.Random(2604)
    whole = hashlib.sha256(b"".join(written.randbytes(MIB) for _ in range(WRITTEN_MIB))).hexdigest()
    assert running.text("sha256sum written").split()[0] == whole
    assert running.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"


async def test_below_the_reserve_nothing_new_is_admitted_and_what_is_there_can_be_destroyed(
    cramped: HookedService, room: SmallVolume, running: Machine, sleeping: Machine
) -> None:
    paused, doomed = make(cramped), make(cramped)
    paused.suspend("pause")
    room.fill(BELOW_RESERVE_BYTES)
    await until(lambda: running.state == "paused" and doomed.state == "paused")
    before = files(cramped)
    refused(running, "vm_create", "no_capacity", memory_mib=256)
    refused(running, "vm_create", "no_capacity", memory_mib=128)
    refused(sleeping, "vm_exec", "no_capacity", vm_id=sleeping.vm_id, command="true")
    refused(sleeping, "vm_resume", "no_capacity", vm_id=sleeping.vm_id)
    refused(paused, "vm_resume", "no_capacity", vm_id=paused.vm_id)
    assert (sleeping.state, paused.state) == ("hibernated", "paused")
    assert files(cramped) == before
    doomed.destroy()
    room.empty()
    await until_room(room)
    for vm in (running, sleeping, paused):
        assert vm.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"


async def test_below_the_reserve_vms_can_be_saved_by_hand_and_by_the_end_of_the_service(
    cramped: HookedService, room: SmallVolume, running: Machine
) -> None:
    """A checkpoint needs next to nothing beside the memfile, and the reserve is there for it."""
    other = make(cramped)
    jobs = {vm.vm_id: vm.start("sleep 600") for vm in (running, other)}
    room.fill(BELOW_RESERVE_BYTES)
    await until(lambda: running.state == "paused" and other.state == "paused")
    assert running.suspend(force=True)["state"] == "hibernated"
    refused(running, "vm_resume", "no_capacity", vm_id=running.vm_id)
    cramped.stop()
    assert not cramped.records("not saved")
    cramped.start()
    running, other = cramped.again(running), cramped.again(other)
    assert (running.state, other.state) == ("hibernated", "hibernated")
    refused(other, "vm_resume", "no_capacity", vm_id=other.vm_id)
    room.empty()
    await until_room(room)
    for vm in (running, other):
        assert vm.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
        assert vm.call("vm_job_status", job_id=jobs[vm.vm_id])["state"] == "running"


async def test_a_volume_filled_to_its_last_block_keeps_what_sleeps_and_what_was_synced(
    cramped: HookedService, room: SmallVolume, running: Machine, sleeping: Machine
) -> None:
    """Also over a kill of the service, which must start again to give room back."""
    room.fill(BELOW_RESERVE_BYTES)
    await until(lambda: running.state == "paused")
    room.fill(0)
    before = files(cramped)
    refused(running, "vm_create", "no_capacity", memory_mib=256)
    refused(sleeping, "vm_resume", "no_capacity", vm_id=sleeping.vm_id)
    refused(running, "vm_suspend", "no_capacity", vm_id=running.vm_id, mode="hibernate")
    refused(running, "vm_exec", "no_capacity", vm_id=running.vm_id, command="true")
    assert (sleeping.state, running.state) == ("hibernated", "paused")
    assert files(cramped) == before
    cramped.kill()
    room.fill(0)  # a dead process's preallocations come back
    cramped.start()
    run_on, slept_on = cramped.again(running), cramped.again(sleeping)
    assert (slept_on.state, run_on.state) == ("hibernated", "failed")
    cause = run_on.status["reason"]
    assert "paused" in cause
    refused(run_on, "vm_resume", "no_capacity", vm_id=run_on.vm_id, cold_boot=True)
    assert (run_on.state, run_on.status["reason"]) == ("failed", cause)
    room.empty()
    await until_room(room)
    check_disk(cramped, run_on)
    assert slept_on.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    assert run_on.call("vm_resume", cold_boot=True)["state"] == "running"
    assert run_on.text("cat note") == "on-disk\n"


async def test_a_guest_that_finds_no_block_stands_still_or_fails_and_what_it_synced_is_there(
    cramped: HookedService, room: SmallVolume, running: Machine
) -> None:
    """The last block goes at once, before anybody looks: which store finds none first is chance."""
    running.write("writer.py", WRITER.encode())
    job_id = running.start("exec python3 -u writer.py")
    running.wait_output(job_id, b"3\n")
    room.fill(0)
    await until(lambda: running.state in {"paused", "failed"})
    status = running.status
    assert status["reason"]
    room.empty()
    await until_room(room)
    if status["state"] == "paused":
        assert status["reason"] == "no_space"
        assert running.call("vm_resume")["state"] == "running"
        assert running.wait(job_id)["exit_code"] == 0
    else:
        check_disk(cramped, running)
        assert running.call("vm_resume", cold_boot=True)["state"] == "running"
    written = random.Random(2604)
    content = b"".join(written.randbytes(MIB) for _ in range(4))
    found = running.text(f"head -c {len(content)} written | sha256sum").split()[0]
    assert found == hashlib.sha256(content).hexdigest()
    assert running.text("cat note") == "on-disk\n"


async def test_a_read_only_volume_refuses_with_the_cause_and_keeps_everything(
    cramped: HookedService, room: SmallVolume, sleeping: Machine
) -> None:
    doomed = make(cramped)
    doomed.suspend()
    with room.read_only():
        before = files(cramped)
        for tool, more in (
            ("vm_resume", {"vm_id": sleeping.vm_id}),
            ("vm_exec", {"vm_id": sleeping.vm_id, "command": "true"}),
            ("vm_write_file", {"vm_id": sleeping.vm_id, "path": "new", "content": "new"}),
            ("vm_create", {"memory_mib": 256}),
        ):
            await check_cause(cramped, refused(sleeping, tool, "internal", **more), "EROFS")
        assert sleeping.state == "hibernated"
        assert {vm["vm_id"] for vm in cramped.owner.call("vm_list")["vms"]} == {
            sleeping.vm_id,
            doomed.vm_id,
        }
        gone = refused(doomed, "vm_destroy", "internal", vm_id=doomed.vm_id)
        await check_cause(cramped, gone, "EROFS")
        assert files(cramped) == before
        cramped.kill()
        with pytest.raises(AssertionError, match="EROFS"):
            cramped.start()
    cramped.start()
    slept_on = cramped.again(sleeping)
    assert slept_on.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    assert [vm["vm_id"] for vm in cramped.owner.call("vm_list")["vms"]] == [sleeping.vm_id]
    slept_on.suspend()
    cramped.check_nothing_left(slept_on)
