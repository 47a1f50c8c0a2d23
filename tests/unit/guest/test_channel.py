"""The guest's end of the channel, byte by byte over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from guest import framing
from guest.channel import MAX_STREAMS, WINDOW, Channel, Stream
from guest.errors import OpError
from guest.framing import CLOSE, CREDIT, DATA, FIN, HELLO, OPEN, RESET, Decoder, Frame, encode_frame
from guest.loop import Loop


class Host:
    """The other side, and the loop that the channel runs on."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.sock, self.theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.theirs.setblocking(False)
        self.opened: list[tuple[Stream, str, dict[str, Any]]] = []
        self.ended = False
        self.decoder = Decoder()
        self.channel = Channel(
            self.loop,
            self.theirs.fileno(),
            on_hello=lambda hello: {**hello, "state": "frozen"},
            on_open=lambda stream, op, args: self.opened.append((stream, op, args)),
            on_eof=self._end,
        )

    def _end(self) -> None:
        self.ended = True

    def turn(self) -> list[Frame]:
        """What the guest says when nothing more is to be done."""
        frames: list[Frame] = []
        for _ in range(6):
            self.loop.soon(lambda: None)
            self.loop.turn()
            try:
                frames += self.decoder.feed(self.sock.recv(1 << 20))
            except BlockingIOError:
                continue
        return frames

    def say(self, *frames: bytes) -> list[Frame]:
        self.sock.sendall(b"".join(frames))
        return self.turn()

    def hello(self, nonce: str = "n") -> list[Frame]:
        self.decoder.await_hello()
        return self.say(encode_frame(HELLO, 0, 0, json.dumps({"nonce": nonce}).encode()))

    def open(self, number: int, op: str = "op", **args: Any) -> list[Frame]:
        payload = json.dumps({"op": op, "args": args}).encode()
        return self.say(encode_frame(OPEN, 0, number, payload))

    def stream(self) -> Stream:
        return self.opened[-1][0]


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.loop.forget(made.theirs.fileno())
    made.sock.close()
    made.theirs.close()


def credit(number: int, count: int) -> bytes:
    return encode_frame(CREDIT, 0, number, struct.pack("<I", count))


def test_the_guest_says_nothing_before_the_hello(host: Host) -> None:
    assert host.open(1) == []
    assert not host.opened
    assert host.channel.open_stream("event", {}, b"") is None
    (answer,) = host.hello("abc")
    assert json.loads(answer.payload) == {"nonce": "abc", "state": "frozen"}


def test_a_call_is_answered_with_its_body_and_a_close(host: Host) -> None:
    host.hello()
    host.open(1, "read", path="x")
    stream, op, args = host.opened[0]
    assert (op, args) == ("read", {"path": "x"})
    stream.answer({"size": 4}, b"body")
    assert host.turn() == [
        Frame(DATA, 0, 1, b"body"),
        Frame(CLOSE, 0, 1, b'{"ok":{"size":4}}'),
    ]
    assert not stream.open


def test_an_error_is_a_close_too(host: Host) -> None:
    host.hello()
    host.open(1)
    host.stream().fail(OpError("not_found", "nothing here"))
    (close,) = host.turn()
    assert json.loads(close.payload) == {"error": {"code": "not_found", "message": "nothing here"}}


def test_a_body_waits_for_credit(host: Host) -> None:
    host.hello()
    host.open(1)
    host.stream().answer({}, b"x" * 100_000)
    assert sum(len(frame.payload) for frame in host.turn()) == WINDOW
    assert host.turn() == []
    assert [len(frame.payload) for frame in host.say(credit(1, 5))] == [5]
    rest = host.say(credit(1, 100_000))
    assert sum(len(frame.payload) for frame in rest if frame.kind == DATA) == 100_000 - WINDOW - 5
    assert rest[-1].kind == CLOSE


def test_streams_take_turns(host: Host) -> None:
    host.hello()
    for number in (1, 3, 5):
        host.open(number)
    for stream, _op, _args in host.opened:
        stream.credit = 10 * framing.PAYLOAD_MAX
        stream.answer({}, bytes(3 * framing.PAYLOAD_MAX))
    order = [frame.stream for _ in range(4) for frame in host.turn() if frame.kind == DATA]
    assert order == [1, 3, 5] * 3


