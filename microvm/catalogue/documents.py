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
        "paths": {f"/v1/tools/{tool.name}": {"post": _operation(tool)} for tool in tools}
        | _fixed_paths()
        | _stream_paths(),
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


def _parameter(where: str, name: str, description: str, kind: str = "string") -> dict[str, Any]:
    return {
        "in": where,
        "name": name,
        "required": where == "path",
        "description": description,
        "schema": {"type": kind},
    }


def _binary(content_type: str) -> dict[str, Any]:
    return {content_type: {"schema": {"type": "string", "format": "binary"}}}


def _written(**members: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in members.items()}
    schema = {"type": "object", "properties": properties, "required": list(members)}
    return _responses({"application/json": {"schema": schema}})


def _stream_paths() -> dict[str, Any]:
    """Transfers, events and live output: no tools, since their bodies are no JSON."""
    vm_id = _parameter("path", "vm_id", "The VM; it is woken.")
    path = _parameter("path", "path", "Below /workspace; slashes stand for themselves.")
    part = {"206": {"description": "The part that Range asked for.", "content": _binary("*/*")}}
    return {
        "/v1/vms/{vm_id}/files/{path}": {
            "get": {
                "operationId": "read_file",
                "summary": "Download a file of any size",
                "description": "With ETag, Last-Modified and Microvm-Mode; one Range, with If-Range, goes on "
                "behind a cut. A file that changes meanwhile cuts the connection.",
                "parameters": [vm_id, path],
                "responses": _responses(_binary("application/octet-stream")) | part,
            },
            "put": {
                "operationId": "write_file",
                "summary": "Upload a file of any size",
                "description": "It replaces the file when all of it has arrived, or changes nothing.",
                "parameters": [
                    vm_id,
                    path,
                    _parameter("query", "mode", "Octal permissions; 0644 by default."),
                    _parameter(
                        "query", "make_parents", "Whether missing directories are made; 1 by default."
                    ),
                ],
                "requestBody": {"required": True, "content": _binary("application/octet-stream")},
                "responses": _written(size="integer", sha256="string"),
            },
        },
        "/v1/vms/{vm_id}/archive/{path}": {
            "get": {
                "operationId": "read_archive",
                "summary": "Download a directory as a tar archive",
                "parameters": [vm_id, path],
                "responses": _responses(_binary("application/x-tar")),
            },
            "put": {
                "operationId": "write_archive",
                "summary": "Unpack a tar archive into a directory",
                "parameters": [vm_id, path],
                "description": "All of it is unpacked aside first. A directory that was not there appears by "
                "one rename; into one that was, entries are moved one by one and replace files.",
                "requestBody": {"required": True, "content": _binary("application/x-tar")},
                "responses": _written(archive_bytes="integer"),
            },
        },
        "/v1/vms/{vm_id}/jobs/{job_id}/stream": {
            "get": {
                "operationId": "follow_job",
                "summary": "Follow a job's output over a WebSocket",
                "description": "Binary frames: a byte for the stream (1 stdout, 2 stderr), its offset as "
                "eight bytes, big-endian, the output. At the end a text frame with the job.",
                "parameters": [
                    _parameter("path", "vm_id", "The VM."),
                    _parameter("path", "job_id", "The job."),
                    _parameter("query", "stdout", "Byte offset to begin at; 0 by default.", "integer"),
                    _parameter("query", "stderr", "Byte offset to begin at; 0 by default.", "integer"),
                ],
                "responses": {
                    "101": {"description": "Go on by RFC 6455."},
                    "default": {"$ref": "#/components/responses/Error"},
                },
            }
        },
        "/v1/events": {
            "get": {
                "operationId": "events",
                "summary": "Changes of VMs and jobs as server-sent events",
                "description": "Events vm and job; data is the object as the tools show it. Last-Event-ID "
                "replays what came behind it, of the last 1000. Comments every 15 s. Slow readers are cut.",
                "parameters": [
                    _parameter("query", "all", "1 for every workspace's (operators)."),
                    _parameter("header", "Last-Event-ID", "The id of the last event that was seen."),
                ],
                "responses": _responses({"text/event-stream": {"schema": {"type": "string"}}}),
            }
        },
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
