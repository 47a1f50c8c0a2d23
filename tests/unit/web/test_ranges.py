"""Which bytes a request for a part of a file gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.web.ranges import Span, find_span

ETAG = '"abc"'
MODIFIED_AT = 784111777.25  # Sun, 06 Nov 1994 08:49:37 GMT, the date of RFC 9110's examples


def span(wanted: str | None, *, size: int = 10, condition: str | None = None) -> Span:
    return find_span(size, wanted=wanted, condition=condition, etag=ETAG, modified_at=MODIFIED_AT)


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=3-5", 3, 6),
        ("bytes=3-", 3, 10),
        ("bytes=3-999", 3, 10),
        ("bytes=-4", 6, 10),
        ("bytes=-999", 0, 10),
        ("Bytes = 9-9", 9, 10),
    ],
)
def test_one_range_is_a_part(wanted: str, start: int, end: int) -> None:
    assert span(wanted) == Span(start, end, partial=True)


@pytest.mark.parametrize("wanted", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_a_range_behind_the_end_cannot_be_had(wanted: str) -> None:
    assert not span(wanted).satisfiable


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        "",
        "bytes=",
        "bytes=-",
        "bytes=5-3",
        "bytes=0-1,3-4",
        "lines=0-1",
        "bytes=a-b",
        "bytes=0-" + "9" * 30,
    ],
)
def test_what_makes_no_sense_or_asks_for_several_is_the_whole_file(wanted: str | None) -> None:
    assert span(wanted) == Span(0, 10)


def test_an_empty_file_has_no_part() -> None:
    assert not span("bytes=0-", size=0).satisfiable
    assert span(None, size=0) == Span(0, 0)


@pytest.mark.parametrize("condition", [ETAG, "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_part_of_the_file_that_the_client_has_is_served(condition: str) -> None:
    assert span("bytes=3-", condition=condition).partial


@pytest.mark.parametrize(
    "condition", ['"other"', 'W/"abc"', "Sun, 06 Nov 1994 08:49:38 GMT", "yesterday", "", "abc"]
)
def test_of_any_other_file_the_client_gets_all(condition: str) -> None:
    assert span("bytes=3-", condition=condition) == Span(0, 10)


@given(st.text(max_size=40), st.text(max_size=40) | st.none(), st.integers(0, 1 << 40))
def test_no_field_breaks_it_or_leaves_the_file(wanted: str, condition: str | None, size: int) -> None:
    found = span(wanted, size=size, condition=condition)
    if found.satisfiable:
        assert 0 <= found.start <= found.end <= size
