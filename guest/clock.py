"""Time as jobs see it: run time, which stands still while they are frozen.

Built on CLOCK_MONOTONIC but independent of what that does over a suspension: `freeze` remembers the run time
and `thaw` continues from it, whether the monotonic clock went on, stood still, or jumped meanwhile. It sets
no clock of the machine; that is `platform`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from guest.loop import Loop, Timer


class RunTimer:
    """A call that is due at a moment of run time."""

    __slots__ = ("action", "at", "timer")

    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at = at
        self.action = action
        self.timer: Timer | None = None

    def disarm(self) -> None:
        """Takes it off the loop; it may be armed again."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None


class RunClock:
    """Run time in seconds since the supervisor's start, and timers on it. Starts frozen."""

    def __init__(self, loop: Loop, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._monotonic = monotonic
        self._run_at_freeze: float | None = 0.0
        self._offset = 0.0
        self._pending: set[RunTimer] = set()

    @property
    def frozen(self) -> bool:
        """Whether run time stands still."""
        return self._run_at_freeze is not None

    def now(self) -> float:
        """Run time, seconds."""
        if self._run_at_freeze is not None:
            return self._run_at_freeze
        return self._monotonic() - self._offset

    def freeze(self) -> None:
        """Stops run time; nothing that is due later happens until `thaw`."""
        if self._run_at_freeze is None:
            self._run_at_freeze = self.now()
            for pending in self._pending:
                pending.disarm()

    def thaw(self) -> None:
        """Continues run time from where it stopped; what was pending has its remaining budget."""
        if self._run_at_freeze is None:
            return
        self._offset = self._monotonic() - self._run_at_freeze
        self._run_at_freeze = None
        for pending in self._pending:
            self._arm(pending)

    def after(self, delay_s: float, action: Callable[[], None]) -> RunTimer:
        """Calls `action` once, after `delay_s` seconds of run time."""
        pending = RunTimer(self.now() + delay_s, action)
        self._pending.add(pending)
        if not self.frozen:
            self._arm(pending)
        return pending

    def _arm(self, pending: RunTimer) -> None:
        pending.timer = self._loop.after(max(0.0, pending.at - self.now()), lambda: self._fire(pending))

    def _fire(self, pending: RunTimer) -> None:
        self._pending.discard(pending)
        pending.action()

    def cancel(self, pending: RunTimer | None) -> None:
        """Takes back a call that did not happen yet."""
        if pending is not None:
            pending.disarm()
            self._pending.discard(pending)
