"""The file worker's loop: one call after another, each from its first packet to its last, blocking at will.

Runs in a child process with the guest user's rights; `files` is the supervisor's end of its socket. What the
calls do is `fileops` and `archive`. Messages (one packet each) begin with a letter:

    to the worker    C call (JSON)   D bytes of the body   E end of the body   X the caller is gone
    from the worker  D bytes of the body   O done (JSON)   F failed (JSON)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from guest import archive, fileops
from guest.errors import OpError
from guest.fileops import Body, Send, Workspace

READS: Final = frozenset({"read_file", "read_archive"})
"""Calls whose answer has a body; they take none."""
_WRITES: Final[dict[str, Callable[[Workspace, dict[str, Any], Body], dict[str, Any]]]] = {
    "write_file": fileops.write,
    "write_archive": archive.write,
}
WRITES: Final = frozenset(_WRITES)
"""Calls that take a body."""


def serve(workspace: Workspace, receive: Callable[[], bytes], send: Send) -> None:
    """Answers calls until the supervisor closes the socket."""
    while packet := receive():
        call = json.loads(packet[1:])
        try:
            answer = b"O" + json.dumps(_run(workspace, call, receive, send)).encode()
        except OpError as error:
            answer = _failure(error)
        except fileops.CallerGoneError:
            answer = _failure(OpError("internal", "the caller is gone"))
        except OSError as error:
            answer = _failure(OpError.of_errno(error.errno or 0, "path"))
        except (ValueError, OverflowError) as error:
            answer = _failure(OpError("invalid_argument", str(error)))
        send(answer)


def _failure(error: OpError) -> bytes:
    return b"F" + json.dumps({"code": error.code, "message": error.message}).encode()


def _run(
    workspace: Workspace, call: dict[str, Any], receive: Callable[[], bytes], send: Send
) -> dict[str, Any]:
    op, args = call["op"], call["args"]
    if op in READS:
        read = fileops.read if op == "read_file" else archive.read
        return read(workspace, args, lambda data: send(b"D" + data))
    if op in WRITES:
        body = _Body(receive)
        try:
            return _WRITES[op](workspace, args, iter(body))
        finally:
            body.discard_rest()
    os.sync()
    return {}


class _Body:
    """The body of a call, as packets, read to its end whatever happens: the next call begins clean."""

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        while not self._ended:
            packet = self._receive()
            if packet[:1] == b"D":
                yield packet[1:]
                continue
            self._ended = True
            if packet[:1] != b"E":
                raise fileops.CallerGoneError

    def discard_rest(self) -> None:
        with contextlib.suppress(fileops.CallerGoneError):
            for _ in self:
                pass
