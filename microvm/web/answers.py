"""Responses as this service makes them: JSON, errors, and streams.

It must not decide what to answer. Its neighbours: `app`, `mcp_http`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quart import Response

from microvm.catalogue.strict_json import dumps
from microvm.errors import MicrovmError


def json_answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    data = dumps(body).encode("utf-8", "replace")
    return Response(data, status=status, headers=dict(headers or {}), content_type="application/json")


def error_answer(error: MicrovmError, *, status: int | None = None) -> Response:
    """The error object with the status of its code, and the headers that belong to it."""
    headers: dict[str, str] = {}
    if error.code == "unauthenticated":
        headers["WWW-Authenticate"] = "Bearer"  # no resource_metadata: it would start an OAuth login
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_answer({"error": error.to_json()}, status or error.status, headers)
