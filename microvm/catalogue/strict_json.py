"""JSON as the doors accept it: RFC 8259 without the liberties that Python's reader takes.

Refused, with the path of the culprit: duplicate keys, NaN and infinities (also by overflow, `1e999`),
integers beyond 64 bits, nesting deeper than 64, more values than any call has, lone surrogates, anything that
is not UTF-8. It must not know any schema. Its neighbours: `web` reads every body with it, `schema` checks
what it returns.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, cast

from microvm.errors import RequestError

MAX_DEPTH: Final = 64
"""Containers within containers, the outermost counted (the service's contract: deeper than 64 is 400)."""

MAX_MEMBERS: Final = 20_000
"""Values in one body. The largest honest call has some hundred; 4 MiB of `[],[],…` would keep the reader, and
with it the daemon, busy for 3.9 s (measured), this many for 60 ms."""

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_INT64_DIGITS: Final = 19
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_SHOWN_NAME: Final = 80


class _Refused:
    """Stands in a parsed tree for what may not be there, so that the walk can say where it was."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


def _object(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return _Refused(f"the key {shown_name(name)} appears twice")
        seen.add(name)
    raise AssertionError("fewer members than pairs, yet no duplicate")


def _integer(digits: str) -> Any:
    if len(digits) <= _INT64_DIGITS + 1 and _INT64_MIN <= (value := int(digits)) <= _INT64_MAX:
        return value
    return _Refused("the integer does not fit 64 bits")


def _float(digits: str) -> Any:
    value = float(digits)
    return value if math.isfinite(value) else _Refused("the number is too large")


def _constant(name: str) -> Any:
    return _Refused(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def shown_name(name: str) -> str:
    """`name` as messages show it: printable, quoted, and of bounded length."""
    return ascii(name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "…")


def _refuse(path: str, why: str) -> RequestError:
    where = path or "the body"
    return RequestError("invalid_argument", f"{where}: {why}", {"path": path})


def loads(body: bytes | bytearray) -> Any:
    """Read one JSON text.

    Args:
        body: The text in UTF-8; a byte order mark is refused.

    Returns:
        dict, list, str, int, float, bool or None.

    Raises:
        RequestError: `invalid_argument`, with the path in `detail`.
    """
    if len(body) > MAX_MEMBERS and _STRING.sub(b"", body).count(b",") >= MAX_MEMBERS:
        raise _refuse("", f"more than {MAX_MEMBERS} values")
    try:
        tree = _DECODER.decode(bytes(body).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _refuse("", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _refuse("", f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _refuse("", f"nested deeper than {MAX_DEPTH}") from None
    _check(tree)
    return tree


def _check(tree: Any) -> None:
    """Find what the decoder marked, what is too deep, and text that has no UTF-8."""
    pending: list[tuple[Any, str, int]] = [(tree, "", 1)]
    while pending:
        node, path, depth = pending.pop()
        if isinstance(node, str):
            if not _encodes(node):
                raise _refuse(path, "a lone surrogate is not text")
        elif isinstance(node, _Refused):
            raise _refuse(path, node.why)
        elif isinstance(node, (dict, list)):
            if depth > MAX_DEPTH:
                raise _refuse(path[:_SHOWN_NAME], f"nested deeper than {MAX_DEPTH}")
            pending.extend(_children(cast("dict[str, Any] | list[Any]", node), path, depth + 1))


def _children(node: dict[str, Any] | list[Any], path: str, depth: int) -> list[tuple[Any, str, int]]:
    """The members that may hold something to refuse, each with its path."""
    children: list[tuple[Any, str, int]] = []
    if isinstance(node, list):
        for index, value in enumerate(node):
            if _may_hold(value):
                children.append((value, f"{path}[{index}]", depth))
        return children
    for name, value in node.items():
        if not _encodes(name):
            raise _refuse(path, "a key holds a lone surrogate")
        if _may_hold(value):
            step = name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "…"
            children.append((value, f"{path}.{step}" if path else step, depth))
    return children


def _may_hold(value: object) -> bool:
    return isinstance(value, (str, dict, list, _Refused))


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def dumps(value: Any) -> str:
    """Compact JSON, never NaN.

    Raises:
        ValueError: The value holds a NaN or an infinity, which is a bug of whoever made it.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
