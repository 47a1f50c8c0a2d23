"""Which era a message belongs to, and whether it may be dispatched: the validation ladder.

A POST is *modern* (2026-07-28, stateless) if its version header names no handshake version, or its body
carries the modern envelope; otherwise it is *legacy*. Modern rungs, first failure wins: message shape →
envelope (`_meta`) → headers equal the body → version is served. Pure; it must not dispatch. Its neighbours:
`messages`, `server`. Source: MCP 2026-07-28 basic/transports/streamable-http, basic/versioning.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.jsonrpc import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    UNSUPPORTED_PROTOCOL_VERSION,
)

from microvm.mcp.messages import Reply, RequestId, error_reply

MODERN_VERSIONS: Final = ("2026-07-28",)
LEGACY_VERSIONS: Final = ("2025-03-26", "2025-06-18", "2025-11-25")
ASSUMED_VERSION: Final = "2025-03-26"
"""What a request without a version header speaks (2025-11-25 basic/transports, "Protocol Version Header")."""

VERSION_HEADER: Final = "mcp-protocol-version"
METHOD_HEADER: Final = "mcp-method"
NAME_HEADER: Final = "mcp-name"
_ROUTING_HEADERS: Final = frozenset({VERSION_HEADER, METHOD_HEADER, NAME_HEADER})
_NAMED: Final[Mapping[str, str]] = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_SENTINEL: Final = re.compile(r"=\?base64\?(.*)\?=")


@dataclass(frozen=True, slots=True)
class Request:
    """A request that may be dispatched.

    Attributes:
        id: The client's.
        method: The method.
        params: Its parameters; empty where there were none.
        version: The protocol version it speaks.
        modern: Whether that version is stateless.
        progress_token: The client's, for progress notifications; None if it gave none.
        traceparent: The client's W3C trace context, unchecked; None if it gave none.
    """

    id: RequestId
    method: str
    params: Mapping[str, Any]
    version: str
    modern: bool
    progress_token: str | int | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that is owed no answer."""

    method: str


Inbound: TypeAlias = Request | Notification | Reply


def read_message(headers: Iterable[tuple[str, str]], body: object) -> Inbound:
    """Classify one POST.

    Args:
        headers: Names (any case) and values, duplicates included.
        body: The decoded JSON.

    Returns:
        What to dispatch, or the rejection to send.
    """
    fields, duplicated = _fold(headers)
    header = fields.get(VERSION_HEADER)
    modern = (header is not None and header not in LEGACY_VERSIONS) or _has_envelope(body)
    if not _is_object(body):
        return _invalid("Body must be a single JSON-RPC object; batches are not accepted")
    if body.get("jsonrpc") != "2.0":
        return _invalid('jsonrpc must be "2.0"')
    method = body.get("method")
    if not isinstance(method, str):
        if not modern and "id" in body and ("result" in body or "error" in body):
            return Notification("")  # an answer to a request that was never sent: taken and dropped
        return _invalid("method must be a string")
    params = body.get("params", {})
    if "id" not in body:
        return _notification(method, params, header, modern=modern)
    request_id = body["id"]
    if not _is_id(request_id):
        return _invalid("id must be a string or an integer")
    if not _is_object(params):
        return error_reply(request_id, INVALID_PARAMS, "params must be an object", modern=modern)
    meta = params.get("_meta")
    token = meta.get("progressToken") if _is_object(meta) else None
    if token is not None and not _is_id(token):
        return error_reply(
            request_id, INVALID_PARAMS, "progressToken must be a string or an integer", modern=modern
        )
    trace = meta.get("traceparent") if _is_object(meta) else None
    if modern:
        refused = _climb(request_id, method, params, fields, duplicated)
        if refused is not None:
            return refused
    return Request(
        request_id,
        method,
        params,
        header or ASSUMED_VERSION,
        modern,
        token,
        trace if isinstance(trace, str) else None,
    )


