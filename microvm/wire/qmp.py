"""QMP, the control protocol of QEMU, as values: commands to bytes, hostile bytes to messages.

Promises that whatever a VMM sends is bounded in size and depth before it is looked at, and that every message
handed on has a checked type. Must not do I/O or know what any command means. Neighbour: `microvm.vmm.monitor`
moves the bytes.

Source: QEMU 10, docs/interop/qmp-spec.rst.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

MAX_LINE_BYTES: Final = 1 << 20  # the longest answer that the driver asks for (query-migrate) is below 4 KiB
MAX_DEPTH: Final = 32  # query-migrate nests 4 deep; Python's own limit is near 1000
MAX_TEXT: Final = 1000  # characters kept of any text that ends up in an error or a log

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_OPENERS: Final = frozenset(b"{[")
_CLOSERS: Final = frozenset(b"}]")


class QmpError(ValueError):
    """The peer broke the protocol; nothing it sends afterwards can be trusted."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a connection.

    Attributes:
        version: "10.0.3", as QEMU says it.
    """

    version: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The success of the command sent with `command_id`."""

    command_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """The failure of the command sent with `command_id`; None where QEMU could not read the command."""

    command_id: int | None
    error_class: str
    description: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The vCPUs stopped, whoever asked for it."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The vCPUs run."""


@dataclass(frozen=True, slots=True)
class BlockIoError:
    """A disk request failed on the host.

    Attributes:
        stops: Whether QEMU stops the vCPUs for it.
        no_space: Whether the cause was a full file system.
    """

    stops: bool
    no_space: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MigrationChanged:
    """Saving or loading reached another status."""

    status: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """QEMU is about to exit.

    Attributes:
        by_guest: Whether the guest powered off, reset or panicked.
        reason: Such as "guest-shutdown", "guest-reset", "host-signal".
    """

    by_guest: bool
    reason: str


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """An event that nobody here acts on."""

    name: str


Event = Stopped | Resumed | BlockIoError | MigrationChanged | Shutdown | OtherEvent
Message = Greeting | Reply | Refusal | Event


def encode_command(command_id: int, name: str, arguments: Mapping[str, Any] | None = None) -> bytes:
    """One command as a line that QEMU reads without waiting for more."""
    command: dict[str, Any] = {"execute": name, "id": command_id}
    if arguments:
        command["arguments"] = dict(arguments)
    return json.dumps(command, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


class QmpDecoder:
    """Cuts a byte stream into messages; memory is bounded by `MAX_LINE_BYTES` and one fed chunk."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._broken = False

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next bytes, in pieces of any size.

        Returns:
            The messages that became complete.

        Raises:
            QmpError: On a message that is too long, too deep, or not QMP; again on every later call.
        """
        if self._broken:
            raise QmpError("the connection is broken")
        try:
            return self._feed(data)
        except QmpError:
            self._broken = True
            self._partial.clear()
            raise

    def _feed(self, data: bytes) -> list[Message]:
        first, *rest = data.split(b"\n")
        self._partial += first
        messages: list[Message] = []
        for piece in rest:
            self._take_line(messages)
            self._partial += piece
        if len(self._partial) > MAX_LINE_BYTES:
            raise QmpError(f"a message is longer than {MAX_LINE_BYTES} bytes")
        return messages

    def _take_line(self, messages: list[Message]) -> None:
        line = bytes(self._partial).strip()
        self._partial.clear()
        if len(line) > MAX_LINE_BYTES:
            raise QmpError(f"a message is longer than {MAX_LINE_BYTES} bytes")
        if line:
            messages.append(_decode_line(line))


def _decode_line(line: bytes) -> Message:
    _check_depth(line)
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise QmpError("a message is not JSON") from error
    message = _object(value, "message")
    if "QMP" in message:
        return _decode_greeting(message)
    if "return" in message:
        return Reply(_command_id(message), message["return"])
    if "error" in message:
        return _decode_refusal(message)
    if "event" in message:
        return _decode_event(message)
    raise QmpError("a message is neither greeting, answer nor event")


def _check_depth(line: bytes) -> None:
    """Refuses deep nesting before the recursive parser sees it."""
    if line.count(b"{") + line.count(b"[") <= MAX_DEPTH:
        return
    depth = 0
    for byte in _STRING.sub(b"", line):
        if byte in _OPENERS:
            depth += 1
            if depth > MAX_DEPTH:
                raise QmpError(f"a message is nested deeper than {MAX_DEPTH}")
        elif byte in _CLOSERS:
            depth -= 1


def _refuse_constant(name: str) -> NoReturn:
    raise QmpError(f"a message holds {name}, which JSON does not have")


def _decode_greeting(message: dict[str, Any]) -> Greeting:
    version = _object(_object(message["QMP"], "QMP").get("version"), "version")
    numbers = _object(version.get("qemu"), "version.qemu")
    parts = [numbers.get(part) for part in ("major", "minor", "micro")]
    if not all(type(part) is int and 0 <= part < 1000 for part in parts):
        raise QmpError("the greeting's version is not three numbers")
    return Greeting(".".join(str(part) for part in parts))


def _decode_refusal(message: dict[str, Any]) -> Refusal:
    error = _object(message["error"], "error")
    known = _command_id(message) if "id" in message else None
    return Refusal(known, _text(error.get("class"), "error.class"), _text(error.get("desc"), "error.desc"))


def _decode_event(message: dict[str, Any]) -> Event:
    name = _text(message["event"], "event")
    data = _object(message.get("data", {}), "data")
    if name == "STOP":
        return Stopped()
    if name == "RESUME":
        return Resumed()
    if name == "BLOCK_IO_ERROR":
        stops = _text(data.get("action"), "action") == "stop"
        return BlockIoError(stops, data.get("nospace") is True, _text(data.get("reason", ""), "reason"))
    if name == "MIGRATION":
        return MigrationChanged(_text(data.get("status"), "status"))
    if name == "SHUTDOWN":
        return Shutdown(data.get("guest") is True, _text(data.get("reason", ""), "reason"))
    return OtherEvent(name)


def _command_id(message: dict[str, Any]) -> int:
    command_id = message.get("id")
    if type(command_id) is not int:
        raise QmpError("an answer names no command of ours")
    return command_id


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise QmpError(f"{what} is not an object")
    return cast("dict[str, Any]", value)


def _text(value: Any, what: str) -> str:
    """A text that is safe to print and to encode: no lone surrogates, no control characters, bounded."""
    if not isinstance(value, str):
        raise QmpError(f"{what} is not a text")
    cut = value[:MAX_TEXT]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
