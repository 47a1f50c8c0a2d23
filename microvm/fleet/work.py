"""What calls do in one VM's guest: commands, their output, files; and what the guest tells by itself.

Every call here takes the VM through `driver.use`, which wakes it and keeps it awake for the call. Reading
what the host holds already takes nothing. Errors of the guest come out as they are; a command whose start may
or may not have happened is `OutcomeUnknownError`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

import trio
from pydantic import TypeAdapter

from microvm.agentlink import GuestCall
from microvm.errors import CapacityError, GuestError, MicrovmError, VmmError
from microvm.fleet.driver import VmDriver
from microvm.fleet.jobs import ACTIVE, STREAMS, JobTable
from microvm.fleet.live import CALL_TIMEOUT_S, Live
from microvm.fleet.log import log
from microvm.fleet.receipts import Begun, OutcomeUnknownError
from microvm.model import PAGE_BYTES, ExecSpec, FileChunk, JobId, JobRecord, JobState, OutputPage
from microvm.store import new_job_id, writes
from microvm.wire.agent import INLINE_BYTES, JobSummary

JOB_JSON: Final = TypeAdapter(JobRecord)
COMMAND_SHOWN: Final = 200
REFRESH_S: Final = 1.0
"""How long a waiting read trusts the guest to tell of new output, which it does for 15 s after a read; one
whose supervisor is older than that message does not."""
CANCEL_S: Final = 10.0
"""How long a cancel waits for the end: processes have 2 s from TERM to kill; a guest may be slow about it."""
PULL_BYTES: Final = 1 << 20
"""One reply of kept output; the link's flow control splits it."""


