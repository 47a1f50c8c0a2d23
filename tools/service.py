"""The service as a process of its own: found, compared, started, stopped.

Promises that a started service survives its starter and holds none of its descriptors, and that nothing is
signalled but the very process that was started (pid and start time agree). It must not know what a VM is.
Neighbours: `quickstart`, which uses it, and `examples/microvm.service`, which it installs where systemd
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx2
from bootstrap import ROOT, FailedError, run, say

from microvm.daemon.settings import DEFAULT_STATE_DIR, Settings
from microvm.host.volume import MOUNT_OPTIONS, mounted_file

BINARY: Final = ROOT / ".venv" / "bin" / "microvm"
UNIT_NAME: Final = "microvm.service"
UNIT_DIR: Final = Path("/etc/systemd/system")
SYSTEMD_RUNS: Final = Path("/run/systemd/system")  # sd_booted(3)

# The first start proves the accelerator with a boot of its own, without hardware help and on a busy host.
READY_S: Final = 180.0
POLL_S: Final = 0.1
# Beyond drain_seconds: the last process ends, the sockets close.
STOP_MARGIN_S: Final = 20.0
UNIT_MARGIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A service that was started from here.

    Attributes:
        pid: Its process.
        started_ticks: The process's start time (proc(5), field 22), so that a reused pid is not taken for it.
        fingerprint: Of the code, image and configuration that it runs.
    """

    pid: int
    started_ticks: int
    fingerprint: str


def fingerprint(config: Path, image_digest: str) -> str:
    """What a service started now would be made of; equal for equal code, image and configuration."""
    digest = hashlib.sha256(image_digest.encode())
    digest.update(sys.version.encode())
    digest.update(config.read_bytes())
    for file in sorted((ROOT / "microvm").rglob("*")):
        if file.suffix in {".py", ".so", ".sql"}:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def uses_systemd(settings: Settings) -> bool:
    """Whether the service is to be a unit: systemd runs here, and this is the host's one service."""
    return SYSTEMD_RUNS.is_dir() and settings.state_dir == DEFAULT_STATE_DIR


def find_running(settings: Settings) -> Running | None:
    """The service that was started for this state directory, if it still runs."""
    try:
        fields = json.loads(_record_path(settings).read_text("utf-8"))
        running = Running(**fields)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if uses_systemd(settings):  # which may have restarted it, or started it at boot
        pid = _unit_pid()
        return Running(pid, _start_ticks(pid) or 0, running.fingerprint) if pid else None
    return running if _start_ticks(running.pid) == running.started_ticks else None


def is_ready(settings: Settings) -> bool:
    """Whether the service says that it can work; asked on its socket, which is its alone."""
    transport = httpx2.HTTPTransport(uds=str(settings.socket), verify=False)
    try:
        with httpx2.Client(transport=transport, timeout=5) as client:
            return client.get("http://localhost/readyz").is_success
    except httpx2.HTTPError:
        return False


