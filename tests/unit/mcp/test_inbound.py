from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microvm.mcp import Notification, Reply, Request, accepts, read_message
from microvm.mcp.inbound import decode_header

VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"


def modern(method: str = "tools/list", version: str = "2026-07-28", **params: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {VERSION: version, CAPABILITIES: {}}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": meta, **params}}


def headers(
    method: str = "tools/list", version: str = "2026-07-28", name: str | None = None
) -> list[tuple[str, str]]:
    given_headers = [("MCP-Protocol-Version", version), ("Mcp-Method", method)]
    return [*given_headers, ("Mcp-Name", name)] if name is not None else given_headers


def code(answer: object) -> tuple[int, int]:
    assert isinstance(answer, Reply)
    assert answer.body is not None
    return answer.status, answer.body["error"]["code"]


def test_a_modern_request_passes() -> None:
    request = read_message(headers(), modern())
    assert isinstance(request, Request)
    assert (request.modern, request.version, request.method) == (True, "2026-07-28", "tools/list")


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25"])
def test_a_handshake_version_in_the_header_is_legacy(version: str) -> None:
    body = {"jsonrpc": "2.0", "id": "a", "method": "ping"}
    request = read_message([("mcp-protocol-version", version)], body)
    assert isinstance(request, Request)
    assert (request.modern, request.version) == (False, version)


def test_no_version_header_is_the_oldest_legacy() -> None:
    request = read_message([], {"jsonrpc": "2.0", "id": 0, "method": "ping"})
    assert isinstance(request, Request)
    assert (request.version, request.id) == ("2025-03-26", 0)


@pytest.mark.parametrize(
    "body",
    [
        [],
        [modern()],
        "x",
        None,
        1,
        {},
        {"jsonrpc": "1.0", "id": 1, "method": "ping"},
        {"jsonrpc": "2.0", "id": 1},
        {"jsonrpc": "2.0", "id": 1, "method": 1},
        {"jsonrpc": "2.0", "id": None, "method": "ping"},
        {"jsonrpc": "2.0", "id": True, "method": "ping"},
        {"jsonrpc": "2.0", "id": 1.5, "method": "ping"},
        {"jsonrpc": "2.0", "id": [], "method": "ping"},
        {"jsonrpc": "2.0", "method": "notifications/x", "params": []},
    ],
)
def test_what_is_no_single_message_is_an_invalid_request(body: object) -> None:
    assert code(read_message([], body)) == (400, -32600)


def test_parameters_that_are_no_object_are_invalid() -> None:
    answer = read_message([], {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []})
    assert code(answer) == (200, -32602)


@pytest.mark.parametrize("missing", [VERSION, CAPABILITIES])
def test_the_modern_envelope_must_be_whole(missing: str) -> None:
    body = modern()
    del body["params"]["_meta"][missing]
    assert code(read_message(headers(), body)) == (400, -32602)


def test_a_modern_header_without_the_envelope_is_refused() -> None:
    assert code(read_message(headers(), {"jsonrpc": "2.0", "id": 1, "method": "ping"})) == (400, -32602)


@pytest.mark.parametrize(
    "given_headers",
    [
        [],
        headers(version="2025-11-25"),
        headers(method="Tools/List"),
        headers()[:1],
        [*headers(), ("mcp-method", "tools/list")],
    ],
    ids=["none", "another version", "another case", "no method", "twice"],
)
def test_headers_that_contradict_the_body_are_a_mismatch(given_headers: list[tuple[str, str]]) -> None:
    assert code(read_message(given_headers, modern())) == (400, -32020)


def test_the_name_header_must_equal_the_name() -> None:
    body = modern("tools/call", name="vm_é")
    encoded = "=?base64?" + base64.b64encode("vm_é".encode()).decode() + "?="
    assert isinstance(read_message(headers("tools/call", name=f"  {encoded} "), body), Request)
    for wrong in (None, "vm_e", "VM_É", "=?base64?!?=", "=?base64?DM1FW6K=?="):
        assert code(read_message(headers("tools/call", name=wrong), body)) == (400, -32020)


@pytest.mark.parametrize("version", ["1999-01-01", "2027-01-01", ""])
def test_a_version_that_is_not_served_is_told_which_are(version: str) -> None:
    answer = read_message(headers(version=version), modern(version=version))
    assert code(answer) == (400, -32022)
    assert isinstance(answer, Reply)
    assert answer.body is not None
    assert answer.body["error"]["data"] == {"supported": ["2026-07-28"], "requested": version}
    assert answer.body["id"] == 1


def test_notifications_are_taken_in_both_eras() -> None:
    body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert isinstance(read_message([], body), Notification)
    assert isinstance(read_message(headers(), body), Notification)
    assert code(read_message(headers(version="1999-01-01"), body)) == (400, -32022)


def test_an_answer_to_nothing_is_dropped_in_the_legacy_era_only() -> None:
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert isinstance(read_message([], body), Notification)
    assert code(read_message(headers(), body)) == (400, -32600)


@pytest.mark.parametrize("token", [0, "t", 7])
def test_a_progress_token_is_kept_as_it_came(token: object) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"_meta": {"progressToken": token}}}
    request = read_message([], body)
    assert isinstance(request, Request)
    assert request.progress_token == token


@pytest.mark.parametrize("token", [True, 1.5, [], {}])
def test_another_progress_token_is_refused(token: object) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"_meta": {"progressToken": token}}}
    assert code(read_message([], body)) == (200, -32602)


@given(st.text())
def test_header_values_survive_their_encoding(text: str) -> None:
    try:
        encoded = base64.b64encode(text.encode()).decode()
    except UnicodeEncodeError:
        return
    assert decode_header(f"=?base64?{encoded}?=") == text


MEMBERS = st.sampled_from(["jsonrpc", "id", "method", "params", "_meta", VERSION, CAPABILITIES, "x"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(MEMBERS, inner),
    )
)
def test_any_json_at_all_is_classified_without_an_exception(body: object) -> None:
    answer = read_message(headers(), body)
    assert isinstance(answer, (Request, Notification, Reply))
    if isinstance(answer, Reply):
        json.dumps(answer.body)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, (True, True)),
        ("", (True, True)),
        ("*/*", (True, True)),
        ("application/json", (True, False)),
        ("text/event-stream", (False, True)),
        ("application/json, text/event-stream;q=0.9", (True, True)),
        ("text/*", (False, True)),
        ("image/png", (True, True)),
    ],
)
def test_accept_is_read_kindly(accept: str | None, expected: tuple[bool, bool]) -> None:
    assert accepts(accept) == expected
