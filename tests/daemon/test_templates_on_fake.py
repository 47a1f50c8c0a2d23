"""What templates cost others: sizes that nobody waits for are not built, and only so many are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.fleet.templates import Templates
from microvm.model import VmSpec, VmState
from microvm.policy import templates as policy
from tests.daemon.fleet_rig import House, make_house

LONG_S = 120.0


@pytest.fixture
def house(reflink_directory: Path, state_dir: Path) -> House:
    return make_house(reflink_directory, state_dir)


async def lend(templates: Templates, memory_mib: int) -> None:
    async with templates.lend(VmSpec(memory_mib=memory_mib)):
        pass


def names(house: House) -> set[str]:
    return {path.name for path in (house.root / "templates").iterdir()}


async def test_builds_that_nobody_waits_for_any_more_hold_up_nobody(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            templates = rig.fleet.parts.templates
            held = house.kind.hold("boot")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lend, templates, 128)
                await held.reached.wait()
                async with trio.open_nursery() as impatient:
                    for more in range(1, 6):
                        impatient.start_soon(lend, templates, 128 + more)
                    await wait_all_tasks_blocked()
                    impatient.cancel_scope.cancel()
                nursery.start_soon(lend, templates, 256)
                await wait_all_tasks_blocked()
                held.release.set()
            built = {templates.key(VmSpec(memory_mib=size)) for size in (128, 256)}
            assert names(house) == built


async def test_the_volume_holds_only_so_many_templates_over_all_runs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "KEPT", 2)
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            for size in (128, 129):
                await lend(rig.fleet.parts.templates, size)
            before = names(house)
        async with house.open() as rig:
            templates = rig.fleet.parts.templates
            assert names(house) == before
            await lend(templates, 128)
            await lend(templates, 130)
            await lend(templates, 129)  # again, while what it was may still be on its way out
            kept = {templates.key(VmSpec(memory_mib=size)) for size in (129, 130)}
        async with house.open():
            assert names(house) == kept


@pytest.mark.parametrize("name", ["ram", "disk", "manifest.json"])
async def test_a_template_that_lost_a_file_is_built_anew(house: House, name: str) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            await rig.create("first")
            (template,) = (house.root / "templates").iterdir()
            (template / name).unlink()
            assert (await rig.create("second")).record.state is VmState.RUNNING
            assert (template / name).exists()