def check_address(settings: Settings) -> None:
    """Makes sure that nobody else listens where the service will.

    Raises:
        FailedError: Somebody does, or the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            reason = f"{settings.listen} cannot be used ({error.strerror})"
            raise FailedError(f"{reason}; stop what uses it or give another --port") from None


def start(settings: Settings, config: Path, mark: str) -> Running:
    """Starts the service and waits until it is ready.

    Raises:
        FailedError: It ended or did not become ready; the message has its last lines.
    """
    check_address(settings)
    log = settings.state_dir / "service.log"
    if uses_systemd(settings):
        say(f"starting the service as the unit {UNIT_NAME}; its output goes to the journal")
        pid, ended = _start_unit(settings, config)
    else:
        say(f"starting the service; its output goes to {log}")
        pid, ended = _start_process(config, log)
    running = Running(pid, _start_ticks(pid) or 0, mark)
    _record_path(settings).write_text(json.dumps(asdict(running)), "utf-8")
    deadline = time.monotonic() + READY_S
    while not is_ready(settings):
        if ended() or time.monotonic() > deadline:
            what = "ended" if ended() else f"was not ready within {READY_S:g} s"
            stop(settings, running)
            raise FailedError(f"the service {what}; the last lines of {log}:\n{_tail(log)}")
        time.sleep(POLL_S)
    return running


def stop(settings: Settings, running: Running) -> None:
    """Stops a service: its VMs are checkpointed. One that does not end is killed."""
    say("stopping the service")
    if uses_systemd(settings):
        run(["systemctl", "stop", UNIT_NAME], what="stopping the service")
    else:
        _stop_process(running, settings.drain_seconds + STOP_MARGIN_S)
    _record_path(settings).unlink(missing_ok=True)


def how_to_stop(settings: Settings, running: Running) -> str:
    """The command by which a person stops the service."""
    return f"systemctl stop {UNIT_NAME}" if uses_systemd(settings) else f"kill {running.pid}"


def _stop_process(running: Running, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(running.pid)
    except ProcessLookupError:
        return
    try:
        if _start_ticks(running.pid) != running.started_ticks:  # checked after the pidfd holds the pid
            return
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, STOP_MARGIN_S)):
            signal.pidfd_send_signal(pidfd, number)
            if select.select([pidfd], [], [], wait_s)[0]:
                break
            say(f"the service did not end within {wait_s:g} s")
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _start_process(config: Path, log: Path) -> tuple[int, Callable[[], bool]]:
    argv = [str(BINARY), "serve", "--config", str(config)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    return process.pid, lambda: process.poll() is not None


def _start_unit(settings: Settings, config: Path) -> tuple[int, Callable[[], bool]]:
    for name, text in units(settings, config).items():
        (UNIT_DIR / name).write_text(text, "utf-8")
        run(["systemctl", "daemon-reload"], what="installing a unit")
        run(["systemctl", "enable", "--quiet", name], what="enabling a unit")
    run(["systemctl", "restart", UNIT_NAME], what="starting the unit")
    return _unit_pid(), lambda: _unit_pid() == 0


def units(settings: Settings, config: Path) -> dict[str, str]:
    """The units of the service and, where the volume lies in a file, of its mount at boot: name and text."""
    text = (ROOT / "examples" / UNIT_NAME).read_text("utf-8")
    text = text.replace("/opt/microvm/.venv/bin/microvm", str(BINARY))
    text = text.replace("/etc/microvm/microvm.toml", str(config))
    text = text.replace(f"RequiresMountsFor={DEFAULT_STATE_DIR}/vm", f"RequiresMountsFor={settings.vm_dir}")
    text = re.sub("TimeoutStopSec=.*", f"TimeoutStopSec={settings.drain_seconds + UNIT_MARGIN_S:g}", text)
    found = {UNIT_NAME: text}
    backing = mounted_file(settings.vm_dir)
    if backing is not None:
        escape = ["systemd-escape", "--path", "--suffix=mount", str(settings.vm_dir)]
        name = subprocess.run(escape, capture_output=True, text=True, check=True).stdout.strip()
        found[name] = (
            "# Written by tools/quickstart: the volume of disks and RAM, mounted again after a reboot.\n"
            f"[Unit]\nDescription=Volume of microvm\nRequiresMountsFor={backing.parent}\n\n"
            f"[Mount]\nWhat={backing}\nWhere={settings.vm_dir}\nType=xfs\nOptions={MOUNT_OPTIONS}\n\n"
            "[Install]\nWantedBy=multi-user.target\n"
        )
    return found


def _unit_pid() -> int:
    show = ["systemctl", "show", "--property", "MainPID", "--value", UNIT_NAME]
    return int(subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip() or 0)


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text[text.rindex(")") + 2 :].split()
    return None if state == "Z" else int(fields[18])


def _record_path(settings: Settings) -> Path:
    return settings.state_dir / "quickstart.json"


def _tail(log: Path, lines: int = 20) -> str:
    if not log.exists():
        return f"(see journalctl -u {UNIT_NAME})"
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
