"""Retries: whoever repeats a request gets the same answer and no second effect."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.vm.live_service import Client, Machine, Service, ToolError, new_request_id

pytestmark = [pytest.mark.vm, pytest.mark.root]

AT_ONCE = 12
COMMAND = "echo ran >> once; echo out"
PATIENCE_S = 120.0


async def at_once(client: Client, tool: str, **arguments: Any) -> list[dict[str, Any]]:
    """The answers of the same call made many times in parallel."""
    answers: list[dict[str, Any]] = []

    async def call() -> None:
        answers.append(await client.acall(tool, **arguments))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(call)
    return answers


def test_a_repeated_command_runs_once_and_is_answered_alike(shared_vm: Machine) -> None:
    request_id = new_request_id()
    first = shared_vm.run("echo ran >> twice", request_id=request_id)
    again = shared_vm.run("echo ran >> twice", request_id=request_id)
    assert again["job_id"] == first["job_id"]
    assert shared_vm.read("twice") == b"ran\n"


async def test_the_same_command_from_many_clients_at_once_runs_once(shared_vm: Machine) -> None:
    answers = await at_once(
        shared_vm.client,
        "vm_exec",
        vm_id=shared_vm.vm_id,
        request_id=new_request_id(),
        command="echo ran >> many",
        wait_seconds=30,
    )
    assert len(answers) == AT_ONCE
    assert len({answer["job_id"] for answer in answers}) == 1
    assert {answer["exit_code"] for answer in answers} == {0}
    assert shared_vm.read("many") == b"ran\n"


async def test_the_same_creation_from_many_clients_at_once_makes_one_vm(client: Client) -> None:
    before = {vm["vm_id"] for vm in client.call("vm_list")["vms"]}
    answers = await at_once(client, "vm_create", request_id=new_request_id(), memory_mib=256)
    made = {vm["vm_id"] for vm in client.call("vm_list")["vms"]} - before
    assert {answer["vm_id"] for answer in answers} == made
    assert len(made) == 1
    client.call("vm_destroy", vm_id=made.pop())


@pytest.mark.parametrize(
    "changed",
    [
        {"command": "echo other"},
        {"env": {"A": "b"}},
        {"cwd": "."},
        {"stdin": ""},
        {"timeout_seconds": 60},
        {"output_limit_kib": 1},
    ],
)
def test_an_id_with_other_arguments_is_refused(shared_vm: Machine, changed: dict[str, Any]) -> None:
    request_id = new_request_id()
    first = shared_vm.call("vm_exec", request_id=request_id, command="echo one", wait_seconds=30)
    with pytest.raises(ToolError) as refused:
        shared_vm.call("vm_exec", **{"request_id": request_id, "command": "echo one", **changed})
    assert (refused.value.code, refused.value.status) == ("request_id_conflict", 409)
    again = shared_vm.call("vm_exec", request_id=request_id, command="echo one")
    assert again["job_id"] == first["job_id"]


def test_an_id_names_one_request_over_all_tools_and_vms(client: Client, shared_vm: Machine) -> None:
    request_id = new_request_id()
    shared_vm.run("true", request_id=request_id)
    with pytest.raises(ToolError) as refused:
        client.call("vm_create", request_id=request_id, memory_mib=256)
    assert refused.value.code == "request_id_conflict"


def test_another_workspace_may_use_the_same_id(service: Service, client: Client, shared_vm: Machine) -> None:
    request_id = new_request_id()
    job = shared_vm.run("true", request_id=request_id)
    other = service.client(service.issue_token("somebody-else"))
    vm = other.create(request_id=request_id)
    try:
        assert vm.vm_id != shared_vm.vm_id
        with pytest.raises(ToolError) as refused:
            other.call("vm_exec", vm_id=shared_vm.vm_id, command="true")
        assert refused.value.code == "not_found"
        assert shared_vm.run("true", request_id=request_id)["job_id"] == job["job_id"]
    finally:
        vm.destroy()


def test_a_refused_request_leaves_its_id_free(vm: Machine) -> None:
    request_id = new_request_id()
    jobs = [vm.start("sleep 600") for _ in range(4)]
    with pytest.raises(ToolError) as refused:
        vm.start("echo at last", request_id=request_id)
    assert refused.value.code == "job_limit"
    vm.call("vm_job_cancel", job_id=jobs[0])
    vm.wait(jobs[0])
    assert vm.run("echo now other words", request_id=request_id)["stdout"] == b"now other words\n"


def test_answers_are_repeated_after_a_hibernation_a_restart_and_the_vms_end(own_service: Service) -> None:
    token = own_service.issue_token("lasting")
    created, ran = new_request_id(), new_request_id()
    client = own_service.client(token)
    vm = client.create(request_id=created)
    job = vm.run(COMMAND, request_id=ran)
    vm.suspend()
    own_service.restart()
    client = own_service.client(token)
    vm = Machine(client, vm.vm_id, vm.view)
    assert vm.call("vm_exec", request_id=ran, command=COMMAND)["job_id"] == job["job_id"]
    assert vm.output(job["job_id"]) == (b"out\n", b"")
    assert vm.state == "hibernated"
    assert vm.read("once") == b"ran\n"
    vm.destroy()
    assert client.create(request_id=created).vm_id == vm.vm_id
    assert vm.call("vm_exec", request_id=ran, command=COMMAND)["job_id"] == job["job_id"]
    assert client.call("vm_list")["vms"] == []
