"""Which bytes of a file a request wants: `Range` and `If-Range` (RFC 9110 §14.2, §13.1.5).

Pure. One range is served; where several are wanted, or the field makes no sense, the whole file is, as the
RFC has it. Neighbour: `transfers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Final

_RANGE: Final = re.compile(r"bytes\s*=\s*([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file, from `start` up to `end`, which is not one of them.

    Attributes:
        partial: Whether the request asked for a part.
        satisfiable: Whether the file has any byte of that part.
    """

    start: int
    end: int
    partial: bool = False
    satisfiable: bool = True

    @property
    def length(self) -> int:
        """How many."""
        return self.end - self.start


def find_span(size: int, *, wanted: str | None, condition: str | None, etag: str, modified_at: float) -> Span:
    """The bytes to serve.

    Args:
        size: The file's.
        wanted: The `Range` field.
        condition: The `If-Range` field: a range of another file than the client has would be of no use.
        etag: The file's, with its quotes; a strong one.
        modified_at: Seconds since the epoch.
    """
    whole = Span(0, size)
    match = _RANGE.fullmatch(wanted.strip()) if wanted is not None else None
    if match is None or not _holds(condition, etag, modified_at):
        return whole
    first, last = match.groups()
    if not first:
        if not last:
            return whole
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < int(first):
            return whole
    return Span(start, end, partial=True, satisfiable=start < end)


def _holds(condition: str | None, etag: str, modified_at: float) -> bool:
    if condition is None:
        return True
    text = condition.strip()
    if text.startswith('"'):
        return text == etag
    date = _date_of(text)
    return date is not None and date.timestamp() == int(modified_at)


def _date_of(text: str) -> datetime | None:
    try:
        return parsedate_to_datetime(text)
    except ValueError:
        return None
