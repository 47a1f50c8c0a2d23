"""The guest's supervisor, as a process of this machine: own cgroup, own workspace, one end of a socket pair.

It touches nothing of the machine: clock, entropy and identity are behind the supervisor's own seam. Needs
root and a cgroup v2 mount (beside v1 is enough). Neighbours: `vmm` puts a VMM's face on it; the tests of
`agentlink` and `guest` use it bare.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Final

import trio

ROOT: Final = Path(__file__).parents[2]
GUEST_UID: Final = 1000
_START: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from guest.supervisor import main; main(sys.argv[1:])"
)
_LOOK_S: Final = 0.002
"""Between looks at a cgroup that becomes frozen or empty: tens of microseconds usually."""


@functools.cache
def launcher() -> Path:
    """The static launcher, compiled once per version of its source."""
    source = ROOT / "guest" / "launch.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"microvm-launch-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as building:
            built = Path(building) / "launch"
            command = ["gcc", "-static", "-Os", "-Wall", "-Wextra", "-Werror", "-o", str(built), str(source)]
            subprocess.run(command, check=True)
            shutil.copy(built, folder.with_suffix(f".{os.getpid()}"))
        folder.with_suffix(f".{os.getpid()}").rename(folder)
    return folder


def cgroup_mount() -> Path:
    """Where this machine has cgroup v2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _source, target, kind, *_rest = line.split()
        if kind == "cgroup2":
            return Path(target)
    raise AssertionError("this machine has no cgroup v2 mount; the supervisor needs one")


class GuestProcess:
    """One supervisor.

    Args:
        parent: The cgroup that the guest's own is made in.
        frozen: Whether the guest stands still from its first instruction on.
        log_fd: Where its standard error goes; None: this process's own.

    Attributes:
        workspace: What is /workspace to the guest's files and commands.
        sock: The host's end of the channel; ownership passes to who takes it.
    """

    def __init__(self, parent: Path, *, frozen: bool = False, log_fd: int | None = None) -> None:
        self.group = Path(tempfile.mkdtemp(prefix="guest-", dir=parent))
        self.folder = Path(tempfile.mkdtemp(prefix="microvm-fake-"))
        self.folder.chmod(0o711)
        self.workspace = self.folder / "workspace"
        self.workspace.mkdir(mode=0o755)
        os.chown(self.workspace, GUEST_UID, GUEST_UID)
        self.set_frozen(frozen=frozen)
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [*self._command(), "--transport-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=log_fd,
                cwd="/",
            )
        (self.group / "cgroup.procs").write_text(str(self.process.pid))

    def _command(self) -> list[str]:
        options = {
            "workspace": str(self.workspace),
            "cgroup": str(self.group),
            "spool": str(self.folder / "spool"),
            "launcher": str(launcher()),
            "uid": str(GUEST_UID),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [sys.executable, "-ISB", "-c", _START, str(ROOT), *words]

    def set_frozen(self, *, frozen: bool) -> None:
        """Freezes or thaws the whole guest, supervisor included, as stopping its processors would."""
        (self.group / "cgroup.freeze").write_text("1" if frozen else "0")

    def _event(self, name: str) -> bool:
        return f"{name} 1" in (self.group / "cgroup.events").read_text()

    async def freeze(self) -> None:
        """Returns when nothing of the guest runs any more."""
        self.set_frozen(frozen=True)
        while not self._event("frozen"):  # noqa: ASYNC110 - Trio has no wait for POLLPRI
            await trio.sleep(_LOOK_S)

    def kill(self) -> None:
        """SIGKILL to the supervisor and everything that it started."""
        with contextlib.suppress(FileNotFoundError):
            (self.group / "cgroup.kill").write_text("1")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    async def remove_group(self) -> None:
        """Kills what is left and removes the guest's cgroups; does nothing the second time."""
        while self.group.exists():
            with contextlib.suppress(FileNotFoundError):
                (self.group / "cgroup.kill").write_text("1")
            if not self._event("populated"):
                for folder in sorted(self.group.glob("**/"), reverse=True):
                    folder.rmdir()
                return
            await trio.sleep(_LOOK_S)

    def pack(self) -> bytes:
        """The workspace as a tar."""
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(self.workspace, ".")
        return packed.getvalue()

    def unpack(self, packed: bytes) -> None:
        """Fills the workspace from a tar."""
        with tarfile.open(fileobj=BytesIO(packed)) as tar:
            tar.extractall(self.workspace, filter="fully_trusted")

    def remove_folder(self) -> None:
        """Removes the workspace and the spool."""
        shutil.rmtree(self.folder, ignore_errors=True)


@asynccontextmanager
async def open_guest() -> AsyncGenerator[tuple[GuestProcess, trio.SocketStream]]:
    """A running supervisor and a stream to it, in a cgroup of its own; nothing is left of it afterwards."""
    guest = GuestProcess(cgroup_mount())
    try:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(guest.sock)) as stream:
            yield guest, stream
    finally:
        with trio.CancelScope(shield=True):
            guest.kill()
            guest.process.wait()
            await guest.remove_group()
            guest.remove_folder()
