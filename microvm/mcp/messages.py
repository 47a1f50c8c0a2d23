"""JSON-RPC messages and the HTTP statuses that go with them, as values.

Pure: it must not do I/O or know the catalogue. Its neighbours: `inbound` reads requests, `server` answers
them. Source: MCP 2026-07-28 basic/index and basic/transports/streamable-http; 2025-11-25 basic/transports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from mcp_types.jsonrpc import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    UNSUPPORTED_PROTOCOL_VERSION,
)

RequestId: TypeAlias = str | int

_MODERN_STATUS: Final[Mapping[int, int]] = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_PROTOCOL_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}
"""The statuses that 2026-07-28 prescribes; what is not here is answered with 200."""

_LEGACY_STATUS: Final[Mapping[int, int]] = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    UNSUPPORTED_PROTOCOL_VERSION: 400,
}
"""In the handshake era an answered request is 200, whatever the answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer.

    Attributes:
        status: The HTTP status.
        body: The JSON-RPC message; None for an empty body.
        headers: Further HTTP headers.
    """

    status: int
    body: dict[str, Any] | None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def result_message(request_id: RequestId, result: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON-RPC response."""
    return {"jsonrpc": "2.0", "id": request_id, "result": dict(result)}


def error_message(request_id: RequestId | None, code: int, message: str, data: Any = None) -> dict[str, Any]:
    """A JSON-RPC error; `request_id` is None where the request's own could not be read."""
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def error_reply(
    request_id: RequestId | None, code: int, message: str, data: Any = None, *, modern: bool
) -> Reply:
    """A JSON-RPC error with the status that its era gives it."""
    status = (_MODERN_STATUS if modern else _LEGACY_STATUS).get(code, 200)
    return Reply(status, error_message(request_id, code, message, data))


def parse_error(why: str) -> Reply:
    """The answer to a body that is not JSON as it must be."""
    return Reply(400, error_message(None, PARSE_ERROR, f"Parse error: {why}"))


def progress_message(
    token: str | int, progress: float, message: str, *, total: float | None = None
) -> dict[str, Any]:
    """A progress notification under the client's own token."""
    params: dict[str, Any] = {"progressToken": token, "progress": progress}
    if total is not None:
        params["total"] = total
    if message:
        params["message"] = message
    return {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
