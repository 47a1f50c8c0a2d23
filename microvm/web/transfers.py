"""Files and directories as request and response bodies of any size: `/v1/vms/{vm_id}/files` and `…/archive`.

Flat memory: a body passes in pieces, each asked for by the other end. An error before the first byte of an
answer is an ordinary answer; one after it cuts the connection, so that no client takes a part for the whole.
It must not know guests. Its neighbours: `app` gives the connection's parts, `streams` the fleet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from email.utils import formatdate
from types import TracebackType
from typing import Final

import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from microvm.errors import GuestError, MicrovmError, RequestError
from microvm.model import FileFacts, Principal
from microvm.web.answers import error_answer, json_answer
from microvm.web.failures import collapse, describe, log
from microvm.web.ranges import Span, find_span
from microvm.web.streams import Pass, StreamApi

STALL_S: Final = 30.0
"""An upload that brings nothing for this long is over (the contract's bound)."""
_FILE_TYPE: Final = "application/octet-stream"
_TAR_TYPE: Final = "application/x-tar"

Bytes = AbstractAsyncContextManager[AsyncIterator[bytes]]


@dataclass(slots=True)
class Upload:
    """A request's body, as an iterator that takes each piece off the connection when it is asked for.

    Attributes:
        pieces: What the connection brings; closed at the body's end.
        size: The length that the request promised; None for one in chunks.
    """

    pieces: trio.MemoryReceiveChannel[bytes]
    size: int | None
    permit: Pass

    def __aiter__(self) -> Upload:
        return self

    async def __anext__(self) -> bytes:
        with trio.move_on_after(STALL_S):
            try:
                data = await self.pieces.receive()
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
            self.permit.check()
            return data
        raise GuestError("guest_timeout", f"the request's body brought nothing for {STALL_S:g} s")


@dataclass(slots=True)
class Exchange:
    """What a transfer needs of its request.

    Attributes:
        nursery: The request's; what runs in it ends with the connection.
    """

    streams: StreamApi
    principal: Principal
    permit: Pass
    nursery: trio.Nursery
    trace_id: str

    async def get_file(
        self, vm_id: str, path: str, *, wanted: str | None, condition: str | None, head: bool
    ) -> Response:
        """A file, or a part of it."""
        facts = await self.streams.look(self.principal, vm_id, path)
        etag = f'"{facts.tag}"'
        span = find_span(
            facts.size, wanted=wanted, condition=condition, etag=etag, modified_at=facts.modified_at
        )
        headers = _headers(facts, etag)
        if not span.satisfiable:
            answer = error_answer(
                RequestError("invalid_argument", f"Range: the file has {facts.size} bytes"), status=416
            )
            answer.headers["Content-Range"] = f"bytes */{facts.size}"
            return answer
        headers["Content-Length"] = str(span.length)
        if span.partial:
            headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{facts.size}"
        body: ResponseBody = _Nothing()
        if not head:
            body = await self._begin(self._file(vm_id, path, span, facts))
        return _stream(body, 206 if span.partial else 200, headers, _FILE_TYPE)

    def _file(self, vm_id: str, path: str, span: Span, facts: FileFacts) -> Bytes:
        return self.streams.read_file(
            self.principal, vm_id, path, offset=span.start, length=span.length, tag=facts.tag
        )

    async def get_archive(self, vm_id: str, path: str, *, head: bool) -> Response:
        """A directory as a tar."""
        source = self.streams.read_archive(self.principal, vm_id, path)
        if head:
            async with source:
                return _stream(_Nothing(), 200, {}, _TAR_TYPE)
        return _stream(await self._begin(source), 200, {}, _TAR_TYPE)

    async def put_file(
        self, vm_id: str, path: str, body: Upload, *, mode: str, make_parents: bool
    ) -> Response:
        """A file from a body."""
        size, sha256 = await self.streams.write_file(
            self.principal, vm_id, path, body, size=body.size, mode=mode, make_parents=make_parents
        )
        return json_answer({"size": size, "sha256": sha256})

    async def put_archive(self, vm_id: str, path: str, body: Upload) -> Response:
        """A directory's content from a tar."""
        size = await self.streams.write_archive(self.principal, vm_id, path, body, size=body.size)
        return json_answer({"archive_bytes": size})

    async def _begin(self, source: Bytes) -> ResponseBody:
        """Starts the source; its failure to begin is raised here, a later one cuts the connection."""
        return await self.nursery.start(self._pump, source)

    async def _pump(self, source: Bytes, *, task_status: trio.TaskStatus[ResponseBody]) -> None:
        begun = False
        send, receive = trio.open_memory_channel[bytes](0)
        try:
            with send:
                async with source as pieces:
                    first = await anext(pieces, b"")
                    begun = True
                    task_status.started(_Pieces(receive))
                    if first:
                        await send.send(first)
                    async for data in pieces:
                        self.permit.check()
                        await send.send(data)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the edge: all are answered
            failure = collapse(error)
            if not begun:
                raise failure from (None if failure is error else error)
            why = failure.message if isinstance(failure, MicrovmError) else describe(failure)
            log.warning("a download was cut: %s (trace %s)", why, self.trace_id)
            self.nursery.cancel_scope.cancel(reason="the rest of the answer cannot be had")


def _headers(facts: FileFacts, etag: str) -> dict[str, str]:
    return {
        "ETag": etag,
        "Last-Modified": formatdate(int(facts.modified_at), usegmt=True),
        "Accept-Ranges": "bytes",
        "Microvm-Mode": facts.mode,
    }


class _Pieces(ResponseBody):
    """What the pump sends."""

    def __init__(self, receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._receive = receive

    async def __aenter__(self) -> _Pieces:
        return self

    async def __aexit__(
        self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._receive.close()

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


class _Nothing(ResponseBody):
    """The body of an answer to HEAD; its length is that of the file."""

    async def __aenter__(self) -> _Nothing:
        return self

    async def __aexit__(
        self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


def _stream(body: ResponseBody, status: int, headers: dict[str, str], content_type: str) -> Response:
    response = Response(
        body,
        status=status,
        headers={
            **headers,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",  # what a guest wrote is not to be run by a browser
            "Content-Disposition": "attachment",
        },
        content_type=content_type,
    )
    response.timeout = None  # bounded by the lack of progress instead
    return response
