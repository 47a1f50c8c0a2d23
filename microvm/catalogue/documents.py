"""What the catalogue says of itself: the list of tools, and the OpenAPI document.

Pure. Neighbours: `web` serves these, `cli` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from microvm.catalogue.tools import Tool
from microvm.errors import STATUS_OF_CODE


def tool_list(tools: Iterable[Tool]) -> dict[str, Any]:
    """The answer of `GET /v1/tools`."""
    return {
        "tools": [
            {
                "name": tool.name,
                "title": tool.title,
                "description": tool.description,
                "input_schema": tool.input_schema,
                "output_schema": tool.output_schema,
                "annotations": hints(tool),
                "scope": tool.scope,
                "profiles": sorted(tool.profiles),
                "progress": tool.progress,
            }
            for tool in tools
        ]
    }


def hints(tool: Tool) -> dict[str, Any]:
    """A tool's annotations under MCP's names, all of them said outright."""
    given = tool.annotations
    return {
        "title": tool.title,
        "readOnlyHint": given.read_only,
        "destructiveHint": given.destructive,
        "idempotentHint": given.idempotent,
        "openWorldHint": given.open_world,
    }


def openapi(tools: Iterable[Tool], *, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the HTTP door.

    Args:
        tools: What the reader may call.
        version: The service's version.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "microvm",
            "version": version,
            "description": "Linux microVMs for a workspace. Every tool is a POST with a JSON object.",
        },
        "security": [{"bearer": []}],
        "paths": {f"/v1/tools/{tool.name}": {"post": _operation(tool)} for tool in tools} | _fixed_paths(),
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error_schema()},
            "responses": {
                "Error": {
                    "description": "The call failed; nothing was changed unless the code says otherwise.",
                    "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
        },
    }


def _operation(tool: Tool) -> dict[str, Any]:
    return {
        "operationId": tool.name,
        "summary": tool.title,
        "description": tool.description,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": tool.input_schema}},
        },
        "responses": _responses({"application/json": {"schema": tool.output_schema}}),
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "200": {"description": "Done.", "content": content},
        "default": {"$ref": "#/components/responses/Error"},
    }


def _fixed_paths() -> dict[str, Any]:
    ready = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    health: dict[str, Any] = {
        "security": [],
        "responses": {
            "200": {"description": "Yes.", "content": {"application/json": {"schema": ready}}},
            "503": {"description": "No.", "content": {"application/json": {"schema": ready}}},
        },
    }
    document = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/v1/tools": {
            "get": {
                "operationId": "list_tools",
                "summary": "List the tools",
                "responses": _responses(document),
            }
        },
        "/openapi.json": {
            "get": {"operationId": "openapi", "summary": "This document", "responses": _responses(document)}
        },
        "/healthz": {"get": {"operationId": "healthz", "summary": "Is the service alive?", **health}},
        "/readyz": {"get": {"operationId": "readyz", "summary": "Does the service take work?", **health}},
    }


def _error_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {
                    "code": {"type": "string", "enum": sorted(STATUS_OF_CODE)},
                    "message": {"type": "string"},
                    "detail": {"type": "object"},
                },
            }
        },
    }
