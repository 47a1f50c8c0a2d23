"""No user code sees the old time after a suspension.

The subject is real time that passes while a guest stands still, so these tests wait it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import trio

from tests.vm.live_service import Machine

pytestmark = [pytest.mark.vm, pytest.mark.root]

TOLERANCE_S = 0.05
"""The contract's: how far off the first command's clock may be, plus the channel's latency."""

LOOP = "while true; do echo $EPOCHREALTIME; date +%s.%N; sleep 0.02; done"


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
async def test_the_first_command_after_a_long_suspension_sees_the_right_time(
    vm: Machine, mode: str, rounds: Callable[[int, int], int]
) -> None:
    vm.suspend(mode)
    await trio.sleep(rounds(3, 90))
    before = time.time()
    seen = float(vm.text("date +%s.%N"))
    assert before - TOLERANCE_S <= seen <= time.time() + TOLERANCE_S


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
async def test_a_command_that_prints_the_time_prints_none_from_before_once_it_runs_on(
    vm: Machine, mode: str
) -> None:
    job_id = vm.start(LOOP)
    vm.wait_output(job_id, b"\n")
    vm.suspend(mode, force=True)
    suspended = time.time()
    await trio.sleep(2)
    resumed = time.time()
    vm.call("vm_resume")
    lines = vm.wait_output(job_id, b"\n" + str(int(resumed) + 2).encode()).split(b"\n")[:-1]
    moments = [float(line) for line in lines]
    assert moments == sorted(moments)
    assert moments[-1] > resumed
    stale = [at for at in moments if suspended + TOLERANCE_S < at < resumed - TOLERANCE_S]
    assert stale == []


def test_a_new_vm_has_the_time_of_now_and_not_that_of_its_template(vm: Machine) -> None:
    before = time.time()
    assert before - TOLERANCE_S <= float(vm.text("date +%s.%N")) <= time.time() + TOLERANCE_S