class GuestWork:
    """The work of one VM.

    Args:
        driver, jobs: The VM's.
        nursery: The service's; copies output to the host while no caller waits.
    """

    def __init__(self, driver: VmDriver, jobs: JobTable, nursery: trio.Nursery) -> None:
        self._driver = driver
        self._jobs = jobs
        self._nursery = nursery
        self._pulling: set[JobId] = set()

    # ---- commands ----

    async def start(self, spec: ExecSpec, begun: Begun) -> dict[str, Any]:
        """Starts a command; the answer is the job as a receipt records it.

        Raises:
            MicrovmError: Nothing was started.
            OutcomeUnknownError: It may have been.
        """
        record = self._driver.record
        job = JobRecord(
            job_id=new_job_id(),
            vm_id=record.vm_id,
            state=JobState.STARTING,
            command=spec.command[:COMMAND_SHOWN],
            started_at=time.time(),
        )
        async with self._driver.use() as live:
            self._jobs.admit(job)
            try:
                await begun.commit(writes.put_job(job))
                await self._exec(live, job.job_id, spec, record.env)
            except OutcomeUnknownError:
                raise
            except BaseException:
                self._jobs.withdraw(job.job_id)
                raise
            self._driver.jobs_changed()
            job = self._jobs.started(job.job_id)
        return JOB_JSON.dump_python(job, mode="json")

    async def _exec(self, live: Live, job_id: JobId, spec: ExecSpec, env: dict[str, str]) -> None:
        try:
            await live.link.exec(job_id, spec, env={**env, **spec.env}, timeout_s=CALL_TIMEOUT_S)
        except GuestError as error:
            if error.code not in {"guest_unreachable", "guest_timeout"}:
                raise
            self._jobs.lose(job_id, "the guest did not answer while the command was being started")
            raise OutcomeUnknownError(await live.explain(error)) from error

    @staticmethod
    def recorded(answer: dict[str, Any]) -> JobRecord:
        """The job of a receipt's answer."""
        return JOB_JSON.validate_python(answer)

    async def wait_first_page(
        self, job: JobRecord, wait_s: float, draining: trio.Event
    ) -> tuple[JobRecord, OutputPage | None]:
        """The job, and its first page when it ended within `wait_s`."""
        try:
            job = await self.wait_end(job.job_id, wait_s, draining)
        except VmmError:
            raise
        except MicrovmError:
            return job, None  # forgotten since: the recorded answer stands
        if job.state is not JobState.COMPLETED or not wait_s:
            return job, None
        page = await self.output(job.job_id, (0, 0), PAGE_BYTES, 0.0, draining)
        return page.job, page

    async def wait_end(self, job_id: str, wait_s: float, draining: trio.Event) -> JobRecord:
        """The job once it has ended, or as it is after `wait_s`."""
        job = self._jobs.get(job_id)
        if wait_s and job.state in ACTIVE:
            await _unless(draining, lambda: self._jobs.wait_end(job.job_id, wait_s))
            job = self._jobs.get(job_id)
            self._tell_of_death(job)
        return job

    def _tell_of_death(self, job: JobRecord) -> None:
        """Whoever waited for a job that went with its VMM is told of that."""
        death = self._driver.effects.death
        if job.state is JobState.LOST and death is not None:
            raise death

    def job(self, job_id: str) -> JobRecord:
        """The job as it is now."""
        return self._jobs.get(job_id)

    async def cancel(self, job_id: str) -> JobRecord:
        """Kills what is left of a job and answers when it is gone; a finished one keeps its result."""
        job = self._jobs.get(job_id)
        if job.state is JobState.LOST or (job.state is JobState.COMPLETED and not job.background_processes):
            return job
        async with self._driver.use() as live:
            summary = await live.link.job_cancel(job.job_id, timeout_s=CALL_TIMEOUT_S)
            self._jobs.heard(summary)
            self._driver.jobs_changed()
            with trio.move_on_after(CANCEL_S):
                await self._jobs.wait_gone(job.job_id)
        return self._jobs.get(job_id)

    # ---- output ----

    async def output(
        self, job_id: str, cursor: tuple[int, int], max_bytes: int, wait_s: float, draining: trio.Event
    ) -> OutputPage:
        """Kept output from `cursor` on, from the host where it has it, else from the guest."""
        deadline, waited = trio.current_time() + wait_s, False
        while True:
            job = self._jobs.get(job_id)
            if self._jobs.holds_output(job):
                return _page(job, cursor, self._jobs.kept_output(job.job_id, cursor, max_bytes))
            if job.state is JobState.LOST:
                if waited:
                    self._tell_of_death(job)
                return _page(job, cursor, (b"", b""))
            if waited and job.state is JobState.FROZEN:  # suspended while we wait: waiting wakes nothing
                page = _page(job, cursor, (b"", b""))
            else:
                page = await self._output_of_guest(job, cursor, max_bytes, follow=wait_s > 0)
            if any(page.data) or page.job.state not in ACTIVE or trio.current_time() >= deadline:
                return page
            waited = True
            job = self._jobs.get(job_id)
            if job.state is JobState.FROZEN or (job.kept[0] <= cursor[0] and job.kept[1] <= cursor[1]):
                # Nothing is awaited between that look and this wait: no news can be lost.
                with trio.move_on_after(min(deadline - trio.current_time(), REFRESH_S)):
                    await _unless(draining, lambda: self._jobs.wait_change(JobId(job_id)))

    async def _output_of_guest(
        self, job: JobRecord, cursor: tuple[int, int], max_bytes: int, *, follow: bool
    ) -> OutputPage:
        async with self._driver.use() as live:
            data: list[bytes] = []
            for name, offset in zip(STREAMS, cursor, strict=True):
                summary, part = await live.link.job_output(
                    job.job_id,
                    name,
                    offset=offset,
                    length=max_bytes,
                    follow=follow,
                    timeout_s=CALL_TIMEOUT_S,
                )
                data.append(part)
                job = self._jobs.heard(summary) or job
        return _page(job, cursor, (data[0], data[1]))

    async def on_guest_call(self, call: GuestCall) -> Mapping[str, Any]:
        """What the guest tells: that a job ended or wrote more, or that what one left behind is gone."""
        if call.op not in {"job_ended", "job_changed", "job_grew"}:
            raise GuestError("invalid_argument", f"there is no operation {call.op[:32]!r}")
        summary = JobSummary.parse(call.args)
        inline = call.args.get("inline") is True
        body = await call.read_all(most=2 * INLINE_BYTES)
        job = self._jobs.heard(summary)
        self._driver.jobs_changed()
        if job is not None and call.op == "job_ended" and not job.output_cached:
            if inline and len(body) == sum(summary.kept):
                self._keep(job, (body[: summary.kept[0]], body[summary.kept[0] :]))
            elif job.job_id not in self._pulling:  # a guest may say it again and again
                self._pulling.add(job.job_id)
                self._nursery.start_soon(self._pull, job)
        return {}

    def _keep(self, job: JobRecord, output: tuple[bytes, bytes]) -> None:
        try:
            self._jobs.keep_output(job.job_id, output)
        except MicrovmError as error:
            log.warning("output stays in the guest", extra={"job_id": job.job_id, "why": error.message})

    async def _pull(self, job: JobRecord) -> None:
        """Copies a finished job's kept output to the host while the guest runs."""
        try:
            async with self._driver.use() as live:
                parts: list[bytes] = []
                for name, kept in zip(STREAMS, job.kept, strict=True):
                    parts.append(await _pull_stream(live, job.job_id, name, kept))
        except MicrovmError as error:
            log.warning("output stays in the guest", extra={"job_id": job.job_id, "why": error.message})
            return
        finally:
            self._pulling.discard(job.job_id)
        self._keep(job, (parts[0], parts[1]))

    # ---- files ----

    async def read_file(self, path: str, offset: int, length: int) -> FileChunk:
        """A part of a file below /workspace."""
        async with self._driver.use() as live:
            part, content = await live.link.read_file(
                path, offset=offset, length=length, timeout_s=CALL_TIMEOUT_S
            )
        return FileChunk(content, part.offset, part.size, part.eof, part.mode, part.modified_at_ns / 1e9)

    async def write_file(
        self, path: str, content: bytes, *, offset: int | None, truncate: bool, mode: str, make_parents: bool
    ) -> tuple[int, str]:
        """Writes a file below /workspace; answers with its size and the SHA-256 of `content`."""
        async with self._driver.use() as live:
            return await live.link.write_file(
                path,
                content,
                offset=offset,
                truncate=truncate,
                mode=mode,
                make_parents=make_parents,
                timeout_s=CALL_TIMEOUT_S,
            )


