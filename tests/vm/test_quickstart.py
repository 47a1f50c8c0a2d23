"""`tools/quickstart` on a machine that has the image and the volume: start, reuse, restart, stop."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from microvm.daemon.settings import dump_settings
from tests.vm.live_service import Service

QUICKSTART = Path(__file__).resolve().parents[2] / "tools" / "quickstart.py"
RUN_S = 600
STOP_S = 120
STEPS = {"create_ms", "first_command_ms", "hibernate_ms", "wake_and_command_ms", "destroy_ms"}

pytestmark = pytest.mark.vm


@dataclass
class Setup:
    """A state directory whose configuration names the tests' image and volume."""

    state_dir: Path

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Runs quickstart until its output ends: a service that kept the pipe would hang here."""
        command = [sys.executable, str(QUICKSTART), "--state-dir", str(self.state_dir), *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)

    def result(self, *argv: str) -> dict[str, Any]:
        """The JSON object of a run that must succeed."""
        done = self.run("--json", *argv)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    @property
    def pid(self) -> int | None:
        """The service's process; None when none is recorded."""
        record = self.state_dir / "quickstart.json"
        return json.loads(record.read_text("utf-8"))["pid"] if record.exists() else None

    def stop(self) -> None:
        """Ends a service that a test left running."""
        if self.pid is None:
            return
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            assert select.select([pidfd], [], [], STOP_S)[0], "the service did not end"
        finally:
            os.close(pidfd)


@pytest.fixture
def setup(service: Service, image_dir: Path, vm_volume: Path) -> Iterator[Setup]:
    prepared = Service(image_dir, vm_volume, like=service, listen=f"127.0.0.1:{free_port()}")
    (prepared.state_dir / "microvm.toml").write_text(dump_settings(prepared.settings), "utf-8")
    setup = Setup(prepared.state_dir)
    try:
        yield setup
    finally:
        setup.stop()
        prepared.remove()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_once_proves_the_service_stops_it_and_shows_no_secret(setup: Setup) -> None:
    done = setup.run("--once", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["state_dir"] == str(setup.state_dir)
    assert result["timings"].keys() >= STEPS
    assert setup.pid is None
    token_file = Path(result["token_file"])
    assert token_file.stat().st_mode & 0o777 == 0o600
    secret = token_file.read_text("ascii")
    assert secret not in done.stdout + done.stderr
    assert secret not in (setup.state_dir / "service.log").read_text("utf-8")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(result["url"].rpartition(":")[2])))


def test_a_second_call_uses_the_running_service_and_a_change_restarts_it(setup: Setup) -> None:
    first = setup.result()
    pid = setup.pid
    assert pid is not None
    assert os.getsid(pid) == pid
    again = setup.result()
    assert setup.pid == pid
    assert {**again, "timings": None} == {**first, "timings": None}
    with (setup.state_dir / "microvm.toml").open("a", encoding="utf-8") as config:
        config.write("max_vms = 9\n")
    setup.result()
    assert setup.pid != pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_used_port_is_named_and_nothing_is_started(setup: Setup) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = setup.run("--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "--port" in done.stderr.splitlines()[-1]
    assert setup.pid is None
