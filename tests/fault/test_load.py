"""Many callers, bounds that are reached, and the same thing over and over."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import trio

from microvm.model import Quota
from tests.fault.hooked_service import HookedService
from tests.vm.live_service import MEMORY_MIB, Client, Machine, ToolError, new_request_id
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

PATIENCE_S = 240.0
CLIENTS = 20
COUNTER = """
cd /dev/shm; i=0
while true; do i=$((i+1)); echo $i > next; mv next count; [ $i = 1 ] && echo $i; sleep 0.05; done
"""
RSS_SLACK_KIB = 12 << 10
"""A leak of one checkpoint's bytes, or of a task with its buffers, a cycle would be more."""


async def from_many(clients: list[Client], tool: str, **arguments: Any) -> list[dict[str, Any]]:
    """Everybody's answers to the same call, made at once."""
    answers: list[dict[str, Any]] = []

    async def call(client: Client) -> None:
        answers.append(await client.acall(tool, **arguments))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(call, client)
    return answers


async def test_twenty_clients_with_one_request_id_make_one_vm_and_one_job(service: HookedService) -> None:
    token = service.issue_token("crowd")
    clients = [service.client(token) for _ in range(CLIENTS)]
    made = await from_many(clients, "vm_create", request_id=new_request_id(), memory_mib=MEMORY_MIB)
    assert len(made) == CLIENTS
    (listed,) = clients[0].call("vm_list")["vms"]
    assert {answer["vm_id"] for answer in made} == {listed["vm_id"]}
    vm = Machine(clients[0], listed["vm_id"], listed)
    vm.suspend()
    ran = await from_many(
        clients,
        "vm_exec",
        vm_id=vm.vm_id,
        request_id=new_request_id(),
        command="echo ran >> log",
        wait_seconds=30,
    )
    assert {(job["job_id"], job["exit_code"]) for job in ran} == {(ran[0]["job_id"], 0)}
    assert len(ran) == CLIENTS
    assert vm.read("log") == b"ran\n"
    assert len(vm.status["jobs"]) == 1
    vm.destroy()


def refused(call: Callable[[], object], status: int, code: str, limit: str) -> None:
    """A refusal that says which bound it was and when to come again."""
    with pytest.raises(ToolError) as error:
        call()
    assert (error.value.status, error.value.code) == (status, code), error.value
    assert error.value.detail["limit"] == limit
    assert int(error.value.retry_after or "0") > 0


@pytest.mark.parametrize(
    ("quota", "limit"),
    [
        (Quota(max_vms=2), "max_vms"),
        (Quota(max_memory_mib=2 * MEMORY_MIB), "max_memory_mib"),
        (Quota(max_storage_gib=7), "max_storage_gib"),
    ],
)
def test_a_workspace_at_its_quota_has_room_again_after_a_destroy(
    service: HookedService, quota: Quota, limit: str
) -> None:
    client = service.client(service.issue_token(limit, quota=quota))
    pair = [client.create() for _ in range(2)]
    request_id = new_request_id()
    refused(lambda: client.create(request_id=request_id), 429, "quota_exceeded", limit)
    assert len(client.call("vm_list")["vms"]) == len(pair)
    stranger = service.owner.create()
    stranger.destroy()
    pair[0].destroy()
    third = client.create(request_id=request_id)
    assert third.text("echo here") == "here\n"
    third.destroy()
    pair[1].destroy()


def test_memory_of_a_hibernated_vm_is_free_for_others_and_its_wake_is_admitted_like_a_creation(
    service: HookedService,
) -> None:
    token = service.issue_token("one-at-a-time", quota=Quota(max_memory_mib=MEMORY_MIB))
    client = service.client(token)
    first = client.create()
    first.text("echo first > /dev/shm/note")
    first.suspend()
    second = client.create()
    refused(lambda: first.text("true"), 429, "quota_exceeded", "max_memory_mib")
    assert first.state == "hibernated"
    second.suspend()
    assert first.text("cat /dev/shm/note") == "first\n"
    first.destroy()
    assert second.call("vm_resume")["state"] == "running"
    second.destroy()


