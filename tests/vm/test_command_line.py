"""The command line against a real service with real guests."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microvm.cli.app import run
from tests.vm.live_service import Machine, Service

BinaryCapture = pytest.CaptureFixture[bytes]
Cli = Callable[..., int]
WAIT_S = 120

pytestmark = pytest.mark.vm


@pytest.fixture
def vm(service: Service) -> Iterator[Machine]:
    """A VM of the host's administrator."""
    machine = service.client().create()
    yield machine
    machine.destroy()


@pytest.fixture
def cli(service: Service) -> Cli:
    """Runs `microvm vm …` as the host's administrator."""

    def run_vm(*argv: str) -> int:
        return run(["vm", "--config", str(service.config), *argv])

    return run_vm


def test_exec_has_the_guests_streams_and_exit_code(cli: Cli, vm: Machine, capfdbinary: BinaryCapture) -> None:
    assert cli("exec", vm.vm_id, "--", "sh", "-c", r"printf 'a\377\000'; echo b >&2; exit 9") == 9
    assert capfdbinary.readouterr() == (b"a\xff\x00", b"b\n")


def test_exec_copies_output_of_many_pages(cli: Cli, vm: Machine, capfdbinary: BinaryCapture) -> None:
    assert cli("exec", "--output-limit-kib", "1024", vm.vm_id, "seq 100000") == 0
    expected = "".join(f"{number}\n" for number in range(1, 100001)).encode()
    assert capfdbinary.readouterr().out == expected


def test_exec_wakes_a_hibernated_vm(cli: Cli, vm: Machine, capfdbinary: BinaryCapture) -> None:
    assert cli("exec", vm.vm_id, "echo kept > /dev/shm/word") == 0
    assert cli("suspend", vm.vm_id) == 0
    assert b"hibernated" in capfdbinary.readouterr().out
    assert cli("exec", vm.vm_id, "cat /dev/shm/word") == 0
    assert capfdbinary.readouterr().out == b"kept\n"


def test_files_of_any_size_come_back_as_they_went(
    cli: Cli, vm: Machine, tmp_path: Path, capfdbinary: BinaryCapture
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(300_001))
    assert cli("write", vm.vm_id, "new/file", str(source)) == 0
    assert cli("exec", vm.vm_id, "sha256sum < new/file") == 0
    assert hashlib.sha256(source.read_bytes()).hexdigest().encode() in capfdbinary.readouterr().out
    assert cli("read", vm.vm_id, "new/file", "-o", str(tmp_path / "copy")) == 0
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_an_interrupt_cancels_the_command_in_the_guest(service: Service, vm: Machine) -> None:
    argv = [sys.executable, "-m", "microvm", "vm", "--config", str(service.config)]
    command = [*argv, "exec", vm.vm_id, "echo begun; sleep 600"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], WAIT_S)[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    [job] = [job for job in vm.status["jobs"] if "sleep 600" in job["command"]]
    ended = vm.wait(job["job_id"])
    assert ended["cancelled"]


def test_a_vm_is_made_listed_and_destroyed(cli: Cli, capfdbinary: BinaryCapture) -> None:
    assert cli("create", "--json", "--memory-mib", "256", "--description", "of the command line") == 0
    made = json.loads(capfdbinary.readouterr().out)
    assert cli("list") == 0
    assert made["vm_id"].encode() in capfdbinary.readouterr().out
    assert cli("destroy", made["vm_id"]) == 0
    capfdbinary.readouterr()
    assert cli("status", "--json", made["vm_id"]) == 1
    assert json.loads(capfdbinary.readouterr().out)["error"]["code"] == "not_found"
