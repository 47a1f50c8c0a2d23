"""Bad input on every tool: the documented code, and the fleet never hears of it.

The matrix is made from the schemas, so that a new parameter is covered by being declared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from microvm.catalogue import CATALOGUE, Tool

GOOD: dict[str, Any] = {
    "vm_id": "vm_" + "a" * 20,
    "job_id": "job_" + "b" * 20,
    "request_id": "r",
    "command": "true",
    "path": "f",
}
NOT: dict[str, list[Any]] = {
    "string": [1, True, 1.5, [], {}, None],
    "integer": ["1", True, 1.5, [], {}, None],
    "number": ["1", True, [], {}, None],
    "boolean": ["true", 0, 1, [], {}, None],
    "object": ["{}", 1, True, [], None],
}


def good(tool: Tool) -> dict[str, Any]:
    base = {name: GOOD[name] for name in tool.input_schema.get("required", [])}
    return {**base, "content": "x"} if tool.name == "vm_write_file" else base


def wrong_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that `schema` refuses."""
    yield from NOT[schema["type"]]
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "enum" in schema:
        yield "nonsense"
    if "pattern" in schema:
        yield "\n"
    if schema["type"] in {"integer", "number"}:
        yield 2**63 - 1
    if schema["type"] == "object":
        yield {"\0": 1}


def matrix() -> Iterator[Any]:
    for tool in CATALOGUE.values():
        for name, schema in tool.input_schema["properties"].items():
            values = list(wrong_values(schema))
            yield pytest.param(tool.name, name, values, id=f"{tool.name}-{name}")


@pytest.mark.parametrize(("tool_name", "parameter", "values"), list(matrix()))
async def test_a_wrong_value_is_refused_with_its_path(
    doors: Any, tool_name: str, parameter: str, values: list[Any]
) -> None:
    tool = CATALOGUE[tool_name]
    async with doors.http() as http:
        for value in values:
            arguments = {**good(tool), parameter: value}
            answer = await http.post(f"/v1/tools/{tool_name}", json=arguments)
            error = answer.json()["error"]
            assert answer.status_code in ({400, 413} if parameter == "length" else {400}), (value, error)
            if answer.status_code == 400:
                assert error["code"] == "invalid_argument"
                assert error["detail"]["path"].startswith(parameter), (value, error)
    assert not doors.fleet.calls


@pytest.mark.parametrize("name", list(CATALOGUE))
async def test_an_unknown_argument_is_refused_with_the_nearest_name(doors: Any, name: str) -> None:
    tool = CATALOGUE[name]
    known = next(iter(tool.input_schema["properties"]))
    async with doors.http() as http:
        answer = await http.post(f"/v1/tools/{name}", json={**good(tool), known + "x": 1})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["detail"] == {"path": known + "x", "nearest": known}
    assert not doors.fleet.calls


@pytest.mark.parametrize("name", [n for n, t in CATALOGUE.items() if t.input_schema.get("required")])
async def test_a_missing_argument_is_named(doors: Any, name: str) -> None:
    tool = CATALOGUE[name]
    async with doors.http() as http:
        for missing in tool.input_schema["required"]:
            arguments = {key: value for key, value in good(tool).items() if key != missing}
            error = (await http.post(f"/v1/tools/{name}", json=arguments)).json()["error"]
            assert (error["code"], error["detail"]["path"]) == ("invalid_argument", missing)
    assert not doors.fleet.calls


BODIES = {
    "NaN": (b'{"vm_id": NaN}', "vm_id"),
    "infinity": (b'{"vm_id": -Infinity}', "vm_id"),
    "an overflowing float": (b'{"vm_id": 1e999}', "vm_id"),
    "an integer beyond 64 bits": (b'{"vm_id": 9223372036854775808}', "vm_id"),
    "an integer of 6000 digits": (b'{"vm_id": ' + b"9" * 6000 + b"}", "vm_id"),
    "a duplicate key": (b'{"vm_id": "a", "vm_id": "b"}', ""),
    "a nested duplicate key": (b'{"vm_id": {"x": [{"a": 1, "a": 2}]}}', "vm_id.x[0]"),
    "deep nesting": (b'{"vm_id": ' + b"[" * 64 + b"]" * 64 + b"}", None),
    "absurd nesting": (b"[" * 400_000, ""),
    "a lone surrogate": (b'{"vm_id": "\\ud800"}', "vm_id"),
    "no UTF-8": (b'{"vm_id": "\xff"}', ""),
    "a byte order mark": (b'\xef\xbb\xbf{"vm_id": "a"}', ""),
    "no JSON": (b"{", ""),
    "two documents": (b"{} {}", ""),
    "an array": (b"[]", ""),
    "a string": (b'"vm_id"', ""),
    "null": (b"null", ""),
}


