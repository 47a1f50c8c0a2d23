"""A scriptable stand-in for QEMU's monitor: it answers as the real one did when watched, or as a test says.

It runs no machine; `tests/contract` is for that. It must stay so small that nobody takes it for the fake VMM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import trio

from microvm.host.process import JailedProcess, JailSpec

GREETING: Any = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 13}}, "capabilities": []}}

Answer = Callable[[dict[str, Any]], Any]


class FakeProcess(JailedProcess):
    """A process that is only a number and an exit status."""

    def __init__(self, on_kill: Callable[[int], None]) -> None:
        super().__init__(pid=4_000_000, pidfd=-1)
        self._status: int | None = None
        self._ended = trio.Event()
        self._on_kill = on_kill

    @property
    def exit_status(self) -> int | None:
        return self._status

    def end(self, status: int) -> None:
        self._status = status
        self._ended.set()

    def kill(self) -> None:
        if self._status is None:
            self._on_kill(-signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._status is not None
        return self._status

    async def aclose(self) -> None:
        self.kill()
        await trio.lowlevel.checkpoint()


class FakeQemu:
    """Answers commands; `answers` overrides an answer by command name, raising `RefuseError` refuses it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.status = "prelaunch"
        self.commands: list[str] = []
        self.written: bytes = b"state"
        self.greeting: bytes = json.dumps(GREETING).encode() + b"\r\n"
        self.answers: dict[str, Answer] = {}
        self.spec: JailSpec | None = None
        self.dies_at_start_with: int | None = None
        self._fd: int | None = None
        self._outcome = "none"

    def launch(self, spec: JailSpec) -> JailedProcess:
        self.spec = spec
        if "-incoming" in spec.argv:
            self.status = "inmigrate"
        self.monitor = trio.socket.from_stdlib_socket(socket.socket(fileno=os.dup(spec.fds[0])))
        self.agent = socket.socket(fileno=os.dup(spec.fds[1]))
        self.process = FakeProcess(self.die)
        if self.dies_at_start_with is not None:
            self.die(self.dies_at_start_with)
        else:
            self._nursery.start_soon(self._serve)
        return self.process

    def die(self, status: int) -> None:
        self.monitor.close()
        self.agent.close()
        self.process.end(status)

    async def event(self, name: str, **data: Any) -> None:
        await self.send({"event": name, "data": data, "timestamp": {"seconds": 1, "microseconds": 1}})

    async def send(self, message: dict[str, Any]) -> None:
        await self.raw(json.dumps(message).encode() + b"\r\n")

    async def raw(self, data: bytes) -> None:
        while data:
            data = data[await self.monitor.send(data) :]

    async def _serve(self) -> None:
        buffer = b""
        try:
            await self.raw(self.greeting)
            while True:
                data, ancillary, _, _ = await self.monitor.recvmsg(65536, socket.CMSG_SPACE(4))
                for _, _, fds in ancillary:
                    self._fd = int.from_bytes(fds[:4], "little")
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    await self._execute(json.loads(line))
        except (OSError, trio.ClosedResourceError):
            return

    async def _execute(self, command: dict[str, Any]) -> None:
        name = command["execute"]
        self.commands.append(name)
        try:
            if name in self.answers:
                value = self.answers[name](command.get("arguments", {}))
                if value is not None:
                    await self.send({"return": value, "id": command["id"]})
                return
            value = await self._usual(name)
        except RefuseError as refusal:
            error = {"class": "GenericError", "desc": str(refusal)}
            await self.send({"error": error, "id": command["id"]})
            return
        await self.send({"return": value, "id": command["id"]})
        if name in {"migrate", "migrate-incoming"}:
            await self.event("MIGRATION", status="completed")

    async def _usual(self, name: str) -> Any:
        if name == "query-status":
            return {"status": self.status, "running": self.status == "running"}
        if name == "query-migrate":
            return {"status": self._outcome}
        if name == "cont":
            self.status = "running"
            await self.event("RESUME")
        if name == "stop" and self.status == "running":
            self.status = "paused"
            await self.event("STOP")
        if name == "migrate":
            self.status, self._outcome = "postmigrate", "completed"
            with os.fdopen(self._take_fd(), "wb") as file:
                file.write(self.written)
        if name == "migrate-incoming":
            self.status, self._outcome = "paused", "completed"
            with os.fdopen(self._take_fd(), "rb") as file:
                self.loaded = file.read()
        return {}

    def _take_fd(self) -> int:
        assert self._fd is not None, "a file must come with getfd"
        fd, self._fd = self._fd, None
        return fd


class RefuseError(Exception):
    """Raised by an answer: QEMU refuses the command."""
