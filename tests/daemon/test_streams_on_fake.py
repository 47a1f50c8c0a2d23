"""Streams of a whole fleet on the fake: transfers, live output, changes, and the end of a workspace's VMs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from microvm.errors import MicrovmError
from microvm.fleet import transfer
from microvm.fleet.streams import Streams
from microvm.host.cgroup import find_hierarchy
from microvm.model import VmId, VmState, VmView
from tests.daemon.fleet_rig import ALICE, BOB, House, Rig, make_house

LONG_S = 60.0
MIB = 1 << 20


@pytest.fixture
def house(reflink_directory: Path, state_dir: Path) -> Iterator[House]:
    house = make_house(reflink_directory, state_dir)
    yield house
    assert not list(find_hierarchy().own_path.glob(f"microvm-{house.instance_id}*")), "a cgroup is left"


async def pieces(data: bytes, size: int = 70_000) -> AsyncGenerator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(streams: Streams, vm_id: str, path: str) -> bytes:
    facts = await streams.look(ALICE, vm_id, path)
    async with streams.read_file(ALICE, vm_id, path, offset=0, length=facts.size, tag=facts.tag) as data:
        return b"".join([piece async for piece in data])


async def write(streams: Streams, vm_id: str, path: str, body: AsyncIterator[bytes], size: int | None) -> str:
    written = await streams.write_file(ALICE, vm_id, path, body, size=size, mode="0640", make_parents=True)
    return written[1]


async def code_of(call: Awaitable[object]) -> str:
    with pytest.raises(MicrovmError) as caught:
        await call
    return caught.value.code


async def test_files_and_directories_travel_and_wake_a_vm(house: House) -> None:
    content = os.urandom(3 * MIB)
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            vm_id = (await rig.create()).record.vm_id
            digest = await write(streams, vm_id, "a/b", pieces(content), len(content))
            assert digest == hashlib.sha256(content).hexdigest()
            await rig.suspend(vm_id)
            assert await read(streams, vm_id, "a/b") == content
            async with streams.read_archive(ALICE, vm_id, "a") as data:
                archive = b"".join([piece async for piece in data])
            assert await streams.write_archive(ALICE, vm_id, "c", pieces(archive), size=len(archive)) == len(
                archive
            )
            assert await read(streams, vm_id, "c/b") == content
            assert await code_of(streams.look(BOB, vm_id, "a/b")) == "not_found"
            assert await code_of(read(streams, vm_id, "a")) == "invalid_argument"


async def test_an_upload_that_ends_early_changes_nothing(house: House) -> None:
    async def breaking() -> AsyncGenerator[bytes]:
        yield b"x" * MIB
        raise MicrovmError("internal", "the client is gone")

    async def hanging() -> AsyncGenerator[bytes]:
        yield b"x" * MIB
        await trio.sleep_forever()

    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            vm_id = (await rig.create()).record.vm_id
            await rig.write(vm_id, "f", b"old")
            assert await code_of(write(streams, vm_id, "f", breaking(), None)) == "internal"
            assert await code_of(write(streams, vm_id, "f", pieces(b"short"), 6)) == "invalid_argument"
            with trio.move_on_after(0.2) as scope:  # a client that leaves while it stalls
                async with contextlib.aclosing(hanging()) as body:
                    await write(streams, vm_id, "f", body, None)
            assert scope.cancelled_caught
            assert await rig.read(vm_id, "f") == b"old"
            assert await rig.stdout(vm_id, "ls -A", "e1") == "f\n"
            await rig.suspend(vm_id)  # no lease is left behind


async def test_a_fourth_transfer_waits_for_a_place_and_single_calls_do_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL_S", 1.0)
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            vm_id = (await rig.create()).record.vm_id
            await rig.write(vm_id, "f", b"x" * 60_000)
            facts = await streams.look(ALICE, vm_id, "f")
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(transfer.AT_ONCE):
                    await stack.enter_async_context(
                        streams.read_file(ALICE, vm_id, "f", offset=0, length=facts.size, tag=facts.tag)
                    )
                assert await code_of(read(streams, vm_id, "f")) == "rate_limited"
                assert await rig.read(vm_id, "f") == b"x" * 60_000
            assert await read(streams, vm_id, "f") == b"x" * 60_000


async def test_output_is_followed_to_the_end_and_from_a_cursor(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            vm_id = (await rig.create()).record.vm_id
            job, _ = await rig.exec(vm_id, "mkfifo g; echo one; cat g; echo no >&2; exit 7", wait_seconds=0)
            follower = streams.follow(ALICE, vm_id, job.job_id, (1, 0))
            first = await follower.next()
            while not first:
                first = await follower.next()
            assert [(piece.stream, piece.offset, piece.data) for piece in first] == [(1, 1, b"ne\n")]
            await rig.exec(vm_id, "echo two > g", "e2")
            seen = {1: b"", 2: b""}
            while not follower.over:
                for piece in await follower.next():
                    seen[piece.stream] += piece.data
            assert seen == {1: b"two\n", 2: b"no\n"}
            assert follower.job.exit_code == 7
            assert await code_of(_follow(streams, vm_id, "job_none")) == "not_found"


async def _follow(streams: Streams, vm_id: str, job_id: str) -> None:
    streams.follow(ALICE, vm_id, job_id, (0, 0))


async def test_changes_are_told_with_what_is_committed(house: House) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            listener = streams.listen(ALICE, all_workspaces=False, after=None)
            other = streams.listen(BOB, all_workspaces=False, after=None)
            vm_id = (await rig.create()).record.vm_id
            await rig.exec(vm_id, "true")
            await rig.suspend(vm_id)
            await rig.fleet.destroy(ALICE, vm_id)
            vms: list[str] = []
            jobs: list[str] = []
            while "destroying" not in vms:
                content = (await listener.receive()).content
                if isinstance(content, VmView):
                    vms += [content.record.state] if content.record.state not in vms[-1:] else []
                else:
                    jobs += [content.state] if content.state not in jobs[-1:] else []
            assert vms == ["creating", "running", "hibernating", "hibernated", "destroying"]
            assert jobs == ["running", "completed"]
            await rig.create("c2", who=BOB)
            first = (await other.receive()).content
            assert isinstance(first, VmView)
            assert first.record.workspace_id == "bob"


async def busy_vm(rig: Rig, request_id: str) -> str:
    vm_id = (await rig.create(request_id)).record.vm_id
    await rig.exec(vm_id, "sleep 600", f"e-{request_id}", wait_seconds=0)
    return vm_id


@pytest.mark.parametrize("destroy", [False, True])
async def test_a_revoked_workspaces_vms_end_at_once(house: House, destroy: bool) -> None:
    with trio.fail_after(LONG_S):
        async with house.open() as rig:
            streams = Streams(rig.fleet)
            busy, asleep = await busy_vm(rig, "c1"), (await rig.create("c2")).record.vm_id
            await rig.suspend(asleep)
            await rig.create("c3", who=BOB)
            async with trio.open_nursery() as nursery:

                async def wake() -> None:
                    with contextlib.suppress(MicrovmError):
                        await rig.stdout(asleep, "echo up", "e2")

                waking = house.kind.hold("load")
                nursery.start_soon(wake)
                await waking.reached.wait()
                nursery.start_soon(streams_end, streams, destroy)
                await trio.testing.wait_all_tasks_blocked(0.01)
                waking.release.set()
            states = {
                view.record.vm_id: view.record.state
                for view in rig.fleet.list_vms(ALICE, all_workspaces=False)
            }
            if destroy:
                assert states == {}
            else:
                assert states[VmId(busy)] is VmState.FAILED
                assert states[VmId(asleep)] in {VmState.FAILED, VmState.HIBERNATED}
            [bobs] = rig.fleet.list_vms(BOB, all_workspaces=False)
            assert bobs.record.state is VmState.RUNNING


async def streams_end(streams: Streams, destroy: bool) -> None:
    await streams.end_workspace(ALICE.workspace_id, destroy=destroy)
