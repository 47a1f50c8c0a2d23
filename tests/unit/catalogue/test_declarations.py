"""What every declaration promises, whatever the tool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from microvm.catalogue import CATALOGUE, PROFILES, Tool, find, hints, listed, openapi, tool_list
from microvm.errors import RequestError
from microvm.model import Principal, WorkspaceId

TOOLS = list(CATALOGUE.values())
CORE = [
    "vm_create",
    "vm_list",
    "vm_status",
    "vm_exec",
    "vm_job_status",
    "vm_job_output",
    "vm_job_cancel",
    "vm_read_file",
    "vm_write_file",
    "vm_suspend",
    "vm_resume",
    "vm_destroy",
]
LATER = {"name", "network", "from", "auto_snapshot_seconds", "ephemeral"}


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node  # pyright: ignore[reportUnknownVariableType]
        for value in node.values():  # pyright: ignore[reportUnknownVariableType]
            yield from schemas(value)
    elif isinstance(node, list):
        for value in node:  # pyright: ignore[reportUnknownVariableType]
            yield from schemas(value)


def test_the_core_tools_are_all_there_in_order() -> None:
    assert list(CATALOGUE) == CORE


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_declaration_is_one_that_every_client_can_take(tool: Tool) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]{0,29}", tool.name)
    assert len(tool.description.encode()) <= 2048
    assert tool.description.isascii()
    for schema in (tool.input_schema, tool.output_schema):
        assert schema["type"] == "object"
        assert schema["additionalProperties"] is False
        assert not {"anyOf", "oneOf", "allOf", "not", "$schema"} & set(schema)
        for part in schemas(schema):
            assert not {"$ref", "$defs", "anyOf", "oneOf", "allOf"} & set(part)
            if part.get("type") == "array":
                assert part["items"]["type"]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_parameter_says_what_it_is_for(tool: Tool) -> None:
    for name, schema in tool.input_schema["properties"].items():
        assert schema.get("description"), name
        assert schema["type"] in {"string", "integer", "number", "boolean", "object"}


def test_parameters_of_later_features_do_not_exist() -> None:
    assert not LATER & set(CATALOGUE["vm_create"].input_schema["properties"])


def test_only_creation_and_execution_take_a_request_id() -> None:
    assert [tool.name for tool in TOOLS if tool.takes_request_id] == ["vm_create", "vm_exec"]


def test_hints_are_all_said() -> None:
    for tool in TOOLS:
        assert set(hints(tool)) == {
            "title",
            "readOnlyHint",
            "destructiveHint",
            "idempotentHint",
            "openWorldHint",
        }


@pytest.mark.parametrize("profile", [*PROFILES, None])
def test_the_profiles_list_the_core_tools(profile: str | None) -> None:
    principal = Principal(WorkspaceId("w"))
    assert [tool.name for tool in listed(CATALOGUE, principal, profile)] == CORE


def test_an_unknown_profile_is_refused_but_the_tokens_own_wins() -> None:
    with pytest.raises(RequestError):
        listed(CATALOGUE, Principal(WorkspaceId("w")), "capsem")
    assert listed(CATALOGUE, Principal(WorkspaceId("w"), profile="core"), "capsem")


def test_operator_tools_are_hidden_from_others() -> None:
    tool = TOOLS[0]
    secret = Tool("ops", "Ops", "For operators.", tool.params, tool.result, tool.handler, scope="operator")
    catalogue = {"ops": secret}
    assert listed(catalogue, Principal(WorkspaceId("w"))) == []
    assert listed(catalogue, Principal(WorkspaceId("w"), operator=True)) == [secret]


def test_a_name_that_is_far_from_any_is_not_found_without_advice() -> None:
    with pytest.raises(RequestError) as caught:
        find(CATALOGUE, "x" * 5000)
    assert (caught.value.code, caught.value.detail) == ("not_found", None)


def test_the_documents_hold_the_same_tools() -> None:
    document = openapi(TOOLS, version="1")
    assert [tool["name"] for tool in tool_list(TOOLS)["tools"]] == CORE
    assert {f"/v1/tools/{name}" for name in CORE} < set(document["paths"])
    identifiers = [
        operation["operationId"] for path in document["paths"].values() for operation in path.values()
    ]
    assert len(identifiers) == len(set(identifiers))
