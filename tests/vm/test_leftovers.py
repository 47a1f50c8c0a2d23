"""What a VM needed on the host is gone with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from tests.vm.live_service import Client, Service, ToolError

pytestmark = [pytest.mark.vm, pytest.mark.root]


async def test_vms_that_were_created_used_and_destroyed_leave_nothing_on_the_host(
    service: Service, rounds: Callable[[int, int], int]
) -> None:
    client = service.client(service.issue_token("leftovers"))
    before, (files, sockets) = service.leftovers(), held_open(service)
    at_once = rounds(3, 4)
    for batch in range(rounds(2, 5)):
        async with trio.open_nursery() as nursery:
            for number in range(at_once):
                nursery.start_soon(trio.to_thread.run_sync, use_one, client, batch + number)
    assert client.call("vm_list")["vms"] == []
    assert service.leftovers() == before
    files_now, sockets_now = held_open(service)
    assert files_now == files
    assert sockets_now <= sockets + at_once  # the connections of the calls above, kept alive


def held_open(service: Service) -> tuple[list[str], int]:
    """The daemon's descriptors: which of them are no sockets, and how many are."""
    everything = service.descriptors()
    files = [name for name in everything if not name.startswith("socket:")]
    return files, len(everything) - len(files)


def use_one(client: Client, number: int) -> None:
    """A VM's life, ended in another state each time: running, paused, hibernated, with a job that runs."""
    vm = client.create()
    vm.text("head -c 1M /dev/urandom > file; sync; cat file > /dev/null")
    if number % 4 == 1:
        vm.suspend("pause")
    elif number % 4 == 2:
        vm.suspend()
    elif number % 4 == 3:
        vm.start("sleep 600")
    vm.destroy()


def test_a_destroyed_vm_is_gone_for_every_tool_and_its_neighbour_is_not(client: Client) -> None:
    one, other = client.create(), client.create()
    one.destroy()
    with pytest.raises(ToolError) as gone:
        one.text("true")
    assert gone.value.code == "not_found"
    assert [vm["vm_id"] for vm in client.call("vm_list")["vms"]].count(other.vm_id) == 1
    assert other.text("echo here") == "here\n"
    other.destroy()
