"""What lives on through pause and hibernation, what refuses them, and what wakes a VM."""

from __future__ import annotations

import hashlib
import random
import time
from datetime import datetime
from pathlib import Path

import pytest
import trio

from tests.vm.live_service import Client, Machine, Service, ToolError
from tests.vm.resident import Resident
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

IDENTITY = """
cat /etc/machine-id
cat /proc/sys/kernel/random/boot_id
python3 -c 'import uuid; print(uuid.UUID(bytes=open("/dev/urandom", "rb").read(16)))'
hostname
"""
TICKER = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.02; done"


def test_a_process_and_its_memory_live_through_pause_and_hibernation(vm: Machine) -> None:
    resident = Resident(vm)
    boot_id = vm.text("cat /proc/sys/kernel/random/boot_id")
    assert vm.suspend("pause", force=True)["state"] == "paused"
    resident.check()
    assert vm.suspend("hibernate", force=True)["state"] == "hibernated"
    assert "pid" not in vm.status
    resident.check()
    assert vm.state == "running"
    vm.suspend("pause", force=True)
    assert vm.suspend("hibernate")["state"] == "hibernated"
    assert vm.call("vm_resume")["state"] == "running"
    resident.check()
    assert vm.text("cat /proc/sys/kernel/random/boot_id") == boot_id


def test_what_is_written_before_each_of_five_hibernations_is_there_after_it(vm: Machine) -> None:
    known: dict[str, str] = {}
    for number in range(5):
        content = random.Random(number).randbytes(100_000)
        for path in (f"/workspace/on-disk-{number}", f"/dev/shm/in-memory-{number}"):
            known[path] = hashlib.sha256(content).hexdigest()
        vm.write(f"on-disk-{number}", content)
        vm.text(f"cp on-disk-{number} /dev/shm/in-memory-{number}")
        assert vm.suspend()["state"] == "hibernated"
        found = vm.text(f"sha256sum {' '.join(known)}").splitlines()
        assert {path: digest for digest, path in map(str.split, found)} == known


def test_every_one_of_twenty_pauses_is_followed_by_a_command_that_runs(vm: Machine) -> None:
    for number in range(20):
        assert vm.suspend("pause")["state"] == "paused"
        assert vm.text(f"echo {number}") == f"{number}\n"


def test_suspending_and_resuming_what_is_there_already_is_no_error(vm: Machine) -> None:
    assert vm.call("vm_resume")["state"] == "running"
    vm.suspend("pause")
    assert vm.suspend("pause")["state"] == "paused"
    vm.suspend("hibernate")
    assert vm.suspend("hibernate")["state"] == "hibernated"
    with pytest.raises(ToolError) as refused:
        vm.suspend("pause")
    assert refused.value.code == "invalid_state"
    assert vm.state == "hibernated"


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
def test_a_job_that_streams_output_loses_and_repeats_nothing_over_a_suspension(
    vm: Machine, mode: str
) -> None:
    job_id = vm.start(TICKER)
    vm.wait_output(job_id, b"\n10\n")
    vm.suspend(mode, force=True)
    assert vm.call("vm_job_status", job_id=job_id)["state"] == "frozen"
    vm.call("vm_resume")
    before = vm.call("vm_job_output", job_id=job_id)["totals"]["stdout"]
    seen = vm.wait_output(job_id, f"\n{count_at(before) + 20}\n".encode())
    numbers = [int(line) for line in seen.split(b"\n")[:-1]]
    assert numbers == list(range(len(numbers)))


def count_at(size: int) -> int:
    """How many lines of `TICKER` make `size` bytes, or a few fewer."""
    count = total = 0
    while total + len(str(count)) + 1 <= size:
        total += len(str(count)) + 1
        count += 1
    return count


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
def test_a_suspension_is_refused_while_a_job_runs_and_force_freezes_it(vm: Machine, mode: str) -> None:
    job_id = vm.start("sleep 600")
    with pytest.raises(ToolError) as refused:
        vm.suspend(mode)
    assert (refused.value.code, refused.value.status) == ("jobs_active", 409)
    assert vm.state == "running"
    assert vm.call("vm_job_status", job_id=job_id)["state"] == "running"
    vm.suspend(mode, force=True)
    assert vm.call("vm_job_status", job_id=job_id)["state"] == "frozen"
    vm.call("vm_resume")
    assert vm.call("vm_job_status", job_id=job_id)["state"] == "running"


def test_what_a_finished_job_left_running_refuses_a_suspension_too(vm: Machine) -> None:
    job = vm.run("sleep 600 > /dev/null 2>&1 & echo started")
    assert (job["state"], job["background_processes"]) == ("completed", 1)
    with pytest.raises(ToolError, match="jobs_active"):
        vm.suspend()
    vm.call("vm_job_cancel", job_id=job["job_id"])
    assert vm.suspend()["state"] == "hibernated"


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
def test_cancelling_a_frozen_job_wakes_the_vm_and_kills_it(vm: Machine, mode: str) -> None:
    job_id = vm.start("setsid sleep 4321 & echo started; wait")
    vm.wait_output(job_id, b"started")
    vm.suspend(mode, force=True)
    job = vm.call("vm_job_cancel", job_id=job_id)
    assert (job["state"], job["cancelled"], job["background_processes"]) == ("completed", True, 0)
    assert vm.state == "running"
    assert vm.run("pgrep -f 'sleep 432[1]'")["exit_code"] == 1


