"""Everything at once on one VM: each call gets a clear answer, nothing is lost or done twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest
import trio

from tests.fault.hooked_service import HookedService
from tests.vm.live_service import Client, Machine, ToolError
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

PATIENCE_S = 240.0
SETTLED = {"running", "paused", "hibernated"}
STATES = SETTLED | {"hibernating", "resuming"}
GONE = {"not_found", "vm_failed", "guest_unreachable", "outcome_unknown"}
"""What a call may hear whose VM is destroyed meanwhile."""
DESTROY_EVERY = 5


class Round:
    """Calls made at once, in random order, and what they were answered."""

    def __init__(self, vm: Machine, number: int, *, destroys: bool) -> None:
        self.vm = vm
        self.number = number
        self.destroys = destroys
        self.jobs: dict[str, str] = {}
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        """Returns once every call was answered."""
        calls: list[Callable[[], Awaitable[None]]] = [
            *(lambda name=f"{self.number}-{each}": self._exec(name) for each in range(3)),
            lambda: self._allowed("vm_suspend", {"jobs_active"}, mode="hibernate"),
            lambda: self._allowed("vm_suspend", {"jobs_active", "invalid_state"}, mode="pause"),
            lambda: self._allowed("vm_suspend", set(), mode="hibernate", force=True),
            lambda: self._allowed("vm_suspend", {"invalid_state"}, mode="pause", force=True),
            lambda: self._allowed("vm_resume", set()),
            lambda: self._allowed("vm_resume", set()),
            lambda: self._allowed("vm_status", set()),
            lambda: self._allowed("vm_read_file", set(), path="here"),
        ]
        if self.destroys:
            calls += [self._destroy, self._destroy]
        random.Random(self.number).shuffle(calls)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(call)

    async def _call(self, tool: str, **arguments: object) -> dict[str, Any] | ToolError:
        try:
            return await self.vm.acall(tool, **arguments)
        except ToolError as error:
            return error

    async def _allowed(self, tool: str, codes: set[str], **arguments: object) -> None:
        answer = await self._call(tool, **arguments)
        if isinstance(answer, ToolError):
            assert answer.code in codes | (GONE if self.destroys else set()), (tool, arguments, answer)
            self.answers[answer.code] += 1
        elif "state" in answer:
            assert answer["state"] in STATES | ({"destroying"} if self.destroys else set()), (tool, answer)
            self.answers[answer["state"]] += 1

    async def _exec(self, name: str) -> None:
        job = await self._call("vm_exec", command=f"echo {name} >> log")
        if isinstance(job, ToolError):
            assert self.destroys, (name, job)
            assert job.code in GONE, (name, job)
        else:
            self.jobs[job["job_id"]] = name

    async def _destroy(self) -> None:
        answer = await self._call("vm_destroy")
        assert not isinstance(answer, ToolError) or answer.code == "not_found", answer


async def test_whatever_happens_to_a_vm_at_once_each_call_is_answered_and_one_state_stays(
    service: HookedService, client: Client, rounds: Callable[[int, int], int]
) -> None:
    vm, expected = fresh(client), set[str]()
    for number in range(rounds(15, 100)):
        once = Round(vm, number, destroys=number % DESTROY_EVERY == DESTROY_EVERY - 1)
        await once.run()
        if once.destroys:
            with pytest.raises(ToolError, match="not_found"):
                vm.call("vm_status")
            assert client.call("vm_list")["vms"] == []
            service.check_nothing_left()
            vm, expected = fresh(client), set[str]()
            continue
        settled = vm.state
        assert settled in SETTLED, once.answers
        assert vm.state == settled
        assert vm.call("vm_resume")["state"] == "running"
        for job_id in once.jobs:
            assert vm.wait(job_id)["exit_code"] == 0
        expected |= set(once.jobs.values())
        lines = vm.read("log").decode().split()
        assert sorted(lines) == sorted(expected)
    vm.destroy()
    service.check_nothing_left()


def fresh(client: Client) -> Machine:
    vm = client.create(idle_seconds=0)
    vm.write("here", b"here")
    return vm


async def test_a_command_that_comes_at_the_very_moment_of_the_idle_deadline_is_never_lost(
    client: Client, rounds: Callable[[int, int], int]
) -> None:
    """Waiting for the deadline is the subject: a command comes 10 ms earlier or later each time."""
    steps = rounds(8, 40)
    at_once = 4
    offsets = [(number - steps // 2) * 0.010 for number in range(steps)]
    vms = [client.create(idle_seconds=5) for _ in range(at_once)]
    states: Counter[str] = Counter()

    async def fire(vm: Machine, mine: list[float]) -> None:
        for offset in mine:
            before = await vm.acall("vm_exec", command="echo before >> log", wait_seconds=30)
            assert before["exit_code"] == 0
            status = await trio.to_thread.run_sync(lambda: vm.status)
            deadline = datetime.fromisoformat(status["hibernates_at"]).timestamp()
            await trio.sleep(max(deadline + offset - time.time(), 0.0))
            after = await vm.acall("vm_exec", command="echo after >> log", wait_seconds=30)
            assert after["exit_code"] == 0, (offset, after)
            states[(await trio.to_thread.run_sync(lambda: vm.status))["state"]] += 1

    with trio.fail_after(PATIENCE_S + 10 * steps):
        async with trio.open_nursery() as nursery:
            for number, vm in enumerate(vms):
                nursery.start_soon(fire, vm, offsets[number::at_once])
    assert set(states) == {"running"}
    for number, vm in enumerate(vms):
        count = len(offsets[number::at_once])
        assert vm.read("log").decode().split() == ["before", "after"] * count
    await until(lambda: all(vm.state == "hibernated" for vm in vms))
