"""The host's end against a guest that is played by the test: slow, silent, gone, or hostile."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from microvm.agentlink import AgentLink, GuestCall, open_link
from microvm.errors import GuestError, RequestError
from microvm.wire import agent
from microvm.wire.framing import (
    CLOSE,
    CREDIT,
    DATA,
    FIN,
    HELLO,
    OPEN,
    RESET,
    Decoder,
    Frame,
    encode_frame,
)


class Guest:
    """The other side of the stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.decoder = Decoder()
        self.frames: list[Frame] = []

    async def hear(self) -> Frame:
        while not self.frames:
            data = await self.stream.receive_some(65536)
            assert data, "the host closed the channel"
            self.frames = self.decoder.feed(bytes(data))
        return self.frames.pop(0)

    async def say(
        self, kind: int, stream: int, payload: bytes | Mapping[str, Any] = b"", flags: int = 0
    ) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.stream.send_all(encode_frame(kind, flags, stream, data))

    async def greet(self, **changes: Any) -> None:
        self.decoder.await_hello()
        self.frames.clear()
        asked = json.loads((await self.hear()).payload)
        answer = {
            "protocol": 1,
            "version": "t",
            "generation": asked["generation"],
            "nonce": asked["nonce"],
            "state": "running",
            "python": "3.13",
        }
        await self.say(HELLO, 0, {**answer, **changes})


@asynccontextmanager
async def linked(handler: Any = None, *, greeted: bool = True) -> AsyncGenerator[tuple[AgentLink, Guest]]:
    async def none(call: GuestCall) -> dict[str, Any]:
        raise RequestError("invalid_argument", f"no {call.op}")

    ours, theirs = trio.testing.memory_stream_pair()
    with trio.fail_after(20):
        async with open_link(ours, on_guest_stream=handler or none) as link:
            guest = Guest(theirs)
            if greeted:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(guest.greet)
                    await link.hello(1)
            yield link, guest


async def failing(link: AgentLink, code: str) -> None:
    with pytest.raises(GuestError) as caught:
        await link.call("op", {}, timeout_s=10)
    assert caught.value.code == code


async def test_nothing_is_said_before_the_hello_is_answered() -> None:
    async with linked(greeted=False) as (link, _guest):
        await failing(link, "guest_unreachable")


async def test_only_the_answer_to_this_hello_counts() -> None:
    async with linked(greeted=False) as (link, guest), trio.open_nursery() as nursery:
        nursery.start_soon(link.hello, 4)
        await guest.stream.send_all(b"what was left in the port \0MVM1" * 9)
        await guest.greet(nonce="0" * 32)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("change", [{"protocol": 2}, {"state": 1}, {"version": "x" * 100}])
async def test_a_guest_that_speaks_otherwise_is_refused(change: dict[str, Any]) -> None:
    async with linked(greeted=False) as (link, guest), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: guest.greet(**change))
        with pytest.raises(GuestError) as caught:
            await link.hello(1)
        assert caught.value.code == "guest_unreachable"
        await failing(link, "guest_unreachable")


async def test_an_unanswered_hello_times_out() -> None:
    async with linked(greeted=False) as (link, _guest):
        with pytest.raises(GuestError) as caught:
            await link.hello(1, timeout_s=0.01)
        assert caught.value.code == "guest_timeout"


