"""A real service whose daemon can be made to die, or to lose a VMM, at a named point.

Promises that a point is armed before the call that reaches it. It must not decide what is true afterwards.
Neighbours: `hooked_daemon`, which runs; `tests.vm.live_service`, which this extends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from microvm.store import checkpoint
from tests.fault.hooked_daemon import KILL_DAEMON
from tests.vm.live_service import STOP_S, Client, Machine, Service, ToolError


class HookedService(Service):
    """See `Service`; the daemon is `hooked_daemon`.

    Attributes:
        constants: Values of `microvm.fleet.service` from the next start on.
        timers: Whether idle VMs go to rest by themselves; from the next start on.
        lasting: VMs that `clear` leaves alone.
    """

    def __init__(
        self, image: Path, volume: Path, *, like: Service | None = None, **settings: int | str | bool
    ) -> None:
        super().__init__(image, volume, like=like, **settings)
        self.constants: dict[str, float] = {}
        self.timers = True
        self.lasting: set[str] = set()
        self._armed: Final = self.directory / "armed"
        self._token: str | None = None

    @property
    def _argv(self) -> list[str]:
        told = {"armed": str(self._armed), "constants": self.constants, "timers": self.timers}
        return [sys.executable, "-m", "tests.fault.hooked_daemon", str(self.config), json.dumps(told)]

    def arm(self, when: str, point: str, act: str = KILL_DAEMON) -> None:
        """From now on the daemon does `act` when it reaches `point`, once."""
        work = self._armed.with_suffix(".new")
        work.write_text(json.dumps({"when": when, "point": point, "act": act}))
        work.rename(self._armed)

    @property
    def fired(self) -> bool:
        """Whether the armed point was reached."""
        return not self._armed.exists()

    def wait_dead(self) -> None:
        """Returns once the daemon has died of its fault."""
        process, self.process = self.process, None
        assert process is not None
        assert process.wait(STOP_S) == -signal.SIGKILL
        for client in self._clients:
            client.http.close()
        self._clients.clear()

    @property
    def owner(self) -> Client:
        """A client of the one workspace of the tests, on the daemon that runs now."""
        if self._token is None:
            self._token = self.issue_token("owner")
        return self.client(self._token)

    def again(self, vm: Machine) -> Machine:
        """The same VM, after a start."""
        return Machine(self.owner, vm.vm_id, vm.view)

    def files_of(self, vm: Machine) -> Path:
        """The directory of a VM's RAM, disk and checkpoint."""
        return self.vm_dir / "vms" / vm.vm_id

    def clear(self) -> None:
        """Destroys what a test left, also one that failed; starts the daemon where it is dead."""
        self._armed.unlink(missing_ok=True)
        if self.process is not None and self.process.poll() is not None:
            self.process = None
        if self.process is None:
            self.start()
        for vm in self.owner.call("vm_list")["vms"]:
            if vm["vm_id"] not in self.lasting:
                self.owner.call("vm_destroy", vm_id=vm["vm_id"])

    def stop_vms(self) -> None:
        """Has every running VM stopped; `vm_status` tells when."""
        os.kill(self.pid, signal.SIGUSR1)

    def check_nothing_left(self, *vms: Machine) -> None:
        """By count: files are of `vms` and of no other, and nothing else is there for VMs at rest."""
        found = self.leftovers()
        assert not found.processes, found
        assert not found.cgroups, found
        assert not found.mounts, found
        assert not found.loop_devices, found
        assert not found.sockets, found
        known = {vm.vm_id for vm in vms}
        assert {Path(path).name for path in found.files} <= known, found
        assert {path.name for path in (self.vm_dir / "vms").iterdir()} == known
        assert not list((self.vm_dir / "templates").glob("*.building"))
        for vm in vms:
            self._check_files(self.files_of(vm))

    def _check_files(self, directory: Path) -> None:
        """No file of a VM but its RAM, its disk, and what its manifest names."""
        manifest = checkpoint.read(directory)
        mine = set[str]() if manifest is None else {checkpoint.MANIFEST, manifest.state_file}
        found = {path.name for path in directory.iterdir()}
        assert "disk" in found
        assert found <= {"ram", "disk"} | mine, found


def check_disk(service: HookedService, vm: Machine) -> None:
    """`e2fsck -fn` finds the disk clean after what every boot does first.

    A VM that did not power off leaves a journal to replay, which `-n` alone would call damage. So a reflink
    of the disk gets what a boot does (`-p` replays the journal and closes what was open: exit status 0 or
    1), and that must be clean.
    """
    copy = service.vm_dir / "examined"
    subprocess.run(
        ["cp", "--reflink=always", service.files_of(vm) / "disk", copy], check=True, stdin=subprocess.DEVNULL
    )
    try:
        replayed = _e2fsck("-p", copy)
        assert replayed.returncode in {0, 1}, replayed
        examined = _e2fsck("-fn", copy)
        assert examined.returncode == 0, examined
    finally:
        copy.unlink()


def _e2fsck(option: str, disk: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["e2fsck", option, disk], check=False, capture_output=True, stdin=subprocess.DEVNULL
    )


def outcome_of(client: Client, tool: str, **arguments: Any) -> str:
    """The state that a call answers with, or its error's code."""
    try:
        return client.call(tool, **arguments).get("state", "ok")
    except ToolError as error:
        return error.code
