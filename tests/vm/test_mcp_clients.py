"""The official client, in each of its modes, drives a real VM through every core tool."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import trio
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from microvm.catalogue import CATALOGUE
from tests.vm.live_service import MEMORY_MIB, Service, new_request_id

pytestmark = [pytest.mark.vm, pytest.mark.root]

MODES = ("auto", "legacy", "2026-07-28")
SECONDS = 240.0


class Session:
    """One client's session; remembers which tools it called."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.called: list[str] = []

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The tool's structured result, which its text and its output schema agree with."""
        self.called.append(tool)
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result
        assert result.structured_content is not None
        text = result.content[0]
        assert text.type == "text"
        assert json.loads(text.text) == result.structured_content
        CATALOGUE[tool].result.model_validate(result.structured_content)
        return result.structured_content


@asynccontextmanager
async def session(service: Service, token: str, mode: str) -> AsyncGenerator[Session]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http:
        target = streamable_http_client(f"{service.url}/mcp", http_client=http)
        async with Client(target, mode=mode, cache=None) as client:
            yield Session(client)


# The client leaves its own stream readers to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_drives_a_vm_through_every_core_tool(service: Service, mode: str) -> None:
    token = service.issue_token(f"mcp-{mode}")
    with trio.fail_after(SECONDS):
        async with session(service, token, mode) as mcp:
            listed = await mcp.client.list_tools()
            assert [tool.name for tool in listed.tools] == list(CATALOGUE)
            vm_id = await create(mcp)
            await use_files(mcp, vm_id)
            await run_commands(mcp, vm_id)
            await suspend_and_resume(mcp, vm_id)
            assert await mcp.call("vm_destroy", vm_id=vm_id) == {"destroyed": True}
            assert await mcp.call("vm_list") == {"vms": []}
            assert set(mcp.called) == set(CATALOGUE)


async def create(mcp: Session) -> str:
    request = {"request_id": new_request_id(), "memory_mib": MEMORY_MIB, "idle_seconds": 0}
    vm = await mcp.call("vm_create", **request)
    assert vm["state"] == "running"
    assert (await mcp.call("vm_create", **request))["vm_id"] == vm["vm_id"]
    assert [one["vm_id"] for one in (await mcp.call("vm_list"))["vms"]] == [vm["vm_id"]]
    return vm["vm_id"]


async def use_files(mcp: Session, vm_id: str) -> None:
    content = bytes(range(256))
    encoded = base64.b64encode(content).decode()
    await mcp.call("vm_write_file", vm_id=vm_id, path="a/b.bin", content_base64=encoded)
    read = await mcp.call("vm_read_file", vm_id=vm_id, path="/workspace/a/b.bin")
    assert (read["content_base64"], read["size"], read["eof"]) == (encoded, 256, True)


async def run_commands(mcp: Session, vm_id: str) -> None:
    job = await mcp.call(
        "vm_exec",
        vm_id=vm_id,
        request_id=new_request_id(),
        command="wc -c < a/b.bin; echo wrong >&2; exit 3",
        wait_seconds=30,
    )
    assert (job["state"], job["exit_code"]) == ("completed", 3)
    assert (job["output"]["stdout"], job["output"]["stderr"]) == ("256\n", "wrong\n")
    page = await mcp.call("vm_job_output", vm_id=vm_id, job_id=job["job_id"])
    assert page == job["output"]


async def suspend_and_resume(mcp: Session, vm_id: str) -> None:
    started = await mcp.call("vm_exec", vm_id=vm_id, request_id=new_request_id(), command="sleep 600")
    job = {"vm_id": vm_id, "job_id": started["job_id"]}
    refused = await mcp.client.call_tool("vm_suspend", {"vm_id": vm_id})
    assert refused.is_error
    assert refused.structured_content is not None
    assert refused.structured_content["error"]["code"] == "jobs_active"
    assert (await mcp.call("vm_suspend", vm_id=vm_id, force=True))["state"] == "hibernated"
    assert (await mcp.call("vm_status", vm_id=vm_id))["jobs"][-1]["state"] == "frozen"
    assert (await mcp.call("vm_resume", vm_id=vm_id))["state"] == "running"
    assert (await mcp.call("vm_job_status", **job))["state"] == "running"
    assert (await mcp.call("vm_job_cancel", **job))["cancelled"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_hears_how_far_a_long_call_is(service: Service, mode: str) -> None:
    heard: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)

    token = service.issue_token(f"progress-{mode}")
    with trio.fail_after(SECONDS):
        async with session(service, token, mode) as mcp:
            vm = await mcp.call("vm_create", request_id=new_request_id(), memory_mib=MEMORY_MIB)
            suspend = {"vm_id": vm["vm_id"]}
            result = await mcp.client.call_tool("vm_suspend", suspend, progress_callback=on_progress)
            assert not result.is_error
            await mcp.call("vm_destroy", vm_id=vm["vm_id"])
    assert heard
    assert heard == sorted(heard)
