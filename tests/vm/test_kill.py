"""What a kill leaves: of the daemon, of a VMM; and what an orderly end saves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import AsyncGenerator

import pytest
import trio

from tests.vm.live_service import Client, Machine, Service, ToolError
from tests.vm.resident import Resident
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

REMEMBER = "echo on-disk > note; sync; echo in-memory > /dev/shm/note"


class Owner:
    """A workspace on a service that dies and comes back."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._token = service.issue_token("owner")

    @property
    def client(self) -> Client:
        return self.service.client(self._token)

    def again(self, vm: Machine) -> Machine:
        """The same VM, after a start."""
        return Machine(self.client, vm.vm_id, vm.view)


@pytest.fixture
def owner(own_service: Service) -> Owner:
    return Owner(own_service)


def test_a_killed_daemon_leaves_what_sleeps_whole_and_what_ran_failed_with_the_reason(owner: Owner) -> None:
    running, paused, hibernated = (owner.client.create() for _ in range(3))
    for vm in (running, paused, hibernated):
        vm.text(REMEMBER)
    lost = running.start("sleep 600")
    paused.suspend("pause")
    resident = hibernated.start("sleep 600")
    hibernated.suspend(force=True)
    owner.service.kill()
    owner.service.start()
    assert not owner.service.leftovers().processes
    assert not owner.service.leftovers().cgroups

    hibernated = owner.again(hibernated)
    assert hibernated.state == "hibernated"
    assert hibernated.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    assert hibernated.call("vm_job_status", job_id=resident)["state"] == "running"
    for vm, was in ((owner.again(running), "running"), (owner.again(paused), "paused")):
        assert (vm.state, was in vm.status["reason"]) == ("failed", True)
        with pytest.raises(ToolError) as failed:
            vm.text("true")
        assert failed.value.code == "vm_failed"
        assert "cold_boot" in failed.value.message
    running = owner.again(running)
    assert running.call("vm_job_status", job_id=lost)["state"] == "lost"
    assert running.call("vm_resume", cold_boot=True)["state"] == "running"
    assert running.text("cat note") == "on-disk\n"
    assert running.run("cat /dev/shm/note")["exit_code"] == 1
    for vm in (running, paused, hibernated):
        owner.again(vm).destroy()
    assert not owner.service.leftovers()


def test_vmms_die_with_a_killed_daemon(owner: Owner) -> None:
    pids = [owner.client.create().status["pid"] for _ in range(2)]
    watched = [os.pidfd_open(pid) for pid in pids]
    owner.service.kill()
    for pidfd in watched:
        wait_dead(pidfd)
        os.close(pidfd)


def wait_dead(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], 60)
    assert ready


async def test_a_killed_vmm_fails_its_vm_at_once_and_tells_every_waiting_call_why(vm: Machine) -> None:
    """The calls wait for what would never come by itself; the kernel's complaint is on the console."""
    assert vm.run("tail /dev/zero")["signal"] == signal.SIGKILL
    job_id = vm.start("echo begun; sleep 600")
    vm.wait_output(job_id, b"begun\n")
    seen: dict[str, ToolError] = {}

    async def waits(name: str, tool: str, **arguments: object) -> None:
        try:
            await vm.acall(tool, **arguments)
        except ToolError as error:
            seen[name] = error

    cursor = {"stdout": 6, "stderr": 0}
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: waits("status", "vm_job_status", job_id=job_id, wait_seconds=30))
            nursery.start_soon(
                lambda: waits("output", "vm_job_output", job_id=job_id, cursor=cursor, wait_seconds=30)
            )
            nursery.start_soon(lambda: waits("exec", "vm_exec", command="sleep 600", wait_seconds=30))
            await until(lambda: [job["state"] for job in vm.status["jobs"]].count("running") == 2)
            os.kill(vm.status["pid"], signal.SIGKILL)
    assert set(seen) == {"status", "output", "exec"}
    for error in seen.values():
        assert error.code == "vm_failed", error
        assert "Out of memory" in error.detail["console_tail"].replace("out of memory", "Out of memory")
    status = vm.status
    assert (status["state"], "pid" in status) == ("failed", False)
    assert "VMM" in status["reason"]
    assert {job["state"] for job in status["jobs"]} <= {"lost", "completed"}
    assert vm.call("vm_resume", cold_boot=True)["state"] == "running"
    assert vm.text("echo again") == "again\n"


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
async def test_a_vmm_that_is_killed_while_its_vm_is_put_to_rest_fails_the_vm_or_comes_too_late(
    vm: Machine, mode: str
) -> None:
    pid = vm.status["pid"]
    answers: list[str] = []

    async def suspend() -> None:
        try:
            answers.append((await vm.acall("vm_suspend", mode=mode))["state"])
        except ToolError as error:
            answers.append(error.code)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(suspend)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda: vm.state in {"failed", "hibernated"})
    if answers == ["hibernated"]:
        assert vm.state == "hibernated"
        return
    assert vm.state == "failed"
    assert answers[0] in {"vm_failed", "paused"}


def test_an_orderly_end_saves_every_vm_with_its_jobs_and_they_go_on_after_the_next_start(
    owner: Owner,
) -> None:
    running, paused, idle = (owner.client.create() for _ in range(3))
    resident = Resident(running)
    frozen = paused.start("while true; do date +%s; sleep 0.1; done")
    paused.suspend("pause", force=True)
    idle.text(REMEMBER)
    assert owner.service.stop() == 0
    assert not owner.service.leftovers().processes
    assert not owner.service.leftovers().cgroups
    owner.service.start()
    running, paused, idle = (owner.again(vm) for vm in (running, paused, idle))
    assert [vm.state for vm in (running, paused, idle)] == ["hibernated"] * 3
    assert paused.call("vm_job_status", job_id=frozen)["state"] == "frozen"
    resident.go_on(running)
    assert running.call("vm_job_status", job_id=resident.job_id)["state"] == "running"
    assert idle.text("cat /dev/shm/note") == "in-memory\n"
    paused.call("vm_resume")
    assert paused.call("vm_job_status", job_id=frozen)["state"] == "running"


@contextlib.asynccontextmanager
async def unfinished_request(service: Service) -> AsyncGenerator[None]:
    """A connection over which half a request has come."""

    def sockets() -> int:
        return sum(name.startswith("socket:") for name in service.descriptors())

    before = sockets()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(service.socket))
        connection.sendall(b"POST /v1/tools/vm_list HTTP/1.1\r\nHost: localhost\r\n")
        await until(lambda: sockets() > before)
        yield


async def test_the_second_signal_ends_the_daemon_before_anything_more_is_saved(owner: Owner) -> None:
    """A request that never ends holds up the first signal's way out for as long as the service lets it."""
    vm = owner.client.create()
    process = owner.service.process
    assert process is not None
    async with unfinished_request(owner.service):
        process.send_signal(signal.SIGTERM)
        await until(lambda: bool(owner.service.records("draining")))
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(60):
            await trio.to_thread.run_sync(process.wait)
    assert owner.service.stop() == 128 + signal.SIGTERM  # of the process that ended above
    owner.service.start()
    vm = owner.again(vm)
    assert vm.state == "failed"
    assert vm.status["reason"]