async def _pull_stream(live: Live, job_id: JobId, name: Literal["stdout", "stderr"], kept: int) -> bytes:
    parts: list[bytes] = []
    offset = 0
    while offset < kept:
        _, part = await live.link.job_output(
            job_id, name, offset=offset, length=min(PULL_BYTES, kept - offset), timeout_s=CALL_TIMEOUT_S
        )
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _page(job: JobRecord, cursor: tuple[int, int], data: tuple[bytes, bytes]) -> OutputPage:
    ended = job.state not in ACTIVE
    complete = (
        ended and cursor[0] + len(data[0]) >= job.kept[0],
        ended and cursor[1] + len(data[1]) >= job.kept[1],
    )
    return OutputPage(job, cursor, data, complete)


async def _unless(draining: trio.Event, wait: Callable[[], Awaitable[object]]) -> None:
    """Waits, unless the service begins to drain: then whoever waits is told so at once."""
    error: MicrovmError | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await draining.wait()
            nursery.cancel_scope.cancel(reason="the service is draining")

        nursery.start_soon(watch)
        try:
            await wait()
        except MicrovmError as failed:  # it leaves the nursery as itself, not as a group
            error = failed
        nursery.cancel_scope.cancel(reason="the wait is over")
    if error is not None:
        raise error
    if draining.is_set():
        raise CapacityError(
            "draining", "The service is shutting down; ask again when it is back.", retry_after_s=10.0
        )
