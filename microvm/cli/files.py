"""`vm read` and `vm write`: files of any size.

Promises exact bytes. A file is replaced when all of it has arrived, or not at all; only with an offset it is
written in place, call by call, and a failure leaves the part that was written. It must not interpret paths:
the guest does. Neighbours: `vm`, and `copies`, which moves files and directories between names.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from microvm.cli.client import BeyondEndError, Client, UsageError, raw_path
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
    first = next(chunks, b"")  # an error at the beginning leaves `to` as it was
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
    if length == 0:
        return
    headers: dict[str, str] = {}
    if offset or length is not None:
        headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
    try:
        with client.download(raw_path(vm_id, "files", path), headers) as response:
            yield from response.iter_raw()
    except BeyondEndError:
        return


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
    if offset is None:
        more = file.read(FILE_CALL_BYTES)
        if more:
            return _upload(client, target, chain((data, more), iter(lambda: file.read(FILE_CALL_BYTES), b"")))
        return _write_call(client, target, data, None, truncate=target.truncate)
    result = _write_call(client, target, data, offset, truncate=target.truncate)
    position = offset + len(data)
    while data := file.read(FILE_CALL_BYTES):
        result = _write_call(client, target, data, position, truncate=target.truncate)
        position += len(data)
    return result


def _upload(client: Client, target: Target, content: Iterable[bytes]) -> dict[str, Any]:
    params = {} if target.mode is None else {"mode": target.mode}
    if target.make_parents is not None:
        params["make_parents"] = "1" if target.make_parents else "0"
    return client.upload(raw_path(target.vm_id, "files", target.path), content, params)


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
