"""The guest's end of the channel: one byte stream to the host, many streams in it, flow control for each.

The host speaks first: its HELLO resets every stream and credit, and only then does the guest say anything.
After the acknowledgement of a freeze (`Stream.close_last`) the guest is silent and deaf until the next HELLO,
whatever comes. A stream carries one call: OPEN, the opener's body, the answerer's body, CLOSE. This module
knows frames and fairness, not operations (`supervisor`). It never blocks and keeps at most one turn's worth
of frames in memory: bodies are pulled from their producers when the window and the transport have room.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from guest import framing
from guest.errors import OpError
from guest.loop import EDGE, READ, WRITE, Loop

WINDOW: Final = 32768
"""Bytes in flight per stream and direction before credit; 24 streams stay under 1 MiB in the virtio ring."""
MAX_STREAMS: Final = 24
OUTBOX_BYTES: Final = 65536
"""Encoded frames that wait for the transport; beyond it producers are not asked."""
_READ_BYTES: Final = 65536
_READS_PER_TURN: Final = 8
_GRANT_BYTES: Final = WINDOW // 4
_CREDIT: Final = struct.Struct("<I")

Source = Callable[[int], "bytes | None"]
"""Gives at most n bytes of a body; b"" for none yet (then `Stream.pump` says when), None at its end."""


def encode_json(value: Any) -> bytes:
    """Compact JSON, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")


class Stream:
    """One call in progress, from either side.

    Attributes:
        on_body: Called with (bytes, end) as the other side's body arrives; `consumed` must follow.
        on_closed: Called with the CLOSE's object, for a call that the guest made.
        on_abandoned: Called when the other side or a HELLO gave the call up; nothing can be sent any more.
    """

    def __init__(self, channel: Channel, number: int, *, ours: bool) -> None:
        self.number = number
        self.ours = ours
        self.on_body: Callable[[bytes, bool], None] = self._ignore_body
        self.on_closed: Callable[[dict[str, Any]], None] | None = None
        self.on_abandoned: Callable[[], None] | None = None
        self.credit = WINDOW
        self.open = True
        self._channel = channel
        self._owed = 0
        self._window = WINDOW
        self._source: Source | None = None
        self._closing: bytes | None = None

    def _ignore_body(self, data: bytes, _end: bool) -> None:  # noqa: FBT001 - on_body's signature
        self.consumed(len(data))

    def received(self, data: bytes, *, end: bool) -> None:
        """Takes a DATA frame from the channel."""
        if len(data) > self._window:
            self.reset("internal", "the window was overrun")
            return
        self._window -= len(data)
        self.on_body(data, end)

    def consumed(self, count: int) -> None:
        """Lets the other side send `count` more bytes."""
        self._owed += count
        if self.open and self._owed >= _GRANT_BYTES:
            self._window += self._owed
            self._channel.enqueue(framing.CREDIT, 0, self.number, _CREDIT.pack(self._owed))
            self._owed = 0

    def answer(self, ok: dict[str, Any], body: bytes | Source | None = None) -> None:
        """Sends the body, then CLOSE with `ok`."""
        if self.open:
            self._closing = encode_json({"ok": ok})
            self._send(body)

    def stream_body(self, source: Source) -> None:
        """Begins an answer whose outcome is not known yet; `conclude` or `fail` ends it."""
        if self.open:
            self._send(source)

    def conclude(self, ok: dict[str, Any]) -> None:
        """Gives the CLOSE of a body that `stream_body` began; its source must come to an end."""
        if self.open:
            self._closing = encode_json({"ok": ok})
            self.pump()

    def fail(self, error: OpError) -> None:
        """Ends the call with an error; a body that was under way is cut."""
        if self.open:
            self._source = None
            self._closing = encode_json({"error": {"code": error.code, "message": error.message[:2000]}})
            self._send(None)

    def send_body(self, body: bytes) -> None:
        """Sends the whole body of a call that the guest made, FIN on its last frame."""
        self._send(body)

    def _send(self, body: bytes | Source | None) -> None:
        if body is None:
            body = b""
        self._source = _source_of(body) if isinstance(body, bytes) else body
        self.pump()

    def pump(self) -> None:
        """Says that the source may have bytes again."""
        self._channel.ready(self)

    def next_frame(self) -> bytes | None:
        """The next frame to write, as far as credit and the source go; None for nothing now."""
        if not self.open or self._source is None:
            return None
        data = self._source(min(self.credit, framing.PAYLOAD_MAX)) if self.credit else b""
        if data is None:
            self._source = None
            if self.ours:
                return framing.encode_frame(framing.DATA, framing.FIN, self.number)
            assert self._closing is not None
            self._channel.drop(self)
            return framing.encode_frame(framing.CLOSE, 0, self.number, self._closing)
        if not data:
            return None
        self.credit -= len(data)
        return framing.encode_frame(framing.DATA, 0, self.number, data)

    def close_last(self, ok: dict[str, Any]) -> None:
        """Answers, and makes that the last frame in both directions until the next HELLO."""
        if self.open:
            self._channel.fall_silent(
                framing.encode_frame(framing.CLOSE, 0, self.number, encode_json({"ok": ok}))
            )

    def reset(self, code: str, message: str) -> None:
        """Abandons the call."""
        if self.open:
            self._channel.enqueue(
                framing.RESET, 0, self.number, encode_json({"code": code, "message": message})
            )
            self.abandon()

    def abandon(self) -> None:
        """Forgets the call and tells its handler."""
        if self.open:
            self._channel.drop(self)
            self._source = None
            if self.on_abandoned is not None:
                self.on_abandoned()


