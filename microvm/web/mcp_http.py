"""MCP over HTTP: one POST in, JSON or a stream of events out.

The stream is deferred: a call that ends soon and reports nothing is answered as plain JSON, so that
statuses hold; the first progress, or 15 s of silence, commits an event stream, on which a comment goes out
whenever 15 s pass. The call runs in the request's own nursery and dies with the connection, which ends the
waiting only. It must not know sessions: none are minted. Its neighbours: `microvm.mcp` decides, `calls`
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from microvm.catalogue import Progress, Tool, hints, no_progress
from microvm.catalogue.strict_json import dumps, loads
from microvm.errors import MicrovmError, RequestError
from microvm.mcp import (
    Notification,
    ProgressLine,
    Reply,
    Request,
    ServerInfo,
    ToolCall,
    accepts,
    fail_call,
    finish_call,
    parse_error,
    progress_message,
    read_message,
    respond,
)
from microvm.model import Principal
from microvm.web.answers import json_answer
from microvm.web.calls import Calls, new_trace_id

SILENCE_S: Final = 15.0
"""Clients and proxies cut at 60 s without a first byte, some at 25 s of silence."""
PROGRESS_INTERVAL_S: Final = 0.1  # the protocol asks for a limit; people read no faster
EVENT_BUFFER: Final = 64  # progress beyond it is dropped: the next report says more anyway
INSTRUCTIONS: Final = (
    "Linux VMs of your own. vm_create makes one, vm_exec runs commands in it, vm_read_file and "
    "vm_write_file move files below /workspace. Suspended VMs wake by themselves. Destroy what you no "
    "longer need."
)


def tool_objects(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The catalogue in MCP's shape.

    There is no outputSchema: clients disagree on what an error must then look like, and some refuse it.
    """
    return [
        {
            "name": tool.name,
            "title": tool.title,
            "description": tool.description,
            "inputSchema": tool.input_schema,
            "annotations": hints(tool),
        }
        for tool in tools
    ]


@dataclass(slots=True)
class _Exchange:
    """One call and the messages that it has to say, in order; the last one is the answer."""

    info: ServerInfo
    call: ToolCall
    streams: bool
    trace_id: str
    line: ProgressLine = field(default_factory=ProgressLine)
    reported_at: float = float("-inf")
    send: trio.MemorySendChannel[dict[str, Any]] = field(init=False)
    receive: trio.MemoryReceiveChannel[dict[str, Any]] = field(init=False)
    fraction: float = 0.0

    def __post_init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[dict[str, Any]](EVENT_BUFFER)

    @property
    def request(self) -> Request:
        return self.call.request

    def progress(self, fraction: float, message: str) -> None:
        """Report, if the client asked for it and the last report is not too fresh."""
        now = trio.current_time()
        if now - self.reported_at < PROGRESS_INTERVAL_S:
            return
        self.reported_at = now
        self.fraction = fraction
        try:
            self.send.send_nowait(self.progress_event(message))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    def progress_event(self, message: str) -> dict[str, Any]:
        token = self.request.progress_token
        assert token is not None
        return progress_message(token, self.line.advance(self.fraction), message, total=1.0)

    @property
    def reporter(self) -> Progress:
        wanted = self.streams and self.request.progress_token is not None
        return self.progress if wanted else no_progress

    async def run(self, calls: Calls, principal: Principal) -> None:
        """Run the tool and put its answer last on the line."""
        with self.send:
            answer = await self._outcome(calls, principal)
            await self.send.send(answer)

    async def _outcome(self, calls: Calls, principal: Principal) -> dict[str, Any]:
        try:
            result = await calls.run(
                calls.catalogue[self.call.name],
                dict(self.call.arguments),
                principal,
                trace_id=self.trace_id,
                progress=self.reporter,
            )
            return finish_call(self.info, self.request, result)
        except MicrovmError as error:
            body = error.to_json()
            if error.retry_after_s is not None:
                body["retry_after_s"] = error.retry_after_s
            return fail_call(self.info, self.request, body)


class _Events(ResponseBody):
    """The exchange as an event stream; a class, since no nursery or scope may live across a `yield`."""

    def __init__(self, exchange: _Exchange, first: dict[str, Any] | None) -> None:
        self._exchange = exchange
        self._first = first
        self._ended = False

    async def __aenter__(self) -> _Events:
        return self

    async def __aexit__(
        self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._exchange.receive.close()  # not aclose: it would raise here when the client has gone

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        message, self._first = self._first, None
        if message is None:
            message = await _next(self._exchange)
        if message is not None:
            self._ended = "method" not in message
            return _event(message)
        if self._exchange.streams and self._exchange.request.progress_token is not None:
            return b": still working\r\n\r\n" + _event(self._exchange.progress_event("still working"))
        return b": still working\r\n\r\n"


async def _next(exchange: _Exchange) -> dict[str, Any] | None:
    """The next message, or None after a silence."""
    with trio.move_on_after(SILENCE_S):
        return await exchange.receive.receive()
    return None


async def _first(exchange: _Exchange, *, json_ok: bool, stream_ok: bool) -> dict[str, Any] | None:
    """What decides between JSON and a stream: the first message, or None where a stream it is."""
    if not stream_ok:
        return await exchange.receive.receive()
    return await _next(exchange) if json_ok else None


def _event(message: dict[str, Any]) -> bytes:
    return f"event: message\r\ndata: {dumps(message)}\r\n\r\n".encode("utf-8", "replace")


class McpDoor:
    """Answers POSTs on /mcp.

    Args:
        calls: Runs tools.
        version: The service's version.
    """

    def __init__(self, calls: Calls, version: str) -> None:
        self._calls = calls
        self._info = ServerInfo("microvm", version, "microvm", INSTRUCTIONS)

    async def answer(
        self,
        body: bytes,
        headers: list[tuple[str, str]],
        tools: Sequence[Tool],
        principal: Principal,
        nursery: trio.Nursery,
    ) -> Response:
        """Answer one POST.

        Args:
            body: As received.
            headers: As received.
            tools: What the caller may call.
            principal: The caller.
            nursery: The request's; the call runs in it.
        """
        try:
            message = read_message(headers, loads(body))
        except RequestError as error:
            return _plain(parse_error(error.message))
        if isinstance(message, Reply):
            return _plain(message)
        if isinstance(message, Notification):
            return Response(b"", status=202)
        step = respond(self._info, tool_objects(tools), message)
        if isinstance(step, Reply):
            return _plain(step)
        fields = {name.lower(): value for name, value in headers}
        json_ok, stream_ok = accepts(fields.get("accept"))
        exchange = _Exchange(
            self._info, step, stream_ok, new_trace_id(message.traceparent or fields.get("traceparent"))
        )
        nursery.start_soon(exchange.run, self._calls, principal)
        try:
            first = await _first(exchange, json_ok=json_ok, stream_ok=stream_ok)
        except BaseException:
            exchange.receive.close()
            raise
        if first is not None and "method" not in first and json_ok:
            exchange.receive.close()
            return json_answer(first)
        return _stream(_Events(exchange, first))


def _plain(reply: Reply) -> Response:
    if reply.body is None:
        return Response(b"", status=reply.status)
    return json_answer(reply.body, reply.status, reply.headers)


def _stream(events: _Events) -> Response:
    response = Response(
        events,
        status=200,
        headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"},
        content_type="text/event-stream",
    )
    response.timeout = None  # Quart's 60 s would cut the stream without a word
    return response
