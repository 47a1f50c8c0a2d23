"""Connections under bad conditions: the stack's known defects, disconnects, the drain, and streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing

VM_ID = "vm_" + "a" * 20
CALL = {
    "jsonrpc": "2.0",
    "id": 5,
    "method": "tools/call",
    "params": {"name": "vm_suspend", "arguments": {"vm_id": VM_ID}, "_meta": {"progressToken": 0}},
}


def post(path: str, body: object, *, token: str = "alice-token") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def read_to_end(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(10):
        while data := await stream.receive_some(65536):
            received += data
    return received


def events(stream_body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream_body.splitlines() if line.startswith("data: ")]


class TestWithAShortKeepAlive:
    @pytest.fixture
    def web_settings(self) -> Mapping[str, Any]:
        return {"listen": "127.0.0.1:0", "keep_alive_s": 0.1, "grace_s": 1.0}

    async def test_an_idle_connection_is_closed_after_its_first_request_too(self, doors: Any) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        async with stream:
            await stream.send_all(post("/v1/tools/vm_list", {}))
            assert (await read_to_end(stream)).startswith(b"HTTP/1.1 200")


class TestWithALongGrace:
    @pytest.fixture
    def web_settings(self) -> Mapping[str, Any]:
        return {"listen": "127.0.0.1:0", "grace_s": 3600.0}

    async def test_idle_connections_do_not_delay_the_stop(self, doors: Any) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(20):
                stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", doors.port))
                await stream.send_all(post("/v1/tools/vm_list", {}))
                await stream.receive_some(65536)
            doors.stop.set()
            with trio.fail_after(10):
                await doors.stopped.wait()


async def test_clients_that_close_after_an_answer_leave_no_connection_behind(doors: Any) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    with trio.fail_after(10):
        for _ in range(10):
            async with await trio.open_tcp_stream("127.0.0.1", doors.port) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                received = b""
                while not received.endswith(b"}"):
                    received += await stream.receive_some(65536)
                await trio.testing.wait_all_tasks_blocked()  # the answer is out, the keep-alive has begun
        while trio.lowlevel.current_statistics().tasks_living > before:
            await trio.lowlevel.checkpoint()


async def test_a_reader_that_stalls_does_not_keep_the_service_from_stopping(doors: Any) -> None:
    doors.fleet.stdout = b"x" * 16384
    stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
    many = post("/v1/tools/vm_job_output", {"vm_id": VM_ID, "job_id": "job_" + "b" * 20}) * 2000
    async with stream:
        with trio.move_on_after(0.5):  # until both kernels' buffers are full of what nobody reads
            await stream.send_all(many)
        doors.stop.set()
        with trio.fail_after(10):
            await doors.stopped.wait()


async def test_a_mutation_outlives_the_client_that_asked_for_it(doors: Any, nursery: trio.Nursery) -> None:
    begun, let_go, done = trio.Event(), trio.Event(), trio.Event()
    waited: list[str] = []

    async def mutation() -> None:  # as the fleet does: in a nursery that is not the request's
        await let_go.wait()
        done.set()

    async def act(_progress: Any) -> None:
        nursery.start_soon(mutation)
        begun.set()
        try:
            await done.wait()
        except trio.Cancelled:
            waited.append("cancelled")
            raise

    with doors.acting(act), trio.fail_after(10):
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        await stream.send_all(post("/v1/tools/vm_suspend", {"vm_id": VM_ID}))
        await begun.wait()
        await stream.aclose()
        while not waited:
            await trio.lowlevel.checkpoint()
        let_go.set()
        await done.wait()


@pytest.mark.parametrize("path", ["/v1/tools/vm_suspend", "/mcp"])
async def test_many_clients_that_vanish_leave_no_task_behind(doors: Any, path: str) -> None:
    begun = 0

    async def act(progress: Any) -> None:
        nonlocal begun
        begun += 1
        progress(0.5, "half way")
        await trio.sleep_forever()

    before = trio.lowlevel.current_statistics().tasks_living
    with doors.acting(act), trio.fail_after(20):
        body: object = CALL if path == "/mcp" else {"vm_id": VM_ID}
        for expected in range(1, 51):
            stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
            await stream.send_all(post(path, body))
            while begun < expected:
                await trio.lowlevel.checkpoint()
            await stream.aclose()
        while trio.lowlevel.current_statistics().tasks_living > before:
            await trio.lowlevel.checkpoint()


async def test_a_waiting_call_is_told_that_the_service_drains(doors: Any, nursery: trio.Nursery) -> None:
    begun = trio.Event()
    answers: list[Any] = []

    async def act(_progress: Any) -> None:
        begun.set()
        await trio.sleep_forever()

    async def ask() -> None:
        async with doors.http() as http:
            answers.append(await http.post("/v1/tools/vm_suspend", json={"vm_id": VM_ID}))

    with doors.acting(act), trio.fail_after(10):
        nursery.start_soon(ask)
        await begun.wait()
        doors.stop.set()
        await doors.stopped.wait()
        while not answers:
            await trio.lowlevel.checkpoint()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "draining"
    assert int(answers[0].headers["retry-after"]) > 0


async def test_a_waiting_stream_ends_with_an_answer_when_the_service_drains(doors: Any) -> None:
    async def act(progress: Any) -> None:
        progress(0.2, "begun")
        doors.stop.set()
        await trio.sleep_forever()

    with doors.acting(act), trio.fail_after(10):
        async with doors.http() as http:
            answer = await http.post("/mcp", json=CALL)
    said = events(answer.text)
    assert [message.get("method") for message in said] == ["notifications/progress", None]
    assert said[-1]["result"]["structuredContent"]["error"]["code"] == "draining"


class TestWithAShortLimit:
    @pytest.fixture
    def web_settings(self) -> Mapping[str, Any]:
        return {"listen": "127.0.0.1:0", "call_limit_s": 0.05, "grace_s": 1.0}

    async def test_a_call_that_takes_too_long_is_answered_and_goes_on(self, doors: Any) -> None:
        async def act(_progress: Any) -> None:
            await trio.sleep_forever()

        with doors.acting(act), trio.fail_after(10):
            async with doors.http() as http:
                answer = await http.post("/v1/tools/vm_suspend", json={"vm_id": VM_ID})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "guest_timeout")


async def test_a_quick_call_is_plain_json_although_a_stream_was_accepted(doors: Any) -> None:
    async with doors.http() as http:
        headers = {"accept": "application/json, text/event-stream"}
        answer = await http.post("/mcp", json=CALL, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["id"] == 5


async def test_silence_commits_a_stream_with_comments_and_progress(
    doors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microvm.web.mcp_http.SILENCE_S", 0.05)

    async def act(_progress: Any) -> None:
        await trio.sleep(0.2)

    with doors.acting(act), trio.fail_after(10):
        async with doors.http() as http:
            answer = await http.post("/mcp", json=CALL)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-accel-buffering"] == "no"
    assert ": still working" in answer.text
    said = events(answer.text)
    values = [m["params"]["progress"] for m in said if m.get("method") == "notifications/progress"]
    assert values == sorted(set(values))
    assert {m["params"]["progressToken"] for m in said if "params" in m} == {0}
    assert said[-1]["id"] == 5


async def test_no_progress_is_sent_to_those_who_gave_no_token(
    doors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microvm.web.mcp_http.SILENCE_S", 0.05)

    async def act(progress: Any) -> None:
        progress(0.5, "half way")
        await trio.sleep(0.12)

    params = {"name": "vm_suspend", "arguments": {"vm_id": VM_ID}}
    with doors.acting(act), trio.fail_after(10):
        async with doors.http() as http:
            answer = await http.post("/mcp", json={**CALL, "params": params})
    assert ": still working" in answer.text
    assert [message.get("method") for message in events(answer.text)] == [None]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json", "application/json"),
        ("text/event-stream", "text/event-stream"),
        ("*/*", "text/event-stream"),
        ("text/html", "text/event-stream"),
    ],
)
async def test_the_answer_is_what_the_client_accepts(doors: Any, accept: str, kind: str) -> None:
    async def act(progress: Any) -> None:
        progress(0.5, "half way")
        await trio.sleep(0.01)

    with doors.acting(act), trio.fail_after(10):
        async with doors.http() as http:
            answer = await http.post("/mcp", json=CALL, headers={"accept": accept})
    assert answer.headers["content-type"] == kind
    last = answer.json() if kind == "application/json" else events(answer.text)[-1]
    assert last["result"]["isError"] is False


class TestWithAShortResponseTimeout:
    @pytest.fixture
    def web_settings(self, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
        monkeypatch.setattr("microvm.web.app.RESPONSE_TIMEOUT_S", 0.05)
        return {"listen": "127.0.0.1:0", "grace_s": 1.0}

    async def test_a_stream_outlives_it(self, doors: Any) -> None:
        async def act(progress: Any) -> None:
            progress(0.5, "half way")
            await trio.sleep(0.3)

        with doors.acting(act), trio.fail_after(10):
            async with doors.http() as http:
                answer = await http.post("/mcp", json=CALL)
        assert events(answer.text)[-1]["id"] == 5


async def test_nonsense_instead_of_http_ends_only_its_own_connection(doors: Any) -> None:
    for nonsense in (b"\x16\x03\x01\x00\xff", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        async with stream:
            await stream.send_all(nonsense + b"\r\n\r\n")
            with trio.move_on_after(1):
                await stream.receive_some(4096)
    async with doors.http() as http:
        assert (await http.get("/healthz")).status_code == 200


async def test_a_websocket_handshake_without_a_token_is_turned_away_too(doors: Any) -> None:
    for path in ("/mcp", "/v1/tools", "/nothing"):
        stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
        async with stream:
            handshake = (
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            await stream.send_all(handshake.encode())
            with trio.fail_after(5):
                answer = await stream.receive_some(4096)
        assert answer.startswith(b"HTTP/1.1 401"), answer
