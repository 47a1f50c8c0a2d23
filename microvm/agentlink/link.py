"""The channel's host end: a reader and a writer task over one byte stream, and the calls between them.

    open_link ──► silent ──hello──► speaking ──freeze──► silent ──hello──► …
                     └──────────── a broken stream ends every wait with guest_unreachable

The host speaks first after a connect and after a freeze; in between, while the guest may be stopped, it
writes nothing. The reader never waits for a consumer, so that one slow call cannot hold up another, and
memory is bounded by 24 windows each way. Everything from the guest is hostile: a rule that is broken breaks
the link.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from microvm.agentlink.call import CHUNK_BYTES, Call
from microvm.agentlink.operations import Operations
from microvm.errors import GuestError, MicrovmError
from microvm.wire import agent, framing
from microvm.wire.agent import Hello, ProtocolError, Reply
from microvm.wire.framing import Frame, FramingError

Body = bytes | AsyncIterable[bytes]

_READ_BYTES: Final = 65536
_WRITE_BYTES: Final = 32768
"""One page run of a virtio-serial port; more would only lengthen the wait of what comes behind."""
_REPLY_BYTES: Final = 1 << 20
"""Most that a reply may carry unless the caller asks for more."""


class GuestCall:
    """A call that the guest makes.

    Attributes:
        op, args: As the guest sent them; types and sizes within are the handler's to judge.
    """

    def __init__(self, call: Call, op: str, args: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self._call = call

    async def receive(self) -> bytes | None:
        """The next bytes of the guest's body; None at its end. Raises GuestError when the guest gave up."""
        return await self._call.receive()

    async def read_all(self, *, most: int) -> bytes:
        """The guest's whole body.

        Raises:
            ProtocolError: when it is longer than `most`.
        """
        body = bytearray()
        while (data := await self.receive()) is not None:
            body += data
            if len(body) > most:
                raise ProtocolError(f"the body of {self.op} is too long")
        return bytes(body)

    async def send(self, data: bytes) -> None:
        """Sends bytes of the answer's body."""
        await self._call.send(data)


GuestHandler = Callable[[GuestCall], Awaitable[Mapping[str, Any]]]
"""Answers a call of the guest; a MicrovmError that it raises is the answer, anything else ends the link."""


