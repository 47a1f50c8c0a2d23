from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import methods

from microvm.mcp import ProgressLine, Reply, Request, ServerInfo, ToolCall, fail_call, finish_call, respond
from microvm.mcp.messages import progress_message

INFO = ServerInfo("microvm", "1", "microvm", "Use it.")
TOOLS: list[dict[str, Any]] = [
    {"name": "vm_list", "description": "List.", "inputSchema": {"type": "object", "properties": {}}}
]
LEGACY = ["2025-03-26", "2025-06-18", "2025-11-25"]
MODERN = "2026-07-28"
META: dict[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}


def request(method: str, version: str, **params: Any) -> Request:
    modern = version == MODERN
    return Request(1, method, {"_meta": META, **params} if modern else params, version, modern)


def answer(method: str, version: str, **params: Any) -> Reply:
    step = respond(INFO, TOOLS, request(method, version, **params))
    assert isinstance(step, Reply)
    assert step.body is not None
    assert step.body["id"] == 1
    return step


def result(method: str, version: str, **params: Any) -> dict[str, Any]:
    """The result, checked against the official schema of that version."""
    body = answer(method, version, **params).body
    assert body is not None
    methods.validate_server_result(method, version, body["result"])
    return body["result"]


def error(method: str, version: str, **params: Any) -> tuple[int, int]:
    reply = answer(method, version, **params)
    assert reply.body is not None
    return reply.status, reply.body["error"]["code"]


CLIENT: dict[str, Any] = {"capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}


@pytest.mark.parametrize("version", LEGACY)
def test_initialize_agrees_on_a_version_that_is_known(version: str) -> None:
    got = result("initialize", version, protocolVersion=version, **CLIENT)
    assert got["protocolVersion"] == version
    assert got["capabilities"] == {"tools": {"listChanged": False}}


@pytest.mark.parametrize("asked", ["2024-11-05", "1.0", MODERN, "2999-01-01"])
def test_initialize_counters_an_unknown_version_with_the_newest(asked: str) -> None:
    got = result("initialize", "2025-03-26", protocolVersion=asked, **CLIENT)
    assert got["protocolVersion"] == "2025-11-25"


def test_discover_names_the_modern_versions_and_how_long_that_holds() -> None:
    got = result("server/discover", MODERN)
    assert got["supportedVersions"] == [MODERN]
    assert got["cacheScope"] == "private"


@pytest.mark.parametrize("version", [*LEGACY, MODERN])
@pytest.mark.parametrize(
    ("method", "key", "count"),
    [
        ("tools/list", "tools", 1),
        ("resources/list", "resources", 0),
        ("resources/templates/list", "resourceTemplates", 0),
        ("prompts/list", "prompts", 0),
    ],
)
def test_lists_are_legal_and_empty_but_for_the_tools(version: str, method: str, key: str, count: int) -> None:
    assert len(result(method, version)[key]) == count
    assert error(method, version, cursor="x") == (400 if version == MODERN else 200, -32602)


@pytest.mark.parametrize("version", LEGACY)
def test_ping_is_answered_in_the_legacy_era(version: str) -> None:
    assert result("ping", version) == {}


@pytest.mark.parametrize(
    "method", ["ping", "initialize", "logging/setLevel", "subscriptions/listen", "nonsense", "tasks/get"]
)
def test_methods_that_a_modern_server_lacks_are_not_found(method: str) -> None:
    params: dict[str, Any] = {"notifications": {}} if method == "subscriptions/listen" else {}
    assert error(method, MODERN, **params) == (404, -32601)


@pytest.mark.parametrize("method", ["server/discover", "completion/complete", "nonsense", "x" * 10_000])
def test_an_unknown_method_of_the_legacy_era_is_answered_with_200(method: str) -> None:
    params: dict[str, Any] = {}
    if method == "completion/complete":
        params = {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": ""}}
    assert error(method, "2025-11-25", **params) == (200, -32601)


@pytest.mark.parametrize(("version", "expected"), [("2025-11-25", (200, -32002)), (MODERN, (400, -32602))])
def test_a_resource_is_never_found_in_the_words_of_its_era(version: str, expected: tuple[int, int]) -> None:
    assert error("resources/read", version, uri="file:///x") == expected


@pytest.mark.parametrize("version", [*LEGACY, MODERN])
def test_an_unknown_tool_is_a_protocol_error_and_a_known_one_a_call(version: str) -> None:
    assert error("tools/call", version, name="nope")[1] == -32602
    assert error("tools/call", version, name=7)[1] == -32602
    assert error("tools/call", version, name="vm_list", arguments=[])[1] == -32602
    call = respond(INFO, TOOLS, request("tools/call", version, name="vm_list", arguments={"all": True}))
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("vm_list", {"all": True})


@pytest.mark.parametrize("version", [*LEGACY, MODERN])
def test_outcomes_are_the_same_json_twice_and_valid(version: str) -> None:
    asked = request("tools/call", version, name="vm_list")
    failure = {"code": "not_found", "message": "no"}
    for message, wrong in (
        (finish_call(INFO, asked, {"vms": []}), False),
        (fail_call(INFO, asked, failure), True),
    ):
        got = message["result"]
        methods.validate_server_result("tools/call", version, got)
        assert json.loads(got["content"][0]["text"]) == got["structuredContent"]
        assert got["isError"] is wrong


def test_every_modern_result_says_who_answered_and_that_it_is_complete() -> None:
    for got in (
        result("tools/list", MODERN),
        finish_call(INFO, request("tools/call", MODERN, name="vm_list"), {})["result"],
    ):
        assert got["resultType"] == "complete"
        assert got["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "microvm"


@given(st.lists(st.floats(0, 1), max_size=30))
def test_progress_always_increases(reports: list[float]) -> None:
    line = ProgressLine()
    values = [line.advance(report) for report in reports]
    assert values == sorted(set(values))


def test_a_progress_message_is_valid_and_says_nothing_it_has_not() -> None:
    message = progress_message(0, 0.5, "")
    methods.validate_client_notification(message["method"], "2025-11-25", message["params"])
    assert message["params"] == {"progressToken": 0, "progress": 0.5}
