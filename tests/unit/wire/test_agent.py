"""Messages of the channel: what the host writes, and what it takes from a hostile guest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.errors import GuestError
from microvm.wire import agent, framing
from microvm.wire.agent import FilePart, JobSummary, ProtocolError

HELLO: dict[str, Any] = {
    "protocol": 1,
    "version": "0.1.0",
    "generation": 3,
    "nonce": "abc",
    "state": "frozen",
    "python": "3.13.5",
}
SUMMARY: dict[str, Any] = {
    "job_id": "job_x",
    "state": "completed",
    "exit_code": 137,
    "signal": 9,
    "timed_out": True,
    "cancelled": False,
    "truncated": True,
    "totals": {"stdout": 300_000_000, "stderr": 0},
    "kept": {"stdout": 262_144, "stderr": 0},
    "started_at_ns": 1,
    "ended_at_ns": 2,
    "run_seconds": 0.5,
    "background_processes": 0,
    "oom_killed": False,
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_hello_is_understood() -> None:
    hello = agent.parse_hello(encoded(HELLO))
    assert (hello.generation, hello.nonce, hello.state) == (3, "abc", "frozen")


def test_the_hosts_hello_is_a_frame() -> None:
    (frame,) = framing.Decoder().feed(agent.encode_hello(7, "n"))
    assert json.loads(frame.payload) == {"protocol": 1, "generation": 7, "nonce": "n"}


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 2},
        {"protocol": "1"},
        {"generation": -1},
        {"generation": True},
        {"generation": 1 << 70},
        {"nonce": "x" * 65},
        {"nonce": None},
        {"state": "odd"},
        {"version": 1},
        {"python": None},
    ],
)
def test_a_hello_that_breaks_a_rule_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        agent.parse_hello(encoded({**HELLO, **change}))


def test_a_summary_is_understood_whole() -> None:
    summary = JobSummary.parse(SUMMARY)
    assert summary.totals == (300_000_000, 0)
    assert (summary.exit_code, summary.signal, summary.timed_out) == (137, 9, True)
    assert summary.message is None
    assert JobSummary.parse({**SUMMARY, "message": "m"}).message == "m"


@pytest.mark.parametrize("name", sorted(SUMMARY))
@pytest.mark.parametrize("value", ["x" * 5000, -1, 1 << 80, [], {"stdout": "1"}, 1.5, float("nan")])
def test_a_field_of_the_wrong_kind_is_refused(name: str, value: Any) -> None:
    if name == "run_seconds" and value == 1.5:
        return
    with pytest.raises(ProtocolError):
        JobSummary.parse({**SUMMARY, name: value})


def test_a_job_that_claims_to_have_kept_more_than_any_may_is_refused() -> None:
    JobSummary.parse({**SUMMARY, "kept": {"stdout": agent.KEPT_MAX - 1, "stderr": 1}})
    with pytest.raises(ProtocolError):
        JobSummary.parse({**SUMMARY, "kept": {"stdout": agent.KEPT_MAX, "stderr": 1}})


@given(json_values)
def test_no_json_makes_a_parser_fail_otherwise(value: Any) -> None:
    for parse in (JobSummary.parse, FilePart.parse):
        try:
            parse(value)
        except ProtocolError:
            pass


@given(st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_a_parser_fail_otherwise(payload: bytes) -> None:
    for parse in (agent.parse_hello, agent.parse_open, agent.parse_close, agent.parse_reset):
        try:
            parse(payload)
        except GuestError:
            pass


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 30_000,
        b'{"a":' * 5_000,
        b"[[[[[[[[[[]]]]]]]]]]",
        b'{"ok":NaN}',
        b'{"ok":Infinity}',
        b"\xff",
        b"",
        b"{}" * 20_000,
    ],
)
def test_deep_long_or_odd_json_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        agent.parse_json(payload)


def test_a_close_is_a_result_or_an_error() -> None:
    assert agent.parse_close(b'{"ok":{"size":1}}') == {"size": 1}
    error = agent.parse_close(b'{"error":{"code":"not_found","message":"m"}}')
    assert isinstance(error, GuestError)
    assert error.code == "not_found"
    for payload in (b"{}", b"[]", b'{"ok":1}', b'{"error":{"code":"made_up","message":""}}'):
        with pytest.raises(ProtocolError):
            agent.parse_close(payload)


def test_arguments_that_do_not_fit_a_frame_are_refused() -> None:
    with pytest.raises(GuestError) as caught:
        agent.encode_open(1, "op", {"long": "x" * 40_000})
    assert caught.value.code == "payload_too_large"


@given(st.integers(0, 0xFFFFFFFF))
def test_credit_comes_back_as_it_was(count: int) -> None:
    decoder = framing.Decoder()
    decoder.feed(agent.encode_hello(1, ""))
    (frame,) = decoder.feed(agent.encode_credit(5, count))
    assert agent.parse_credit(frame.payload) == count
