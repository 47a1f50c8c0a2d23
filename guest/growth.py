"""Telling the host of new output while somebody there follows a job.

The host follows by reading output and asking to be told; for a while after each such read it hears of
growth, at most every 50 ms a job and one message at a time, so that a command that writes much costs no more
than one that writes a little. That a job ended is told anyway (`supervisor`). This module knows neither the
messages nor where output is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from guest.channel import Stream
from guest.jobs import Job
from guest.loop import Loop

INTERVAL_S: Final = 0.05
"""People see no difference below it, and it bounds what following costs at 20 messages a second."""
FOLLOW_S: Final = 15.0
"""The host reads again within a second or so while it follows (`fleet.work`)."""


@dataclass(slots=True)
class _Followed:
    until: float
    told_at: float = 0.0
    waiting: bool = False  # a message is due
    under_way: bool = False
    grown: bool = False  # since the message under way was made


class Growth:
    """Which jobs are followed, and what the host still has to hear of them.

    Args:
        loop: Runs the timers.
        tell: Sends the message about a job; None when it cannot be sent now.
    """

    def __init__(self, loop: Loop, tell: Callable[[Job], Stream | None]) -> None:
        self._loop = loop
        self._tell = tell
        self._followed: dict[str, _Followed] = {}

    def follow(self, job: Job) -> None:
        """Tells of the job's growth for a while; again, for a while longer."""
        if job.completed:
            return
        until = time.monotonic() + FOLLOW_S
        known = self._followed.get(job.job_id)
        if known is not None:
            known.until = until
            return
        self._followed[job.job_id] = _Followed(until)
        job.capture.on_growth = lambda: self._grew(job)

    def _grew(self, job: Job) -> None:
        followed = self._followed[job.job_id]
        now = time.monotonic()
        if job.completed or now > followed.until:
            del self._followed[job.job_id]
            job.capture.on_growth = None
        elif followed.under_way:
            followed.grown = True
        elif not followed.waiting:
            followed.waiting = True
            self._loop.after(max(0.0, followed.told_at + INTERVAL_S - now), lambda: self._send(job, followed))

    def _send(self, job: Job, followed: _Followed) -> None:
        followed.waiting = False
        if job.completed:
            return
        followed.told_at = time.monotonic()
        stream = self._tell(job)
        if stream is None:
            return  # the host reads again by itself after the silence
        followed.under_way = True

        def over(_answer: dict[str, Any] | None = None) -> None:
            followed.under_way = False
            if followed.grown and self._followed.get(job.job_id) is followed:
                followed.grown = False
                self._grew(job)

        stream.on_closed = over
        stream.on_abandoned = over