def _source_of(body: bytes) -> Source:
    """A source over bytes that are there already."""
    view = memoryview(body)
    at = 0

    def take(limit: int) -> bytes | None:
        nonlocal at
        if at >= len(view):
            return None
        piece = bytes(view[at : at + limit])
        at += len(piece)
        return piece

    return take


class Channel:
    """Frames over one descriptor: a virtio-serial port, a vsock connection, or a Unix socket.

    Args:
        fd: Non-blocking; stays the caller's.
        on_hello: Gets the host's HELLO object and returns the answer's; earlier streams are gone by then.
        on_open: Gets every call that the host opens.
        on_eof: Called when the other end closed for good; a port whose host comes back has no such end.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int,
        *,
        on_hello: Callable[[dict[str, Any]], dict[str, Any]],
        on_open: Callable[[Stream, str, dict[str, Any]], None],
        on_eof: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_hello = on_hello
        self._on_open = on_open
        self._on_eof = on_eof
        self._decoder = framing.Decoder()
        self._streams: dict[int, Stream] = {}
        self._ready: deque[Stream] = deque()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._silent = True
        self._next_number = 2
        self._last_theirs = 0
        self._flush_pending = False
        self._on_flushed: Callable[[], None] | None = None
        loop.watch(fd, READ | WRITE | EDGE, self._on_event)

    @property
    def silent(self) -> bool:
        """Whether nothing may be sent: no HELLO yet, or none since a freeze."""
        return self._silent

    def open_stream(self, op: str, args: dict[str, Any], body: bytes) -> Stream | None:
        """Calls the host; None when that cannot be now (silent, or too many calls)."""
        if self._silent or sum(stream.ours for stream in self._streams.values()) >= MAX_STREAMS:
            return None
        stream = Stream(self, self._next_number, ours=True)
        self._next_number += 2
        self._streams[stream.number] = stream
        self.enqueue(framing.OPEN, 0, stream.number, encode_json({"op": op, "args": args}))
        stream.send_body(body)
        return stream

    def when_flushed(self, action: Callable[[], None]) -> None:
        """Calls `action` once the transport has taken every frame."""
        self._on_flushed = action
        self._schedule_flush()

    def enqueue(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Puts one small frame behind those that wait."""
        if not self._silent:
            self._push(framing.encode_frame(kind, flags, stream, payload))

    def ready(self, stream: Stream) -> None:
        """Puts a stream in line for writing."""
        if stream.open and stream not in self._ready:
            self._ready.append(stream)
        self._schedule_flush()

    def drop(self, stream: Stream) -> None:
        """Forgets a stream that is over."""
        stream.open = False
        self._streams.pop(stream.number, None)

    def fall_silent(self, last_frame: bytes) -> None:
        """Sends `last_frame` and nothing more; every call is abandoned."""
        self._abandon_all()
        self._push(last_frame)
        self._silent = True
        self._decoder.await_hello()

    def _abandon_all(self) -> None:
        self._silent = True
        self._ready.clear()
        for stream in list(self._streams.values()):
            stream.abandon()
        self._streams.clear()

    def _push(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_pending:
            self._flush_pending = True
            self._loop.soon(self._flush)

    def _on_event(self, events: int) -> None:
        if events & READ:
            self._read()
        self._flush()

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_eof()
                return
            try:
                frames = self._decoder.feed(data)
            except framing.FramingError:
                self._abandon_all()
                self._decoder.await_hello()
                continue
            for frame in frames:
                self._take(frame)
        self._loop.soon(self._read)  # edge-triggered: what is left would not be reported again

    def _take(self, frame: framing.Frame) -> None:
        if frame.kind == framing.HELLO:
            self._take_hello(frame.payload)
            return
        if self._silent:
            return
        if frame.kind == framing.OPEN:
            self._take_open(frame)
            return
        stream = self._streams.get(frame.stream)
        if stream is None:
            return  # abandoned on this side while the frame was on its way
        if frame.kind == framing.DATA:
            stream.received(frame.payload, end=bool(frame.flags & framing.FIN))
        elif frame.kind == framing.CREDIT:
            stream.credit += _CREDIT.unpack(frame.payload)[0]
            self.ready(stream)
        elif frame.kind == framing.CLOSE and stream.ours:
            self.drop(stream)
            if stream.on_closed is not None:
                stream.on_closed(_object_of(frame.payload))
        else:
            stream.abandon()

    def _take_hello(self, payload: bytes) -> None:
        self._abandon_all()
        self._outbox.clear()
        self._outbox_bytes = 0
        self._next_number = 2
        self._last_theirs = 0
        answer = self._on_hello(_object_of(payload))
        self._silent = False
        self.enqueue(framing.HELLO, 0, 0, encode_json(answer))

    def _take_open(self, frame: framing.Frame) -> None:
        theirs = sum(not stream.ours for stream in self._streams.values())
        if frame.stream % 2 == 0 or frame.stream <= self._last_theirs or theirs >= MAX_STREAMS:
            self.enqueue(
                framing.RESET, 0, frame.stream, encode_json({"code": "internal", "message": "stream refused"})
            )
            return
        self._last_theirs = frame.stream
        stream = Stream(self, frame.stream, ours=False)
        self._streams[stream.number] = stream
        request = _object_of(frame.payload)
        op, args = request.get("op"), request.get("args")
        if isinstance(op, str) and isinstance(args, dict):
            self._on_open(stream, op, cast("dict[str, Any]", args))
        else:
            stream.fail(OpError("invalid_argument", "a call is {op, args}"))

    def _flush(self) -> None:
        self._flush_pending = False
        while True:
            self._fill()
            if not self._outbox:
                break
            # One write for all: each is a notification of the host, and one for the guest's other side.
            frame = self._outbox[0] if len(self._outbox) == 1 else b"".join(self._outbox)
            self._outbox.clear()
            try:
                written = os.write(self._fd, frame)
            except BlockingIOError:
                self._outbox.append(frame)
                return
            except OSError:
                self._outbox_bytes = 0
                return  # the read side reports the end
            self._outbox_bytes -= written
            if written < len(frame):
                self._outbox.append(frame[written:])
        if self._on_flushed is not None:
            action, self._on_flushed = self._on_flushed, None
            action()

    def _fill(self) -> None:
        """Asks the streams in line, one frame each in turn, while the outbox has room."""
        while self._ready and self._outbox_bytes < OUTBOX_BYTES:
            stream = self._ready.popleft()
            frame = stream.next_frame()
            if frame is not None:
                self._outbox.append(frame)
                self._outbox_bytes += len(frame)
                if stream.open:
                    self._ready.append(stream)


def _object_of(payload: bytes) -> dict[str, Any]:
    """The JSON object in a payload; an empty one when it is something else."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
