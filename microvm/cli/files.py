"""`vm read` and `vm write`: files of any size over calls of at most 128 KiB.

Promises exact bytes. A file that fits one call is replaced atomically; a larger one is written in place,
call by call, and a failure leaves the part that was written. It must not interpret paths: the guest does.
Neighbour: `vm`.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from microvm.cli.client import Client, UsageError
from microvm.cli.console import GuestOutput, print_json
from microvm.errors import RequestError
from microvm.model import FILE_CALL_BYTES


@dataclass(frozen=True, slots=True)
class Target:
    """A guest's file and how it is written; None is left to the service."""

    vm_id: str
    path: str
    mode: str | None = None
    make_parents: bool | None = None
    truncate: bool | None = None


def read(
    client: Client,
    vm_id: str,
    path: str,
    *,
    to: Path | None,
    offset: int,
    length: int | None,
    as_json: bool,
) -> None:
    """Copies a guest's file to `to` or standard output; with `as_json` prints one call's result instead."""
    if as_json:
        first = None if length is None else min(length, FILE_CALL_BYTES)
        print_json(
            client.call("vm_read_file", {"vm_id": vm_id, "path": path, "offset": offset, "length": first})
        )
        return
    chunks = _chunks(client, vm_id, path, offset, length)
    first = next(chunks, b"")  # an error of the first call leaves `to` as it was
    if to is None:
        sink = GuestOutput(sys.stdout)
        sink.write(first)
        for data in chunks:
            sink.write(data)
        sink.write(b"", final=True)
        return
    try:
        with to.open("wb") as file:
            file.write(first)
            file.writelines(chunks)
    except OSError as error:
        raise RequestError("invalid_argument", f"{to} cannot be written: {error.strerror}") from error


def _chunks(client: Client, vm_id: str, path: str, offset: int, length: int | None) -> Iterator[bytes]:
    while length is None or length > 0:
        size = FILE_CALL_BYTES if length is None else min(length, FILE_CALL_BYTES)
        arguments = {"vm_id": vm_id, "path": path, "offset": offset, "length": size, "encoding": "base64"}
        result = client.call("vm_read_file", arguments)
        data = base64.b64decode(result["content_base64"])
        yield data
        if result["eof"] or not data:
            return
        offset += len(data)
        length = None if length is None else length - len(data)


def write(client: Client, target: Target, *, source: Path, offset: int | None) -> dict[str, Any]:
    """Writes a guest's file from `source` (`-` for standard input); returns the last call's result."""
    if source == Path("-"):
        if sys.stdin.isatty():
            raise UsageError("give a file, or a pipe as standard input")
        return _write_from(client, target, sys.stdin.buffer, offset)
    try:
        with source.open("rb") as file:
            return _write_from(client, target, file, offset)
    except OSError as error:
        raise RequestError("invalid_argument", f"{source} cannot be read: {error.strerror}") from error


def _write_from(client: Client, target: Target, file: BinaryIO, offset: int | None) -> dict[str, Any]:
    data = file.read(FILE_CALL_BYTES)
    result = _write_call(client, target, data, offset, truncate=target.truncate)
    position = (offset or 0) + len(data)
    while data := file.read(FILE_CALL_BYTES):
        result = _write_call(client, target, data, position, truncate=target.truncate)
        position += len(data)
    return result


def _write_call(
    client: Client, target: Target, data: bytes, offset: int | None, *, truncate: bool | None
) -> dict[str, Any]:
    return client.call(
        "vm_write_file",
        {
            "vm_id": target.vm_id,
            "path": target.path,
            "content_base64": base64.b64encode(data).decode(),
            "offset": offset,
            "truncate": truncate,
            "mode": target.mode,
            "make_parents": target.make_parents,
        },
    )
