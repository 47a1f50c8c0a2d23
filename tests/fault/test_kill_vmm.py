"""kill -9 of a VMM in every state that has one: the VM is failed, gone, or hibernated as before.

Whoever waits is told so, with the last lines of the console.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import trio

from tests.fault.hooked_daemon import KILL_VMM
from tests.fault.hooked_service import HookedService, check_disk
from tests.vm.live_service import Client, Machine, ToolError, new_request_id
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

PATIENCE_S = 240.0
REMEMBER = "echo on-disk > note; sync; echo in-memory > /dev/shm/note"
LAST_WORDS = "out of memory"


def rare(*values: str) -> Any:
    """A case that only `--all` tries: its neighbours lead to the same."""
    return pytest.param(*values, marks=pytest.mark.slow)


def make(client: Client, *, talkative: bool = False) -> Machine:
    """A VM with notes; a talkative one has a complaint of its kernel on its console."""
    vm = client.create(idle_seconds=0)
    if talkative:
        assert vm.run("tail /dev/zero")["signal"] == signal.SIGKILL
    vm.text(REMEMBER)
    return vm


def check_failed(service: HookedService, vm: Machine) -> None:
    """Failed with the reason, nothing left of the VMM, the disk whole; a cold boot brings it back."""
    status = vm.status
    assert (status["state"], "pid" in status) == ("failed", False), status
    assert "VMM" in status["reason"] or "QEMU ended" in status["reason"], status
    service.check_nothing_left(vm)
    check_disk(service, vm)
    assert vm.call("vm_resume", cold_boot=True)["state"] == "running"
    assert vm.text("cat note") == "on-disk\n"


@pytest.mark.parametrize(
    ("when", "point"),
    [rare("before", "load"), ("after", "load"), rare("after", "cont")],
)
def test_a_vmm_that_dies_while_its_vm_is_created_leaves_nothing_and_the_id_free(
    service: HookedService, client: Client, when: str, point: str
) -> None:
    request_id = new_request_id()
    service.arm(when, point, KILL_VMM)
    with pytest.raises(ToolError) as died:
        client.create(request_id=request_id)
    assert died.value.code == "vm_failed"
    assert service.fired
    assert client.call("vm_list")["vms"] == []
    service.check_nothing_left()
    vm = client.create(request_id=request_id)
    assert vm.text("echo here") == "here\n"
    vm.destroy()


async def test_a_vmm_that_dies_while_its_vm_is_paused_fails_it_at_once(
    service: HookedService, client: Client
) -> None:
    vm = make(client, talkative=True)
    job_id = vm.start("echo begun; sleep 600")
    vm.wait_output(job_id, b"begun\n")
    vm.suspend("pause", force=True)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(ToolError) as told:
                    await vm.acall("vm_job_status", job_id=job_id, wait_seconds=30)
                assert told.value.code == "vm_failed"
                assert LAST_WORDS in told.value.detail["console_tail"].lower()

            nursery.start_soon(wait)
            os.kill(vm.status["pid"], signal.SIGKILL)
        await until(lambda: vm.state == "failed")
    assert vm.call("vm_job_status", job_id=job_id)["state"] == "lost"
    with pytest.raises(ToolError) as failed:
        vm.text("true")
    assert failed.value.code == "vm_failed"
    assert LAST_WORDS in failed.value.detail["console_tail"].lower()
    check_failed(service, vm)
    vm.destroy()


@pytest.mark.parametrize(
    ("when", "point"),
    [rare("before", "freeze"), ("after", "freeze"), rare("before", "save")],
)
async def test_a_vmm_that_dies_while_it_hibernates_fails_its_vm_and_tells_every_waiting_call(
    service: HookedService, client: Client, when: str, point: str
) -> None:
    vm = make(client, talkative=True)
    told: dict[str, ToolError] = {}

    async def call(name: str, tool: str, **arguments: object) -> None:
        with contextlib.suppress(ToolError):
            try:
                await vm.acall(tool, **arguments)
            except ToolError as error:
                told[name] = error
                raise

    service.arm(when, point, KILL_VMM)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: call("suspend", "vm_suspend", mode="hibernate"))
            await until(lambda: vm.state != "running")
            nursery.start_soon(lambda: call("exec", "vm_exec", command="true", wait_seconds=30))
    assert service.fired
    assert set(told) == {"suspend", "exec"}
    for error in told.values():
        assert error.code == "vm_failed", error
        assert LAST_WORDS in error.detail["console_tail"].lower()
    check_failed(service, vm)
    vm.destroy()


@pytest.mark.parametrize(("when", "point"), [("after", "manifest"), rare("before", "release")])
def test_a_vmm_that_dies_after_its_checkpoint_was_committed_is_not_missed(
    service: HookedService, client: Client, when: str, point: str
) -> None:
    vm = make(client)
    service.arm(when, point, KILL_VMM)
    assert vm.suspend()["state"] == "hibernated"
    assert service.fired
    service.check_nothing_left(vm)
    assert vm.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    vm.destroy()


def test_a_vmm_that_dies_before_the_checkpoint_is_spent_leaves_the_vm_hibernated(
    service: HookedService, client: Client
) -> None:
    vm = make(client)
    vm.suspend()
    service.arm("before", "load", KILL_VMM)
    with pytest.raises(ToolError) as died:
        vm.call("vm_resume")
    assert died.value.code == "vm_failed"
    assert service.fired
    assert vm.state == "hibernated"
    service.check_nothing_left(vm)
    assert vm.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    vm.destroy()


@pytest.mark.parametrize(("when", "point"), [("after", "spent of wake"), rare("after", "cont")])
def test_a_vmm_that_dies_after_the_checkpoint_was_spent_fails_the_vm(
    service: HookedService, client: Client, when: str, point: str
) -> None:
    vm = make(client)
    vm.suspend()
    service.arm(when, point, KILL_VMM)
    with pytest.raises(ToolError) as died:
        vm.call("vm_resume")
    assert died.value.code == "vm_failed"
    assert service.fired
    check_failed(service, vm)
    vm.destroy()


@pytest.mark.slow
def test_a_vmm_that_dies_while_its_vm_boots_fails_it_again_and_it_boots_at_the_next_try(
    service: HookedService, client: Client
) -> None:
    vm = make(client)
    vm.suspend()
    service.arm("after", "boot", KILL_VMM)
    with pytest.raises(ToolError) as died:
        vm.call("vm_resume", cold_boot=True, discard_memory=True)
    assert died.value.code == "vm_failed"
    assert service.fired
    check_failed(service, vm)
    vm.destroy()


async def test_a_vmm_that_dies_while_its_vm_is_stopped_was_about_to_end_anyway(
    service: HookedService, client: Client
) -> None:
    vm = make(client)
    service.arm("after", "intent of power_off", KILL_VMM)
    service.stop_vms()
    await until(lambda: vm.state in {"stopped", "failed"})
    assert service.fired
    assert vm.state == "stopped"
    service.check_nothing_left(vm)
    check_disk(service, vm)
    assert vm.call("vm_resume")["state"] == "running"
    assert vm.text("cat note") == "on-disk\n"
    vm.destroy()
