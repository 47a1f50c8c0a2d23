"""SIGTERM with many VMs at work: all are saved within the budget, and go on where they were."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest
import trio

from tests.fault.hooked_service import HookedService
from tests.vm.live_service import Machine
from tests.vm.resident import Resident

pytestmark = [pytest.mark.vm, pytest.mark.root]

MARGIN_S = 0.5  # two clocks that are read at other moments


def seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


async def test_every_vm_is_saved_with_its_jobs_whose_timeouts_count_only_the_time_that_they_run(
    service: HookedService, rounds: Callable[[int, int], int]
) -> None:
    """Waiting for the timeouts is the subject here."""
    owner = service.owner
    vms = [owner.create(idle_seconds=0) for _ in range(rounds(2, 6))]
    residents = [Resident(vm) for vm in vms]
    timeout_s = rounds(12, 40)  # longer than it takes to save them all
    timed = [vm.start("sleep 600", timeout_seconds=timeout_s) for vm in vms]
    vms[-1].suspend("pause", force=True)
    ending = time.time()
    assert service.stop() == 0
    assert not service.records("killed")
    assert not service.records("not saved")
    assert not service.leftovers().processes
    service.start()
    vms = [service.again(vm) for vm in vms]
    for vm, resident, job_id in zip(vms, residents, timed, strict=True):
        assert vm.state == "hibernated"
        for known in (resident.job_id, job_id):
            assert vm.call("vm_job_status", job_id=known)["state"] == "frozen"
    service.check_nothing_left(*vms)
    slept_s = time.time() - ending
    for vm, resident in zip(vms, residents, strict=True):
        resident.go_on(vm)
        assert vm.call("vm_job_status", job_id=resident.job_id)["state"] == "running"

    async def check(vm: Machine, job_id: str) -> None:
        job = await trio.to_thread.run_sync(vm.wait, job_id)
        assert job["timed_out"]
        assert job["run_seconds"] >= timeout_s
        wall_s = seconds(job["ended_at"]) - seconds(job["started_at"])
        assert wall_s - job["run_seconds"] >= slept_s - MARGIN_S

    with trio.fail_after(240):
        async with trio.open_nursery() as nursery:
            for vm, job_id in zip(vms, timed, strict=True):
                nursery.start_soon(check, vm, job_id)
    for vm in vms:
        vm.destroy()
    service.check_nothing_left()
