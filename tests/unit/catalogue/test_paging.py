from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.catalogue.paging import fetch_bytes, text_page

almost_text = st.lists(
    st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3)), max_size=12
).map(b"".join)


def read_all(data: bytes, max_bytes: int) -> tuple[str, bool, list[int]]:
    """Page through `data` as a finished job's output."""
    text, errors, offset, advances = "", False, 0, list[int]()
    while offset < len(data):
        part = data[offset : offset + fetch_bytes(max_bytes)]
        page = text_page(part, max_bytes=max_bytes, more_may_come=offset + len(part) < len(data))
        assert page.consumed > 0, "a page that does not advance would be asked for for ever"
        text += page.text
        errors = errors or page.decoding_error
        advances.append(page.consumed)
        offset += page.consumed
    return text, errors, advances


def valid(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(almost_text, st.integers(1, 9))
def test_pages_of_any_size_join_to_the_whole_text(data: bytes, max_bytes: int) -> None:
    text, errors, _ = read_all(data, max_bytes)
    assert text == data.decode("utf-8", "replace")
    assert errors == (not valid(data))


@given(st.text(max_size=20), st.integers(1, 9))
def test_valid_text_is_never_flagged_and_never_split(text: str, max_bytes: int) -> None:
    data = text.encode()
    joined, errors, advances = read_all(data, max_bytes)
    assert (joined, errors) == (text, False)
    assert all(advance <= max(max_bytes, 4) for advance in advances)


@given(st.text(min_size=1, max_size=8), st.integers(1, 40))
def test_a_cut_off_character_waits_while_more_may_come(text: str, keep: int) -> None:
    data = text.encode()[:keep]
    page = text_page(data, max_bytes=16384, more_may_come=True)
    assert not page.decoding_error
    assert data[: page.consumed].decode() == page.text
    assert len(data) - page.consumed < 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_long_character_is_whole_on_a_page_that_is_shorter(size: int) -> None:
    assert text_page("😀"[:1].encode() + b"ab"[:0], max_bytes=size, more_may_come=True) == ("😀", 4, False)


def test_a_literal_replacement_character_is_no_error() -> None:
    assert text_page("\ufffd".encode(), max_bytes=9, more_may_come=False) == ("\ufffd", 3, False)


def test_the_end_of_what_was_kept_makes_a_cut_off_character_invalid() -> None:
    assert text_page(b"a\xe2\x82", max_bytes=9, more_may_come=False) == ("a\ufffd", 3, True)


def test_nothing_is_an_empty_page() -> None:
    assert text_page(b"", max_bytes=1, more_may_come=True) == ("", 0, False)
    assert text_page(b"", max_bytes=1, more_may_come=False) == ("", 0, False)
