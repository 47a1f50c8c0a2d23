"""cgroup v2: the real core on this machine, limits on a tree of plain files."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from microvm.errors import HostError
from microvm.host.cgroup import Cgroup, CgroupTree, GroupLimits, Hierarchy, find_hierarchy

WAIT_SECONDS = 10.0


@pytest.fixture
async def tree() -> AsyncIterator[CgroupTree]:
    made = CgroupTree(find_hierarchy(), f"test-{uuid.uuid4().hex[:8]}", "none")
    made.prepare()
    try:
        yield made
    finally:
        with trio.CancelScope(shield=True):
            await made.remove()
        assert not exists(made)


def exists(group: Cgroup | CgroupTree) -> bool:
    return group.path.is_dir()


def start_sleeper(group: Cgroup) -> subprocess.Popen[bytes]:
    """A process with a child in a session of its own, all in the group."""
    script = "echo 0 > $0; setsid sleep 600 & echo ready; exec sleep 600"
    sleeper = subprocess.Popen(["sh", "-c", script, str(group.path / "cgroup.procs")], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == b"ready\n"
    sleeper.stdout.close()
    return sleeper


@pytest.mark.root
async def test_killing_a_group_kills_all_that_is_in_it_frozen_or_not(tree: CgroupTree) -> None:
    for freeze in (False, True):
        async with tree.open_group("vm_a") as group:
            assert not group.populated
            sleeper = start_sleeper(group)
            assert group.populated
            if freeze:
                group.freeze()
                with trio.fail_after(WAIT_SECONDS):
                    while not group.frozen:
                        await trio.lowlevel.checkpoint()
            group.kill()
            assert await trio.to_thread.run_sync(sleeper.wait) == -9
            with trio.fail_after(WAIT_SECONDS):
                while group.populated:
                    await trio.lowlevel.checkpoint()
            assert group.cpu_seconds > 0


@pytest.mark.root
async def test_a_thawed_group_goes_on(tree: CgroupTree) -> None:
    async with tree.open_group("vm_a") as group:
        group.freeze()
        sleeper = start_sleeper_later(group)
        group.thaw()
        with trio.fail_after(WAIT_SECONDS):
            assert await trio.to_thread.run_sync(sleeper.wait) == 0


def start_sleeper_later(group: Cgroup) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "echo 0 > $0; exec true", str(group.path / "cgroup.procs")])


@pytest.mark.root
async def test_leaving_the_block_kills_and_removes_also_when_cancelled(tree: CgroupTree) -> None:
    sleepers: list[subprocess.Popen[bytes]] = []
    groups: list[Cgroup] = []
    with trio.CancelScope() as scope:
        async with tree.open_group("vm_a") as group:
            groups.append(group)
            sleepers.append(start_sleeper(group))
            scope.cancel(reason="test")
            await trio.lowlevel.checkpoint()
    assert not exists(groups[0])
    assert await trio.to_thread.run_sync(sleepers[0].wait) == -9
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(groups[0].fd)


@pytest.mark.root
async def test_a_name_can_be_held_once(tree: CgroupTree) -> None:
    async with tree.open_group("vm_a"):
        with pytest.raises(HostError, match="EEXIST"):
            tree.create_group("vm_a")


@pytest.mark.root
async def test_the_sweep_takes_all_groups_of_its_mark_and_no_other(tree: CgroupTree) -> None:
    other = CgroupTree(tree.hierarchy, f"{tree.path.name.removeprefix('microvm-')}x", "none")
    other.prepare()
    try:
        spared = other.create_group("vm_spared")
        sleeper = start_sleeper(tree.create_group("vm_left"))
        os.mkdir(tree.path / "vm_left" / "inner")
        tree.create_group("vm_empty")
        assert await tree.sweep() == ["vm_empty", "vm_left"]
        assert await tree.sweep() == []
        assert await trio.to_thread.run_sync(sleeper.wait) == -9
        assert exists(spared)
    finally:
        await other.remove()


@pytest.mark.root
async def test_a_refused_write_is_an_error(tree: CgroupTree) -> None:
    async with tree.open_group("vm_a") as group:
        with pytest.raises(HostError) as caught:
            group.write("cgroup.freeze", "7")
        assert (caught.value.operation, caught.value.path) == ("write", str(group.path / "cgroup.freeze"))
        with pytest.raises(HostError, match="ENOENT"):
            group.write("cgroup.absent", "1")


def hierarchy_files(tmp_path: Path, mountinfo: str, membership: str) -> tuple[str, str]:
    (tmp_path / "mountinfo").write_text(mountinfo)
    (tmp_path / "cgroup").write_text(membership)
    return str(tmp_path / "mountinfo"), str(tmp_path / "cgroup")


def test_the_hierarchy_is_found_alone_and_beside_v1(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    group = mount / "system.slice" / "microvm.service"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    alone = f"30 23 0:26 / {mount} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    beside = f"29 23 0:25 / /cg/cpu rw - cgroup cgroup rw,cpu\n{alone}"
    for mountinfo, membership in (
        (alone, "0::/system.slice/microvm.service\n"),
        (beside, "2:cpu:/elsewhere\n0::/system.slice/microvm.service\n"),
    ):
        found = find_hierarchy(*hierarchy_files(tmp_path, mountinfo, membership))
        assert found.own_path == group
        assert found.lacks == frozenset()


def test_a_daemon_in_its_leaf_is_found_where_it_started(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    make_group_files(mount / "service", "cgroup.controllers")
    mountinfo = f"30 23 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"
    found = find_hierarchy(*hierarchy_files(tmp_path, mountinfo, "0::/service/microvm-one/daemon\n"))
    assert found.own_path == mount / "service"


def test_a_group_outside_the_mount_is_refused(tmp_path: Path) -> None:
    mountinfo = f"30 23 0:26 /container {tmp_path} rw - cgroup2 cgroup2 rw\n"
    with pytest.raises(HostError, match="outside this mount"):
        find_hierarchy(*hierarchy_files(tmp_path, mountinfo, "0::/elsewhere\n"))


def test_no_v2_mount_is_said(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no cgroup2 file system"):
        find_hierarchy(*hierarchy_files(tmp_path, "29 23 0:25 / /cg rw - cgroup cgroup rw,cpu\n", "0::/\n"))


def test_limits_are_refused_where_a_controller_is_missing(tmp_path: Path) -> None:
    poor = Hierarchy(tmp_path, Path(), frozenset({"cpu", "pids"}))
    with pytest.raises(HostError, match=r"lacks the controllers memory; set limits"):
        CgroupTree(poor, "one", "v2").prepare()
    assert list(tmp_path.iterdir()) == []


def make_group_files(path: Path, *names: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).touch()


def test_controllers_are_handed_down_from_a_group_that_holds_only_the_daemon(tmp_path: Path) -> None:
    own = tmp_path / "microvm.service"
    mark = own / "microvm-one"
    make_group_files(own, "cgroup.subtree_control")
    make_group_files(mark, "cgroup.subtree_control")
    make_group_files(mark / "daemon", "cgroup.procs")
    rich = Hierarchy(tmp_path, Path("microvm.service"), frozenset({"cpu", "io", "memory", "pids"}))
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    with pytest.raises(HostError, match="other processes"):
        CgroupTree(rich, "one", "v2").prepare()
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    CgroupTree(rich, "one", "v2").prepare()
    assert (mark / "daemon" / "cgroup.procs").read_text() == str(os.getpid())
    for group in (own, mark):
        assert (group / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_limits_are_written_in_the_kernels_units(tmp_path: Path) -> None:
    make_group_files(tmp_path, "memory.max", "cpu.weight", "cpu.max", "pids.max")
    group = Cgroup(tmp_path, -1)
    group.limit(GroupLimits(memory_max_bytes=1 << 30, cpu_weight=50, cpu_max_vcpus=1.5, pids_max=64))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {
        "memory.max": "1073741824",
        "cpu.weight": "50",
        "cpu.max": "150000 100000",
        "pids.max": "64",
    }