class AgentLink(Operations):
    """Calls to one guest. Made by `open_link`.

    Raises (all calls): GuestError guest_unreachable when the stream broke or the guest broke the protocol,
    guest_timeout when `timeout_s` passed, or the code that the guest answered.
    """

    def __init__(self, stream: trio.abc.Stream, nursery: trio.Nursery, handler: GuestHandler) -> None:
        self._stream = stream
        self._nursery = nursery
        self._handler = handler
        self._decoder = framing.Decoder()
        self._calls: dict[int, Call] = {}
        self._outbox: deque[tuple[bytes, Call | None]] = deque()
        self._outbox_filled = trio.Event()
        self._next_number = 1
        self._last_guest_stream = 0
        self._silent = True
        self._freezing: Call | None = None
        self._nonce = ""
        self._hello: Hello | None = None
        self._hello_arrived = trio.Event()
        self._free_slot = trio.Event()
        self._ended = trio.Event()
        self._broken: GuestError | None = None

    @property
    def broken(self) -> GuestError | None:
        """Why nothing can be said any more; None while the link is good."""
        return self._broken

    async def hello(self, generation: int, *, timeout_s: float = 60.0) -> Hello:
        """Begins to speak: discards what is on its way in both directions and waits for the guest's answer.

        Also after a freeze. Calls that were open fail.

        Args:
            generation: The host's agent generation, which the guest repeats.
            timeout_s: Seconds until the guest must have answered; it may still be booting.
        """
        self._raise_if_broken()
        self._fall_silent(GuestError("guest_unreachable", "the call was cut by a new hello"))
        self._decoder.await_hello()
        self._nonce = secrets.token_hex(16)
        self._hello = None
        self._hello_arrived = trio.Event()
        self._next_number = 1
        self._last_guest_stream = 0
        self.put(agent.encode_hello(generation, self._nonce), hello=True)
        with trio.move_on_after(timeout_s):
            await self._hello_arrived.wait()
        self._raise_if_broken()
        if self._hello is None:
            raise GuestError("guest_timeout", f"the guest did not answer the hello within {timeout_s:g} s")
        return self._hello

    async def call(
        self,
        op: str,
        args: Mapping[str, Any],
        body: Body = b"",
        *,
        timeout_s: float,
        max_body_bytes: int = _REPLY_BYTES,
    ) -> Reply:
        """Makes one call and waits for its whole answer.

        Args:
            op: The operation.
            args: Its arguments, at most a frame of JSON.
            body: What follows the arguments; an iterable is taken as fast as the guest reads.
            timeout_s: Seconds for all of it; then the call is abandoned.
            max_body_bytes: A longer answer breaks the link.

        Cancellation: the guest is told to give up; what it did until then stays done.
        """
        with trio.move_on_after(timeout_s) as scope:
            async with self.call_stream(op, args) as call:
                await _send_body(call, body)
                received = bytearray()
                while (data := await call.receive()) is not None:
                    received += data
                    if len(received) > max_body_bytes:
                        self._break(ProtocolError(f"the answer to {op} is too long"))
                return Reply(await call.outcome(), bytes(received))
        assert scope.cancelled_caught
        raise GuestError("guest_timeout", f"the guest did not answer {op} within {timeout_s:g} s")

    @asynccontextmanager
    async def call_stream(self, op: str, args: Mapping[str, Any]) -> AsyncGenerator[Call]:
        """Opens a call whose bodies the caller sends and receives piece by piece; no deadline of its own.

        The caller sends its body, `end=True` with the last, receives until None, and takes `outcome`. Leaving
        before that abandons the call.
        """
        while not self._silent and self._open_count(ours=True) >= agent.MAX_STREAMS:
            await self._free_slot.wait()
        self._raise_if_broken()
        if self._silent:
            raise GuestError("guest_unreachable", "the guest is frozen, or was not greeted yet")
        frame = agent.encode_open(self._next_number, op, args)
        call = Call(self, self._next_number, ours=True)
        self._next_number += 2
        self._calls[call.number] = call
        if op == "freeze":
            self._freezing = call
        self.put(frame)
        try:
            yield call
        finally:
            call.abandon(GuestError("guest_unreachable", "the call was given up"))

    async def freeze(self, *, timeout_s: float = 15.0) -> dict[str, Any]:
        """Freezes every job; the acknowledgement is the last thing said in either direction until `hello`.

        No other call may be open: it would be cut.
        """
        return (await self.call("freeze", {}, timeout_s=timeout_s)).ok

    async def drain_to_eof(self) -> None:
        """Waits until all that the guest had sent is read and the stream has ended, after the VMM's death."""
        await self._ended.wait()

    # ---- The writer's side

    def put(self, frame: bytes, owner: Call | None = None, *, hello: bool = False) -> None:
        """Queues a frame for the writer; dropped while the host must be silent."""
        if self._broken is None and (hello or not self._silent):
            self._outbox.append((frame, owner))
            self._outbox_filled.set()

    def drop(self, call: Call) -> None:
        """Forgets a call that is over."""
        if self._calls.pop(call.number, None) is not None:
            self._free_slot.set()
            self._free_slot = trio.Event()

    def _open_count(self, *, ours: bool) -> int:
        return sum(call.ours == ours for call in self._calls.values())

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _fall_silent(self, error: MicrovmError) -> None:
        self._silent = True
        self._freezing = None
        self._outbox.clear()
        for call in list(self._calls.values()):
            call.fail(error)
            self.drop(call)

    def _break(self, error: GuestError) -> None:
        """The link is of no use any more; everybody who waits learns why."""
        if self._broken is None:
            self._broken = error
            self._fall_silent(error)
            self._hello_arrived.set()
            self._outbox_filled.set()

    async def _serve_writes(self) -> None:
        try:
            while self._broken is None:
                if not self._outbox:
                    self._outbox_filled = trio.Event()
                    await self._outbox_filled.wait()
                    continue
                frames, owners = self._take_outbox()
                await self._stream.send_all(frames)
                for owner in owners:
                    owner.frame_written()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError) as error:
            self._break(_unreachable(error))

    def _take_outbox(self) -> tuple[bytes, list[Call]]:
        """What one write takes, and whose: a call and its short body reach the guest in one interrupt."""
        frames: list[bytes] = []
        owners: list[Call] = []
        size = 0
        while self._outbox and size < _WRITE_BYTES:
            frame, owner = self._outbox.popleft()
            frames.append(frame)
            size += len(frame)
            if owner is not None:
                owners.append(owner)
        return b"".join(frames), owners

    # ---- The reader's side

    async def _serve_reads(self) -> None:
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                if self._broken is None:
                    self._take_bytes(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._break(_unreachable(error))
        else:
            self._break(GuestError("guest_unreachable", "the guest's channel has ended"))
        self._ended.set()

    def _take_bytes(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self._decoder.awaiting_hello and frame.kind != framing.HELLO:
                    continue  # behind the last frame of a freeze: not ours to judge
                self._take(frame)
        except (FramingError, ProtocolError) as error:
            self._break(error)

    def _take(self, frame: Frame) -> None:
        if frame.kind == framing.HELLO:
            self._take_hello(frame.payload)
            return
        if self._silent:
            return
        if frame.kind == framing.OPEN:
            self._take_open(frame)
            return
        call = self._calls.get(frame.stream)
        if call is None:
            return  # abandoned here while the frame was on its way
        if frame.kind == framing.DATA:
            call.take_data(frame.payload, end=bool(frame.flags & framing.FIN))
        elif frame.kind == framing.CREDIT:
            call.take_credit(agent.parse_credit(frame.payload))
        elif frame.kind == framing.RESET:
            self.drop(call)
            call.fail(agent.parse_reset(frame.payload))
        else:
            self._take_close(call, frame.payload)

    def _take_close(self, call: Call, payload: bytes) -> None:
        outcome = agent.parse_close(payload)
        if not call.ours:
            raise ProtocolError("it closed a call of its own")
        self.drop(call)
        call.take_close(outcome)
        if call is self._freezing:
            self._freezing = None
            if not isinstance(outcome, MicrovmError):
                self._fall_silent(GuestError("guest_unreachable", "the guest was frozen"))
                self._decoder.await_hello()

    def _take_hello(self, payload: bytes) -> None:
        if not self._silent:
            raise ProtocolError("a hello out of turn")
        hello = agent.parse_hello(payload)
        if hello.nonce != self._nonce:
            self._decoder.await_hello()  # an answer to an earlier one
            return
        self._nonce = ""
        self._hello = hello
        self._silent = False
        self._hello_arrived.set()

    def _take_open(self, frame: Frame) -> None:
        op, args = agent.parse_open(frame.payload)
        if frame.stream % 2 or frame.stream <= self._last_guest_stream:
            raise ProtocolError("it opened a stream that is not its own")
        if self._open_count(ours=False) >= agent.MAX_STREAMS:
            raise ProtocolError("it opened too many streams")
        self._last_guest_stream = frame.stream
        call = Call(self, frame.stream, ours=False)
        self._calls[call.number] = call
        self._nursery.start_soon(self._answer, GuestCall(call, op, args), call)

    async def _answer(self, guest_call: GuestCall, call: Call) -> None:
        try:
            answer = agent.encode_ok(call.number, await self._handler(guest_call))
        except ProtocolError as error:
            self._break(error)
            return
        except MicrovmError as error:
            answer = agent.encode_error(call.number, error.code, error.message)
        if not call.over and call.number in self._calls:
            self.drop(call)
            self.put(answer)
            call.take_close({})


async def _send_body(call: Call, body: Body) -> None:
    if isinstance(body, bytes):
        await call.send(body, end=True)
        return
    async for data in body:
        for at in range(0, len(data), CHUNK_BYTES):
            await call.send(data[at : at + CHUNK_BYTES])
    await call.send(b"", end=True)


def _unreachable(error: Exception) -> GuestError:
    wrapped = GuestError("guest_unreachable", "the guest's channel is broken")
    wrapped.__cause__ = error
    return wrapped


@asynccontextmanager
async def open_link(stream: trio.abc.Stream, *, on_guest_stream: GuestHandler) -> AsyncGenerator[AgentLink]:
    """A link over a connected stream; call `hello` first.

    Args:
        stream: Bytes to and from the guest's agent port.
        on_guest_stream: Called, each in its own task, for every call that the guest makes.

    Ownership: the stream stays the caller's and is not closed; leaving cancels what is open.
    """
    try:
        async with trio.open_nursery() as nursery:
            link = AgentLink(stream, nursery, on_guest_stream)
            nursery.start_soon(link._serve_reads)  # pyright: ignore[reportPrivateUsage]
            nursery.start_soon(link._serve_writes)  # pyright: ignore[reportPrivateUsage]
            try:
                yield link
            finally:
                link._break(GuestError("guest_unreachable", "the link was closed"))  # pyright: ignore[reportPrivateUsage]
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:  # the body's own error, which is not to look as if it were several
            raise group.exceptions[0] from group.exceptions[0].__cause__
        raise
