"""Messages of the guest channel: what HELLO, OPEN, CLOSE and RESET carry, as values.

Pure: bytes in, values out. What comes from a guest is hostile input: sizes are bounded by the frame, depth,
types and ranges here; a message that breaks a rule is a `ProtocolError`, after which the connection is of no
further use. It must not know streams or credit (`agentlink`) nor what an operation is for (`fleet`). The
guest's end is `guest/supervisor.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from microvm.errors import STATUS_OF_CODE, GuestError
from microvm.wire import framing

PROTOCOL: Final = 1
"""The one version that both ends speak; a guest that answers another is refused."""
WINDOW: Final = 32768
"""Bytes in flight per stream and direction before credit."""
MAX_STREAMS: Final = 24
"""Open streams per initiator; all windows together stay under 1 MiB of the virtio ring's 4 MiB."""
INLINE_BYTES: Final = 16384
"""Output per stream that a job's end carries with it."""
KEPT_MAX: Final = 16 << 20
"""Output that a job may keep (the contract's bound); the host fetches what a guest says that it kept."""
MAX_DEPTH: Final = 8
"""No message nests deeper than four."""
MAX_TEXT: Final = 4096
_MAX_COUNT: Final = 1 << 62
_GUEST_STATES: Final = frozenset({"booting", "frozen", "running"})
_JOB_STATES: Final = frozenset({"running", "frozen", "completed"})


class ProtocolError(GuestError):
    """The guest said something that the protocol does not have."""

    def __init__(self, message: str) -> None:
        super().__init__("guest_unreachable", f"the guest broke the channel's protocol: {message}")


@dataclass(frozen=True, slots=True)
class Hello:
    """The guest's answer to the host's HELLO.

    Attributes:
        version: The supervisor's own.
        generation: The host's agent generation, repeated.
        state: "booting" before the first thaw, then "frozen" or "running".
        python: The version of the guest's Python.
    """

    protocol: int
    version: str
    generation: int
    nonce: str
    state: str
    python: str = ""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job as its guest sees it; times are nanoseconds since the epoch, pairs are (stdout, stderr)."""

    job_id: str
    state: str
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    cancelled: bool = False
    truncated: bool = False
    totals: tuple[int, int] = (0, 0)
    kept: tuple[int, int] = (0, 0)
    started_at_ns: int = 0
    ended_at_ns: int | None = None
    run_seconds: float = 0.0
    background_processes: int = 0
    oom_killed: bool = False
    message: str | None = None

    @classmethod
    def parse(cls, value: object) -> JobSummary:
        """The summary in a message.

        Raises:
            ProtocolError: when it is not one.
        """
        fields = Fields(value)
        state = fields.text("state")
        if state not in _JOB_STATES:
            raise ProtocolError(f"unknown job state {state[:32]!r}")
        kept = fields.pair("kept")
        if sum(kept) > KEPT_MAX:
            raise ProtocolError("a job kept more output than any may")
        return cls(
            job_id=fields.text("job_id"),
            state=state,
            exit_code=fields.optional_number("exit_code"),
            signal=fields.optional_number("signal"),
            timed_out=fields.flag("timed_out"),
            cancelled=fields.flag("cancelled"),
            truncated=fields.flag("truncated"),
            totals=fields.pair("totals"),
            kept=kept,
            started_at_ns=fields.number("started_at_ns"),
            ended_at_ns=fields.optional_number("ended_at_ns"),
            run_seconds=fields.seconds("run_seconds"),
            background_processes=fields.number("background_processes"),
            oom_killed=fields.flag("oom_killed"),
            message=fields.optional_text("message"),
        )


@dataclass(frozen=True, slots=True)
class FilePart:
    """What a read of a file in the guest answered, beside the bytes."""

    offset: int
    size: int
    mode: str
    modified_at_ns: int
    eof: bool
    tag: str = ""

    @classmethod
    def parse(cls, value: object) -> FilePart:
        """The facts in a message; raises ProtocolError when they are not there."""
        fields = Fields(value)
        return cls(
            offset=fields.number("offset"),
            size=fields.number("size"),
            mode=fields.text("mode"),
            modified_at_ns=fields.number("modified_at_ns", low=-_MAX_COUNT),
            eof=fields.flag("eof"),
            tag=fields.optional_text("tag") or "",
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call came to: the CLOSE's object, and the answer's body."""

    ok: dict[str, Any] = field(default_factory=dict[str, Any])
    body: bytes = b""


