"""The official client, in each of its modes, over TCP and over the Unix socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from microvm.catalogue import CATALOGUE

VM_ID = "vm_" + "a" * 20
JOB_ID = "job_" + "b" * 20
ARGUMENTS: dict[str, dict[str, Any]] = {
    "vm_create": {"request_id": "r1", "memory_mib": 512},
    "vm_list": {},
    "vm_status": {"vm_id": VM_ID},
    "vm_exec": {"vm_id": VM_ID, "request_id": "r2", "command": "echo hello", "wait_seconds": 5},
    "vm_job_status": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_job_output": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_job_cancel": {"vm_id": VM_ID, "job_id": JOB_ID},
    "vm_read_file": {"vm_id": VM_ID, "path": "a"},
    "vm_write_file": {"vm_id": VM_ID, "path": "a", "content": "x"},
    "vm_suspend": {"vm_id": VM_ID},
    "vm_resume": {"vm_id": VM_ID},
    "vm_destroy": {"vm_id": VM_ID},
}
MODES = ("auto", "legacy", "2026-07-28")


@asynccontextmanager
async def client(
    doors: Any, mode: str, *, path: str = "/mcp", uds: str | None = None
) -> AsyncGenerator[Client]:
    base = "http://localhost" if uds else doors.bound.url
    async with doors.mcp_http(uds=uds) as http:
        target = streamable_http_client(base + path, http_client=http)
        async with Client(target, mode=mode, cache=None) as session:
            yield session


@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_lists_and_calls_every_tool(doors: Any, mode: str) -> None:
    with trio.fail_after(30):
        async with client(doors, mode) as session:
            listed = await session.list_tools()
            assert [tool.name for tool in listed.tools] == list(CATALOGUE)
            for name, arguments in ARGUMENTS.items():
                result = await session.call_tool(name, arguments)
                assert not result.is_error, result
                text = result.content[0]
                assert text.type == "text"
                assert json.loads(text.text) == result.structured_content
                CATALOGUE[name].result.model_validate(result.structured_content)


@pytest.mark.parametrize("mode", MODES)
async def test_a_refusal_reaches_the_official_client_with_its_code(doors: Any, mode: str) -> None:
    with trio.fail_after(10):
        async with client(doors, mode) as session:
            result = await session.call_tool("vm_status", {"vm_id": "vm_nobody"})
    assert result.is_error
    assert result.structured_content is not None
    assert result.structured_content["error"]["code"] == "not_found"


# The client leaves its own stream readers to the garbage collector; ours is the server's end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", MODES)
async def test_progress_reaches_the_client_that_asked_for_it(doors: Any, mode: str) -> None:
    seen: list[tuple[float, str | None]] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))

    async def act(progress: Any) -> None:
        progress(0.1, "freezing")
        await trio.sleep(0.15)
        progress(0.7, "writing")

    with trio.fail_after(10), doors.acting(act):
        async with client(doors, mode) as session:
            result = await session.call_tool("vm_suspend", {"vm_id": VM_ID}, progress_callback=heard)
    assert not result.is_error
    assert seen == [(0.1, "freezing"), (0.7, "writing")]


@pytest.mark.parametrize("mode", MODES)
async def test_the_unix_socket_and_the_slashed_path_serve_the_same(doors: Any, mode: str) -> None:
    with trio.fail_after(10):
        async with client(doors, mode, path="/mcp/", uds=doors.bound.service_socket) as session:
            assert len((await session.list_tools()).tools) == len(CATALOGUE)
