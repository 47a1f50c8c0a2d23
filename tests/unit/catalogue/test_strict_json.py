from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.catalogue.strict_json import dumps, loads
from microvm.errors import RequestError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert loads(dumps(value).encode()) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    try:
        value = loads(data)
    except RequestError:
        return
    assert json.loads(data) == value


@pytest.mark.parametrize(
    "number", ["9223372036854775808", "-9223372036854775809", "1e400", "-1e400", "9" * 5000]
)
def test_numbers_that_do_not_fit_are_refused_with_their_path(number: str) -> None:
    with pytest.raises(RequestError) as caught:
        loads(f'{{"a": [0, {{"b": {number}}}]}}'.encode())
    assert caught.value.detail == {"path": "a[1].b"}


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 0])
def test_numbers_of_64_bits_are_exact(number: int) -> None:
    assert loads(str(number).encode()) == number


def test_the_depth_limit_is_exact() -> None:
    assert loads(b"[" * 64 + b"]" * 64)
    with pytest.raises(RequestError, match="deeper than 64"):
        loads(b"[" * 65 + b"]" * 65)


def test_a_long_key_does_not_make_a_long_message() -> None:
    with pytest.raises(RequestError) as caught:
        loads(b'{"' + b"k" * 100_000 + b'": NaN}')
    assert len(caught.value.message) < 200


def test_a_nan_of_ours_is_a_bug_and_never_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"x": float("nan")})


@pytest.mark.parametrize("item", [b"[]", b'"\\",\\\\"', b"1", b'{"a,b":1}'])
def test_more_values_than_any_call_has_are_refused(item: bytes) -> None:
    with pytest.raises(RequestError, match="more than 20000 values"):
        loads(b"[" + b",".join([item] * 20_001) + b"]")


def test_commas_within_text_are_no_values() -> None:
    assert loads(b'"' + b',\\",' * 100_000 + b'"') == ',",' * 100_000
