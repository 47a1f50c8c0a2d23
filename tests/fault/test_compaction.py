"""A memfile in too many pieces is written anew while its VM sleeps; no kill in between costs the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from microvm.fleet.layout import extents_of
from tests.fault.hooked_service import HookedService
from tests.vm.live_service import Machine
from tests.vm.resident import Resident
from tests.vm.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.root]

FEW = 1
LOOK_S = 0.2
NEVER_S = 1e6


@pytest.fixture
def asleep(make_service: Callable[..., HookedService]) -> tuple[HookedService, Machine, Resident]:
    """A VM with a process in its memory, hibernated on a service that is not running any more.

    A machine made from a template shares the template's blocks until it writes to them, here and there: its
    memfile is in many pieces by itself.
    """
    service = make_service()
    service.start()
    vm = service.owner.create(idle_seconds=0)
    resident = Resident(vm)
    vm.suspend(force=True)
    service.stop()
    service.constants = {"MAX_EXTENTS": FEW, "COMPACT_LOOK_S": LOOK_S}
    return service, vm, resident


def ram_of(service: HookedService, vm: Machine) -> Path:
    return service.files_of(vm) / "ram"


async def test_a_memfile_in_many_pieces_is_written_anew_and_the_vm_wakes_with_its_memory(
    asleep: tuple[HookedService, Machine, Resident],
) -> None:
    service, vm, resident = asleep
    ram = ram_of(service, vm)
    inode, pieces = ram.stat().st_ino, extents_of(ram)
    assert pieces > FEW
    service.start()
    await until(lambda: ram.stat().st_ino != inode)
    await until(lambda: not ram.with_name("ram.new").exists())
    assert extents_of(ram) < pieces
    vm = service.again(vm)
    assert vm.state == "hibernated"
    service.check_nothing_left(vm)
    resident.go_on(vm)
    vm.suspend(force=True)
    resident.go_on(vm)


@pytest.mark.parametrize(
    ("when", "point"),
    [
        pytest.param("after", "intent of compact", marks=pytest.mark.slow),
        ("after", "copy"),
        ("after", "manifest"),
        pytest.param("after", "rename", marks=pytest.mark.slow),
        pytest.param("before", "done of compact", marks=pytest.mark.slow),
        pytest.param("after", "done of compact", marks=pytest.mark.slow),
    ],
)
async def test_a_rewrite_that_is_cut_off_leaves_the_old_memory_or_the_new(
    asleep: tuple[HookedService, Machine, Resident], when: str, point: str
) -> None:
    service, vm, resident = asleep
    service.arm(when, point)
    service.start()
    service.wait_dead()
    assert service.fired
    service.constants = {"COMPACT_LOOK_S": NEVER_S}
    service.start()
    vm = service.again(vm)
    assert vm.state == "hibernated"
    service.check_nothing_left(vm)
    resident.go_on(vm)