def test_a_host_at_its_budget_has_room_again_after_a_destroy(
    make_service: Callable[..., HookedService],
) -> None:
    service = make_service(max_memory_mib=2 * MEMORY_MIB, max_vms=3)
    service.start()
    clients = [service.client(service.issue_token(name)) for name in ("one", "other")]
    vms = [client.create() for client in clients]
    refused(clients[0].create, 503, "no_capacity", "max_memory_mib")
    vms[0].suspend()
    third = clients[0].create()
    refused(lambda: vms[0].call("vm_resume"), 503, "no_capacity", "max_memory_mib")
    refused(clients[1].create, 503, "no_capacity", "max_vms")
    vms[1].destroy()
    assert vms[0].call("vm_resume")["state"] == "running"
    for vm in (vms[0], third):
        vm.destroy()
    service.check_nothing_left()


async def test_a_wake_without_room_first_hibernates_a_vm_that_is_past_its_idle_time(
    make_service: Callable[..., HookedService],
) -> None:
    """Without its timers the service leaves overdue VMs awake; only the need for room may take one."""
    service = make_service(max_memory_mib=2 * MEMORY_MIB)
    service.timers = False
    service.start()
    busy, idle = (service.owner.create(idle_seconds=seconds) for seconds in (0, 5))
    idle.text("echo idle > /dev/shm/note")
    refused(service.owner.create, 503, "no_capacity", "max_memory_mib")
    busy.suspend()
    sleeper = service.owner.create(idle_seconds=0)
    refused(lambda: busy.call("vm_resume"), 503, "no_capacity", "max_memory_mib")
    await until(lambda: is_overdue(idle))
    assert idle.state == "running"
    assert busy.text("echo awake") == "awake\n"
    assert (busy.state, idle.state, sleeper.state) == ("running", "hibernated", "running")
    refused(lambda: idle.text("true"), 503, "no_capacity", "max_memory_mib")
    sleeper.destroy()
    assert idle.text("cat /dev/shm/note") == "idle\n"


def is_overdue(vm: Machine) -> bool:
    return datetime.fromisoformat(vm.status["hibernates_at"]).timestamp() < time.time()


def test_hibernating_and_waking_over_and_over_loses_nothing_and_costs_the_daemon_nothing(
    service: HookedService, client: Client, rounds: Callable[[int, int], int]
) -> None:
    vm = client.create(idle_seconds=0)
    counter = vm.start(COUNTER)
    vm.wait_output(counter, b"1\n")
    seen = 0

    def cycle(number: int) -> None:
        nonlocal seen
        vm.text(f"head -c 64K /dev/zero | tr '\\0' '{number % 10}' >> growing; sync")
        assert vm.suspend(force=True)["state"] == "hibernated"
        size, count = vm.text("stat -c %s growing; cat /dev/shm/count").split()
        assert int(size) == (number + 1) << 16
        assert int(count) >= seen
        seen = int(count)

    warm = 2
    for number in range(warm):
        cycle(number)
    before = service.descriptors(), rss_kib(service)
    for number in range(warm, warm + rounds(5, 50)):
        cycle(number)
    after = service.descriptors(), rss_kib(service)
    (files, sockets), (files_before, sockets_before) = kinds(after[0]), kinds(before[0])
    assert files == files_before
    assert sockets <= sockets_before  # other clients' connections are closed after a while
    assert after[1] - before[1] < RSS_SLACK_KIB, (before[1], after[1])
    assert vm.call("vm_job_status", job_id=counter)["state"] == "running"
    content = vm.text("tr -d '\\n' < growing | fold -w 65536 | cut -c1 | tr -d '\\n'")
    assert content == "".join(str(number % 10) for number in range(warm + rounds(5, 50)))
    vm.destroy()
    service.check_nothing_left()


def kinds(descriptors: list[str]) -> tuple[list[str], int]:
    """Descriptors without the numbers that differ within a kind; and how many are sockets."""
    names = sorted(name.split("[")[0].split(":")[0] for name in descriptors)
    return [name for name in names if name != "socket"], names.count("socket")


def rss_kib(service: HookedService) -> int:
    """What the daemon holds in memory."""
    with open(f"/proc/{service.pid}/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1])
