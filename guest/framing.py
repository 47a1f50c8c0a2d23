"""Bytes to frames and back, for the channel between guest and host.

A frame is a 20-byte little-endian header and at most 32 KiB of payload:

    0 magic "MVM1" | 4 kind | 5 flags | 6 zero u16 | 8 stream u32 | 12 length u32 | 16 crc32 u32 | 20 payload

The checksum covers bytes 0 to 15 and the payload. No I/O and no meaning here: `channel` knows what the kinds
do. The host has the same in C (`native/frame.c`); each is the other's oracle in the tests.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

MAGIC: Final = b"MVM1"
HELLO: Final = 1
OPEN: Final = 2
DATA: Final = 3
CREDIT: Final = 4
CLOSE: Final = 5
RESET: Final = 6
FIN: Final = 1
"""Flag of DATA: the opener's body ends with this frame."""

HEADER_BYTES: Final = 20
PAYLOAD_MAX: Final = 32768
"""One frame fills one stream's window; larger frames would only delay the others."""
HELLO_MAX: Final = 4096

_FIELDS: Final = struct.Struct("<4sBBHII")
_WORD: Final = struct.Struct("<I")


class FramingError(Exception):
    """The bytes are not frames; the connection is of no further use until the next HELLO."""


class Frame(NamedTuple):
    """One frame: what it is, for which stream, and its bytes."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """The bytes of one frame.

    Raises:
        FramingError: when the fields are not those of a legal frame.
    """
    problem = _problem_of(kind, flags, stream, len(payload))
    if problem:
        raise FramingError(problem)
    fields = _FIELDS.pack(MAGIC, kind, flags, 0, stream, len(payload))
    return b"".join((fields, _WORD.pack(zlib.crc32(payload, zlib.crc32(fields))), payload))


def _problem_of(kind: int, flags: int, stream: int, length: int) -> str:
    """What is wrong with these header fields; empty when nothing is."""
    if not HELLO <= kind <= RESET:
        return f"unknown kind {kind}"
    if flags & ~(FIN if kind == DATA else 0):
        return f"unknown flags {flags}"
    if (kind == HELLO) != (stream == 0) or not 0 <= stream <= 0xFFFFFFFF:
        return f"stream {stream} is not one for kind {kind}"
    if length > (HELLO_MAX if kind == HELLO else PAYLOAD_MAX):
        return f"{length} bytes are too many"
    if kind == CREDIT and length != _WORD.size:
        return "a credit is 4 bytes"
    return ""


class Decoder:
    """Turns a stream of bytes, cut anywhere, into frames. Starts out awaiting a HELLO.

    While awaiting, anything is skipped up to the first HELLO that is complete and valid: the one whose last
    byte comes first, so that a false beginning can never hide a true one behind it. After it every byte must
    belong to a valid frame.
    """

    __slots__ = ("_awaiting", "_buffer", "_seen")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._awaiting = True
        self._seen = 0

    @property
    def awaiting_hello(self) -> bool:
        """Whether bytes are being skipped until a HELLO."""
        return self._awaiting

    def await_hello(self) -> None:
        """Skips everything from here to the next HELLO, a partial frame included."""
        self._buffer.clear()
        self._awaiting = True
        self._seen = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Takes the next bytes; returns the frames that they complete.

        Raises:
            FramingError: in framed mode, when the bytes are not a frame. Frames before the bad bytes are lost
            too.
        """
        self._buffer += data
        frames: list[Frame] = []
        if self._awaiting:
            found = self._find_hello()
            if found is None:
                return frames
            frames.append(found)
        at = 0
        while True:
            frame, at = self._parse(at)
            if frame is None:
                break
            frames.append(frame)
        del self._buffer[:at]
        return frames

    def _parse(self, at: int) -> tuple[Frame | None, int]:
        """The frame at `at` and where the next begins; None while it is incomplete."""
        buffer = self._buffer
        have = len(buffer) - at
        if not MAGIC.startswith(bytes(buffer[at : at + 4])):
            raise FramingError("no frame begins here")
        if have < HEADER_BYTES:
            return None, at
        _magic, kind, flags, zero, stream, length = _FIELDS.unpack_from(buffer, at)
        problem = "reserved bytes are not zero" if zero else _problem_of(kind, flags, stream, length)
        if problem:
            raise FramingError(problem)
        end = at + HEADER_BYTES + length
        if len(buffer) < end:
            return None, at
        payload = bytes(buffer[at + HEADER_BYTES : end])
        if zlib.crc32(payload, zlib.crc32(buffer[at : at + 16])) != _WORD.unpack_from(buffer, at + 16)[0]:
            raise FramingError("checksum mismatch")
        return Frame(kind, flags, stream, payload), end

    def _find_hello(self) -> Frame | None:
        """The HELLO that is complete first; leaves the buffer at the byte behind it, in framed mode."""
        buffer = self._buffer
        best: Frame | None = None
        best_end = 0
        keep_from = len(buffer)
        at = buffer.find(MAGIC[:1])
        while at >= 0:
            if self._may_end_first(at, best_end):
                try:
                    frame, end = self._parse(at)
                except FramingError:
                    pass
                else:
                    if frame is None:
                        if len(buffer) - at <= 4 or buffer[at + 4] == HELLO:
                            keep_from = min(keep_from, at)
                    elif frame.kind == HELLO:
                        best, best_end = frame, end
            at = buffer.find(MAGIC[:1], at + 1)
        if best is None:
            self._seen = len(buffer) - keep_from
            del buffer[:keep_from]
            return None
        del buffer[:best_end]
        self._awaiting = False
        self._seen = 0
        return best

    def _may_end_first(self, at: int, best_end: int) -> bool:
        """Whether a candidate at `at` was not judged before and could beat the best one."""
        if len(self._buffer) - at < HEADER_BYTES:
            return True
        end = at + HEADER_BYTES + int(_WORD.unpack_from(self._buffer, at + 12)[0])
        return end > self._seen and not (best_end and end >= best_end)