class Fields:
    """Reads typed, bounded fields out of a hostile object.

    Raises (all methods): ProtocolError, when a field is missing or not of its type and range.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ProtocolError("not an object")
        self._values = cast("dict[str, Any]", value)

    def number(self, name: str, *, low: int = 0, high: int = _MAX_COUNT) -> int:
        """An integer within its range."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ProtocolError(f"{name} is no number in range")
        return value

    def optional_number(self, name: str) -> int | None:
        """A number from 0, or None."""
        return None if self._values.get(name) is None else self.number(name)

    def seconds(self, name: str) -> float:
        """A finite, non-negative duration."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_COUNT:
            raise ProtocolError(f"{name} is no duration")
        return float(value)

    def text(self, name: str, *, most: int = MAX_TEXT) -> str:
        """A text of bounded length."""
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise ProtocolError(f"{name} is no text, or too long")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text, or None."""
        return None if self._values.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise ProtocolError(f"{name} is no flag")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Numbers for (stdout, stderr)."""
        both = Fields(self._values.get(name))
        return both.number("stdout"), both.number("stderr")


def parse_json(payload: bytes, *, most: int = framing.PAYLOAD_MAX) -> Any:
    """The JSON value in hostile bytes.

    Raises:
        ProtocolError: when it is too long or too deep, has NaN, or is no JSON.
    """
    if len(payload) > most:
        raise ProtocolError("a message is too long")
    try:
        value = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message is not JSON") from error
    _check_depth(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _check_depth(value: object) -> None:
    """Refuses what nests deeper than any message; the parser itself stops at the recursion limit."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast("dict[str, object]", item).values())
            elif isinstance(item, list):
                below.extend(cast("list[object]", item))
        if not below:
            return
        level = below
    raise ProtocolError("a message nests too deep")


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def encode_hello(generation: int, nonce: str) -> bytes:
    """The HELLO frame that the host begins with."""
    payload = _encode({"protocol": PROTOCOL, "generation": generation, "nonce": nonce})
    return framing.encode_frame(framing.HELLO, 0, 0, payload)


def parse_hello(payload: bytes) -> Hello:
    """The guest's HELLO.

    Raises:
        ProtocolError: when it is malformed, or of another protocol than `PROTOCOL`.
    """
    fields = Fields(parse_json(payload, most=framing.HELLO_MAX))
    protocol = fields.number("protocol")
    if protocol != PROTOCOL:
        raise ProtocolError(f"it speaks version {protocol}, this service version {PROTOCOL}")
    state = fields.text("state", most=32)
    if state not in _GUEST_STATES:
        raise ProtocolError("unknown state in the hello")
    return Hello(
        protocol=protocol,
        version=fields.text("version", most=64),
        generation=fields.number("generation"),
        nonce=fields.text("nonce", most=64),
        state=state,
        python=fields.text("python", most=64),
    )


def encode_open(stream: int, op: str, args: Mapping[str, Any]) -> bytes:
    """The OPEN frame of a call.

    Raises:
        GuestError: payload_too_large, when the arguments do not fit; large values belong in the body.
    """
    payload = _encode({"op": op, "args": args})
    if len(payload) > framing.PAYLOAD_MAX:
        raise GuestError("payload_too_large", f"the arguments of {op} are longer than a frame")
    return framing.encode_frame(framing.OPEN, 0, stream, payload)


def parse_open(payload: bytes) -> tuple[str, dict[str, Any]]:
    """Operation and arguments of a call that the guest makes."""
    value = parse_json(payload)
    args = cast("dict[str, Any]", value).get("args") if isinstance(value, dict) else None
    if not isinstance(args, dict):
        raise ProtocolError("a call without arguments")
    fields = Fields(cast("object", value))
    return fields.text("op", most=64), cast("dict[str, Any]", args)


def encode_data(stream: int, data: bytes, *, end: bool = False) -> bytes:
    """A DATA frame; `end` on the opener's last."""
    return framing.encode_frame(framing.DATA, framing.FIN if end else 0, stream, data)


def encode_credit(stream: int, count: int) -> bytes:
    """A CREDIT frame."""
    return framing.encode_frame(framing.CREDIT, 0, stream, count.to_bytes(4, "little"))


def parse_credit(payload: bytes) -> int:
    """The bytes that a CREDIT grants."""
    return int.from_bytes(payload, "little")


def encode_ok(stream: int, ok: Mapping[str, Any]) -> bytes:
    """The CLOSE frame of a call that succeeded."""
    return framing.encode_frame(framing.CLOSE, 0, stream, _encode({"ok": ok}))


def encode_error(stream: int, code: str, message: str) -> bytes:
    """The CLOSE frame of a call that failed."""
    error = {"code": code, "message": message[:MAX_TEXT]}
    return framing.encode_frame(framing.CLOSE, 0, stream, _encode({"error": error}))


def encode_reset(stream: int, code: str, message: str) -> bytes:
    """The RESET frame that abandons a stream."""
    payload = _encode({"code": code, "message": message[:MAX_TEXT]})
    return framing.encode_frame(framing.RESET, 0, stream, payload)


def parse_close(payload: bytes) -> dict[str, Any] | GuestError:
    """What a CLOSE says: the result, or the guest's error as a value."""
    value = parse_json(payload)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if isinstance(fields.get("ok"), dict):
            return cast("dict[str, Any]", fields["ok"])
        if "error" in fields:
            return _error_of(fields["error"])
    raise ProtocolError("a close that says nothing")


def parse_reset(payload: bytes) -> GuestError:
    """The error that a RESET gives as its reason."""
    return _error_of(parse_json(payload))


def _error_of(value: object) -> GuestError:
    fields = Fields(value)
    code = fields.text("code", most=64)
    message = fields.text("message")
    if code not in STATUS_OF_CODE:
        raise ProtocolError(f"unknown error code {code!r}")
    return GuestError(code, message)
