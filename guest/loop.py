"""The one loop that everything in the supervisor runs on: descriptors that are ready, and timers.

Single-threaded and never blocking: whatever could block is done by a child process. It knows no meaning of
what it watches. Timers run on the loop's own clock; `clock.RunClock` decides which timers may run while jobs
are frozen.
"""

from __future__ import annotations

import heapq
import itertools
import select
import sys
import time
from collections.abc import Callable
from typing import Final

READ: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITE: Final = select.EPOLLOUT
PRIORITY: Final = select.EPOLLPRI | select.EPOLLERR
"""What a cgroup's event file reports when it changes."""
EDGE: Final = select.EPOLLET

Callback = Callable[[int], None]


def _guard(action: Callable[..., None], *args: int) -> None:
    """Calls `action`; a resource that ran out in the middle of it is told and survived, a bug is not."""
    try:
        action(*args)
    except (OSError, MemoryError) as error:
        sys.stderr.write(f"supervisor: {error!r}\n")


class Timer:
    """One pending call; `cancel` makes it never happen."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """The action is not called, if it was not yet."""
        self.action = None


class Loop:
    """Calls back what became ready, in the order of the kernel's report, then the timers that are due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: list[Callable[[], None]] = []
        self._running = True

    def watch(self, fd: int, events: int, callback: Callback) -> None:
        """Calls `callback(events)` whenever one of `events` holds for `fd`, until `forget`."""
        if fd in self._callbacks:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Stops watching `fd`; must come before it is closed. Nothing happens when it is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Calls `action` once, `delay_s` seconds from now on CLOCK_MONOTONIC."""
        timer = Timer(time.monotonic() + delay_s, action)
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    def soon(self, action: Callable[[], None]) -> None:
        """Calls `action` at the end of this turn."""
        self._soon.append(action)

    def stop(self) -> None:
        """Makes `run` return after this turn."""
        self._running = False

    def run(self) -> None:
        """Serves until `stop`."""
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Waits for something to happen and handles it."""
        for fd, events in self._epoll.poll(self._wait_s()):
            callback = self._callbacks.get(fd)
            if callback is not None:
                _guard(callback, events)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.action is not None:
                _guard(timer.action)
        while self._soon:
            batch, self._soon = self._soon, []
            for action in batch:
                _guard(action)

    def _wait_s(self) -> float | None:
        if self._soon:
            return 0
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())