async def test_a_timeout_counts_only_the_time_that_the_vm_runs(vm: Machine) -> None:
    """Waiting out more than the timeout while the VM is suspended is the subject here."""
    timeout_s, rest_s, slept_s = 6.0, 4.0, 0.0
    job_id = vm.start("sleep 600", timeout_seconds=timeout_s)
    for mode in ("pause", "hibernate"):
        vm.suspend(mode, force=True)
        began = time.time()
        await trio.sleep(rest_s)
        slept_s += time.time() - began
        assert vm.call("vm_job_status", job_id=job_id)["state"] == "frozen"
        vm.call("vm_resume")
        assert vm.call("vm_job_status", job_id=job_id)["state"] == "running"
    assert slept_s > timeout_s
    job = vm.wait(job_id)
    assert job["timed_out"]
    assert job["run_seconds"] >= timeout_s
    wall_s = seconds(job["ended_at"]) - seconds(job["started_at"])
    assert wall_s - job["run_seconds"] >= slept_s - 0.2  # two clocks that are read at other moments


def seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


@pytest.mark.parametrize(("mode", "state"), [("hibernate", "hibernated"), ("pause", "paused")])
async def test_an_idle_vm_goes_to_rest_however_often_it_is_polled_and_the_next_command_wakes_it(
    client: Client, mode: str, state: str
) -> None:
    vm = client.create(idle_seconds=5, idle_mode=mode)
    try:
        vm.text("echo remembered > /dev/shm/note")
        assert "hibernates_at" in vm.status
        await until(lambda: vm.state == state)
        assert vm.text("cat /dev/shm/note") == "remembered\n"
        assert vm.state == "running"
    finally:
        vm.destroy()


async def test_a_running_job_and_what_one_left_behind_keep_an_idle_vm_awake(client: Client) -> None:
    """Waiting out more than the idle time is the subject here."""
    busy, haunted = client.create(idle_seconds=5), client.create(idle_seconds=5)
    try:
        jobs = [busy.start("sleep 3600"), haunted.run("sleep 3600 > /dev/null 2>&1 &")["job_id"]]
        assert "hibernates_at" not in busy.status
        assert "hibernates_at" not in haunted.status
        await trio.sleep(7)
        assert [busy.state, haunted.state] == ["running", "running"]
        for vm, job_id in zip((busy, haunted), jobs, strict=True):
            vm.call("vm_job_cancel", job_id=job_id)
        await until(lambda: [busy.state, haunted.state] == ["hibernated", "hibernated"])
    finally:
        busy.destroy()
        haunted.destroy()


def test_polling_wakes_nothing_and_serves_what_a_finished_job_printed(vm: Machine) -> None:
    job = vm.run("echo done")
    vm.suspend()
    assert vm.client.call("vm_list")["vms"]
    assert vm.call("vm_job_status", job_id=job["job_id"])["state"] == "completed"
    assert vm.call("vm_job_output", job_id=job["job_id"])["stdout"] == "done\n"
    assert vm.state == "hibernated"


def test_a_cold_boot_over_a_valid_checkpoint_needs_to_be_told_to_discard_it(vm: Machine) -> None:
    vm.text("echo on-disk > note; sync; echo in-memory > /dev/shm/note")
    with pytest.raises(ToolError, match="invalid_state"):
        vm.call("vm_resume", cold_boot=True, discard_memory=True)
    vm.suspend()
    with pytest.raises(ToolError, match="discard_memory") as refused:
        vm.call("vm_resume", cold_boot=True)
    assert refused.value.code == "invalid_state"
    assert vm.text("cat /dev/shm/note") == "in-memory\n"
    vm.suspend()
    assert vm.call("vm_resume", cold_boot=True, discard_memory=True)["state"] == "running"
    assert vm.run("cat /dev/shm/note")["exit_code"] == 1
    assert vm.text("cat note") == "on-disk\n"
    assert vm.suspend()["state"] == "hibernated"
    assert vm.text("cat note") == "on-disk\n"


def test_a_second_creation_of_a_size_boots_nothing(service: Service, client: Client) -> None:
    before = template_files(service)
    assert before
    built = len(service.records("template built"))
    twins = [client.create(), client.create()]
    try:
        assert template_files(service) == before
        assert len(service.records("template built")) == built
        one, other = (vm.text(IDENTITY).splitlines() for vm in twins)
        assert [len(line) for line in one] == [32, 36, 36, len(one[3])]
        assert one[3] == twins[0].vm_id.replace("_", "-")
        assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    finally:
        for vm in twins:
            vm.destroy()


def template_files(service: Service) -> dict[Path, tuple[int, int, int]]:
    """Every file of every template, with what would change if one were built anew or written to."""
    found = {path: path.stat() for path in (service.vm_dir / "templates").rglob("*")}
    return {path: (st.st_ino, st.st_size, st.st_mtime_ns) for path, st in found.items()}
