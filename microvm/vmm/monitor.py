"""One QMP connection: commands out, pipelined and with descriptors; answers and events in.

Promises that every command ends: with its answer, with a refusal, or with `MonitorLostError` as soon as the
connection is gone or the peer breaks the protocol. Must not know what commands mean. Neighbours:
`microvm.wire.qmp` is the codec, `qemu` the only user.
"""

from __future__ import annotations

import array
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from microvm.wire.qmp import (
    Event,
    Greeting,
    Message,
    QmpDecoder,
    QmpError,
    Refusal,
    Reply,
    encode_command,
)

READ_BYTES: Final = 65536


class MonitorError(Exception):
    """A command was not carried out."""


class MonitorRefusedError(MonitorError):
    """QEMU answered with an error."""


class MonitorLostError(MonitorError):
    """The connection is gone, so the answer will never come."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute. A descriptor travels with the command that needs it, such as `getfd`."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fd: int | None = None


@dataclass(slots=True)
class _Pending:
    name: str
    answered: trio.Event = field(default_factory=trio.Event)
    answer: Reply | Refusal | None = None


class Monitor:
    """The daemon's end of a QMP socket.

    Args:
        connection: One end of a socketpair; owned, closed by `close`.
        on_event: Called for each event in the order they came; must not raise or block.

    Attributes:
        lost: Set when the connection is gone, so that neither answers nor events will come.
        misbehaved: Whether it is gone because the peer broke the protocol.
        version: QEMU's version; empty before the greeting.
    """

    def __init__(self, connection: trio.socket.SocketType, on_event: Callable[[Event], None]) -> None:
        self._connection = connection
        self._on_event = on_event
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._sending = trio.StrictFIFOLock()
        self._greeted = trio.Event()
        self._lost: str | None = None
        self.lost = trio.Event()
        self.misbehaved = False
        self.version = ""

    async def run(self) -> None:
        """Reads until the connection ends. Whatever ends it, waiting commands are told; nothing is raised."""
        decoder = QmpDecoder()
        reason = "the connection was closed"
        try:
            while data := await self._connection.recv(READ_BYTES):
                for message in decoder.feed(data):
                    self._take(message)
        except QmpError as error:
            reason = f"the VMM broke the protocol: {error}"
            self.misbehaved = True
        except (OSError, trio.ClosedResourceError):
            reason = "the connection failed"
        finally:
            self._lose(reason)

    async def greeting(self) -> str:
        """Waits for QEMU's first message.

        Returns:
            QEMU's version.

        Raises:
            MonitorLostError: The connection ended first.
        """
        await self._greeted.wait()
        if not self.version:
            raise MonitorLostError(self._lost or "no greeting came")
        return self.version

    async def execute(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Runs one command; see `execute_all`."""
        return (await self.execute_all([Command(name, arguments or {})]))[0]

    async def execute_all(self, commands: Sequence[Command]) -> list[Any]:
        """Sends all commands without waiting between them, then waits for all answers.

        Returns:
            The commands' values, in order.

        Raises:
            MonitorRefusedError: QEMU refused one; those after it were executed or refused all the same.
            MonitorLostError: The connection is gone.

        Cancellation: before everything is sent, it breaks the connection; afterwards the commands happen.
        """
        async with self._sending:
            waiting = [await self._send(command) for command in commands]
        for pending in waiting:
            await pending.answered.wait()
        values: list[Any] = []
        for pending in waiting:
            if pending.answer is None:
                raise MonitorLostError(f"{pending.name}: {self._lost}")
            if isinstance(pending.answer, Refusal):
                raise MonitorRefusedError(f"{pending.name}: {pending.answer.description}")
            values.append(pending.answer.value)
        return values

    def close(self) -> None:
        """Closes the connection; commands that still wait end with `MonitorLostError`."""
        self._lose("the connection was closed")
        self._connection.close()

    async def _send(self, command: Command) -> _Pending:
        if self._lost is not None:
            raise MonitorLostError(f"{command.name}: {self._lost}")
        pending = _Pending(command.name)
        command_id = self._next_id
        self._next_id += 1
        data = encode_command(command_id, command.name, command.arguments)
        self._pending[command_id] = pending
        whole = False
        try:
            sent = 0
            if command.fd is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [command.fd]))]
                sent = await self._connection.sendmsg([data], rights)
            while sent < len(data):
                sent += await self._connection.send(data[sent:])
            whole = True
        except (OSError, trio.ClosedResourceError) as error:
            raise MonitorLostError(f"{command.name}: {self._lost or 'the connection failed'}") from error
        finally:
            if not whole:
                self._lose("a command was sent in part")
        return pending

    def _take(self, message: Message) -> None:
        if isinstance(message, Greeting):
            self.version = message.version
            self._greeted.set()
        elif isinstance(message, Reply):
            self._answer(message.command_id, message)
        elif isinstance(message, Refusal):
            if message.command_id is None:
                raise QmpError(f"a command was not understood: {message.description}")
            self._answer(message.command_id, message)
        else:
            self._on_event(message)

    def _answer(self, command_id: int, answer: Reply | Refusal) -> None:
        pending = self._pending.pop(command_id, None)
        if pending is None:
            raise QmpError(f"an answer came to command {command_id}, which was not asked")
        pending.answer = answer
        pending.answered.set()

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        self.lost.set()
        self._greeted.set()
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.answered.set()
        with contextlib.suppress(OSError, trio.ClosedResourceError):
            self._connection.shutdown(socket.SHUT_RDWR)
