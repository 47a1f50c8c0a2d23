"""A real service for tests: the daemon as a process of its own, clients of it, and what it leaves behind.

Promises that a service which was started ends with its test run, and that a service made `like` another one
shares its base image and templates by hard links instead of building them again. It must not use anything
of the daemon but its command line, its doors, its registry of tokens and the host's own records. Neighbour:
`conftest`, which gives these to tests.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import httpx2
import trio

from microvm.host.cgroup import MARK, CgroupTree, find_hierarchy
from microvm.store import open_registry
from microvm.store.database import FILE_NAME, instance_id, open_reader

START_S: Final = 240.0  # an unseen image is hashed and copied once; the rest takes a few seconds
STOP_S: Final = 120.0
CALL_S: Final = 240.0  # the first creation of a size boots its template, on a busy host
JOB_S: Final = 300.0
MEMORY_MIB: Final = 256

_numbers = itertools.count()


class ToolError(Exception):
    """What the service answered instead of a result."""

    def __init__(self, status: int, error: dict[str, Any], retry_after: str | None = None) -> None:
        super().__init__(f"{status} {error['code']}: {error['message']}")
        self.status = status
        self.code: str = error["code"]
        self.message: str = error["message"]
        self.detail: dict[str, Any] = error.get("detail", {})
        self.retry_after = retry_after


def new_request_id() -> str:
    """A `request_id` that nobody used."""
    return uuid.uuid4().hex


class Client:
    """Calls tools, as one workspace. Threads may share it."""

    def __init__(self, socket: Path, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx2.Client(
            base_url="http://localhost",
            transport=httpx2.HTTPTransport(uds=str(socket)),
            headers=headers,
            timeout=CALL_S,
            trust_env=False,
        )

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The tool's result. Raises ToolError. `request_id` is made up where the tool wants one."""
        if tool in {"vm_create", "vm_exec"}:
            arguments.setdefault("request_id", new_request_id())
        answer = self.http.post(f"/v1/tools/{tool}", json=arguments)
        body = answer.json()
        if answer.status_code != 200:
            raise ToolError(answer.status_code, body["error"], answer.headers.get("Retry-After"))
        return cast("dict[str, Any]", body)

    async def acall(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """`call`, for Trio; a cancelled one goes on in its thread and is forgotten."""
        call = partial(self.call, tool, **arguments)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    def create(self, **arguments: Any) -> Machine:
        """A new VM, of the size that every test shares unless it asks for another."""
        view = self.call("vm_create", **{"memory_mib": MEMORY_MIB, **arguments})
        return Machine(self, view["vm_id"], view)


class Machine:
    """One VM as its owner sees it."""

    def __init__(self, client: Client, vm_id: str, view: dict[str, Any]) -> None:
        self.client = client
        self.vm_id = vm_id
        self.view = view

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """A tool with this VM's id."""
        return self.client.call(tool, vm_id=self.vm_id, **arguments)

    async def acall(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """`call`, for Trio."""
        return await self.client.acall(tool, vm_id=self.vm_id, **arguments)

    @property
    def status(self) -> dict[str, Any]:
        """`vm_status` now."""
        return self.call("vm_status")

    @property
    def state(self) -> str:
        """The VM's state now."""
        return self.status["state"]

    def start(self, command: str, **arguments: Any) -> str:
        """Starts a job and returns its id."""
        return self.call("vm_exec", command=command, **arguments)["job_id"]

    def run(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Runs a job to its end: the job, with all of its output as bytes in `stdout` and `stderr`."""
        job = self.call("vm_exec", command=command, wait_seconds=30, **arguments)
        done = job if job["state"] == "completed" else self.wait(job["job_id"])
        stdout, stderr = self.output(job["job_id"])
        return {**done, "stdout": stdout, "stderr": stderr}

    def text(self, command: str, **arguments: Any) -> str:
        """The stdout of a job that must succeed."""
        job = self.run(command, **arguments)
        assert job["exit_code"] == 0, job
        return job["stdout"].decode()

    def wait(self, job_id: str) -> dict[str, Any]:
        """The job once it is over."""
        for _ in range(int(JOB_S / 30)):
            job = self.call("vm_job_status", job_id=job_id, wait_seconds=30)
            if job["state"] in {"completed", "lost"}:
                return job
        raise AssertionError(f"{job_id} does not end")

    def output(self, job_id: str) -> tuple[bytes, bytes]:
        """All that is kept of a finished job's output."""
        cursor, parts = {"stdout": 0, "stderr": 0}, (bytearray(), bytearray())
        while True:
            page = self.call("vm_job_output", job_id=job_id, cursor=cursor, encoding="base64")
            for part, name in zip(parts, ("stdout", "stderr"), strict=True):
                part += base64.b64decode(page[f"{name}_base64"])
            if page["next_cursor"] == cursor:
                return bytes(parts[0]), bytes(parts[1])
            cursor = page["next_cursor"]

    def wait_output(self, job_id: str, wanted: bytes) -> bytes:
        """Reads a live job's stdout from its start until `wanted` is in it."""
        cursor, seen = {"stdout": 0, "stderr": 0}, b""
        for _ in range(200):
            page = self.call(
                "vm_job_output", job_id=job_id, cursor=cursor, encoding="base64", wait_seconds=30
            )
            seen += base64.b64decode(page["stdout_base64"])
            if wanted in seen:
                return seen
            assert page["state"] != "completed" or page["next_cursor"] != cursor, (page, seen[-500:])
            cursor = page["next_cursor"]
        raise AssertionError(f"{wanted!r} never came; the last was {seen[-500:]!r}")

    def read(self, path: str) -> bytes:
        """A whole file."""
        content, offset = b"", 0
        while True:
            part = self.call("vm_read_file", path=path, offset=offset)
            content += base64.b64decode(part["content_base64"])
            offset = part["next_offset"]
            if part["eof"]:
                return content

    def write(self, path: str, content: bytes, **arguments: Any) -> dict[str, Any]:
        """`vm_write_file` of exact bytes."""
        encoded = base64.b64encode(content).decode()
        return self.call("vm_write_file", path=path, content_base64=encoded, **arguments)

    def suspend(self, mode: str = "hibernate", **arguments: Any) -> dict[str, Any]:
        """`vm_suspend`."""
        return self.call("vm_suspend", mode=mode, **arguments)

    def destroy(self) -> None:
        """`vm_destroy`."""
        self.call("vm_destroy")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is there on the host on behalf of one service, apart from the daemon and its own two sockets."""

    processes: tuple[int, ...]
    cgroups: tuple[str, ...]
    mounts: tuple[str, ...]
    loop_devices: tuple[str, ...]
    sockets: tuple[str, ...]
    files: tuple[str, ...]

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


class Service:
    """A daemon with directories of its own. `start` belongs on the main thread: the daemon dies with it.

    Args:
        image: The guest image.
        volume: The reflink volume; the service gets a new directory on it.
        like: A service whose base image, templates and verifications are shared.
        settings: More lines of the configuration, as TOML keys.
    """

    def __init__(
        self, image: Path, volume: Path, *, like: Service | None = None, **settings: int | str | bool
    ) -> None:
        name = f"{os.getpid()}-{next(_numbers)}"
        self.directory: Final = Path(tempfile.mkdtemp(prefix=f"microvm-test-{name}-"))
        self.state_dir: Final = self.directory / "state"
        self.vm_dir: Final = volume / f"service-{name}-{uuid.uuid4().hex[:6]}"
        self.vm_dir.mkdir(mode=0o700)
        self.state_dir.mkdir(mode=0o700)
        self.socket: Final = self.state_dir / "run" / "service.sock"
        self.config: Final = self.directory / "microvm.toml"
        self.log_file: Final = self.directory / "log"
        self.image: Final = image
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self._clients: list[Client] = []
        # One range of 256 for each service of each run: two runs on one host never share a UID.
        uid_base = 200_000_000 + (os.getpid() % 100_000) * 4096 + int(name.rsplit("-", 1)[1]) % 16 * 256
        self.settings: dict[str, int | str | bool] = {
            "state_dir": str(self.state_dir),
            "vm_dir": str(self.vm_dir),
            "image": str(image),
            "listen": "127.0.0.1:0",
            "uid_base": uid_base,
            "limits": "none",
            **settings,
        }
        if like is not None:
            self._share(like)

    def _share(self, like: Service) -> None:
        for name in ("verified.json", "closures.json", "accelerator.json"):
            if (like.state_dir / name).exists():
                shutil.copy2(like.state_dir / name, self.state_dir / name)
        for name in ("images", "templates"):
            for source in sorted((like.vm_dir / name).rglob("*")):
                target = self.vm_dir / source.relative_to(like.vm_dir)
                if source.is_file() and ".building" not in str(source):
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    os.link(source, target)

    def start(self) -> None:
        """Starts the daemon and returns once it takes calls."""
        assert self.process is None
        self.config.write_text("".join(f"{key} = {json.dumps(v)}\n" for key, v in self.settings.items()))
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._argv],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        listening = threading.Event()
        threading.Thread(target=self._follow, args=(self.process, listening), daemon=True).start()
        in_time = listening.wait(START_S)
        if not in_time or not self.url:
            self.kill()
            raise AssertionError(f"the service does not listen:\n{self.log[-4000:]}")

    @property
    def _argv(self) -> list[str]:
        """The daemon's command."""
        return [sys.executable, "-m", "microvm", "serve", "--config", str(self.config)]

    def _follow(self, process: subprocess.Popen[bytes], listening: threading.Event) -> None:
        """Keeps the log, and finds in it where the service listens."""
        assert process.stderr is not None
        self.url = ""
        with process.stderr as lines, self.log_file.open("ab", buffering=0) as log:
            for line in lines:
                log.write(line)
                if b'"msg": "listening"' in line:
                    self.url = json.loads(line)["url"]
                    listening.set()
        listening.set()

    @property
    def pid(self) -> int:
        """The daemon's."""
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything that was logged so far, over all starts."""
        return self.log_file.read_text("utf-8", "replace") if self.log_file.exists() else ""

    def records(self, message: str) -> list[dict[str, Any]]:
        """The log's records with this `msg`."""
        lines = (line for line in self.log.splitlines() if line.startswith("{"))
        return [record for record in map(json.loads, lines) if record["msg"] == message]

    def stop(self) -> int:
        """SIGTERM; returns the exit status once everything is saved."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL; returns once the daemon is dead. Its VMMs die by themselves a moment later."""
        return self._end(signal.SIGKILL)

    def restart(self) -> None:
        """`stop` where it runs, then `start`."""
        if self.process is not None:
            self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        assert process is not None
        for client in self._clients:
            client.http.close()
        self._clients.clear()
        process.send_signal(number)
        return process.wait(STOP_S)

    def client(self, token: str | None = None) -> Client:
        """A client with a token; without one, the host's administrator. It lives as long as the daemon."""
        client = Client(self.socket if token else self.socket.with_name("admin.sock"), token)
        self._clients.append(client)
        return client

    def issue_token(self, workspace: str, **facts: Any) -> str:
        """The secret of a new token (`Registry.issue_token`)."""
        with open_registry(self.state_dir) as registry:
            return registry.issue_token(workspace, **facts).secret

    @property
    def cgroup(self) -> Path:
        """The directory of all of its groups."""
        with contextlib.closing(open_reader(self.state_dir)) as database:
            return find_hierarchy().own_path / f"{MARK}{instance_id(database)}"

    def leftovers(self) -> Leftovers:
        """What there is now."""
        group, places = self.cgroup, (str(self.state_dir), str(self.vm_dir))
        groups = [group, *group.rglob("*/")] if group.is_dir() else []
        mine = [folder for folder in groups if folder.name != "daemon"]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return Leftovers(
            processes=tuple(
                int(pid) for folder in mine for pid in (folder / "cgroup.procs").read_text().split()
            ),
            cgroups=tuple(str(folder.relative_to(group)) for folder in mine if folder != group),
            mounts=tuple(line for line in mounts if line.split()[4].startswith(places)),
            loop_devices=tuple(name for name in _backing_files() if name.startswith(places)),
            sockets=tuple(
                line[7]
                for line in unix
                if len(line) > 7 and line[7].startswith(places) and line[7] not in self._own_sockets
            ),
            files=tuple(
                str(path)
                for folder in (self.vm_dir / "vms", self.state_dir / "vms")
                for path in sorted(folder.iterdir())
            ),
        )

    @property
    def _own_sockets(self) -> set[str]:
        return {str(self.socket), str(self.socket.with_name("admin.sock"))}

    def descriptors(self) -> list[str]:
        """What the daemon holds open."""
        return sorted(_links(Path(f"/proc/{self.pid}/fd")))

    def remove(self) -> None:
        """Ends it, and removes its directories and, where it was killed, its group."""
        if self.process is not None:
            self.kill()
        if (self.state_dir / FILE_NAME).exists():
            instance = self.cgroup.name.removeprefix(MARK)
            trio.run(CgroupTree(find_hierarchy(), instance, "none").remove)
        shutil.rmtree(self.vm_dir)
        shutil.rmtree(self.directory)


def _links(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        try:
            yield os.readlink(entry)
        except FileNotFoundError:
            continue  # closed since it was listed


def _backing_files() -> Iterator[str]:
    for facts in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield facts.read_text().strip()
        except OSError:
            continue  # detached since it was listed
