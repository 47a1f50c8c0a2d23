"""The jail, seen by a program inside it and by the kernel outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from microvm.errors import HostError
from microvm.host.process import JailedProcess, JailSpec, spawn_jailed

pytestmark = pytest.mark.root

UID = 21001
LIFE_SECONDS = 10.0


@dataclass
class Bench:
    """A jail's parts, and what its program printed."""

    spec: JailSpec
    log: Path
    ram: Path

    async def run(self, *argv: str, **changes: object) -> int:
        process = spawn_jailed(replace(self.spec, argv=("/bin/probe", *argv), **changes))  # pyright: ignore[reportArgumentType]
        async with process:
            with trio.fail_after(LIFE_SECONDS):
                return await process.wait()

    def spawn(self, *argv: str) -> JailedProcess:
        return spawn_jailed(replace(self.spec, argv=("/bin/probe", *argv)))

    def lines(self, key: str) -> list[str]:
        found = [line.split(" ", 1) for line in self.log.read_text().splitlines()]
        return [rest for name, rest in found if name == key]


@pytest.fixture
def bench(jail_root: Path, tmp_path: Path) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:

        def opened(path: Path, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            return fd

        log, ram, disk = tmp_path / "log", tmp_path / "ram", tmp_path / "disk"
        ram_fd = opened(ram, os.O_RDWR | os.O_CREAT)
        os.fchown(ram_fd, UID, UID)
        disk_fd = opened(disk, os.O_RDWR | os.O_CREAT)
        os.fchown(disk_fd, UID, UID)
        spec = JailSpec(
            root_fd=opened(jail_root, os.O_PATH | os.O_DIRECTORY),
            argv=("/bin/probe",),
            uid=UID,
            gid=UID,
            log_fd=opened(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            env={"HOME": "/vm"},
            binds=((ram_fd, "vm/ram"),),
            read_only_binds=((disk_fd, "vm/disk"),),
            limit_fsize_bytes=1 << 20,
        )
        yield Bench(spec, log, ram)


async def test_the_program_has_no_rights(bench: Bench) -> None:
    assert await bench.run() == 0
    assert bench.lines("caps") == ["0 0 0 0 0"]
    assert bench.lines("ids") == [f"{UID} {UID} {UID} {UID} 0"]
    assert bench.lines("no_new_privs") == ["1"]
    assert bench.lines("seccomp") == ["2"]
    assert bench.lines("limits") == [f"256 0 {1 << 20}"]


async def test_the_program_sees_only_its_closure_and_an_empty_network(bench: Bench) -> None:
    await bench.run()
    assert sorted(bench.lines("entry")) == sorted(
        ["/bin", "/dev", "/vm", "/vm/ram", "/vm/disk", "/vm/kernel", "/dev/null", "/dev/zero", "/dev/urandom"]
    )
    assert bench.lines("interface") == ["lo"]
    assert bench.lines("host") == ["vm"]
    assert bench.lines("pid") == ["1 1"]
    assert bench.lines("env") == ["HOME=/vm"]
    assert bench.lines("signals") == ["0 0"]


async def test_nothing_but_the_bound_file_can_be_written(bench: Bench) -> None:
    await bench.run()
    assert bench.lines("open") == [
        "/new EROFS",
        "/dev/new EROFS",
        "/dev/null ok",
        "/vm/ram ok",
        "/vm/disk EROFS",
    ]
    assert bench.ram.read_bytes() == b"jailed"


async def test_huge_pages_are_refused_and_other_advice_is_not(bench: Bench) -> None:
    await bench.run()
    assert bench.lines("huge") == ["EINVAL"]
    assert bench.lines("nohuge") == ["ok"]


async def test_system_calls_of_the_other_abi_are_death(bench: Bench) -> None:
    assert await bench.run("int80") == -signal.SIGSYS


async def test_the_largest_file_is_bounded(bench: Bench) -> None:
    assert await bench.run("fill") == 0
    assert bench.lines("filled") == [f"{1 << 20} EFBIG"]


async def test_descriptors_are_exactly_those_passed_in_order(bench: Bench) -> None:
    read_end, write_end = os.pipe()
    stray = os.dup2(read_end, 60, inheritable=True)
    try:
        # Given in an order in which placing one by one would overwrite the next.
        await bench.run(fds=(write_end, bench.spec.log_fd, read_end))
    finally:
        for fd in (read_end, write_end, stray):
            os.close(fd)
    assert bench.lines("fd") == ["0 chr", "1 reg", "2 reg", "3 fifo", "4 reg", "5 fifo"]


async def test_kvm_is_there_only_when_asked_for(bench: Bench) -> None:
    if not os.access("/dev/kvm", os.F_OK):
        with pytest.raises(HostError, match="mknod in /dev"):
            await bench.run(with_kvm=True)
        return
    await bench.run(with_kvm=True)
    assert "/dev/kvm" in bench.lines("entry")


async def test_exit_statuses_are_told_apart(bench: Bench) -> None:
    assert await bench.run("exit", "0") == 0
    assert await bench.run("exit", "7") == 7
    async with bench.spawn("pause") as process:
        assert process.exit_status is None
        process.kill()
        with trio.fail_after(LIFE_SECONDS):
            assert await process.wait() == -signal.SIGKILL
        process.kill()  # dead already: nothing to do
        assert await process.wait() == -signal.SIGKILL


async def test_many_tasks_may_wait_and_one_may_give_up(bench: Bench) -> None:
    seen: list[int] = []

    async def wait(process: JailedProcess) -> None:
        seen.append(await process.wait())

    async with bench.spawn("pause") as process:
        with trio.fail_after(LIFE_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait, process)
                with trio.move_on_after(0):
                    await process.wait()
                await trio.testing.wait_all_tasks_blocked()
                process.kill()
    assert seen == [-signal.SIGKILL] * 3


async def test_closing_kills_also_when_cancelled(bench: Bench) -> None:
    process = bench.spawn("pause")
    with trio.CancelScope() as scope:
        scope.cancel(reason="test")
        await process.aclose()
    assert process.exit_status == -signal.SIGKILL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process.pidfd)
    await process.aclose()


@pytest.mark.parametrize(
    ("changes", "operation", "errno_name"),
    [
        ({"argv": ("/bin/absent",)}, "execve", "ENOENT"),
        ({"argv": ("/vm/ram",)}, "execve", "EACCES"),
        ({"root_fd": 4000}, "open_tree root", "EBADF"),
        ({"log_fd": 4000}, "move log", "EBADF"),
        ({"fds": (4000,)}, "move descriptor", "EBADF"),
        ({"cgroup_fd": 4000}, "clone3", "EBADF"),
        ({"binds": ((0, "vm/absent"),)}, "move_mount bind", "ENOENT"),
        ({"fds": (0,) * 65}, "count descriptors and binds", "E2BIG"),
    ],
)
def test_a_failing_step_is_named_and_leaves_nothing(
    bench: Bench, changes: dict[str, object], operation: str, errno_name: str
) -> None:
    if "binds" in changes:
        changes = {"binds": ((bench.spec.binds[0][0], "vm/absent"),)}
    before = os.listdir("/proc/self/fd")
    with pytest.raises(HostError, match=errno_name) as caught:
        spawn_jailed(replace(bench.spec, **changes))  # pyright: ignore[reportArgumentType]
    assert caught.value.operation == operation
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


async def test_spawning_leaves_no_descriptor_but_the_pidfd(bench: Bench) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = bench.spawn("pause")
    assert set(os.listdir("/proc/self/fd")) - before == {str(process.pidfd)}
    await process.aclose()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_it_must_be_the_main_thread(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="main thread"):
        await trio.to_thread.run_sync(bench.spawn, "pause")


PARENT_SCRIPT = """
import os, sys, time
from microvm.host.process import JailSpec, spawn_jailed
root = os.open(sys.argv[1], os.O_PATH)
process = spawn_jailed(JailSpec(root, ("/bin/probe", "pause"), 21001, 21001, 2))
print(process.pid, flush=True)
time.sleep(60)
"""


def test_it_dies_with_its_parent(jail_root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT_SCRIPT, str(jail_root)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert select.select([pidfd], [], [], 0)[0] == []
            parent.kill()
            assert select.select([pidfd], [], [], LIFE_SECONDS)[0] == [pidfd]
        finally:
            os.close(pidfd)
