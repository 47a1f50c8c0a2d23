"""The self-check: one VM's whole life against a running service, timed from outside.

Promises that a returned result means it really happened: a command ran in a guest, and what it left in the
guest's memory was still there after hibernation. It must not leave its VM behind, whatever fails.
Neighbour: `quickstart`.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from bootstrap import FailedError, say

from microvm.cli.client import Client
from microvm.errors import MicrovmError

# The first VM of its size waits for the template to be built: a cold boot, by translation on a busy host.
CREATE_S: Final = 600.0
EXEC_WAIT_S: Final = 30
POLL_S: Final = 1.0
REMEMBER: Final = (
    "echo {word} > /dev/shm/selfcheck && . /etc/os-release && echo $PRETTY_NAME, Linux $(uname -r)"
)
RECALL: Final = "cat /dev/shm/selfcheck"


def run_selfcheck(client: Client) -> dict[str, float]:
    """Creates, uses, hibernates, wakes and destroys a VM; returns how long each took, in milliseconds.

    Raises:
        FailedError: A step failed; names it.
    """
    timings: dict[str, float] = {}
    word = secrets.token_hex(8)
    vm_id = _create(client, timings)
    try:
        guest = _timed("first_command_ms", timings, lambda: _exec(client, vm_id, REMEMBER.format(word=word)))
        say(f"the guest is {guest}")
        _timed("second_command_ms", timings, lambda: _exec(client, vm_id, "true"))
        suspend = {"vm_id": vm_id, "mode": "hibernate"}
        state = _timed("hibernate_ms", timings, lambda: client.call("vm_suspend", suspend)["state"])
        _expect("hibernating", state, "hibernated")
        # One call: the command wakes the VM by itself.
        recalled = _timed("wake_and_command_ms", timings, lambda: _exec(client, vm_id, RECALL))
        _expect("what was in memory before the hibernation", recalled, word)
        _timed("next_command_ms", timings, lambda: _exec(client, vm_id, "true"))
    finally:
        with _step("destroy_ms"):
            _timed("destroy_ms", timings, lambda: client.call("vm_destroy", {"vm_id": vm_id}))
    return timings


def _create(client: Client, timings: dict[str, float]) -> str:
    say("creating a VM (the first one waits for its template to be booted and saved)")
    began = time.monotonic()
    with _step("create_ms"):
        vm = client.call("vm_create", {"request_id": f"selfcheck-{secrets.token_hex(8)}"})
        while vm["state"] == "creating":
            if time.monotonic() - began > CREATE_S:
                raise FailedError(f"self-check: the VM was not made within {CREATE_S:g} s")
            say(f"still creating: {vm.get('reason', 'booting the template')}")
            time.sleep(POLL_S)
            vm = client.call("vm_status", {"vm_id": vm["vm_id"]})
    _expect("creating", vm["state"], "running")
    timings["create_ms"] = _since(began)
    say(f"create_ms: {timings['create_ms']:g}")
    return vm["vm_id"]


def _exec(client: Client, vm_id: str, command: str) -> str:
    request_id = f"selfcheck-{secrets.token_hex(8)}"
    arguments: dict[str, Any] = {"vm_id": vm_id, "request_id": request_id, "command": command}
    job = client.call("vm_exec", {**arguments, "wait_seconds": EXEC_WAIT_S})
    page = {"vm_id": vm_id, "job_id": job["job_id"], "encoding": "base64", "wait_seconds": EXEC_WAIT_S}
    output = job.get("output") or client.call("vm_job_output", page)
    text = output["stdout"] if "stdout" in output else base64.b64decode(output["stdout_base64"]).decode()
    _expect(f"the exit code of {command!r}", output["exit_code"], 0)
    return text.strip()


def _timed(name: str, timings: dict[str, float], step: Callable[[], Any]) -> Any:
    began = time.monotonic()
    with _step(name):
        result = step()
    timings[name] = _since(began)
    say(f"{name}: {timings[name]:g}")
    return result


@contextmanager
def _step(name: str) -> Generator[None]:
    try:
        yield
    except MicrovmError as error:
        tail = (error.detail or {}).get("console_tail", "")
        raise FailedError(
            f"self-check, {name.removesuffix('_ms')}: {error.message} [{error.code}]\n{tail}"
        ) from None


def _expect(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise FailedError(f"self-check, {what}: {seen!r} instead of {wanted!r}")


def _since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)
