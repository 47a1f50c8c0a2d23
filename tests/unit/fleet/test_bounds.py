"""What one guest, one instance or one crash may do to the others: nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.agentlink import GuestCall
from microvm.errors import GuestError, HostError
from microvm.fleet import Fleet, Layout, jobs
from microvm.fleet import service as fleet_service
from microvm.fleet.driver import VmDriver
from microvm.fleet.jobs import JobTable
from microvm.fleet.work import GuestWork
from microvm.model import JobId, JobRecord, JobState, VmId

LONG_S = 5.0
VM = VmId("vm_" + "a" * 20)
JOB = JobId("job_" + "a" * 20)
ENDED: Mapping[str, Any] = {
    "job_id": JOB,
    "state": "completed",
    "exit_code": 0,
    "timed_out": False,
    "cancelled": False,
    "truncated": False,
    "totals": {"stdout": 1 << 20, "stderr": 0},
    "kept": {"stdout": 1 << 18, "stderr": 0},
    "started_at_ns": 1,
    "ended_at_ns": 2,
    "run_seconds": 0.1,
    "background_processes": 0,
    "oom_killed": False,
    "inline": False,
}


def a_table(directory: Path) -> JobTable:
    running = JobRecord(JOB, VM, JobState.RUNNING, "true", 0.0)
    return JobTable(VM, directory, [running], save=lambda _job: None, forget=lambda _job_id: None)


class _Ended:
    """A guest that says that a job ended, and keeps the output to itself."""

    op = "job_ended"
    args = ENDED

    async def read_all(self, *, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""[:most]


class _Asleep:
    """A driver whose guest does not come."""

    def __init__(self) -> None:
        self.uses = 0

    def jobs_changed(self) -> None:
        """Nobody listens."""

    def use(self) -> _Asleep:
        self.uses += 1
        return self

    async def __aenter__(self) -> None:
        await trio.sleep_forever()

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError


async def test_an_end_that_a_guest_tells_again_and_again_is_fetched_once(tmp_path: Path) -> None:
    driver = _Asleep()
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            work = GuestWork(cast("VmDriver", driver), a_table(tmp_path), nursery)
            for _ in range(100):
                await work.on_guest_call(cast("GuestCall", _Ended()))
            await wait_all_tasks_blocked()
            assert driver.uses == 1
            nursery.cancel_scope.cancel()


async def test_an_output_that_could_not_be_fetched_may_be_fetched_later(tmp_path: Path) -> None:
    class Unreachable(_Asleep):
        async def __aenter__(self) -> None:
            await trio.lowlevel.checkpoint()
            raise GuestError("guest_unreachable", "it is gone")

    driver = Unreachable()
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            work = GuestWork(cast("VmDriver", driver), a_table(tmp_path), nursery)
            for asked in (1, 2):
                await work.on_guest_call(cast("GuestCall", _Ended()))
                await wait_all_tasks_blocked()
                assert driver.uses == asked


class _SlowStore:
    def __init__(self) -> None:
        self.goes_on = trio.Event()
        self.written: list[str] = []

    async def commit(self, write: str) -> None:
        await self.goes_on.wait()
        self.written.append(write)


async def test_of_a_jobs_news_that_wait_for_the_disk_only_the_newest_is_kept() -> None:
    store = _SlowStore()
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            fleet = Fleet(*cast("tuple[Any, Any, Any]", (None, store, None)), nursery, nursery)
            tell = cast("Any", fleet)._later
            tell(JOB, "first")
            await wait_all_tasks_blocked()  # being written
            for number in range(1000):
                tell(JOB, f"news {number}")
                tell(JobId("other"), f"other {number}")
            store.goes_on.set()
    assert store.written == ["first", "news 999", "other 999"]


def test_output_is_not_kept_in_the_reserve_of_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = a_table(tmp_path)
    kept = table.keep_output(JOB, (b"out", b""))
    assert kept is not None
    assert kept.output_cached
    full = SimpleNamespace(f_bavail=jobs.RESERVE_BYTES // 4096, f_frsize=4096)

    def statvfs(_path: Path) -> SimpleNamespace:
        return full

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(HostError) as caught:
        table.keep_output(JOB, (b"new", b""))
    assert caught.value.code == "disk_full"
    assert table.kept_output(JOB, (0, 0), 10) == (b"out", b"")


@pytest.mark.parametrize("crashes", [True, False])
async def test_a_service_that_crashes_asks_for_the_drain_and_ends_nobody_else(crashes: bool) -> None:
    asked: list[bool] = []

    async def serve(_fleet: Fleet) -> None:
        await trio.lowlevel.checkpoint()
        if crashes:
            raise OSError("the disk is gone")

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            guarded = cast("Any", fleet_service)._serve_guarded
            nursery.start_soon(guarded, serve, None, lambda: asked.append(True))
    assert asked == [True] * crashes


def test_a_directory_of_vms_is_one_instances(tmp_path: Path) -> None:
    places = Layout(tmp_path / "state", tmp_path / "vm")
    places.prepare()
    places.claim("one")
    places.claim("one")
    with pytest.raises(HostError, match="belongs to the instance 'one'"):
        places.claim("two")
    (places.vm_dir / "owner").unlink()
    places.claim("two")
