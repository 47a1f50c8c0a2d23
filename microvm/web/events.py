"""`GET /v1/events`: changes of VMs and jobs as server-sent events.

Each event's data is the very object that the tools show, and its id goes into `Last-Event-ID` to go on after
a cut (WHATWG HTML §9.2). A comment goes out whenever 15 s pass. Whoever reads too slowly is cut. It must not
keep events: the fleet does. Neighbour: `streams`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from microvm.catalogue.results import show_job, show_vm
from microvm.catalogue.strict_json import dumps
from microvm.errors import RequestError
from microvm.model import Change, Principal, VmView
from microvm.web.streams import Listener, Pass

SILENCE_S: Final = 15.0
_MAX_ID: Final = 1 << 62


def parse_last_id(text: str | None) -> int | None:
    """The id of `Last-Event-ID`.

    Raises:
        RequestError: It is none of ours.
    """
    if text is None or not text.strip():
        return None
    if not text.strip().isdecimal() or len(text.strip()) > 18:
        raise RequestError("invalid_argument", "Last-Event-ID: the id of an event, or nothing")
    return min(int(text), _MAX_ID)


def encode_change(change: Change, principal: Principal) -> bytes:
    """A change as `principal` may see it."""
    content = change.content
    shown: dict[str, Any]
    name, shown = (
        ("vm", show_vm(content, principal)) if isinstance(content, VmView) else ("job", show_job(content))
    )
    return f"id: {change.change_id}\nevent: {name}\ndata: {dumps(shown)}\n\n".encode("utf-8", "replace")


class _Events(ResponseBody):
    """The stream; a class, since no scope may live across a `yield`."""

    def __init__(self, listener: Listener, principal: Principal, permit: Pass) -> None:
        self._listener = listener
        self._principal = principal
        self._permit = permit
        self._first: bytes | None = (
            b": some events before these are not kept any more\n\n" if listener.missed else b": hello\n\n"
        )

    async def __aenter__(self) -> _Events:
        return self

    async def __aexit__(
        self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._listener.close()

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        if first is not None:
            return first
        change: Change | None = None
        with trio.move_on_after(SILENCE_S):
            try:
                change = await self._listener.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError):
                raise StopAsyncIteration from None
        if not self._permit.holds:
            raise StopAsyncIteration
        return b": nothing new\n\n" if change is None else encode_change(change, self._principal)


async def _end_with(closing: trio.Event, listener: Listener) -> None:
    await closing.wait()
    listener.close()


def answer_events(
    listener: Listener, principal: Principal, permit: Pass, closing: trio.Event, nursery: trio.Nursery
) -> Response:
    """The stream of what `listener` hears; it ends when the service does or the caller's token.

    Args:
        listener: Belongs to the stream from now on.
        principal: The caller.
        permit: How long the caller may listen.
        closing: The service's end.
        nursery: The request's.
    """
    nursery.start_soon(_end_with, closing, listener)
    response = Response(
        _Events(listener, principal, permit),
        status=200,
        headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"},
        content_type="text/event-stream",
    )
    response.timeout = None
    return response
