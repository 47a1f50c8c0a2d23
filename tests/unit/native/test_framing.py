"""The C framing and the guest's Python framing: each is the other's oracle."""

from __future__ import annotations

import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guest import framing as guest_framing
from microvm._native import ffi, lib
from microvm.wire import framing
from microvm.wire.framing import CREDIT, DATA, FIN, HELLO, OPEN, RESET, Decoder, Frame, encode_frame

NATIVE = Path(__file__).parents[3] / "native"
AnyDecoder = framing.Decoder | guest_framing.Decoder

streams = st.one_of(st.integers(1, 9), st.integers(1, 2**32 - 1))
hellos = st.builds(Frame, st.just(HELLO), st.just(0), st.just(0), st.binary(max_size=60))
others = st.one_of(
    st.builds(
        Frame,
        st.integers(OPEN, RESET).filter(lambda k: k != CREDIT),
        st.just(0),
        streams,
        st.binary(max_size=60),
    ),
    st.builds(Frame, st.just(DATA), st.just(FIN), streams, st.binary(max_size=60)),
    st.builds(Frame, st.just(CREDIT), st.just(0), streams, st.binary(min_size=4, max_size=4)),
)
frames = st.one_of(hellos, others)


def header(kind: int, flags: int, zero: int, stream: int, length: int) -> bytes:
    return struct.pack("<4sBBHII", b"MVM1", kind, flags, zero, stream, length)


def raw_frame(
    kind: int, flags: int, zero: int, stream: int, payload: bytes, length: int | None = None
) -> bytes:
    fields = header(kind, flags, zero, stream, len(payload) if length is None else length)
    return fields + struct.pack("<I", zlib.crc32(fields + payload)) + payload


