"""Changes as server-sent events: whose they are, what they say, and how a listener goes on behind a cut."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio

from microvm.catalogue.results import show_job, show_vm
from microvm.fleet.events import KEPT, QUEUE
from microvm.model import JobId, JobRecord, JobState, Principal, VmId, VmState, VmView, WorkspaceId
from tests.daemon.web import conftest
from tests.daemon.web.conftest import Doors

ALICE, BOB = WorkspaceId("alice"), WorkspaceId("bob")


def view(workspace: str, state: VmState = VmState.RUNNING) -> VmView:
    return VmView(conftest.make_record(workspace).with_(state=state), 1.0)


def job(number: int) -> JobRecord:
    return JobRecord(JobId(f"job_{number}"), VmId(conftest.VM_ID), JobState.RUNNING, "x", started_at=1.0)


class Heard:
    """An open stream of events, read off the socket: clients leave their generators to the collector."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)
        self._text = ""
        self.last_id = ""

    async def ask(self, target: str, headers: list[tuple[str, str]]) -> int:
        """Sends the request; returns the answer's status."""
        request = h11.Request(method="GET", target=target, headers=[("Host", "localhost"), *headers])
        await self._stream.send_all(
            (self._http.send(request) or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        )
        answer = await self._event()
        assert isinstance(answer, h11.Response)
        assert dict(answer.headers)[b"content-type"].startswith(b"text/event-stream")
        return answer.status_code

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.receive_some(65536))
        return event

    async def block(self) -> dict[str, str]:
        """The next block's fields; those of a comment have no name."""
        while "\n\n" not in self._text:
            event = await self._event()
            if not isinstance(event, h11.Data):
                raise EOFError
            self._text += event.data.decode()
        block, _, self._text = self._text.partition("\n\n")
        return dict(line.split(": ", 1) for line in block.splitlines())

    async def next(self) -> tuple[str, Any]:
        """The next event's name and data; comments pass."""
        while "data" not in (fields := await self.block()):
            pass
        self.last_id = fields["id"]
        return fields["event"], json.loads(fields["data"])


@asynccontextmanager
async def listening(
    doors: Doors, token: str = "alice-token", query: str = "", after: str | None = None
) -> AsyncGenerator[Heard]:
    headers = [("Authorization", f"Bearer {token}")]
    if after is not None:
        headers.append(("Last-Event-ID", after))
    async with await trio.open_tcp_stream("127.0.0.1", doors.port) as stream:
        heard = Heard(stream)
        assert await heard.ask(f"/v1/events{query}", headers) == 200
        assert "data" not in await heard.block()
        yield heard


async def test_an_event_is_the_very_object_of_the_tools(doors: Doors) -> None:
    with trio.fail_after(10):
        async with listening(doors) as heard:
            doors.streams.events.publish(ALICE, view("alice"))
            doors.streams.events.publish(ALICE, job(1))
            assert await heard.next() == ("vm", show_vm(view("alice"), Principal(ALICE)))
            first = int(heard.last_id)
            assert await heard.next() == ("job", show_job(job(1)))
            assert int(heard.last_id) > first


async def test_a_workspace_hears_its_own_and_an_operator_all_if_it_asks(doors: Doors) -> None:
    with trio.fail_after(10):
        async with listening(doors) as own, listening(doors, "root-token", "?all=1") as every:
            doors.streams.events.publish(BOB, view("bob"))
            doors.streams.events.publish(ALICE, view("alice"))
            assert "workspace" not in (await own.next())[1]
            assert [(await every.next())[1]["workspace"] for _ in range(2)] == ["bob", "alice"]
        async with doors.http() as http:
            assert (await http.get("/v1/events?all=1")).status_code == 403
            assert (await http.get("/v1/events?since=1")).status_code == 400
            assert (await http.get("/v1/events", headers={"Last-Event-ID": "one"})).status_code == 400
        async with doors.http(None) as http:
            assert (await http.get("/v1/events")).status_code == 401


async def test_a_listener_goes_on_behind_the_last_event_that_it_saw(doors: Doors) -> None:
    with trio.fail_after(10):
        async with listening(doors) as heard:
            doors.streams.events.publish(ALICE, job(0))
            await heard.next()
        for number in range(1, 4):
            doors.streams.events.publish(BOB, job(100))
            doors.streams.events.publish(ALICE, job(number))
        async with listening(doors, after=heard.last_id) as again:
            assert [(await again.next())[1]["job_id"] for _ in range(3)] == ["job_1", "job_2", "job_3"]
            doors.streams.events.publish(ALICE, job(4))
            assert (await again.next())[1]["job_id"] == "job_4"


async def test_the_last_thousand_are_kept_of_each_workspace(doors: Doors) -> None:
    events = doors.streams.events
    events.publish(BOB, job(0))
    for number in range(KEPT + 5):
        events.publish(ALICE, job(number))
    heard = events.listen(ALICE, 0)
    assert heard.missed
    assert isinstance(first := (await heard.receive()).content, JobRecord)
    assert first.job_id == "job_5"
    heard.close()
    other = events.listen(BOB, (await events.listen(BOB, 0).receive()).change_id - 1)
    assert not other.missed


async def test_a_slow_listener_is_cut_and_loses_nothing_that_it_asks_for_again(doors: Doors) -> None:
    events = doors.streams.events
    slow = events.listen(ALICE, None)
    for number in range(QUEUE + 10):
        events.publish(ALICE, job(number))
    seen = [await slow.receive() for _ in range(QUEUE)]
    with pytest.raises(trio.EndOfChannel):
        await slow.receive()
    again = events.listen(ALICE, seen[-1].change_id)
    assert [(await again.receive()).change_id - seen[-1].change_id for _ in range(10)] == list(range(1, 11))


async def test_a_client_that_leaves_is_listened_for_no_more(doors: Doors) -> None:
    with trio.fail_after(10):
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(20):
            async with listening(doors):
                pass
        while trio.lowlevel.current_statistics().tasks_living > before:
            await trio.lowlevel.checkpoint()
        doors.streams.events.publish(ALICE, job(1))  # finds who has gone, and forgets them


async def test_a_stream_of_events_ends_with_its_token(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microvm.web.streams.RECHECK_S", 0.0)
    with trio.fail_after(10):
        async with listening(doors) as heard:
            monkeypatch.delitem(conftest.TOKENS, "alice-token")
            doors.streams.events.publish(ALICE, job(1))
            with pytest.raises(EOFError):
                await heard.next()


async def test_the_drain_does_not_wait_for_listeners(doors: Doors) -> None:
    with trio.fail_after(10):
        async with listening(doors) as heard:
            doors.stop.set()
            with pytest.raises(EOFError):
                await heard.next()
