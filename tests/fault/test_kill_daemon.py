"""kill -9 of the daemon at every step of a VM's life: afterwards it is as before, as after, or says why not.

After each kill the daemon is started again on the same directories, and everything is looked at: the VM's
state, its disk, what is left on the host, and what the caller of the interrupted request is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx2
import pytest

from tests.fault.hooked_service import HookedService, check_disk
from tests.vm.live_service import Machine, ToolError, new_request_id
from tests.vm.resident import Resident

pytestmark = [pytest.mark.vm, pytest.mark.root]

REMEMBER = "echo on-disk > note; sync; echo in-memory > /dev/shm/note"


@dataclass(frozen=True)
class Fault:
    """A kill, and what is true after the next start.

    Attributes:
        then: The VM's state; "gone" where there is none.
        why: A part of a failed VM's reason.
        rare: Whether only `--all` tries it: its neighbours lead to the same.
    """

    when: str
    point: str
    then: str
    why: str = ""
    rare: bool = False

    def __str__(self) -> str:
        return f"{self.when} {self.point}"


def cases(*faults: Fault) -> pytest.MarkDecorator:
    """One test for each; the rare ones are slow."""
    return pytest.mark.parametrize(
        "fault",
        [
            pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] if fault.rare else [])
            for fault in faults
        ],
    )


@pytest.fixture(scope="module")
def sleeper(service: HookedService) -> Iterator[tuple[Machine, Resident]]:
    """A hibernated VM with a process in its memory; it sleeps through everything that happens here."""
    vm = service.owner.create(idle_seconds=0)
    resident = Resident(vm)
    vm.suspend(force=True)
    service.lasting.add(vm.vm_id)
    yield vm, resident
    service.lasting.clear()


def die(service: HookedService, fault: Fault, call: Callable[[], object]) -> None:
    """Makes the call that the daemon does not survive, and starts it again."""
    service.arm(fault.when, fault.point)
    with contextlib.suppress(httpx2.TransportError):
        call()
    service.wait_dead()
    assert service.fired
    service.start()


def check(service: HookedService, sleeper: Machine, vm: Machine, fault: Fault) -> None:
    """What is promised of `vm` is true; then it is used, and destroyed."""
    vm, sleeper = service.again(vm), service.again(sleeper)
    assert sleeper.state == "hibernated"
    if fault.then == "gone":
        with pytest.raises(ToolError) as missing:
            vm.call("vm_status")
        assert missing.value.code == "not_found"
        service.check_nothing_left(sleeper)
        return
    status = vm.status
    assert status["state"] == fault.then, status
    assert fault.why in status.get("reason", ""), status
    service.check_nothing_left(sleeper, vm)
    check_disk(service, vm)
    if fault.then == "hibernated":
        assert vm.text("cat note /dev/shm/note") == "on-disk\nin-memory\n"
    elif fault.then == "failed":
        with pytest.raises(ToolError) as failed:
            vm.text("true")
        assert failed.value.code == "vm_failed"
        if fault.rare:
            assert vm.call("vm_resume", cold_boot=True)["state"] == "running"
            assert vm.text("cat note") == "on-disk\n"
    vm.destroy()
    service.check_nothing_left(sleeper)


def prepared_vm(service: HookedService) -> Machine:
    vm = service.owner.create(idle_seconds=0)
    vm.text(REMEMBER)
    return vm


@cases(
    Fault("before", "intent of hibernate", "failed", "running", rare=True),
    Fault("after", "intent of hibernate", "failed", "hibernating"),
    Fault("after", "flush", "failed", "hibernating", rare=True),
    Fault("after", "sync", "failed", "hibernating", rare=True),
    Fault("after", "freeze", "failed", "hibernating", rare=True),
    Fault("after", "save", "failed", "hibernating", rare=True),
    Fault("after", "fsync", "failed", "hibernating", rare=True),
    Fault("before", "manifest", "failed", "hibernating"),
    Fault("after", "manifest", "hibernated"),
    Fault("after", "release", "hibernated", rare=True),
    Fault("before", "done of hibernate", "hibernated", rare=True),
    Fault("after", "done of hibernate", "hibernated"),
)
def test_a_hibernation_that_is_cut_off_was_either_committed_or_has_failed(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    die(service, fault, vm.suspend)
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("before", "intent of pause", "failed", "running", rare=True),
    Fault("after", "intent of pause", "failed", "running"),
    Fault("after", "freeze", "failed", "running", rare=True),
    Fault("before", "done of pause", "failed", "running", rare=True),
    Fault("after", "done of pause", "failed", "paused"),
)
def test_a_pause_that_is_cut_off_says_what_the_vm_was(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    die(service, fault, lambda: vm.suspend("pause"))
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("before", "intent of wake", "hibernated", rare=True),
    Fault("after", "intent of wake", "hibernated"),
    Fault("after", "load", "hibernated", rare=True),
    Fault("before", "spent of wake", "hibernated"),
    Fault("after", "spent of wake", "failed", "resuming"),
    Fault("after", "cont", "failed", "resuming", rare=True),
    Fault("after", "greet", "failed", "resuming", rare=True),
    Fault("after", "drop", "failed", "resuming", rare=True),
    Fault("before", "done of wake", "failed", "resuming", rare=True),
    Fault("after", "done of wake", "failed", "running"),
)
def test_a_wake_that_is_cut_off_left_the_checkpoint_whole_or_spent(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    vm.suspend()
    die(service, fault, lambda: vm.call("vm_resume"))
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("after", "intent of unpause", "failed", "paused"),
    Fault("after", "cont", "failed", "paused", rare=True),
    Fault("after", "done of unpause", "failed", "running", rare=True),
)
def test_a_paused_vm_whose_resume_is_cut_off_has_failed(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    vm.suspend("pause")
    die(service, fault, lambda: vm.call("vm_resume"))
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("after", "intent of boot", "failed", "booting", rare=True),
    Fault("after", "spent of boot", "failed", "booting", rare=True),
    Fault("after", "boot", "failed", "booting", rare=True),
    Fault("after", "done of boot", "failed", "running", rare=True),
)
def test_a_cold_boot_that_is_cut_off_may_be_tried_again(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    vm.suspend()
    die(service, fault, lambda: vm.call("vm_resume", cold_boot=True, discard_memory=True))
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("before", "intent of power_off", "failed", "running", rare=True),
    Fault("after", "intent of power_off", "failed", "stopping"),
    Fault("after", "release", "failed", "stopping", rare=True),
    Fault("before", "done of power_off", "failed", "stopping", rare=True),
    Fault("after", "done of power_off", "stopped"),
)
def test_a_stop_that_is_cut_off_was_done_or_has_failed(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    die(service, fault, service.stop_vms)
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("before", "intent of remove", "hibernated"),
    Fault("after", "intent of remove", "gone"),
    Fault("after", "removal", "gone", rare=True),
    Fault("before", "gone of remove", "gone"),
    Fault("after", "gone of remove", "gone", rare=True),
)
def test_a_destruction_that_is_cut_off_is_finished_at_the_next_start(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    vm.suspend()
    die(service, fault, vm.destroy)
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("after", "intent of remove", "gone", rare=True),
    Fault("after", "release", "gone", rare=True),
)
def test_the_destruction_of_a_running_vm_is_finished_too(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    vm.start("sleep 600")
    die(service, fault, vm.destroy)
    check(service, sleeper[0], vm, fault)


@cases(
    Fault("before", "receipt of vm_create", "new"),
    Fault("after", "receipt of vm_create", "outcome_unknown"),
    Fault("after", "clone", "outcome_unknown", rare=True),
    Fault("after", "load", "outcome_unknown", rare=True),
    Fault("after", "cont", "outcome_unknown", rare=True),
    Fault("after", "greet", "outcome_unknown", rare=True),
    Fault("before", "done of create", "outcome_unknown"),
)
def test_a_creation_that_is_cut_off_leaves_nothing_and_its_id_says_so(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    request_id = new_request_id()
    die(service, fault, lambda: service.owner.create(request_id=request_id))
    owner, sleeping = service.owner, service.again(sleeper[0])
    assert [vm["vm_id"] for vm in owner.call("vm_list")["vms"]] == [sleeping.vm_id]
    service.check_nothing_left(sleeping)
    if fault.then == "new":
        vm = owner.create(request_id=request_id)
        assert vm.text("echo here") == "here\n"
        vm.destroy()
        return
    with pytest.raises(ToolError) as unknown:
        owner.create(request_id=request_id)
    assert unknown.value.code == fault.then
    assert [vm["vm_id"] for vm in owner.call("vm_list")["vms"]] == [sleeping.vm_id]


@cases(
    Fault("after", "done of create", "outcome_unknown"),
    Fault("after", "answer of vm_create", "replayed", rare=True),
)
def test_a_creation_that_was_done_is_listed_and_never_done_twice(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    request_id = new_request_id()
    die(service, fault, lambda: service.owner.create(request_id=request_id))
    owner, sleeping = service.owner, service.again(sleeper[0])
    (made,) = (vm for vm in owner.call("vm_list")["vms"] if vm["vm_id"] != sleeping.vm_id)
    assert made["state"] == "failed"
    vm = Machine(owner, made["vm_id"], made)
    if fault.then == "replayed":
        assert owner.create(request_id=request_id).vm_id == vm.vm_id
    else:
        with pytest.raises(ToolError) as unknown:
            owner.create(request_id=request_id)
        assert unknown.value.code == fault.then
    service.check_nothing_left(sleeping, vm)
    check_disk(service, vm)
    vm.destroy()


@cases(
    Fault("before", "receipt of vm_exec", "again", rare=True),
    Fault("after", "receipt of vm_exec", "outcome_unknown"),
    Fault("after", "answer of vm_exec", "replayed", rare=True),
)
def test_a_command_that_is_cut_off_never_runs_twice_under_its_id(
    service: HookedService, sleeper: tuple[Machine, Resident], fault: Fault
) -> None:
    vm = prepared_vm(service)
    request_id = new_request_id()
    command = "echo ran >> count; sync; sleep 600"
    die(service, fault, lambda: vm.start(command, request_id=request_id))
    vm = service.again(vm)
    assert vm.call("vm_resume", cold_boot=True)["state"] == "running"
    if fault.then == "again":
        job = vm.call("vm_exec", request_id=request_id, command="echo ran >> count", wait_seconds=30)
        assert job["exit_code"] == 0
        assert vm.read("count") == b"ran\n"
    elif fault.then == "replayed":
        job = vm.call("vm_exec", request_id=request_id, command=command)
        assert vm.call("vm_job_status", job_id=job["job_id"])["state"] == "lost"
    else:
        with pytest.raises(ToolError) as unknown:
            vm.start(command, request_id=request_id)
        assert unknown.value.code == fault.then
    assert vm.text("cat count 2> /dev/null || true").count("ran") <= 1
    vm.destroy()


def test_a_vm_that_slept_through_all_of_this_wakes_with_its_memory(
    service: HookedService, sleeper: tuple[Machine, Resident]
) -> None:
    vm, resident = sleeper
    resident.go_on(service.again(vm))
