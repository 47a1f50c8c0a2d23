"""`/v1/vms/{vm_id}/jobs/{job_id}/stream`: a job's output as it comes, over a WebSocket (RFC 6455).

Binary frames: one byte that names the stream (1 stdout, 2 stderr), its offset as eight bytes, big-endian, and
the output. At the end a text frame with the job, as the tools show it, and a normal close; or one with the
error, and another close. What the client sends is ignored. It must not know guests. Neighbour: `streams`.
"""

from __future__ import annotations

import struct
from typing import Final

import trio
from quart import Websocket

from microvm.catalogue.results import show_job
from microvm.catalogue.strict_json import dumps
from microvm.errors import RequestError
from microvm.model import OutputPiece
from microvm.web.failures import collapse, public
from microvm.web.streams import Follower, Pass

HEAD: Final = struct.Struct(">BQ")
DONE: Final = 1000  # RFC 6455 §7.4.1
RESTARTS: Final = 1012  # IANA WebSocket close codes: service restart
FAILED: Final = 1011
_MAX_CURSOR: Final = 1 << 62


def parse_cursor(stdout: str | None, stderr: str | None) -> tuple[int, int]:
    """The offsets to begin at.

    Raises:
        RequestError: One is no number from 0.
    """
    values: list[int] = []
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text is None:
            values.append(0)
        elif text.isdecimal() and text.isascii() and len(text) <= 18:
            values.append(min(int(text), _MAX_CURSOR))
        else:
            raise RequestError("invalid_argument", f"{name}: a byte offset from 0")
    return values[0], values[1]


def encode_piece(piece: OutputPiece) -> bytes:
    """A binary frame's payload."""
    return HEAD.pack(piece.stream, piece.offset) + piece.data


async def serve_follow(websocket: Websocket, follower: Follower, permit: Pass, trace_id: str) -> None:
    """Sends a job's output to its end.

    Cancellation: when the client has gone; the job goes on.
    """
    await websocket.accept()  # pyright: ignore[reportUnknownMemberType]  # its headers have no types
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ignore, websocket)
        try:
            while not follower.over:
                for piece in await follower.next():
                    await websocket.send(encode_piece(piece))
                permit.check()
            await websocket.send(dumps(show_job(follower.job)))
            await websocket.close(DONE)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the edge: everything is answered
            failure = public(collapse(error), trace_id)
            await websocket.send(dumps({"error": failure.to_json()}))
            await websocket.close(RESTARTS if failure.code == "draining" else FAILED)
        nursery.cancel_scope.cancel(reason="all was said")


async def _ignore(websocket: Websocket) -> None:
    """Takes what the client says off the connection, whose end would not be seen behind it."""
    while True:
        await websocket.receive()