async def test_a_call_carries_bodies_both_ways_with_credit() -> None:
    sent = bytes(range(256)) * 400
    async with linked() as (link, guest), trio.open_nursery() as nursery:
        replies: list[agent.Reply] = []

        async def call() -> None:
            replies.append(await link.call("echo", {"a": 1}, sent, timeout_s=10))

        nursery.start_soon(call)
        opened = await guest.hear()
        assert (opened.kind, opened.stream) == (OPEN, 1)
        assert json.loads(opened.payload) == {"op": "echo", "args": {"a": 1}}
        received = bytearray()
        window = agent.WINDOW
        while True:
            frame = await guest.hear()
            assert frame.kind == DATA
            received += frame.payload
            window -= len(frame.payload)
            assert window >= 0
            if frame.flags & FIN:
                break
            if window == 0:
                await trio.testing.wait_all_tasks_blocked()
                assert not guest.frames, "the host waits for credit"
                await guest.say(CREDIT, 1, struct.pack("<I", agent.WINDOW))
                window = agent.WINDOW
        assert received == sent
        left = memoryview(bytes(sent))
        credit = agent.WINDOW
        while left:
            piece = left[: min(credit, 32768)]
            await guest.say(DATA, 1, bytes(piece))
            left = left[len(piece) :]
            credit -= len(piece)
            while left and not credit:
                frame = await guest.hear()
                assert frame.kind == CREDIT
                credit += agent.parse_credit(frame.payload)
        await guest.say(CLOSE, 1, {"ok": {"n": 7}})
        await trio.testing.wait_all_tasks_blocked()
        assert replies == [agent.Reply({"n": 7}, sent)]


async def test_the_guests_error_is_raised_with_its_code() -> None:
    async with linked() as (link, guest), trio.open_nursery() as nursery:
        nursery.start_soon(failing, link, "disk_full")
        await guest.hear()
        await guest.say(CLOSE, 1, {"error": {"code": "disk_full", "message": "full"}})


async def test_a_reset_fails_the_call() -> None:
    async with linked() as (link, guest), trio.open_nursery() as nursery:
        nursery.start_soon(failing, link, "internal")
        await guest.hear()
        await guest.say(RESET, 1, {"code": "internal", "message": "no"})


async def test_a_deadline_is_an_error_and_tells_the_guest() -> None:
    async with linked() as (link, guest):
        with pytest.raises(GuestError) as caught:
            await link.call("slow", {}, timeout_s=0.01)
        assert caught.value.code == "guest_timeout"
        assert [(await guest.hear()).kind for _ in range(3)] == [OPEN, DATA, RESET]


async def test_cancelling_a_call_tells_the_guest_and_what_still_comes_is_ignored() -> None:
    async with linked() as (link, guest):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing, link, "x")
            await guest.hear()
            nursery.cancel_scope.cancel()
        while (await guest.hear()).kind != RESET:
            pass
        await guest.say(DATA, 1, b"too late")
        await guest.say(CLOSE, 1, {"ok": {}})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.thaw)
            assert (await guest.hear()).stream == 3
            await guest.say(CLOSE, 3, {"ok": {}})


async def test_an_ended_stream_fails_every_wait_at_once() -> None:
    async with linked() as (link, guest), trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(failing, link, "guest_unreachable")
        await guest.hear()
        await guest.stream.aclose()
        await link.drain_to_eof()
        assert link.broken is not None
        with pytest.raises(GuestError):
            await link.hello(2)


async def test_a_call_waits_when_too_many_are_open() -> None:
    async with linked() as (link, guest), trio.open_nursery() as nursery:
        for _ in range(agent.MAX_STREAMS + 1):
            nursery.start_soon(failing, link, "not_found")
        opened: list[int] = []
        while len(opened) < agent.MAX_STREAMS:
            frame = await guest.hear()
            opened += [frame.stream] * (frame.kind == OPEN)
        await trio.testing.wait_all_tasks_blocked()
        for number in opened:
            await guest.say(CLOSE, number, {"error": {"code": "not_found", "message": ""}})
        while (frame := await guest.hear()).kind != OPEN:
            pass
        await guest.say(CLOSE, frame.stream, {"error": {"code": "not_found", "message": ""}})


async def test_after_a_freeze_the_host_is_silent_until_a_hello() -> None:
    async with linked() as (link, guest):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.freeze)
            await guest.hear()
            await guest.say(CLOSE, 1, {"ok": {"jobs": 0}})
            await guest.stream.send_all(b"what a stopped machine left behind")
        await failing(link, "guest_unreachable")
        assert link.broken is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guest.greet)
            hello = await link.hello(2)
        assert hello.generation == 2