def test_the_hosts_body_is_credited_as_it_is_consumed(host: Host) -> None:
    host.hello()
    host.open(1)
    stream = host.stream()
    seen: list[tuple[bytes, bool]] = []
    stream.on_body = lambda data, end: seen.append((data, end))
    assert host.say(encode_frame(DATA, 0, 1, b"x" * 10_000), encode_frame(DATA, FIN, 1)) == []
    assert seen == [(b"x" * 10_000, False), (b"", True)]
    stream.consumed(10_000)
    assert host.turn() == [Frame(CREDIT, 0, 1, struct.pack("<I", 10_000))]


def test_an_overrun_window_resets_the_stream(host: Host) -> None:
    host.hello()
    host.open(1)
    host.stream().on_body = lambda _data, _end: None
    host.say(encode_frame(DATA, 0, 1, bytes(WINDOW)))
    assert [frame.kind for frame in host.say(encode_frame(DATA, 0, 1, b"x"))] == [RESET]
    assert not host.stream().open


def test_a_reset_abandons_the_call(host: Host) -> None:
    host.hello()
    host.open(1)
    gone: list[int] = []
    host.stream().on_abandoned = lambda: gone.append(1)
    host.say(encode_frame(RESET, 0, 1, b'{"code":"internal","message":""}'))
    assert gone == [1]
    host.stream().answer({"too": "late"})
    assert host.turn() == []


@pytest.mark.parametrize("number", [2, 1])
def test_a_stream_that_is_not_the_hosts_or_not_new_is_refused(host: Host, number: int) -> None:
    host.hello()
    host.open(1)
    assert [frame.kind for frame in host.open(number)] == [RESET]
    assert len(host.opened) == 1


def test_only_so_many_calls_are_open(host: Host) -> None:
    host.hello()
    for index in range(MAX_STREAMS):
        assert host.open(2 * index + 1) == []
    assert [frame.kind for frame in host.open(99)] == [RESET]


def test_a_call_that_is_no_call_is_an_error(host: Host) -> None:
    host.hello()
    for number, payload in ((1, b"no json"), (3, b"[]"), (5, b'{"op":1,"args":{}}'), (7, b"[" * 30_000)):
        (close,) = host.say(encode_frame(OPEN, 0, number, payload))
        assert json.loads(close.payload)["error"]["code"] == "invalid_argument"


def test_a_hello_forgets_everything_before_it(host: Host) -> None:
    host.hello()
    host.open(1)
    first = host.stream()
    first.answer({}, bytes(100_000))
    host.turn()
    assert [frame.kind for frame in host.hello()] == [HELLO]
    assert not first.open
    host.open(1)
    assert host.stream() is not first


def test_a_freeze_is_the_last_word_until_the_next_hello(host: Host) -> None:
    host.hello()
    host.open(1, "other")
    lost: list[int] = []
    host.stream().on_abandoned = lambda: lost.append(1)
    host.open(3, "freeze")
    host.stream().close_last({"jobs": 0})
    assert host.turn() == [Frame(CLOSE, 0, 3, b'{"ok":{"jobs":0}}')]
    assert lost == [1]
    assert host.channel.silent
    assert host.open(5) == []
    assert host.say(b"garbage from an old connection") == []
    assert host.channel.open_stream("job_ended", {}, b"") is None
    assert [frame.kind for frame in host.hello()] == [HELLO]


def test_broken_framing_silences_the_guest_until_the_next_hello(host: Host) -> None:
    host.hello()
    host.open(1)
    assert host.say(b"\0" * 64) == []
    assert not host.stream().open
    assert [frame.kind for frame in host.hello()] == [HELLO]


def test_the_guest_calls_the_host(host: Host) -> None:
    host.hello()
    stream = host.channel.open_stream("job_ended", {"job_id": "j"}, b"output")
    assert stream is not None
    answers: list[dict[str, Any]] = []
    stream.on_closed = answers.append
    assert host.turn() == [
        Frame(OPEN, 0, 2, b'{"op":"job_ended","args":{"job_id":"j"}}'),
        Frame(DATA, 0, 2, b"output"),
        Frame(DATA, FIN, 2, b""),
    ]
    host.say(encode_frame(CLOSE, 0, 2, b'{"ok":{}}'))
    assert answers == [{"ok": {}}]


def test_the_end_of_the_transport_is_told(host: Host) -> None:
    host.hello()
    host.sock.shutdown(socket.SHUT_RDWR)
    host.loop.turn()
    assert host.ended
