"""Pages of text and bytes: how exact bytes from a guest become the strings that callers read.

Pure. Text never splits a UTF-8 character across pages while more may come; invalid bytes become U+FFFD and
are flagged; a page always advances by at least one whole character when there is one. Its neighbour:
`results`.
"""

from __future__ import annotations

import codecs
from typing import Final, NamedTuple

CHARACTER_BYTES: Final = 4
"""The longest UTF-8 character (RFC 3629 §3): what has to be fetched at least for a text page to advance."""

_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class TextPage(NamedTuple):
    """A page of text.

    Attributes:
        text: What to show.
        consumed: Bytes that `text` stands for; the next page begins behind them.
        decoding_error: Whether U+FFFD in `text` stands for invalid bytes (a literal one does not count).
    """

    text: str
    consumed: int
    decoding_error: bool


def fetch_bytes(max_bytes: int) -> int:
    """How many bytes to fetch so that a text page of `max_bytes` can always advance."""
    return max(max_bytes, CHARACTER_BYTES)


def text_page(data: bytes, *, max_bytes: int, more_may_come: bool) -> TextPage:
    """Cut a page of text from the start of `data`.

    Args:
        data: The bytes at the cursor, `fetch_bytes(max_bytes)` of them where there are as many.
        max_bytes: Bytes the page may consume; a single longer character is taken whole nevertheless.
        more_may_come: Whether bytes may follow `data`; if not, a cut-off character at its end is invalid.

    Returns:
        The page; empty only if `data` is, or holds no more than the start of a character.
    """
    whole = len(data) <= max_bytes and not more_may_come
    page = _decode(data[:max_bytes], final=whole)
    return page if page.consumed else _first_character(data, more_may_come=more_may_come)


def _first_character(data: bytes, *, more_may_come: bool) -> TextPage:
    """The first character of `data` alone, where it is longer than the page."""
    head = data[:CHARACTER_BYTES]
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start == 0:
            if more_may_come and error.reason == "unexpected end of data":
                return TextPage("", 0, decoding_error=False)
            return TextPage("\ufffd", error.end, decoding_error=True)
        text = head[: error.start].decode("utf-8")
    return TextPage(text[:1], len(text[:1].encode("utf-8")), decoding_error=False)


def _decode(data: bytes, *, final: bool) -> TextPage:
    decoder = _DECODER("replace")
    text = decoder.decode(data, final)
    consumed = len(data) - len(decoder.getstate()[0])
    try:
        data[:consumed].decode("utf-8")
    except UnicodeDecodeError:
        return TextPage(text, consumed, decoding_error=True)
    return TextPage(text, consumed, decoding_error=False)