async def test_a_freeze_that_fails_leaves_the_link_speaking() -> None:
    async with linked() as (link, guest):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failing_freeze, link)
            await guest.hear()
            await guest.say(CLOSE, 1, {"error": {"code": "internal", "message": "not now"}})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.thaw)
            while (frame := await guest.hear()).kind != OPEN:
                pass
            await guest.say(CLOSE, frame.stream, {"ok": {}})


async def failing_freeze(link: AgentLink) -> None:
    with pytest.raises(GuestError):
        await link.freeze()


async def test_the_guests_calls_are_answered() -> None:
    async def handler(call: GuestCall) -> dict[str, Any]:
        if call.op == "bad":
            raise RequestError("not_found", "who?")
        return {"got": (await call.read_all(most=100)).decode(), **call.args}

    async with linked(handler) as (_link, guest):
        await guest.say(OPEN, 2, {"op": "job_ended", "args": {"job_id": "j"}})
        await guest.say(DATA, 2, b"out")
        await guest.say(DATA, 2, b"put", FIN)
        await guest.say(OPEN, 4, {"op": "bad", "args": {}})
        await guest.say(DATA, 4, b"", FIN)
        answers = {}
        for _ in range(2):
            frame = await guest.hear()
            assert frame.kind == CLOSE
            answers[frame.stream] = json.loads(frame.payload)
        assert answers[2] == {"ok": {"got": "output", "job_id": "j"}}
        assert answers[4]["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "frames",
    [
        [(OPEN, 1, b'{"op":"x","args":{}}')],
        [(OPEN, 2, b"no json")],
        [(OPEN, 2, b'{"op":"x"}')],
        [(OPEN, 2, b'{"op":"x","args":{}}'), (OPEN, 2, b'{"op":"x","args":{}}')],
        [(OPEN, 2 * n, b'{"op":"wait","args":{}}') for n in range(1, 26)],
        [(OPEN, 2, b'{"op":"wait","args":{}}'), (DATA, 2, bytes(32768)), (DATA, 2, b"x")],
        [(OPEN, 2, b'{"op":"wait","args":{}}'), (CLOSE, 2, b'{"ok":{}}')],
        [(OPEN, 2, b'{"op":"wait","args":{}}'), (CREDIT, 2, b"\1\0\0\0")],
        [(HELLO, 0, b"{}")],
    ],
)
async def test_a_guest_that_breaks_the_rules_loses_the_link(frames: list[tuple[int, int, bytes]]) -> None:
    async def handler(call: GuestCall) -> dict[str, Any]:
        await trio.sleep_forever()
        return {}

    async with linked(handler) as (link, guest):
        for frame in frames:
            await guest.say(*frame)
        await trio.testing.wait_all_tasks_blocked()
        assert link.broken is not None
        await failing(link, "guest_unreachable")


async def test_noise_instead_of_frames_loses_the_link() -> None:
    async with linked() as (link, guest):
        await guest.stream.send_all(b"noise that is no frame at all")
        await trio.testing.wait_all_tasks_blocked()
        assert link.broken is not None


async def test_a_reply_that_is_longer_than_asked_for_loses_the_link() -> None:
    async with linked() as (link, guest), trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(GuestError):
                await link.read_file("f", length=10)

        nursery.start_soon(read)
        await guest.hear()
        await guest.say(DATA, 1, bytes(11))
        await trio.testing.wait_all_tasks_blocked()
        assert link.broken is not None


async def test_frames_of_unknown_streams_are_ignored() -> None:
    async with linked() as (link, guest):
        for kind, payload in ((DATA, b"x"), (CREDIT, b"\0\0\0\1"), (CLOSE, b"{}"), (RESET, b"?")):
            await guest.say(kind, 77, payload)
        await trio.testing.wait_all_tasks_blocked()
        assert link.broken is None


async def test_an_error_inside_the_link_comes_out_as_itself() -> None:
    with pytest.raises(RequestError, match="mine"):
        async with linked():
            raise RequestError("invalid_state", "mine")
