"""Jobs: commands that run, what is known of those that ran, and how they are ended.

    start ──► running ──main process ends──► completed
                 └─ cancel, timeout: TERM to the whole cgroup, 2 s of run time, cgroup.kill ─► completed

A job ends when its main process ends; what it left behind stays in its cgroup, is counted, and is not timed.
After a cancel or a timeout a job is completed only when its cgroup is empty. All time here is run time
(`clock`). This module knows neither the channel nor how bytes are kept (`output`) or processes begin
(`spawn`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from guest import spawn
from guest.cgroups import Group, Tree
from guest.clock import RunClock, RunTimer
from guest.errors import OpError
from guest.loop import PRIORITY, Loop
from guest.output import Capture

MAX_RUNNING: Final = 4
MAX_REMEMBERED: Final = 256
GRACE_S: Final = 2.0
"""Between SIGTERM and cgroup.kill."""
BASE_ENV: Final = {
    b"PATH": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    b"HOME": b"/workspace",
    b"USER": b"agent",
    b"LOGNAME": b"agent",
    b"SHELL": b"/bin/bash",
    b"LANG": b"C.UTF-8",
}
_DISK_FULL_BYTES: Final = 65536
"""Less than this available to the user, and a job is told that the disk was full."""


@dataclass(slots=True)
class JobSpec:
    """What to run.

    Attributes:
        command: Text for bash.
        cwd: Relative to the workspace.
        stdin_fd: A file with the standard input, -1 for an empty one; ownership passes to `Jobs.start`.
        timeout_s: Run time after which the job is ended; None for no limit.
    """

    job_id: str
    command: bytes
    cwd: str = "."
    env: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    stdin_fd: int = -1
    timeout_s: float | None = None
    output_limit_bytes: int = 256 * 1024


class Job:
    """One command, from its spawn until it is forgotten."""

    def __init__(self, job_id: str, group: Group, capture: Capture, started_run: float) -> None:
        self.job_id = job_id
        self.group = group
        self.capture = capture
        self.started_run = started_run
        self.started_at_ns = time.time_ns()
        self.ended_at_ns: int | None = None
        self.pid = -1
        self.launched = False
        self.status: int | None = None
        self.completed = False
        self.timed_out = False
        self.cancelled = False
        self.background = 0
        self.run_seconds = 0.0
        self.oom_killed = False
        self.pids_refused = False
        self.message = ""
        self.timeout: RunTimer | None = None
        self.grace: RunTimer | None = None
        self.watched = False

    def summary(self, clock: RunClock) -> dict[str, Any]:
        """The job as the host sees it."""
        code = None if self.status is None or not self.completed else os.waitstatus_to_exitcode(self.status)
        running = "frozen" if clock.frozen else "running"
        summary: dict[str, Any] = {
            "job_id": self.job_id,
            "state": "completed" if self.completed else running,
            "exit_code": None if code is None else (code if code >= 0 else 128 - code),
            "signal": -code if code is not None and code < 0 else None,
            "timed_out": self.timed_out,
            "cancelled": self.cancelled,
            "truncated": self.capture.truncated,
            "totals": {"stdout": self.capture.totals[0], "stderr": self.capture.totals[1]},
            "kept": {"stdout": self.capture.kept[0], "stderr": self.capture.kept[1]},
            "started_at_ns": self.started_at_ns,
            "ended_at_ns": self.ended_at_ns,
            "run_seconds": round(self.run_seconds if self.completed else clock.now() - self.started_run, 6),
            "background_processes": self.background,
            "oom_killed": self.oom_killed,
        }
        message = "; ".join(part for part in (self.message, self.capture.message) if part)
        if message:
            summary["message"] = message
        return summary


class Jobs:
    """All jobs of this guest.

    Args:
        spool: A directory that only root can enter, for output.
        on_completed: Called once when a job completes.
        on_emptied: Called when the last process that a completed job left behind is gone.
    """

    def __init__(
        self,
        loop: Loop,
        clock: RunClock,
        tree: Tree,
        host: spawn.Host,
        *,
        spool: str,
        env: dict[bytes, bytes] | None = None,
        on_completed: Callable[[Job], None],
        on_emptied: Callable[[Job], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._tree = tree
        self._launcher = spawn.Launcher(loop, host)
        self._launcher.prepare()
        self._workspace_fd = host.workspace_fd
        self._spool = spool
        self._env = {**BASE_ENV, **(env or {})}
        self._on_completed = on_completed
        self._on_emptied = on_emptied
        self._jobs: dict[str, Job] = {}
        self._pids: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}
        self._null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._noop_pending: list[Callable[[OpError | None], None]] = []

    def __iter__(self) -> Any:
        return iter(self._jobs.values())

    def get(self, job_id: object) -> Job:
        """The job of that id.

        Raises:
            OpError: not_found.
        """
        job = self._jobs.get(job_id) if isinstance(job_id, str) else None
        if job is None or not job.launched:
            raise OpError("not_found", "there is no such job")
        return job

    def start(self, spec: JobSpec, on_outcome: Callable[[Job | OpError], None]) -> None:
        """Runs a command; `on_outcome` gets the job once the command has begun, or why it did not.

        An id that is known already is the same call again: it gets the job as it is, and nothing is run.
        """
        try:
            known = self._jobs.get(spec.job_id)
            if known is None:
                self._begin(spec, on_outcome)
            elif known.launched:
                on_outcome(known)
            else:
                on_outcome(OpError("invalid_state", "this job is being started"))
        except OpError as error:
            on_outcome(error)
        finally:
            if spec.stdin_fd >= 0:
                os.close(spec.stdin_fd)

    def _begin(self, spec: JobSpec, on_outcome: Callable[[Job | OpError], None]) -> None:
        if self._clock.frozen:
            raise OpError("invalid_state", "the guest is frozen")
        if sum(not job.completed for job in self._jobs.values()) >= MAX_RUNNING:
            raise OpError("job_limit", f"{MAX_RUNNING} jobs are running; wait for one or cancel it")
        try:
            group = self._tree.take_group()
        except OSError as error:
            raise OpError("internal", f"no cgroup for the job: {error.strerror}") from error
        capture = Capture(self._loop, f"{self._spool}/{spec.job_id}", spec.output_limit_bytes, self._null_fd)
        job = Job(spec.job_id, group, capture, self._clock.now())
        try:
            self._spawn(job, spec, on_outcome)
        except OSError as error:
            self._discard(job)
            raise OpError("internal", f"the guest cannot start a process: {error.strerror}") from error
        except OpError:
            self._discard(job)
            raise
        self._make_room()
        self._jobs[spec.job_id] = job

    def _spawn(self, job: Job, spec: JobSpec, on_outcome: Callable[[Job | OpError], None]) -> None:
        out, err = job.capture.open_pipes()
        argv, kept_fd = spawn.bash_argv(spec.command)

        def launched(pid: int, error: OpError | None) -> None:
            job.pid = pid
            if error is not None:
                self._jobs.pop(job.job_id, None)
                on_outcome(error)
                if pid < 0:
                    self._discard(job)
                else:
                    self.expect(pid, lambda _status: self._discard(job))
                return
            job.launched = True
            if spec.timeout_s is not None:
                job.timeout = self._clock.after(spec.timeout_s, lambda: self._time_out(job))
            on_outcome(job)
            self.expect(pid, lambda status: self._reaped(job, status))

        try:
            self._launcher.launch(
                job.group,
                argv,
                env={**self._env, **spec.env},
                cwd=spec.cwd,
                stdio=(spec.stdin_fd if spec.stdin_fd >= 0 else self._null_fd, out, err),
                kept_fd=kept_fd,
                on_outcome=launched,
            )
        finally:
            for fd in (out, err, kept_fd):
                if fd >= 0:
                    os.close(fd)

    def _discard(self, job: Job) -> None:
        job.capture.close()
        job.capture.forget()
        job.completed = True
        if not self._give_group_back(job):  # the launcher died in the middle of it
            self._watch_group(job)
            job.group.kill()

    def _make_room(self) -> None:
        """Forgets the oldest finished job when one more would be too many."""
        while len(self._jobs) >= MAX_REMEMBERED:
            oldest = next((job for job in self._jobs.values() if job.completed), None)
            if oldest is None:
                return
            del self._jobs[oldest.job_id]
            oldest.capture.forget()

    def reap(self) -> None:
        """Collects every dead child, orphans included; to be called after SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            action = self._pids.pop(pid, None)
            if action is not None:
                action(status)
            elif self._launcher.busy:
                self._claim(pid, status)

    def _claim(self, pid: int, status: int) -> None:
        """Finds whose a dead child is that nobody expects yet: a command that was quicker than its news."""
        self._unclaimed[pid] = status
        self._launcher.take_outcomes()
        if pid in self._unclaimed:
            self._launcher.forget_dead(pid)
        self._unclaimed.pop(pid, None)

    def expect(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Has `on_exit` called with the wait status of a child, also of one that was collected just now."""
        status = self._unclaimed.pop(pid, None)
        if status is None:
            self._pids[pid] = on_exit
        else:
            on_exit(status)

    def _reaped(self, job: Job, status: int) -> None:
        job.status = status
        job.run_seconds = self._clock.now() - job.started_run
        job.ended_at_ns = time.time_ns()
        self._clock.cancel(job.timeout)
        job.capture.finish()
        emptied = self._give_group_back(job)
        if not emptied:
            self._watch_group(job)
        if emptied or not (job.cancelled or job.timed_out):
            self._complete(job)

    def _give_group_back(self, job: Job) -> bool:
        """Parts with the job's cgroup if nothing is in it, after a look at what the kernel noted there."""
        if job.group.populated():
            return False
        self._clock.cancel(job.grace)
        if self._tree.had_trouble():
            job.oom_killed = job.group.oom_kills() > 0
            job.pids_refused = job.group.pid_refusals() > 0
        self._tree.give_back(job.group)
        return True

    def _complete(self, job: Job) -> None:
        """The job is over, with or without processes that it left behind."""
        if job.completed:
            return
        job.completed = True
        job.background = len(job.group.pids()) if job.watched else 0
        job.message = self._message_of(job)
        if not job.watched:
            job.capture.close()
        self._on_completed(job)

    def _message_of(self, job: Job) -> str:
        parts: list[str] = []
        if job.oom_killed:
            parts.append("the guest ran out of memory and processes of this job were killed")
        if job.pids_refused:
            parts.append("the guest ran out of process ids and forks of this job failed")
        with contextlib.suppress(OSError):
            space = os.fstatvfs(self._workspace_fd)
            if space.f_bavail * space.f_frsize < _DISK_FULL_BYTES:
                parts.append("the guest's disk is full")
        return "; ".join(parts)

    def _watch_group(self, job: Job) -> None:
        """Has the job's cgroup parted with when the last process in it is gone."""
        if job.watched:
            return
        job.watched = True
        self._loop.watch(job.group.events_fd, PRIORITY, lambda _events: self._group_changed(job))

    def _group_changed(self, job: Job) -> None:
        if not job.watched or job.group.populated():
            return
        job.watched = False
        self._loop.forget(job.group.events_fd)
        self._give_group_back(job)
        job.background = 0
        if job.completed:
            job.capture.close()
            if job.launched:
                self._on_emptied(job)
        else:
            self._complete(job)

    def cancel(self, job: Job) -> None:
        """Ends the job and all that belongs to it; of a completed one, only what it left behind."""
        if not job.completed:
            job.cancelled = job.cancelled or not job.timed_out
        elif not job.watched:
            return
        self._end(job)

    def _time_out(self, job: Job) -> None:
        job.timed_out = not job.cancelled
        self._end(job)

    def _end(self, job: Job) -> None:
        job.group.terminate()
        if job.grace is None:
            job.grace = self._clock.after(GRACE_S, job.group.kill)

    def count_background(self, job: Job) -> int:
        """How many processes a completed job has now."""
        if job.completed and job.watched:
            job.background = len(job.group.pids())
        return job.background

    def run_noop(self, on_done: Callable[[OpError | None], None]) -> None:
        """Runs `bash -c true`, outside of what is frozen, to warm up; overlapping calls share a run."""
        self._noop_pending.append(on_done)
        if len(self._noop_pending) > 1:
            return
        group = self._tree.noop_group

        def done(error: OpError | None) -> None:
            pending, self._noop_pending = self._noop_pending, []
            for action in pending:
                action(error)

        def launched(pid: int, error: OpError | None) -> None:
            if pid < 0:
                done(error)
            else:
                failed = error or OpError("internal", "the no-op failed")
                self.expect(pid, lambda status: done(None if status == 0 else failed))

        try:
            null = self._null_fd
            self._launcher.launch(
                group,
                spawn.bash_argv(b"true")[0],
                env=self._env,
                cwd=".",
                stdio=(null, null, null),
                kept_fd=-1,
                on_outcome=launched,
            )
        except OSError as error:
            done(OpError("internal", f"the guest cannot start a process: {error.strerror}"))
