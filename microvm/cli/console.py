"""What the command line prints: JSON for programs, tables for people, guest text made harmless.

Promises that nothing a guest wrote can move a terminal's cursor, change its title or its colours. It must
not ask the service anything. Neighbours: every module of `cli`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final, TextIO

from microvm.errors import MicrovmError

# C0, DEL and C1 without newline and tab; bidirectional overrides, which reorder what is read (UTR 36).
_CONTROL: Final = {
    code: None
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if code not in (0x09, 0x0A)
}


def strip_control(text: str) -> str:
    """`text` without the characters by which it could steer a terminal."""
    return text.translate(_CONTROL)


def print_json(value: Any) -> None:
    """One JSON value and a newline on standard output; indented on a terminal."""
    json.dump(value, sys.stdout, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
    sys.stdout.write("\n")


def print_line(text: str, *, to: TextIO | None = None) -> None:
    """One line for a person, stripped on a terminal."""
    stream = to or sys.stdout
    stream.write((strip_control(text) if stream.isatty() else text) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows under headings: drawn on a terminal, tab-separated elsewhere."""
    cells = [[strip_control("" if cell is None else str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in (list(columns), *cells):
            sys.stdout.write("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """The members of one object, a line each, nested objects flattened."""
    lines = list(_flatten(facts))
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        print_line(f"{name:<{width}}  {value}")


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def print_error(error: MicrovmError, *, as_json: bool) -> None:
    """The error object on standard output for programs, a sentence on standard error for people."""
    if as_json:
        print_json({"error": error.to_json()})
        return
    print_line(f"microvm: {error.message} [{error.code}]", to=sys.stderr)
    tail = (error.detail or {}).get("console_tail")
    if isinstance(tail, str) and tail:
        print_line("last console lines:\n" + tail, to=sys.stderr)


class GuestOutput:
    """Writes a guest's bytes as they come: exact to a file or pipe, as harmless text to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        import codecs

        self._stream = stream
        self._bytes: BinaryIO | None = None if stream.isatty() else stream.buffer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, *, final: bool = False) -> None:
        """Passes `data` on at once; `final` also flushes an incomplete character."""
        if self._bytes is not None:
            self._bytes.write(data)
            self._bytes.flush()
            return
        self._stream.write(strip_control(self._decoder.decode(data, final)))
        self._stream.flush()
