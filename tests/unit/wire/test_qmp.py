"""QMP is read as hostile input: bounded, typed, and the same in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.wire.qmp import (
    MAX_DEPTH,
    MAX_LINE_BYTES,
    MAX_TEXT,
    BlockIoError,
    Greeting,
    Message,
    MigrationChanged,
    OtherEvent,
    QmpDecoder,
    QmpError,
    Refusal,
    Reply,
    Resumed,
    Shutdown,
    Stopped,
    encode_command,
)

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 13, "minor": 0, "major": 10}, "package": ""},'
    b' "capabilities": ["oob"]}}'
)
BLOCK_IO_ERROR = (
    '"event": "BLOCK_IO_ERROR", "data": {"device": "", "node-name": "disk", "nospace": true,'
    ' "operation": "write", "action": "stop", "reason": "No space left on device"}'
)
STAMP = '"timestamp": {"seconds": 1, "microseconds": 2}'


def decode(line: bytes) -> Message:
    (message,) = QmpDecoder().feed(line + b"\r\n")
    return message


def test_the_greeting_tells_the_version() -> None:
    assert decode(GREETING) == Greeting("10.0.13")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"return": {"status": "paused"}, "id": 7}', Reply(7, {"status": "paused"})),
        ('{"id": 8, "error": {"class": "GenericError", "desc": "no"}}', Refusal(8, "GenericError", "no")),
        (
            '{"error": {"class": "GenericError", "desc": "not JSON"}}',
            Refusal(None, "GenericError", "not JSON"),
        ),
        (f'{{{STAMP}, "event": "STOP"}}', Stopped()),
        (f'{{{STAMP}, "event": "RESUME"}}', Resumed()),
        (
            f'{{{STAMP}, "event": "MIGRATION", "data": {{"status": "completed"}}}}',
            MigrationChanged("completed"),
        ),
        (
            f'{{{STAMP}, "event": "SHUTDOWN", "data": {{"guest": true, "reason": "guest-panic"}}}}',
            Shutdown(by_guest=True, reason="guest-panic"),
        ),
        (
            f"{{{STAMP}, {BLOCK_IO_ERROR}}}",
            BlockIoError(stops=True, no_space=True, reason="No space left on device"),
        ),
        (f'{{{STAMP}, "event": "VSERPORT_CHANGE", "data": {{"open": true}}}}', OtherEvent("VSERPORT_CHANGE")),
    ],
)
def test_each_message_becomes_its_type(line: str, message: Message) -> None:
    assert decode(line.encode()) == message


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"1",
        b'"QMP"',
        b"{}",
        b"{",
        b"\xff\xfe",
        b'{"return": NaN, "id": 1}',
        b'{"return": {}, "id": "1"}',
        b'{"return": {}, "id": true}',
        b'{"return": {}}',
        b'{"error": "no", "id": 1}',
        b'{"event": 5}',
        b'{"event": "MIGRATION", "data": {"status": 3}}',
        b'{"event": "STOP", "data": []}',
        b'{"QMP": {"version": {"qemu": {"major": "10"}}}}',
        b'{"QMP": 1}',
        b'{"return": ' + b"9" * 5000 + b', "id": 1}',
    ],
)
def test_what_is_not_qmp_breaks_the_connection_for_good(line: bytes) -> None:
    decoder = QmpDecoder()
    with pytest.raises(QmpError):
        decoder.feed(line + b"\n")
    with pytest.raises(QmpError):
        decoder.feed(b'{"return": {}, "id": 1}\n')


@pytest.mark.parametrize(("depth", "fits"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False), (100_000, False)])
def test_nesting_is_bounded_before_the_parser_sees_it(depth: int, fits: bool) -> None:
    line = b'{"id": 1, "return": ' + b"[" * depth + b"]" * depth + b"}"
    if fits:
        assert isinstance(decode(line), Reply)
    else:
        with pytest.raises(QmpError, match="nested"):
            decode(line)


def test_brackets_inside_texts_are_not_nesting() -> None:
    text = '[{\\"' * 100
    assert decode(f'{{"id": 1, "return": "{text}"}}'.encode()) == Reply(1, '[{"' * 100)


def test_a_message_without_an_end_is_refused_at_the_bound() -> None:
    decoder = QmpDecoder()
    decoder.feed(b" " * MAX_LINE_BYTES)
    with pytest.raises(QmpError, match="longer"):
        decoder.feed(b" ")


def test_a_long_message_that_ends_is_refused_too() -> None:
    line = b'{"id": 1, "return": "' + b"x" * MAX_LINE_BYTES + b'"}\n'
    with pytest.raises(QmpError, match="longer"):
        QmpDecoder().feed(line)


def test_texts_are_cut_and_made_printable() -> None:
    refusal = decode(b'{"id": 1, "error": {"class": "a\\u001b[2J\\ud800", "desc": "' + b"y" * 5000 + b'"}}')
    assert isinstance(refusal, Refusal)
    assert refusal.error_class == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"
    assert refusal.description == "y" * MAX_TEXT
    refusal.error_class.encode("utf-8")


def test_empty_lines_mean_nothing() -> None:
    assert QmpDecoder().feed(b"\r\n\n  \n") == []


LINES = st.sampled_from(
    [
        GREETING,
        b'{"return": {}, "id": 1}',
        b'{"return": [1, {"a": "\xc3\xa9"}], "id": 2}',
        b'{"id": 3, "error": {"class": "GenericError", "desc": "no"}}',
        b'{"event": "STOP"}',
        b"",
    ]
)


@given(st.lists(LINES), st.lists(st.integers(1, 40)))
def test_pieces_of_any_size_decode_to_the_same(lines: list[bytes], sizes: list[int]) -> None:
    data = b"".join(line + b"\r\n" for line in lines)
    whole = QmpDecoder().feed(data)
    decoder = QmpDecoder()
    pieces: list[Message] = []
    for size in [*sizes, *([1] * len(data))]:
        piece, data = data[:size], data[size:]
        pieces += decoder.feed(piece)
    assert pieces == whole


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        QmpDecoder().feed(data + b"\n")
    except QmpError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.integers(1), st.dictionaries(st.text(), JSON, max_size=3))
def test_a_command_is_one_line_that_says_what_was_asked(command_id: int, arguments: dict[str, Any]) -> None:
    line = encode_command(command_id, "getfd", arguments)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    said = json.loads(line)
    assert said.pop("arguments", {}) == arguments
    assert said == {"execute": "getfd", "id": command_id}
