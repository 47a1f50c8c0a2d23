"""The jobs of one VM as the host knows them, and the output it holds of the finished ones.

The guest runs jobs and pushes how they end; this table is what polling reads, so that it never wakes a VM. A
finished job's kept output is copied to the host while the guest runs, and served from there for ever after.
Only the VM's driver and the calls it has let into the guest write here; the store keeps what must outlive the
service.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

import trio

from microvm.errors import CapacityError, RequestError
from microvm.fleet.layout import remove_tree
from microvm.host.files import host_errors
from microvm.model import MAX_ACTIVE_JOBS, MAX_JOBS, JobId, JobRecord, JobState, VmId
from microvm.wire.agent import JobSummary

STREAMS: Final[tuple[Literal["stdout"], Literal["stderr"]]] = ("stdout", "stderr")
RESERVE_BYTES: Final = 256 << 20
"""Of the metadata's file system, which output must leave: a commit without a block fails for everybody."""
ACTIVE: Final = frozenset({JobState.STARTING, JobState.RUNNING, JobState.FROZEN})


class JobTable:
    """Jobs of one VM.

    Args:
        vm_id: Whose.
        directory: Where output of finished jobs is kept, one directory a job; made on first use.
        records: What the store knows, in any order.
        save: Told of each change that must outlive the service; must not block.
        forget: Told of each job that left the table.
    """

    def __init__(
        self,
        vm_id: VmId,
        directory: Path,
        records: Iterable[JobRecord],
        *,
        save: Callable[[JobRecord], None],
        forget: Callable[[JobId], None],
    ) -> None:
        self._vm_id = vm_id
        self._directory = directory
        self._jobs = {job.job_id: job for job in sorted(records, key=lambda job: job.started_at)}
        self.changed: Callable[[JobRecord], None] = lambda _job: None  # told of what is saved
        self._changed: dict[JobId, trio.Event] = {}
        self._save = save
        self._forget = forget

    def list(self) -> list[JobRecord]:
        """All remembered jobs, oldest first."""
        return list(self._jobs.values())

    def get(self, job_id: str) -> JobRecord:
        """One job.

        Raises:
            RequestError: `not_found`.
        """
        job = self._jobs.get(JobId(job_id))
        if job is None:
            raise RequestError("not_found", "There is no job with this id; vm_status lists the known ones.")
        return job

    @property
    def active(self) -> int:
        """Jobs that keep the VM awake: running mains, and finished ones that left processes behind."""
        return sum(
            job.state in ACTIVE or (job.state is JobState.COMPLETED and job.background_processes > 0)
            for job in self._jobs.values()
        )

    def admit(self, job: JobRecord) -> None:
        """Takes a new job in, in state `starting`; forgets the oldest finished one beyond the limit.

        Raises:
            CapacityError: `job_limit` while four mains run.
        """
        running = sum(known.state in ACTIVE for known in self._jobs.values())
        if running >= MAX_ACTIVE_JOBS:
            raise job_limit()
        if len(self._jobs) >= MAX_JOBS:
            finished = [known for known in self._jobs.values() if known.state not in ACTIVE]
            # One that left processes behind goes last: it is what keeps the VM awake for them.
            oldest = min(finished, key=lambda known: known.background_processes > 0)
            del self._jobs[oldest.job_id]
            self._ring(oldest.job_id)
            with contextlib.suppress(Exception):
                remove_tree(self._directory / oldest.job_id)
            self._forget(oldest.job_id)
        self._jobs[job.job_id] = job

    def withdraw(self, job_id: JobId) -> None:
        """Takes back a job that never started."""
        self._jobs.pop(job_id, None)
        self._ring(job_id)
        self._forget(job_id)

    def started(self, job_id: JobId) -> JobRecord:
        """Marks a job as running, unless its end was heard of first."""
        job = self._jobs[job_id]
        if job.state is JobState.STARTING:
            job = self._put(job.with_(state=JobState.RUNNING))
        return job

    def heard(self, summary: JobSummary) -> JobRecord | None:
        """Takes over what the guest says of a job; one that the host does not know is ignored.

        An answer and an event may be heard in the other order than they were said in: what has ended
        stays so.
        """
        job = self._jobs.get(JobId(summary.job_id))
        if job is None:
            return None
        if job.state is JobState.COMPLETED and (
            summary.state != JobState.COMPLETED or not job.background_processes
        ):
            return job
        return self._put(
            job.with_(
                state=JobState(summary.state) if summary.state in tuple(JobState) else job.state,
                ended_at=summary.ended_at_ns / 1e9 if summary.ended_at_ns else job.ended_at,
                exit_code=summary.exit_code,
                signal=summary.signal,
                timed_out=summary.timed_out,
                cancelled=summary.cancelled,
                truncated=summary.truncated,
                totals=_most(job.totals, summary.totals),
                kept=_most(job.kept, summary.kept),
                run_seconds=summary.run_seconds,
                background_processes=summary.background_processes,
                message=summary.message,
            )
        )

    def lose(self, job_id: JobId, why: str) -> None:
        """Nobody can say whether this job ran."""
        self._put(self._jobs[job_id].with_(state=JobState.LOST, ended_at=time.time(), message=why))

    def lose_active(self, why: str) -> None:
        """The guest is gone: what ran is lost, and finished jobs have no processes any more."""
        for job in list(self._jobs.values()):
            if job.state in ACTIVE:
                self._put(job.with_(state=JobState.LOST, ended_at=time.time(), message=why))
            elif job.background_processes:
                self._put(job.with_(background_processes=0))

    def freeze(self, *, frozen: bool) -> None:
        """Shows running jobs as frozen, or frozen ones as running again."""
        old, new = (JobState.RUNNING, JobState.FROZEN) if frozen else (JobState.FROZEN, JobState.RUNNING)
        for job in list(self._jobs.values()):
            if job.state is old:
                self._put(job.with_(state=new))

    async def wait_change(self, job_id: JobId) -> None:
        """Returns at the next change of a job."""
        await self._changed.setdefault(job_id, trio.Event()).wait()

    async def wait_end(self, job_id: JobId, timeout_s: float) -> JobRecord:
        """The job once its main process has ended, or as it is after `timeout_s` seconds."""
        with trio.move_on_after(timeout_s):
            while self.get(job_id).state in ACTIVE:
                await self.wait_change(job_id)
        return self.get(job_id)

    async def wait_gone(self, job_id: JobId) -> None:
        """Returns once a job has ended and left nothing running."""
        while (job := self.get(job_id)).state in ACTIVE or job.background_processes:
            await self.wait_change(job_id)

    # ---- output kept on the host ----

    def keep_output(self, job_id: JobId, output: tuple[bytes, bytes]) -> JobRecord | None:
        """Keeps all retained output of a finished job on the host.

        Raises:
            HostError: It was not kept; reading asks the guest, as before.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        directory = self._directory / job_id
        with host_errors("keep output", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.statvfs(directory)
            if found.f_bavail * found.f_frsize < RESERVE_BYTES + sum(map(len, output)):
                raise OSError(errno.ENOSPC, "the reserve is for metadata")
            for name, data in zip(STREAMS, output, strict=True):
                (directory / name).write_bytes(data)
        return self._put(job.with_(output_cached=True))

    def holds_output(self, job: JobRecord) -> bool:
        """Whether the host really has all that a finished job kept.

        These files are not fsynced: after a power loss one may be short, and then the guest is asked again.
        """
        try:
            found = [(self._directory / job.job_id / name).stat().st_size for name in STREAMS]
        except OSError:
            return False
        return job.output_cached and tuple(found) == job.kept

    def kept_output(self, job_id: JobId, cursor: tuple[int, int], max_bytes: int) -> tuple[bytes, bytes]:
        """A page of a finished job's kept output, per stream."""
        return self._page(job_id, "stdout", cursor[0], max_bytes), self._page(
            job_id, "stderr", cursor[1], max_bytes
        )

    def _page(self, job_id: JobId, name: str, offset: int, max_bytes: int) -> bytes:
        path = self._directory / job_id / name
        with host_errors("read output", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(fd, max_bytes, offset)
            finally:
                os.close(fd)

    def _put(self, job: JobRecord) -> JobRecord:
        """Takes a job over; what a running one has written so far is no change that must outlive us."""
        known = self._jobs.get(job.job_id)
        self._jobs[job.job_id] = job
        if known is None or _lasting(known) != _lasting(job):
            self._save(job)
            self.changed(job)
        if known is None or known.with_(run_seconds=0.0) != job.with_(run_seconds=0.0):
            self._ring(job.job_id)
        return job

    def _ring(self, job_id: JobId) -> None:
        event = self._changed.pop(job_id, None)
        if event is not None:
            event.set()


def _most(known: tuple[int, int], heard: tuple[int, int]) -> tuple[int, int]:
    return max(known[0], heard[0]), max(known[1], heard[1])


def _lasting(job: JobRecord) -> JobRecord:
    """A job without what grows while it runs."""
    if job.state not in ACTIVE:
        return job
    return job.with_(run_seconds=0.0, totals=(0, 0), kept=(0, 0))


def job_limit() -> CapacityError:
    """The refusal of a fifth running job."""
    return CapacityError(
        "job_limit",
        f"{MAX_ACTIVE_JOBS} jobs are running, the most that one VM takes; wait for one to end or cancel it.",
        retry_after_s=5.0,
    )
