"""The host's table of a VM's jobs: what polling reads, and what outlives the service."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from microvm.errors import CapacityError, HostError, RequestError
from microvm.fleet.jobs import JobTable
from microvm.model import MAX_ACTIVE_JOBS, MAX_JOBS, JobId, JobRecord, JobState, VmId
from microvm.wire.agent import JobSummary

VM = VmId("vm_" + "a" * 20)
LONG_S = 5.0


class Kept:
    """What the table gave away to be stored."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, JobRecord] = {}
        self.forgotten: list[JobId] = []

    def save(self, job: JobRecord) -> None:
        self.jobs[job.job_id] = job

    def forget(self, job_id: JobId) -> None:
        self.forgotten.append(job_id)


def a_job(number: int, state: JobState = JobState.STARTING, **changes: object) -> JobRecord:
    return JobRecord(JobId(f"job_{number}"), VM, state, "true", float(number)).with_(**changes)


def a_table(directory: Path, *jobs: JobRecord) -> tuple[JobTable, Kept]:
    kept = Kept()
    return JobTable(VM, directory, jobs, save=kept.save, forget=kept.forget), kept


def said(number: int, state: str = "completed", **changes: object) -> JobSummary:
    return JobSummary(job_id=f"job_{number}", state=state, **changes)  # type: ignore[arg-type]


def test_jobs_are_listed_oldest_first_whatever_order_they_were_stored_in(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path, a_job(3), a_job(1), a_job(2))
    table.admit(a_job(4))
    assert [job.job_id for job in table.list()] == ["job_1", "job_2", "job_3", "job_4"]


def test_a_fifth_running_job_is_refused_and_a_finished_one_makes_room(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path, *(a_job(number, JobState.RUNNING) for number in range(MAX_ACTIVE_JOBS)))
    with pytest.raises(CapacityError) as refused:
        table.admit(a_job(9))
    assert refused.value.code == "job_limit"
    table.heard(said(2, exit_code=0))
    table.admit(a_job(9))
    assert table.active == MAX_ACTIVE_JOBS


def test_of_256_jobs_the_oldest_finished_one_is_forgotten_with_its_output(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path, a_job(0, JobState.RUNNING))
    for number in range(1, MAX_JOBS):
        table.admit(a_job(number))
        table.heard(said(number, exit_code=0))
    table.keep_output(JobId("job_1"), (b"out", b"err"))
    table.admit(a_job(MAX_JOBS))
    assert kept.forgotten == ["job_1"]
    assert not (tmp_path / "job_1").exists()
    assert table.get("job_0").state is JobState.RUNNING
    with pytest.raises(RequestError) as missing:
        table.get("job_1")
    assert missing.value.code == "not_found"
    assert len(table.list()) == MAX_JOBS


async def test_who_waits_for_a_job_that_is_forgotten_is_told(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path, a_job(1, JobState.RUNNING))

    async def wait() -> None:
        with pytest.raises(RequestError):
            await table.wait_end(JobId("job_1"), 30.0)

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            table.withdraw(JobId("job_1"))


async def test_waiting_ends_with_the_job_or_with_the_time(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path, a_job(1, JobState.RUNNING))
    assert (await table.wait_end(JobId("job_1"), 0.0)).state is JobState.RUNNING
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(table.wait_end, JobId("job_1"), 30.0)
            await wait_all_tasks_blocked()
            table.freeze(frozen=True)
            await wait_all_tasks_blocked()
            table.heard(said(1, exit_code=3))
    assert (await table.wait_end(JobId("job_1"), 30.0)).exit_code == 3


def test_an_end_that_is_heard_before_the_start_is_answered_stays(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path)
    table.admit(a_job(1))
    table.heard(said(1, exit_code=0))
    assert table.started(JobId("job_1")).state is JobState.COMPLETED


def test_an_older_answer_never_revives_an_ended_job(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path, a_job(1, JobState.RUNNING))
    table.heard(said(1, exit_code=7, kept=(3, 0)))
    ended = table.get("job_1")
    table.heard(said(1, "running"))
    assert table.get("job_1") == kept.jobs[JobId("job_1")] == ended


def test_what_a_finished_job_left_behind_counts_until_it_is_gone(tmp_path: Path) -> None:
    table, _ = a_table(tmp_path, a_job(1, JobState.RUNNING))
    table.heard(said(1, exit_code=0, background_processes=2))
    assert table.active == 1
    table.heard(said(1, exit_code=0, background_processes=0))
    assert table.active == 0


def test_a_job_that_the_host_does_not_know_is_ignored(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path)
    assert table.heard(said(5)) is None
    assert not kept.jobs


def test_freezing_is_stored_and_touches_running_jobs_only(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path, a_job(1, JobState.RUNNING), a_job(2, JobState.COMPLETED))
    table.freeze(frozen=True)
    assert kept.jobs == {JobId("job_1"): a_job(1, JobState.FROZEN)}
    assert table.active == 1
    table.freeze(frozen=False)
    assert kept.jobs[JobId("job_1")].state is JobState.RUNNING


def test_a_lost_guest_loses_what_ran_and_what_was_left_behind(tmp_path: Path) -> None:
    jobs = [a_job(n, state) for n, state in enumerate((JobState.STARTING, JobState.RUNNING, JobState.FROZEN))]
    table, kept = a_table(tmp_path, *jobs, a_job(9, JobState.COMPLETED, background_processes=1, exit_code=0))
    table.lose_active("the power went")
    assert table.active == 0
    for number in range(3):
        job = kept.jobs[JobId(f"job_{number}")]
        assert (job.state, job.message) == (JobState.LOST, "the power went")
        assert job.ended_at is not None
    assert table.get("job_9").state is JobState.COMPLETED


def test_kept_output_is_read_by_the_page_and_exactly(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path, a_job(1, JobState.COMPLETED))
    out, err = bytes(range(256)), b"\xff\x00"
    table.keep_output(JobId("job_1"), (out, err))
    assert kept.jobs[JobId("job_1")].output_cached
    assert table.kept_output(JobId("job_1"), (0, 0), 100) == (out[:100], err)
    assert table.kept_output(JobId("job_1"), (250, 1), 100) == (out[250:], err[1:])
    assert table.kept_output(JobId("job_1"), (256, 2), 100) == (b"", b"")


def test_output_that_cannot_be_kept_is_not_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table, kept = a_table(tmp_path / "file" / "jobs", a_job(1, JobState.COMPLETED))
    with pytest.raises(HostError):
        table.keep_output(JobId("job_1"), (b"x", b""))
    assert not table.get("job_1").output_cached
    assert not kept.jobs
    assert table.keep_output(JobId("job_2"), (b"", b"")) is None


def test_a_job_that_never_started_is_withdrawn(tmp_path: Path) -> None:
    table, kept = a_table(tmp_path)
    table.admit(a_job(1))
    table.withdraw(JobId("job_1"))
    assert table.list() == []
    assert kept.forgotten == ["job_1"]
