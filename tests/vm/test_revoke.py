"""Revoking tokens and workspaces on a real service: access ends, and VMs only when that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from microvm.cli.app import run
from tests.vm.live_service import Client, Machine, Service, ToolError
from tests.vm.waiting import until

pytestmark = pytest.mark.vm


def revoke(service: Service, workspace: str, *options: str) -> int:
    return run(["revoke-workspace", workspace, "--config", str(service.config), *options])


def status(call: Callable[[], object]) -> int:
    try:
        call()
    except ToolError as error:
        return error.status
    return 200


def everybodys(service: Service) -> dict[str, str]:
    """State by VM, as the host's operator sees them."""
    return {vm["vm_id"]: vm["state"] for vm in service.client().call("vm_list", all=True)["vms"]}


def test_a_revoked_workspace_keeps_its_vms_unless_told_otherwise(service: Service) -> None:
    client = service.client(service.issue_token("plain"))
    vm = client.create()
    assert revoke(service, "plain") == 0
    assert status(lambda: client.call("vm_list")) == 401
    assert everybodys(service)[vm.vm_id] == "running"
    assert revoke(service, "plain", "--destroy") == 0
    assert vm.vm_id not in everybodys(service)


def test_stop_kills_what_runs_at_once_and_nothing_else(
    own_service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = (own_service.client(own_service.issue_token(name)) for name in ("mine", "other"))
    busy, paused, asleep = (mine.create() for _ in range(3))
    bystander = other.create()
    job_id = busy.start("sleep 600")
    paused.suspend("pause")
    asleep.suspend()
    capsys.readouterr()
    assert revoke(own_service, "mine", "--stop", "--json") == 0
    assert sorted(json.loads(capsys.readouterr().out)["stopped"]) == sorted([busy.vm_id, paused.vm_id])
    assert everybodys(own_service) == {
        busy.vm_id: "failed",
        paused.vm_id: "failed",
        asleep.vm_id: "hibernated",
        bystander.vm_id: "running",
    }
    shown = own_service.client().call("vm_status", vm_id=busy.vm_id)
    assert "revoked" in shown["reason"]
    assert [job["state"] for job in shown["jobs"] if job["job_id"] == job_id] == ["lost"]
    assert len(own_service.leftovers().processes) == 1
    assert bystander.text("echo on") == "on\n"


def test_destroy_leaves_nothing_of_a_workspace(own_service: Service) -> None:
    client = own_service.client(own_service.issue_token("mine"))
    busy, asleep = client.create(), client.create()
    busy.start("sleep 600")
    asleep.suspend()
    assert revoke(own_service, "mine", "--destroy") == 0
    assert everybodys(own_service) == {}
    assert not own_service.leftovers()


def test_without_the_service_it_holds_at_the_next_start(own_service: Service) -> None:
    mine, other = (own_service.client(own_service.issue_token(name)) for name in ("mine", "other"))
    gone, kept = mine.create(), other.create()
    own_service.stop()
    assert revoke(own_service, "mine", "--destroy") == 0
    own_service.start()
    assert everybodys(own_service) == {kept.vm_id: "hibernated"}
    assert [path for path in own_service.leftovers().files if gone.vm_id in path] == []


async def test_a_token_that_expires_ends_access_and_not_the_job(service: Service, client: Client) -> None:
    lasting = service.client(service.issue_token("expiring"))
    vm = lasting.create()
    brief = Machine(service.client(service.issue_token("expiring", ttl_s=3.0)), vm.vm_id, vm.view)
    job_id = brief.start("rm -f gate; mkfifo gate; cat gate")
    await until(lambda: status(lambda: brief.status) == 401)
    vm.run("echo on > gate")
    ended = vm.wait(job_id)
    assert (ended["exit_code"], vm.output(job_id)[0]) == (0, b"on\n")
    vm.destroy()
