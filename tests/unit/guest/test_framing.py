"""The guest's framing on its own; against the host's: `tests/unit/native`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guest.framing import (
    CLOSE,
    CREDIT,
    DATA,
    FIN,
    HELLO,
    HELLO_MAX,
    OPEN,
    PAYLOAD_MAX,
    RESET,
    Decoder,
    Frame,
    FramingError,
    encode_frame,
)

HELLO_FRAME = encode_frame(HELLO, 0, 0, b"{}")


def framed(data: bytes) -> list[Frame]:
    decoder = Decoder()
    decoder.feed(HELLO_FRAME)
    return decoder.feed(data)


def bodies() -> st.SearchStrategy[Frame]:
    streams = st.integers(1, 0xFFFFFFFF)
    payload = st.binary(max_size=200)
    plain = st.builds(Frame, st.sampled_from([OPEN, CLOSE, RESET]), st.just(0), streams, payload)
    data = st.builds(Frame, st.just(DATA), st.sampled_from([0, FIN]), streams, payload)
    credit = st.builds(Frame, st.just(CREDIT), st.just(0), streams, st.binary(min_size=4, max_size=4))
    hello = st.builds(Frame, st.just(HELLO), st.just(0), st.just(0), payload)
    return st.one_of(plain, data, credit, hello)


@given(st.lists(bodies(), max_size=8))
def test_frames_come_back_as_they_were(frames: list[Frame]) -> None:
    assert framed(b"".join(encode_frame(*frame) for frame in frames)) == frames


@given(st.binary(max_size=60), st.lists(bodies(), max_size=4))
def test_cutting_the_bytes_anywhere_changes_nothing(garbage: bytes, frames: list[Frame]) -> None:
    data = garbage + HELLO_FRAME + b"".join(encode_frame(*frame) for frame in frames)
    whole = Decoder().feed(data)
    single = Decoder()
    assert [frame for byte in data for frame in single.feed(bytes([byte]))] == whole


@pytest.mark.parametrize("cut", range(1, 21))
def test_a_false_beginning_never_hides_a_hello(cut: int) -> None:
    false = encode_frame(HELLO, 0, 0, b"x" * HELLO_MAX)[:cut]
    assert Decoder().feed(false + HELLO_FRAME) == [Frame(HELLO, 0, 0, b"{}")]


def test_bytes_before_a_hello_are_skipped_and_those_after_it_must_be_frames() -> None:
    decoder = Decoder()
    assert decoder.feed(encode_frame(OPEN, 0, 1, b"x")) == []
    assert decoder.awaiting_hello
    assert len(decoder.feed(HELLO_FRAME + encode_frame(OPEN, 0, 1, b"x"))) == 2
    with pytest.raises(FramingError):
        decoder.feed(b"noise")


def test_awaiting_a_hello_discards_a_partial_frame() -> None:
    decoder = Decoder()
    decoder.feed(HELLO_FRAME + encode_frame(DATA, 0, 1, b"half")[:22])
    decoder.await_hello()
    assert decoder.feed(HELLO_FRAME) == [Frame(HELLO, 0, 0, b"{}")]


def test_what_is_kept_while_awaiting_a_hello_is_bounded() -> None:
    decoder = Decoder()
    for _ in range(200):
        decoder.feed(b"MVM1" * 256)
    assert len(vars_of(decoder)) <= HELLO_MAX + 20


def vars_of(decoder: Decoder) -> bytearray:
    return decoder._buffer  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("at", range(20))
def test_every_damaged_header_byte_is_noticed(at: int) -> None:
    damaged = bytearray(encode_frame(DATA, FIN, 7, b"payload") + encode_frame(DATA, 0, 9))
    damaged[at] ^= 0x41
    with pytest.raises(FramingError):
        framed(bytes(damaged) + bytes(PAYLOAD_MAX + 20))


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "payload"),
    [
        (0, 0, 1, b""),
        (7, 0, 1, b""),
        (OPEN, FIN, 1, b""),
        (DATA, 2, 1, b""),
        (DATA, 0, 0, b""),
        (HELLO, 0, 1, b""),
        (HELLO, 0, 0, bytes(HELLO_MAX + 1)),
        (DATA, 0, 1, bytes(PAYLOAD_MAX + 1)),
        (CREDIT, 0, 1, b"123"),
        (DATA, 0, 1 << 32, b""),
    ],
)
def test_an_illegal_frame_is_not_encoded(kind: int, flags: int, stream: int, payload: bytes) -> None:
    with pytest.raises(FramingError):
        encode_frame(kind, flags, stream, payload)