@pytest.mark.parametrize("name", list(CATALOGUE))
async def test_a_body_that_is_not_the_json_we_take_is_400_everywhere(doors: Any, name: str) -> None:
    async with doors.http() as http:
        for what, (body, path) in BODIES.items():
            answer = await http.post(f"/v1/tools/{name}", content=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_argument"), what
            if path is not None:
                assert error["detail"]["path"] == path, what
    assert not doors.fleet.calls


@pytest.mark.parametrize("what", list(BODIES))
async def test_the_same_bodies_are_parse_or_request_errors_over_mcp(doors: Any, what: str) -> None:
    async with doors.http() as http:
        answer = await http.post("/mcp", content=BODIES[what][0])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in {-32700, -32600}
    assert answer.json()["id"] is None


@pytest.mark.parametrize("name", list(CATALOGUE))
async def test_bad_arguments_over_mcp_are_tool_errors_with_the_same_code(doors: Any, name: str) -> None:
    async with doors.http() as http:
        params = {"name": name, "arguments": {**good(CATALOGUE[name]), "zzzzzz": 1}}
        message = {"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": params}
        answer = await http.post("/mcp", json=message)
    result = answer.json()["result"]
    assert result["isError"] is True
    assert json.loads(result["content"][0]["text"])["error"]["code"] == "invalid_argument"
    assert not doors.fleet.calls


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/tools/vm_list", "/mcp"])
async def test_a_body_over_4_mib_is_too_large(doors: Any, path: str, *, chunked: bool) -> None:
    body = b'{"x": "' + b"a" * (4 << 20) + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with doors.http() as http:
        answer = await http.post(path, content=pieces() if chunked else body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


ENVIRONMENTS = [
    {"LD_PRELOAD": "x"},
    {"LD_ANYTHING": "x"},
    {"BASH_ENV": "x"},
    {"ENV": "x"},
    {"IFS": "x"},
    {"PS4": "x"},
    {"1A": "x"},
    {"A-B": "x"},
    {"": "x"},
    {"BASH_FUNC_ls%%": "() { :; }"},
    {"A": "\0"},
    {"A": "x" * 32769},
    {f"N{i}": "" for i in range(257)},
    {f"N{i}": "x" * 32000 for i in range(9)},
]


@pytest.mark.parametrize("name", ["vm_create", "vm_exec"])
async def test_dangerous_and_malformed_environments_are_refused_without_their_values(
    doors: Any, name: str
) -> None:
    async with doors.http() as http:
        for env in ENVIRONMENTS:
            answer = await http.post(f"/v1/tools/{name}", json={**good(CATALOGUE[name]), "env": env})
            assert (answer.status_code, answer.json()["error"]["detail"]["path"]) == (400, "env"), list(env)
            assert "xxx" not in answer.text
        fine = {**good(CATALOGUE[name]), "env": {"PATH": "/bin", "PYTHONPATH": "x", "_A1": ""}}
        assert (await http.post(f"/v1/tools/{name}", json=fine)).status_code == 200


PAIRS = [
    ("vm_exec", {"stdin": "a", "stdin_base64": "YQ=="}, "stdin"),
    ("vm_exec", {"stdin_base64": "YQ"}, "stdin_base64"),
    ("vm_exec", {"stdin_base64": "Y Q=="}, "stdin_base64"),
    ("vm_exec", {"command": ""}, "command"),
    ("vm_exec", {"command": "a\0b"}, "command"),
    ("vm_exec", {"command": "é" * (1 << 19) + "a"}, "command"),
    ("vm_exec", {"timeout_seconds": 0}, "timeout_seconds"),
    ("vm_exec", {"wait_seconds": 30.001}, "wait_seconds"),
    ("vm_create", {"idle_seconds": 4.9}, "idle_seconds"),
    ("vm_create", {"request_id": "a" * 129}, "request_id"),
    ("vm_create", {"network": "on"}, "network"),
    ("vm_create", {"name": "x"}, "name"),
    ("vm_write_file", {"content_base64": "YQ=="}, "content"),
    ("vm_write_file", {"truncate": False}, "truncate"),
    ("vm_write_file", {"mode": "4755"}, "mode"),
    ("vm_write_file", {"mode": "0888"}, "mode"),
    ("vm_job_output", {"cursor": {"stdot": 1}}, "cursor.stdot"),
    ("vm_job_output", {"cursor": {"stdout": True}}, "cursor.stdout"),
    ("vm_job_output", {"max_bytes": 16385}, "max_bytes"),
]


@pytest.mark.parametrize(("name", "extra", "path"), PAIRS)
async def test_rules_beyond_the_schema_are_kept(doors: Any, name: str, extra: Any, path: str) -> None:
    async with doors.http() as http:
        answer = await http.post(f"/v1/tools/{name}", json={**good(CATALOGUE[name]), **extra})
    assert (answer.status_code, answer.json()["error"]["detail"]["path"]) == (400, path)
    assert not doors.fleet.calls


async def test_an_unknown_tool_is_not_found_with_the_nearest_name(doors: Any) -> None:
    async with doors.http() as http:
        answer = await http.post("/v1/tools/vm_creat", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["detail"] == {"nearest": "vm_create"}