# What may stand before a HELLO: noise, beginnings of frames, and HELLOs that promise more than comes.
beginnings = st.tuples(frames.map(lambda f: encode_frame(*f)), st.integers(0, 80)).map(lambda p: p[0][: p[1]])
false_hellos = st.integers(0, 6000).map(lambda n: header(HELLO, 0, 0, 0, n) + b"\0\0\0\0")
garbage = st.lists(
    st.one_of(
        st.binary(max_size=30), st.sampled_from([b"M", b"MV", b"MVM", b"MVM1"]), beginnings, false_hellos
    ),
    max_size=5,
).map(b"".join)


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Garbage, a HELLO, frames; now and then with a byte changed or the end cut off."""
    parts = [draw(garbage), encode_frame(*draw(hellos))]
    parts += [encode_frame(*frame) for frame in draw(st.lists(frames, max_size=6))]
    data = bytearray(b"".join(parts))
    if draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    chunks: list[bytes] = []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    return [*chunks, data]


def outcome(decoder: AnyDecoder, chunks: list[bytes]) -> tuple[list[tuple[object, ...]], bool]:
    """All frames, and whether the connection broke; what comes after the break is not fed."""
    got: list[tuple[object, ...]] = []
    for chunk in chunks:
        try:
            got += [tuple(frame) for frame in decoder.feed(chunk)]
        except framing.FramingError as error:
            return [*got, *(tuple(frame) for frame in error.frames)], True
        except guest_framing.FramingError:
            return got, True
    return got, False


def single_bytes(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@given(frames)
def test_both_encoders_make_the_same_bytes(frame: Frame) -> None:
    assert (
        encode_frame(*frame)
        == guest_framing.encode_frame(*frame)
        == raw_frame(frame[0], frame[1], 0, *frame[2:])
    )


@given(st.integers(0, 300), st.integers(0, 300), st.integers(-1, 2**33), st.integers(0, 5000), st.booleans())
@example(HELLO, 0, 0, 4096, False)
@example(HELLO, 0, 0, 4097, False)
@example(DATA, 1, 1, 32768, False)
@example(DATA, 1, 1, 32769, False)
@example(DATA, 2, 1, 1, False)
@example(OPEN, 1, 1, 1, False)
@example(OPEN, 0, 0, 1, False)
@example(HELLO, 0, 1, 1, False)
@example(CREDIT, 0, 1, 3, False)
def test_both_encoders_refuse_the_same_fields(
    kind: int, flags: int, stream: int, length: int, tiny: bool
) -> None:
    if tiny:
        kind, flags, stream = kind % 8, flags % 3, stream % 3
    payload = bytes(length)

    def accepts(encode: Callable[[int, int, int, bytes], bytes]) -> bool:
        try:
            encode(kind, flags, stream, payload)
        except (framing.FramingError, guest_framing.FramingError):
            return False
        return True

    assert accepts(encode_frame) == accepts(guest_framing.encode_frame)


@given(st.lists(frames, max_size=8))
def test_what_is_encoded_is_decoded(sent: list[Frame]) -> None:
    greeting = Frame(HELLO, 0, 0, b"{}")
    data = b"".join(encode_frame(*frame) for frame in [greeting, *sent])
    assert Decoder().feed(data) == [greeting, *sent]


@settings(max_examples=400)
@given(conversations(), st.lists(st.integers(0, 70), max_size=12))
def test_how_bytes_are_cut_changes_nothing(data: bytes, sizes: list[int]) -> None:
    by_bytes = outcome(Decoder(), single_bytes(data))
    assert outcome(Decoder(), [data]) == by_bytes
    assert outcome(Decoder(), cut(data, sizes)) == by_bytes


@settings(max_examples=400)
@given(conversations())
def test_host_and_guest_decode_alike(data: bytes) -> None:
    assert outcome(Decoder(), single_bytes(data)) == outcome(guest_framing.Decoder(), single_bytes(data))


@given(
    st.tuples(st.integers(0, 8), st.integers(0, 3), st.sampled_from([0, 0, 1]), st.integers(0, 2)),
    st.binary(max_size=8),
    st.one_of(st.none(), st.sampled_from([0, 4096, 4097, 32768, 32769, 2**32 - 1])),
)
def test_both_refuse_the_same_frames(
    fields: tuple[int, int, int, int], payload: bytes, length: int | None
) -> None:
    data = encode_frame(HELLO, 0, 0) + raw_frame(*fields, payload, length)
    assert outcome(Decoder(), single_bytes(data)) == outcome(guest_framing.Decoder(), single_bytes(data))


def test_a_false_hello_hides_no_true_one_behind_it() -> None:
    true = encode_frame(HELLO, 0, 0, b'{"protocol":1}')
    for length in (1, len(true), 4000, 4096):
        decoder = Decoder()
        assert decoder.feed(header(HELLO, 0, 0, 0, length) + b"\0\0\0\0" + true) == [
            Frame(HELLO, 0, 0, b'{"protocol":1}')
        ]
        assert not decoder.awaiting_hello


def test_noise_before_the_hello_takes_no_memory() -> None:
    decoder = Decoder()
    flood = header(HELLO, 0, 0, 0, 4096) + b"\0\0\0\0"
    for _ in range(2000):
        assert decoder.feed(flood) == []
    assert decoder.feed(encode_frame(HELLO, 0, 0, b"x")) == [Frame(HELLO, 0, 0, b"x")]


def test_a_broken_connection_stays_broken_until_a_hello_is_awaited() -> None:
    decoder = Decoder()
    good = encode_frame(DATA, FIN, 1, b"good")
    with pytest.raises(framing.FramingError, match="bad magic") as caught:
        decoder.feed(encode_frame(HELLO, 0, 0) + good + b"junk")
    assert [frame.payload for frame in caught.value.frames] == [b"", b"good"]
    with pytest.raises(framing.FramingError):
        decoder.feed(good)
    decoder.await_hello()
    assert decoder.feed(good + encode_frame(HELLO, 0, 0, b"again")) == [Frame(HELLO, 0, 0, b"again")]


def test_awaiting_a_hello_discards_the_partial_frame() -> None:
    decoder = Decoder()
    decoder.feed(encode_frame(HELLO, 0, 0) + encode_frame(DATA, 0, 1, bytes(100))[:50])
    decoder.await_hello()
    assert decoder.feed(encode_frame(HELLO, 0, 0, b"new")) == [Frame(HELLO, 0, 0, b"new")]


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_checksums_chain_as_zlibs(parts: list[bytes]) -> None:
    ours = theirs = 0
    for part in parts:
        ours = lib.mvm_crc32(ours, ffi.from_buffer("uint8_t[]", part), len(part))
        theirs = zlib.crc32(part, theirs)
    assert ours == theirs


@pytest.fixture(scope="session")
def sanitized_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("sanitize") / "driver"
    subprocess.run(
        ["gcc", "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", f"-I{NATIVE}", "-o", str(program),
         str(Path(__file__).with_name("sanitize_driver.c")), str(NATIVE / "frame.c")],
        check=True,
    )  # fmt: skip
    return program


@settings(max_examples=5, deadline=None)
@given(cases=st.lists(st.one_of(conversations(), garbage), min_size=20, max_size=60))
def test_no_input_makes_the_c_code_read_astray(sanitized_driver: Path, cases: list[bytes]) -> None:
    corpus = b"".join(struct.pack("=I", len(case)) + case for case in cases)
    done = subprocess.run([str(sanitized_driver)], input=corpus, capture_output=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(cases)).encode()), done.stderr.decode()