def _climb(
    request_id: RequestId,
    method: str,
    params: Mapping[str, Any],
    fields: Mapping[str, str],
    duplicated: str | None,
) -> Reply | None:
    """The modern rungs above message shape; None if all hold."""
    meta = params.get("_meta")
    needed = (PROTOCOL_VERSION_META_KEY, CLIENT_CAPABILITIES_META_KEY)
    if not _is_object(meta):
        return error_reply(
            request_id, INVALID_PARAMS, f"params._meta must carry {' and '.join(needed)}", modern=True
        )
    missing = [key for key in needed if key not in meta]
    if missing:
        return error_reply(
            request_id, INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}", modern=True
        )
    requested = meta[PROTOCOL_VERSION_META_KEY]
    mismatch = _mismatch(method, params, requested, fields, duplicated)
    if mismatch is not None:
        return error_reply(request_id, HEADER_MISMATCH, mismatch, modern=True)
    if not isinstance(requested, str) or not _is_object(meta[CLIENT_CAPABILITIES_META_KEY]):
        return error_reply(
            request_id, INVALID_PARAMS, "params._meta holds a value of the wrong type", modern=True
        )
    if requested not in MODERN_VERSIONS:
        return _unsupported(request_id, requested)
    return None


def _mismatch(
    method: str,
    params: Mapping[str, Any],
    requested: object,
    fields: Mapping[str, str],
    duplicated: str | None,
) -> str | None:
    """How the headers contradict the body; None if they agree."""
    if duplicated is not None:
        return f"{duplicated} appears more than once"
    if fields.get(VERSION_HEADER) != requested:
        return "MCP-Protocol-Version must equal the version in params._meta"
    if fields.get(METHOD_HEADER) != method:
        return "Mcp-Method must equal the method"
    key = _NAMED.get(method)
    if (
        key is not None
        and params.get(key) is not None
        and decode_header(fields.get(NAME_HEADER)) != params[key]
    ):
        return f"Mcp-Name must equal params.{key}"
    return None


def _notification(method: str, params: object, header: str | None, *, modern: bool) -> Inbound:
    if not _is_object(params):
        return _invalid("params must be an object")
    if modern and header not in MODERN_VERSIONS:
        return _unsupported(None, header or "")
    return Notification(method)


def _unsupported(request_id: RequestId | None, requested: str) -> Reply:
    data = {"supported": [*MODERN_VERSIONS], "requested": requested[:80]}
    return error_reply(
        request_id, UNSUPPORTED_PROTOCOL_VERSION, "Unsupported protocol version", data, modern=True
    )


def _invalid(why: str) -> Reply:
    return error_reply(None, INVALID_REQUEST, why, modern=True)


def _fold(headers: Iterable[tuple[str, str]]) -> tuple[dict[str, str], str | None]:
    """Headers by lower-case name, and the first routing header that was given twice."""
    fields: dict[str, str] = {}
    duplicated: str | None = None
    for name, value in headers:
        key = name.lower()
        if key in fields and key in _ROUTING_HEADERS:
            duplicated = duplicated or key
        fields[key] = value.strip()
    return fields, duplicated


def decode_header(value: str | None) -> str | None:
    """A header's value with the `=?base64?…?=` form undone; None if absent or malformed."""
    match = None if value is None else _SENTINEL.fullmatch(value)
    if match is None:
        return value
    payload = match.group(1)
    try:
        decoded = base64.b64decode(payload, validate=True)
        if base64.b64encode(decoded).decode("ascii") != payload:
            return None  # another spelling of the same bytes: two readers could disagree
        return decoded.decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None


def _has_envelope(body: object) -> bool:
    if not _is_object(body):
        return False
    params = body.get("params")
    meta = params.get("_meta") if _is_object(params) else None
    return _is_object(meta) and PROTOCOL_VERSION_META_KEY in meta


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)


def _is_id(value: object) -> TypeGuard[RequestId]:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def accepts(accept: str | None) -> tuple[bool, bool]:
    """What an `Accept` header lets us answer: (JSON, an event stream).

    An absent header, `*/*`, and one that names neither accept both: clients send all of these.
    """
    kinds = {part.split(";", 1)[0].strip().lower() for part in (accept or "").split(",")} - {""}
    both = not kinds or "*/*" in kinds
    json_ok = both or bool(kinds & {"application/json", "application/*"})
    stream_ok = both or bool(kinds & {"text/event-stream", "text/*"})
    return (True, True) if not (json_ok or stream_ok) else (json_ok, stream_ok)


__all__ = [
    "ASSUMED_VERSION",
    "LEGACY_VERSIONS",
    "MODERN_VERSIONS",
    "Inbound",
    "Notification",
    "Request",
    "accepts",
    "decode_header",
    "read_message",
]
