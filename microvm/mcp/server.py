"""What the server answers: a decision per request, without I/O.

`respond` gives either a finished reply or a `ToolCall` that somebody must run; `finish_call` and
`fail_call` turn the outcome into the message to send. Tools only, plus empty lists for what clients probe.
It must not run tools or know the catalogue: it is given tools in MCP's own shape. Its neighbours: `inbound`
before it, `web` around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from mcp_types import SERVER_INFO_META_KEY, methods
from mcp_types.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from pydantic import ValidationError

from microvm.mcp.inbound import LEGACY_VERSIONS, MODERN_VERSIONS, Request
from microvm.mcp.messages import Reply, error_reply, result_message

LIST_TTL_MS: Final = 300_000  # the tools change with the service's version only
_RESOURCE_NOT_FOUND: Final = (
    -32002
)  # 2025-11-25 server/resources, "Error Handling"; the modern era has -32602
_PROGRESS_STEP: Final = 1e-3  # progress must increase; this much where the caller reports less


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself."""

    name: str
    version: str
    title: str
    instructions: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that somebody must run.

    Attributes:
        request: Where it came from.
        name: The tool, one of those that were offered.
        arguments: Unvalidated.
    """

    request: Request
    name: str
    arguments: Mapping[str, Any]


Step: TypeAlias = Reply | ToolCall


def respond(info: ServerInfo, tools: Sequence[Mapping[str, Any]], request: Request) -> Step:
    """Decide what a request gets.

    Args:
        info: Who answers.
        tools: What this caller may call, in order, as MCP tool objects.
        request: What came through the ladder.
    """
    try:
        methods.validate_client_request(request.method, request.version, request.params)
    except KeyError:
        return _error(request, METHOD_NOT_FOUND, f"Method not found: {request.method[:80]}")
    except ValidationError as error:
        return _error(request, INVALID_PARAMS, f"Invalid params: {_first_path(error)}")
    answer = _ANSWERS.get(request.method)
    if answer is None:
        return _error(request, METHOD_NOT_FOUND, f"Method not found: {request.method[:80]}")
    return answer(info, tools, request)


def _first_path(error: ValidationError) -> str:
    """Where the first error is, without its value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(step)[:80] for step in first['loc'])}: {first['msg']}"


def _result(info: ServerInfo, request: Request, result: Mapping[str, Any], *, cached: bool = False) -> Reply:
    return Reply(200, result_message(request.id, _dressed(info, request, result, cached=cached)))


def _dressed(
    info: ServerInfo, request: Request, result: Mapping[str, Any], *, cached: bool = False
) -> dict[str, Any]:
    """The result with what the modern era adds to every one of them."""
    if not request.modern:
        return dict(result)
    identity = {SERVER_INFO_META_KEY: {"name": info.name, "version": info.version, "title": info.title}}
    dressed: dict[str, Any] = {**result, "resultType": "complete", "_meta": identity}
    if cached:
        dressed |= {"ttlMs": LIST_TTL_MS, "cacheScope": "private"}
    return dressed


def _error(request: Request, code: int, message: str, data: Any = None) -> Reply:
    return error_reply(request.id, code, message, data, modern=request.modern)


_Tools: TypeAlias = Sequence[Mapping[str, Any]]


def _initialize(info: ServerInfo, _tools: _Tools, request: Request) -> Reply:
    asked = request.params.get("protocolVersion")
    version = asked if asked in LEGACY_VERSIONS else LEGACY_VERSIONS[-1]
    return _result(
        info,
        request,
        {
            "protocolVersion": version,
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": info.name, "version": info.version, "title": info.title},
            "instructions": info.instructions,
        },
    )


def _discover(info: ServerInfo, _tools: _Tools, request: Request) -> Reply:
    result = {
        "supportedVersions": [*MODERN_VERSIONS],
        "capabilities": {"tools": {"listChanged": False}},
        "instructions": info.instructions,
    }
    return _result(info, request, result, cached=True)


def _ping(info: ServerInfo, _tools: _Tools, request: Request) -> Reply:
    return _result(info, request, {})


def _list(key: str) -> Callable[[ServerInfo, _Tools, Request], Step]:
    """Answers a list that fits one page; a cursor cannot be ours."""

    def answer(info: ServerInfo, tools: _Tools, request: Request) -> Step:
        if request.params.get("cursor") is not None:
            return _error(request, INVALID_PARAMS, "Invalid cursor")
        items = [dict(tool) for tool in tools] if key == "tools" else []
        return _result(info, request, {key: items}, cached=True)

    return answer


def _call(_info: ServerInfo, tools: _Tools, request: Request) -> Step:
    name = request.params["name"]
    if not any(tool["name"] == name for tool in tools):
        return _error(request, INVALID_PARAMS, f"Unknown tool: {name[:80]}")
    return ToolCall(request, name, request.params.get("arguments") or {})


def _no_resource(_info: ServerInfo, _tools: _Tools, request: Request) -> Reply:
    code = INVALID_PARAMS if request.modern else _RESOURCE_NOT_FOUND
    return _error(request, code, "Resource not found", {"uri": str(request.params.get("uri"))[:200]})


def _no_prompt(_info: ServerInfo, _tools: _Tools, request: Request) -> Reply:
    return _error(request, INVALID_PARAMS, "Unknown prompt")


_ANSWERS: Final[Mapping[str, Callable[[ServerInfo, _Tools, Request], Step]]] = {
    "initialize": _initialize,
    "ping": _ping,
    "server/discover": _discover,
    "tools/list": _list("tools"),
    "tools/call": _call,
    "resources/list": _list("resources"),
    "resources/templates/list": _list("resourceTemplates"),
    "resources/read": _no_resource,
    "prompts/list": _list("prompts"),
    "prompts/get": _no_prompt,
}


def finish_call(info: ServerInfo, request: Request, result: Mapping[str, Any]) -> dict[str, Any]:
    """The message for a tool that answered: the same JSON as structured content and as text."""
    return _tool_result(info, request, result, is_error=False)


def fail_call(info: ServerInfo, request: Request, error: Mapping[str, Any]) -> dict[str, Any]:
    """The message for a tool that refused or failed; `error` has code, message and perhaps detail."""
    return _tool_result(info, request, {"error": dict(error)}, is_error=True)


def _tool_result(
    info: ServerInfo, request: Request, content: Mapping[str, Any], *, is_error: bool
) -> dict[str, Any]:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    result = {
        "content": [{"type": "text", "text": text}],
        "structuredContent": dict(content),
        "isError": is_error,
    }
    return result_message(request.id, _dressed(info, request, result))


@dataclass(slots=True)
class ProgressLine:
    """Progress of one request as the protocol wants it: always increasing, within the whole."""

    last: float = -_PROGRESS_STEP

    def advance(self, fraction: float) -> float:
        """The value to report for `fraction` (0-1): greater than any before."""
        self.last = round(max(min(fraction, 1.0), self.last + _PROGRESS_STEP), 6)
        return self.last
