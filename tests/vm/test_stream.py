"""Live output of real jobs over the WebSocket: as it is written, from a cursor, through a suspension."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, wrap_client_stream

from microvm.web.follow import HEAD
from tests.vm.live_service import Machine, Service

LONG_S = 120.0

pytestmark = pytest.mark.vm

GATED = "rm -f gate; mkfifo gate; echo one; echo err >&2; cat gate; echo end"


@asynccontextmanager
async def following(
    service: Service, vm: Machine, job_id: str, query: str = ""
) -> AsyncGenerator[WebSocketConnection]:
    headers = [(b"Authorization", vm.client.http.headers["Authorization"].encode())]
    path = f"/v1/vms/{vm.vm_id}/jobs/{job_id}/stream{query}"
    stream = await trio.open_unix_socket(str(service.socket))
    async with stream, trio.open_nursery() as nursery:
        yield await wrap_client_stream(nursery, stream, "localhost", path, extra_headers=headers)
        nursery.cancel_scope.cancel(reason="the test has seen enough")


class Output:
    """What came so far, and the job once it has ended."""

    def __init__(self, start: tuple[int, int] = (0, 0)) -> None:
        self.data = {1: b"", 2: b""}
        self.start = {1: start[0], 2: start[1]}
        self.job: dict[str, Any] | None = None

    async def take(self, connection: WebSocketConnection) -> None:
        message = await connection.get_message()
        if isinstance(message, str):
            self.job = json.loads(message)
            return
        number, offset = HEAD.unpack_from(message)
        assert offset == self.start[number] + len(self.data[number])
        self.data[number] += message[HEAD.size :]

    async def until(self, connection: WebSocketConnection, wanted: bytes) -> None:
        while wanted not in self.data[1]:
            await self.take(connection)

    async def to_end(self, connection: WebSocketConnection) -> dict[str, Any]:
        while self.job is None:
            await self.take(connection)
        return self.job


async def test_output_is_seen_while_the_command_runs(service: Service, shared_vm: Machine) -> None:
    job_id = shared_vm.start(GATED)
    seen = Output()
    with trio.fail_after(LONG_S):
        async with following(service, shared_vm, job_id) as connection:
            await seen.until(connection, b"one\n")
            await shared_vm.acall("vm_exec", command="echo two > gate")
            await seen.until(connection, b"two\n")
            job = await seen.to_end(connection)
    assert seen.data == {1: b"one\ntwo\nend\n", 2: b"err\n"}
    assert job == shared_vm.call("vm_job_status", job_id=job_id)
    assert job["exit_code"] == 0


async def test_much_output_comes_whole_and_in_order(service: Service, shared_vm: Machine) -> None:
    job_id = shared_vm.start("seq 1 200000; seq 1 1000 >&2", output_limit_kib=4096)
    expected = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    seen, late = Output(), Output((1000, 10))
    with trio.fail_after(LONG_S):
        async with following(service, shared_vm, job_id) as connection:
            await seen.to_end(connection)
        async with following(service, shared_vm, job_id, "?stdout=1000&stderr=10") as connection:
            await late.to_end(connection)
    assert seen.data[1] == expected
    assert late.data[1] == expected[1000:]
    assert seen.data[2][10:] == late.data[2]


async def test_following_neither_wakes_nor_loses_a_suspended_job(service: Service, vm: Machine) -> None:
    job_id = vm.start(GATED)
    seen = Output()
    with trio.fail_after(LONG_S):
        async with following(service, vm, job_id) as connection:
            await seen.until(connection, b"one\n")
            await vm.acall("vm_suspend", force=True)
            # Longer than any follower trusts the guest to speak up; polling a job wakes nothing either.
            status = await vm.acall("vm_job_status", job_id=job_id, wait_seconds=3)
            assert (status["state"], vm.state) == ("frozen", "hibernated")
            await vm.acall("vm_exec", command="echo two > gate")
            job = await seen.to_end(connection)
    assert seen.data[1] == b"one\ntwo\nend\n"
    assert job["state"] == "completed"


async def test_a_follower_learns_that_its_vm_is_gone(service: Service, vm: Machine) -> None:
    job_id = vm.start(GATED)
    seen = Output()
    with trio.fail_after(LONG_S):
        async with following(service, vm, job_id) as connection:
            await seen.until(connection, b"one\n")
            await vm.acall("vm_destroy")
            said = await seen.to_end(connection)
    assert said.get("state") == "lost" or said["error"]["code"] in {"not_found", "vm_failed"}
    vm.client.create().destroy()


@pytest.fixture
def vm(client: Any) -> Any:
    """A VM that a test may destroy itself."""
    machine = client.create()
    yield machine
    if machine.vm_id in {known["vm_id"] for known in client.call("vm_list")["vms"]}:
        machine.destroy()
