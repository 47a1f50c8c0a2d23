"""Events of a real service: a VM's and a job's life as it is committed, and again for who was away."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.vm.live_service import Client, Service

pytestmark = pytest.mark.vm

Event = tuple[int, str, dict[str, Any]]


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


@contextmanager
def listening(client: Client, after: int | None = None, query: str = "") -> Generator[Iterator[Event]]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    with client.http.stream("GET", f"/v1/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        yield events_of(answer.iter_lines())


def states(events: Iterator[Event], kind: str, last: str) -> list[str]:
    """The states that one kind goes through, up to `last`."""
    seen: list[str] = []
    for _, name, data in events:
        if name == kind and (not seen or seen[-1] != data["state"]):
            seen.append(data["state"])
            if data["state"] == last:
                break
    return seen


def test_a_life_is_told_as_it_is_committed_and_replayed(service: Service) -> None:
    mine = service.client(service.issue_token("events"))
    other = service.client(service.issue_token("bystander"))
    with listening(mine) as live:
        vm = mine.create()
        first, name, shown = next(live)
        assert (name, shown["vm_id"], shown["state"]) == ("vm", vm.vm_id, "creating")
        assert states(live, "vm", "running") == ["running"]
        job_id = vm.run("echo hi; exit 3")["job_id"]
        for _, name, data in live:
            if name == "job" and data["state"] == "completed":
                assert data == vm.call("vm_job_status", job_id=job_id)
                break
        vm.suspend()
        assert states(live, "vm", "hibernated") == ["running", "hibernating", "hibernated"][-2:]
        vm.text("true")
        assert states(live, "vm", "running") == ["resuming", "running"]
        vm.destroy()
        assert states(live, "vm", "destroying") == ["destroying"]
    with listening(mine, after=first) as again:
        ids: list[int] = []
        replayed: list[str] = []
        for number, name, data in again:
            ids.append(number)
            if name == "vm" and (not replayed or replayed[-1] != data["state"]):
                replayed.append(data["state"])
            if data["state"] == "destroying":
                break
    assert (
        replayed
        == ["creating", "running", "hibernating", "hibernated", "resuming", "running", "destroying"][
            7 - len(replayed) :
        ]
    )
    assert ids == sorted(set(ids))
    made = other.create()
    with listening(other, after=0) as theirs:
        assert {data["vm_id"] for _, name, data in [next(theirs)] if name == "vm"} == {made.vm_id}
    with listening(service.client(), after=first, query="?all=1") as every:
        assert {data.get("workspace") for _, name, data in (next(every), next(every)) if name == "vm"} <= {
            "events",
            "bystander",
            "tests",
        }
    made.destroy()


def test_writing_output_is_no_event(service: Service) -> None:
    mine = service.client(service.issue_token("quiet"))
    vm = mine.create()
    with listening(mine) as live:
        job_id = vm.start("for n in $(seq 200); do echo $n; done; read line < /dev/null; sleep 1; echo end")
        vm.wait_output(job_id, b"end")
        told: list[str] = []
        for _, name, data in live:
            if name == "job":
                told.append(data["state"])
                if data["state"] == "completed":
                    break
    assert told == ["running", "completed"]
    vm.destroy()
