"""One stream of the channel, from either side: credit, bodies, and how it ended.

State only, and the waiting on it; frames are written by `link`, which is the one that hands this module what
arrived. A call never holds more than one window of unread bytes, whatever the guest sends.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

import trio

from microvm.errors import MicrovmError
from microvm.wire import agent
from microvm.wire.agent import ProtocolError

CHUNK_BYTES: Final = 16384
"""Body bytes per frame: half a window, so that credit comes back while the next frame is written."""
_GRANT_BYTES: Final = agent.WINDOW // 4


class Outbox(Protocol):
    """Where frames go: the link's writer."""

    def put(self, frame: bytes, owner: Call | None = None) -> None:
        """Queues a frame; `owner.frame_written` is called once it is on its way."""
        ...

    def drop(self, call: Call) -> None:
        """Forgets a call that is over."""
        ...


class Call:
    """One call in progress.

    Attributes:
        number: The stream's.
        error: Why the call failed; None while it is open or when it succeeded.
        ok: The CLOSE's object, for a call of ours that succeeded.
    """

    def __init__(self, outbox: Outbox, number: int, *, ours: bool) -> None:
        self.number = number
        self.ours = ours
        self.error: MicrovmError | None = None
        self.ok: dict[str, Any] | None = None
        self._outbox = outbox
        self._changed = trio.Event()
        self._credit = agent.WINDOW
        self._window = agent.WINDOW
        self._owed = 0
        self._inbound: deque[bytes] = deque()
        self._inbound_ended = False
        self._frame_queued = False

    @property
    def over(self) -> bool:
        """Whether the stream has ended, one way or the other."""
        return self.error is not None or self.ok is not None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ---- What arrives, from the reader: never waits

    def take_data(self, data: bytes, *, end: bool) -> None:
        """A DATA frame.

        Raises:
            ProtocolError: when the guest sends more than it was allowed to, or after its end.
        """
        if len(data) > self._window or self._inbound_ended:
            raise ProtocolError("it sent more than the window allows")
        self._window -= len(data)
        if data:
            self._inbound.append(data)
        self._inbound_ended = end
        self._wake()

    def take_credit(self, count: int) -> None:
        """A CREDIT frame.

        Raises:
            ProtocolError: when the guest grants more than was sent.
        """
        self._credit += count
        if self._credit > agent.WINDOW:
            raise ProtocolError("it granted more credit than was used")
        self._wake()

    def take_close(self, outcome: dict[str, Any] | MicrovmError) -> None:
        """The end of a call of ours; what arrived before it is still read."""
        if isinstance(outcome, MicrovmError):
            self.fail(outcome)
        else:
            self.ok = outcome
            self._wake()

    def fail(self, error: MicrovmError) -> None:
        """Ends the call with an error; everybody who waits on it gets that."""
        if not self.over:
            self.error = error
            self._inbound.clear()
            self._wake()

    def frame_written(self) -> None:
        """The writer has sent the call's frame; it may queue another."""
        self._frame_queued = False
        self._wake()

    # ---- What callers do

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Sends bytes of this side's body, `end` with the last; waits for credit and for its turn.

        Returns early, sending no more, when the other side has closed the call meanwhile.

        Raises:
            MicrovmError: when the call failed.
        """
        view = memoryview(data)
        while True:
            while (self._frame_queued or (view and not self._credit)) and not self.over:
                await self._changed.wait()
            if self.error is not None:
                raise self.error
            if self.over:
                return
            piece = view[: min(CHUNK_BYTES, self._credit)]
            view = view[len(piece) :]
            self._credit -= len(piece)
            self._frame_queued = True
            last = end and not view
            self._outbox.put(agent.encode_data(self.number, bytes(piece), end=last), self)
            if not view:
                return

    async def receive(self) -> bytes | None:
        """The next bytes of the other side's body; None at its end.

        Raises:
            MicrovmError: when the call failed.
        """
        while not self._inbound and not self.over and not self._inbound_ended:
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        if not self._inbound:
            return None
        data = self._inbound.popleft()
        self._grant(len(data))
        return data

    def _grant(self, count: int) -> None:
        self._owed += count
        if self._owed >= _GRANT_BYTES and not self.over and not self._inbound_ended:
            self._window += self._owed
            self._outbox.put(agent.encode_credit(self.number, self._owed))
            self._owed = 0

    async def outcome(self) -> dict[str, Any]:
        """The result of a call of ours.

        Raises:
            MicrovmError: when the call failed.
        """
        while not self.over:
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        assert self.ok is not None
        return self.ok

    def abandon(self, error: MicrovmError) -> None:
        """Gives the call up and tells the other side; does nothing when it is over."""
        if not self.over:
            self._outbox.drop(self)
            self._outbox.put(agent.encode_reset(self.number, "internal", "abandoned"))
            self.fail(error)
