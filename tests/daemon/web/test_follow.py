"""Live output over a WebSocket: frames, cursors, the end, and who may listen."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection, wrap_client_stream

from microvm.catalogue.results import show_job
from microvm.errors import CapacityError, GuestError
from microvm.model import JobId, JobRecord, JobState, OutputPiece, VmId
from microvm.web.follow import HEAD
from tests.daemon.web import conftest
from tests.daemon.web.conftest import JOB_ID, VM_ID, Doors, FollowerDouble

STREAM = f"/v1/vms/{VM_ID}/jobs/{JOB_ID}/stream"
JOB = JobRecord(
    JobId(JOB_ID), VmId(VM_ID), JobState.COMPLETED, "x", started_at=1.0, ended_at=2.0, exit_code=3
)


@asynccontextmanager
async def following(
    doors: Doors, path: str = STREAM, token: str | None = "alice-token", **headers: str
) -> AsyncGenerator[WebSocketConnection]:
    extra = [(b"Authorization", f"Bearer {token}".encode())] if token else []
    extra += [(name.encode(), value.encode()) for name, value in headers.items()]
    stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
    async with stream, trio.open_nursery() as nursery:
        yield await wrap_client_stream(nursery, stream, "localhost", path, extra_headers=extra)
        nursery.cancel_scope.cancel(reason="the client leaves")


async def refused(doors: Doors, *args: Any, **headers: str) -> tuple[int, str]:
    with pytest.raises(ExceptionGroup) as caught:
        async with following(doors, *args, **headers):
            pass
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType]
    assert isinstance(error, ConnectionRejected)
    return error.status_code, json.loads(error.body or b"{}")["error"]["code"]


async def test_output_comes_as_it_is_written_and_the_job_at_its_end(doors: Doors) -> None:
    follower = doors.streams.follower = FollowerDouble(JOB)
    with trio.fail_after(10):
        async with following(doors, STREAM + "?stdout=5&stderr=7") as connection:
            for piece in (
                OutputPiece(1, 5, b"out"),
                OutputPiece(2, 7, b"\xff\0"),
                OutputPiece(1, 8, b"x" * 65536),
            ):
                follower.pieces.append(piece)
                follower.news.set()
                message = await connection.get_message()
                assert isinstance(message, bytes)
                assert HEAD.unpack_from(message) == (piece.stream, piece.offset)
                assert message[HEAD.size :] == piece.data
            follower.ended = True
            follower.news.set()
            assert json.loads(await connection.get_message()) == show_job(JOB)
            with pytest.raises(ConnectionClosed) as closed:
                await connection.get_message()
    assert closed.value.reason is not None
    assert closed.value.reason.code == 1000
    assert doors.streams.cursors == [(5, 7)]


@pytest.mark.parametrize(
    ("error", "close"),
    [(GuestError("guest_unreachable", "gone"), 1011), (CapacityError("draining", "the service ends"), 1012)],
)
async def test_what_ends_it_early_is_said(doors: Doors, error: Any, close: int) -> None:
    follower = doors.streams.follower = FollowerDouble(JOB, [error])
    follower.news.set()
    with trio.fail_after(10):
        async with following(doors) as connection:
            said = json.loads(await connection.get_message())
            assert said["error"]["code"] == error.code
            with pytest.raises(ConnectionClosed) as closed:
                await connection.get_message()
    assert closed.value.reason is not None
    assert closed.value.reason.code == close


async def test_a_handshake_is_refused_with_an_error(doors: Doors) -> None:
    doors.streams.follower = FollowerDouble(JOB)
    with trio.fail_after(10):
        assert await refused(doors, STREAM, None) == (401, "unauthenticated")
        assert await refused(doors, STREAM, "bob-token") == (404, "not_found")
        assert await refused(doors, STREAM + "?stdout=-1") == (400, "invalid_argument")
        assert await refused(doors, STREAM + "?from=1") == (400, "invalid_argument")
        assert await refused(doors, STREAM.replace("stream", "else")) == (404, "not_found")
        assert await refused(doors, STREAM, Origin="http://evil.example") == (403, "forbidden")
    assert doors.streams.cursors == []


async def test_a_client_that_talks_or_leaves_harms_nothing(doors: Doors) -> None:
    follower = doors.streams.follower = FollowerDouble(JOB)
    with trio.fail_after(20):
        before = trio.lowlevel.current_statistics().tasks_living
        async with following(doors) as connection:
            for _ in range(100):
                await connection.send_message("who cares")
            follower.pieces.append(OutputPiece(1, 0, b"x"))
            follower.news.set()
            await connection.get_message()
        while trio.lowlevel.current_statistics().tasks_living > before:  # long before the next ping
            await trio.lowlevel.checkpoint()
        async with doors.http() as http:
            assert (await http.get("/healthz")).status_code == 200


async def test_a_silent_follower_is_pinged(doors: Doors) -> None:
    doors.streams.follower = FollowerDouble(JOB)
    with trio.fail_after(10):
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        head = f"GET {STREAM} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice-token\r\n"
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        await stream.send_all(f"{head}{upgrade}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode())
        heard = b""
        while not heard.partition(b"\r\n\r\n")[2]:
            heard += await stream.receive_some(4096)
        await stream.aclose()
    assert heard.startswith(b"HTTP/1.1 101")
    assert heard.endswith(b"\x89\0")  # FIN, ping, no payload: RFC 6455 §5.5.2


async def test_a_follower_is_cut_when_its_token_ends(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = doors.streams.follower = FollowerDouble(JOB)
    monkeypatch.setattr("microvm.web.streams.RECHECK_S", 0.0)
    with trio.fail_after(10):
        async with following(doors) as connection:
            monkeypatch.delitem(conftest.TOKENS, "alice-token")
            follower.pieces.append(OutputPiece(1, 0, b"x"))
            follower.news.set()
            await connection.get_message()
            assert json.loads(await connection.get_message())["error"]["code"] == "unauthenticated"
