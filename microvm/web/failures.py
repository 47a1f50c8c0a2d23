"""From exceptions to answers: the one place where a failure gets its status.

Groups collapse here, before Quart sees them (Quart-Trio keeps one of a group and loses the others): one
error of the domain wins, the rest are logged. What is not of the domain becomes `internal` with a trace id
and nothing else. It must not decide what to do about a failure. Its neighbours: `app`, `calls`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import cast

import trio

from microvm.errors import HostError, MicrovmError

log = logging.getLogger("microvm.web")


def collapse(error: BaseException) -> Exception:
    """The one failure that stands for `error`.

    Raises:
        BaseException: `error` itself, if nothing but cancellation or the interpreter's own exits is in it.
    """
    leaves = list(_leaves(error))
    failures = [leaf for leaf in leaves if isinstance(leaf, Exception)]
    if not failures or any(not isinstance(leaf, (Exception, trio.Cancelled)) for leaf in leaves):
        raise error
    chosen = next((leaf for leaf in failures if isinstance(leaf, MicrovmError)), failures[0])
    for other in failures:
        if other is not chosen:
            log.error("a second failure in one call: %s", describe(other))
    return chosen


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error


def describe(error: BaseException) -> str:
    """Type and place of a failure; not its message, which may quote what a caller sent."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"


def public(error: Exception, trace_id: str) -> MicrovmError:
    """What the caller is told; a failure that is not the caller's to know is logged under the trace id."""
    if isinstance(error, HostError):
        log.error("%s (trace %s)", error, trace_id)
        if error.code == "disk_full":
            return MicrovmError("disk_full", "the host's disk is full; nothing was changed")
        return _internal(trace_id)
    if isinstance(error, MicrovmError):
        if error.code == "internal":
            log.error("%s (trace %s)", error, trace_id)
        return error
    log.error("%s (trace %s)", describe(error), trace_id)
    return _internal(trace_id)


def _internal(trace_id: str) -> MicrovmError:
    return MicrovmError(
        "internal", f"the service failed; its log says more under {trace_id}", {"trace_id": trace_id}
    )
