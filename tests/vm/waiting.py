"""Waiting for what a service tells only when it is asked; not for what a call can wait for by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

PATIENCE_S: Final = 120.0
POLL_S: Final = 0.05


async def until(condition: Callable[[], bool]) -> None:
    """Returns once `condition`, called in a thread again and again, is true."""
    with trio.fail_after(PATIENCE_S):
        while not await trio.to_thread.run_sync(condition):  # noqa: ASYNC110 - another process has no event here
            await trio.sleep(POLL_S)
