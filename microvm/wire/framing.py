"""Frames of the guest channel: bytes ⇄ `Frame`, over the C shim.

Promises that how the bytes were cut into reads changes nothing, that whatever a hostile guest sends costs
at most one frame of memory, and that a broken frame is an error at once. It must not know streams, credit
or messages (`agentlink`, `wire.agent`). Neighbour: `guest/framing.py` says the same in Python for the
other end.

    feed ──► awaiting hello ──valid HELLO──► framed ──bad frame──► broken
                   ▲                           │
                   └───────await_hello─────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from microvm._native import ffi, lib
from microvm.errors import GuestError

HELLO: Final = 1
OPEN: Final = 2
DATA: Final = 3
CREDIT: Final = 4
CLOSE: Final = 5
RESET: Final = 6

FIN: Final = 1
"""The only flag; on DATA only: the sender's last bytes on this stream."""

HEADER_BYTES: Final = lib.MVM_HEADER_BYTES
PAYLOAD_MAX: Final = lib.MVM_PAYLOAD_MAX
HELLO_MAX: Final = lib.MVM_HELLO_MAX

_REASONS: Final = {
    lib.MVM_FRAME_BAD_MAGIC: "bad magic",
    lib.MVM_FRAME_BAD_KIND: "unknown kind",
    lib.MVM_FRAME_BAD_FLAGS: "bad flags",
    lib.MVM_FRAME_BAD_STREAM: "bad stream id",
    lib.MVM_FRAME_BAD_LENGTH: "bad length",
    lib.MVM_FRAME_BAD_CHECKSUM: "bad checksum",
}


class Frame(NamedTuple):
    """One frame; the fields are as on the wire."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class FramingError(GuestError):
    """The bytes are no frame; the connection they came over is of no further use.

    Args:
        reason: What is wrong.
        frames: The whole frames that came before it in the same `feed`.
    """

    def __init__(self, reason: str, frames: Sequence[Frame] = ()) -> None:
        super().__init__("guest_unreachable", f"The guest's channel is broken: {reason}.")
        self.reason = reason
        self.frames = list(frames)


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encodes one frame.

    Args:
        kind: HELLO to RESET.
        flags: 0, or FIN on DATA.
        stream: 0 for HELLO, 1 to 2³²-1 for all others.
        payload: At most PAYLOAD_MAX bytes; of HELLO at most HELLO_MAX; of CREDIT exactly 4.

    Raises:
        FramingError: The fields make no frame that a decoder would accept.
    """
    if not (0 <= kind <= 255 and 0 <= flags <= 255 and 0 <= stream < 1 << 32 and len(payload) < 1 << 32):
        raise FramingError("a field does not fit its place")
    header = ffi.new("struct mvm_frame *", (kind, flags, stream, len(payload)))
    state = lib.mvm_frame_check(header)
    if state != lib.MVM_FRAME_WHOLE:
        raise FramingError(_REASONS[state])
    encoded = bytearray(HEADER_BYTES + len(payload))
    lib.mvm_frame_encode(header, ffi.from_buffer("uint8_t[]", payload), ffi.from_buffer("uint8_t[]", encoded))
    return bytes(encoded)


class Decoder:
    """Turns the bytes of one connection into frames; begins by awaiting a HELLO."""

    def __init__(self) -> None:
        self._rest = b""
        self._awaiting_hello = True
        self._seen = 0  # bytes of _rest in which no HELLO ends
        self._broken: str | None = None

    @property
    def awaiting_hello(self) -> bool:
        """Whether everything up to the next valid HELLO is being discarded."""
        return self._awaiting_hello

    def await_hello(self) -> None:
        """Discards the partial frame that is held, and all that follows up to the next valid HELLO."""
        self._rest = b""
        self._seen = 0
        self._awaiting_hello = True
        self._broken = None

    def feed(self, data: bytes) -> list[Frame]:
        """Takes the next bytes of the connection.

        Args:
            data: Any number of bytes, also none.

        Returns:
            The frames that are whole now, in order.

        Raises:
            FramingError: At the first bad frame, and at every call after it until `await_hello`.
        """
        if self._broken is not None:
            raise FramingError(self._broken)
        frames: list[Frame] = []
        buffer = self._rest + data
        view = ffi.from_buffer("uint8_t[]", buffer)
        header = ffi.new("struct mvm_frame *")
        at = 0
        if self._awaiting_hello:
            keep_from = ffi.new("size_t *")
            state = lib.mvm_hello_scan(view, len(buffer), self._seen, keep_from, header)
            at = int(keep_from[0])
            if state != lib.MVM_FRAME_WHOLE:
                self._rest = buffer[at:]
                self._seen = len(self._rest)
                return frames
            self._awaiting_hello = False
        while (state := lib.mvm_frame_parse(view + at, len(buffer) - at, header)) == lib.MVM_FRAME_WHOLE:
            end = at + HEADER_BYTES + int(header.length)
            payload = buffer[at + HEADER_BYTES : end]
            frames.append(Frame(int(header.kind), int(header.flags), int(header.stream), payload))
            at = end
        self._rest = buffer[at:]
        if state != lib.MVM_FRAME_PARTIAL:
            self._rest = b""
            self._broken = _REASONS[state]
            raise FramingError(self._broken, frames)
        return frames
