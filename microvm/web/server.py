"""Hypercorn on sockets of ours: its connections, with five defects of the stack mended in one place.

What is mended, each in one place (and what shows it):

* Keep-alive was never enforced after the first request: Quart-Trio cancels its request's nursery while
  Hypercorn re-arms the idle timer from within the last `send`. Here the re-arming is shielded.
* A reader that stalls held a shielded `send_all`, and so the whole shutdown, for ever. Here a write has a
  limit, and the drain ends all of them.
* A connection whose client had closed stayed open until its keep-alive ended. Here it ends at once.
* A WebSocket's pings outlived its connection by their interval. Here they end with it.
* A connection's failure other than an OSError ended the server. Here it ends the connection.

The lifespan protocol is not used: nothing of ours hangs on it. It must not know routes. Its neighbour:
`app`. Source: hypercorn 0.18 `trio/tcp_server.py`, `trio/run.py`; quart-trio 0.12 `asgi.py`.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import LifespanState

from microvm.errors import HostError
from microvm.web.failures import describe, log
from microvm.web.settings import WebSettings

BACKLOG: Final = 512  # Hypercorn's 100 overflows when 200 clients reconnect at once
STALL_S: Final = 30.0  # a write that moves nothing for this long has lost its reader
PING_S: Final = 20.0  # below the minute or so after which proxies and NATs forget a silent connection
_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the door it is."""

    listener: trio.SocketListener
    door: str


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the service listens.

    Attributes:
        url: Base URL over TCP; "" without it.
        service_socket: Path; "" without it.
        admin_socket: Path; "" without it.
    """

    url: str
    service_socket: str
    admin_socket: str


class _Context(WorkerContext):
    """The server's context as one connection has it: what sleeps on its behalf wakes at its end."""

    def __init__(self, server: WorkerContext) -> None:
        super().__init__(None)
        self.terminated = server.terminated
        self.ended = trio.Event()

    async def sleep(self, wait: float) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # a static one
        """Sleep, at most to the connection's end."""
        with trio.move_on_after(wait):
            await self.ended.wait()


class Connection(TCPServer):
    """One connection, with the mends that the module lists."""

    def __init__(self, server: Server, stream: trio.SocketStream, door: str) -> None:
        state: dict[str, Any] = {"door": door}
        if door != "tcp":
            state["uid"] = _peer_uid(stream)
        self._ended = _Context(server.context)
        super().__init__(
            server.app,
            server.config,
            self._ended,
            LifespanState(state),
            stream,  # pyright: ignore[reportArgumentType]  # a plain socket, which it handles
        )
        self._server = server
        self._socket = stream.socket

    async def protocol_send(self, event: Event) -> None:
        """Write, bounded; re-arm the idle timer whatever happens to the request."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            with trio.CancelScope(shield=True):
                await super().protocol_send(event)
        else:
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        """Read to the client's end; then nothing is waited for any more, the idle timer least of all."""
        await super()._read_data()
        self._ended.ended.set()
        await self.idle_task.stop()

    async def _write(self, data: bytes) -> None:
        async with self.send_lock:
            with self._server.writing() as scope:
                try:
                    await self.stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    await self.protocol.handle(Closed())
            if scope.cancelled_caught:
                self._socket.close()
                await self.protocol.handle(Closed())

    async def _close(self) -> None:
        """Close, also when cancelled; the stock version would leave the socket to the collector."""
        try:
            with trio.move_on_after(1):
                await super()._close()
        finally:
            self._socket.close()


class Server:
    """Serves an ASGI app on listeners until it is stopped.

    Args:
        app: The application.
        keep_alive_s: Seconds that an idle connection stays open.
    """

    def __init__(self, app: Any, *, keep_alive_s: float) -> None:
        self.config = Config()
        self.config.accesslog = None
        self.config.errorlog = log
        self.config.include_server_header = False
        self.config.keep_alive_timeout = keep_alive_s
        self.config.keep_alive_max_requests = 1 << 40
        self.config.websocket_ping_interval = PING_S
        self.app = ASGIWrapper(app)
        self.context = WorkerContext(None)
        self._writes: set[trio.CancelScope] = set()
        self._stopped = trio.Event()
        self._grace_ends = math.inf
        self._cut = False

    @contextmanager
    def writing(self) -> Generator[trio.CancelScope]:
        """A write that cancellation of its request does not tear, but that ends in bounded time."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STALL_S) as scope:
            if self._cut:
                scope.cancel(reason="the grace has ended")
            self._writes.add(scope)
            try:
                yield scope
            finally:
                self._writes.discard(scope)

    async def _handle(self, stream: trio.SocketStream, door: str) -> None:
        try:
            await Connection(self, stream, door).run()
        except* Exception as group:  # noqa: BLE001  # one connection never ends the server
            log.error("a connection failed: %s", describe(group.exceptions[0]))

    async def serve(
        self,
        listeners: list[Listener],
        *,
        stop: trio.Event,
        grace_s: float,
        on_stop: Callable[[], Awaitable[None]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until `stop`, then let requests end.

        Args:
            listeners: Open; closed on return.
            stop: Ends it.
            grace_s: Seconds that connections have after the stop.
            on_stop: Run after the stop, beside the ending connections and cancelled after the last.
            task_status: Started when connections are accepted.
        """
        async with trio.open_nursery() as guards:
            guards.start_soon(self._cut_writes)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for item in listeners:
                        accepting.start_soon(self._accept, item, connections)
                    task_status.started()
                    await stop.wait()
                    accepting.cancel_scope.cancel(reason="the service is stopping")
                await self.context.terminated.set()
                self._grace_ends = connections.cancel_scope.deadline = trio.current_time() + grace_s
                self._stopped.set()
                guards.start_soon(on_stop)
            guards.cancel_scope.cancel(reason="every connection has ended")

    async def _accept(self, item: Listener, connections: trio.Nursery) -> None:
        async def handle(stream: trio.SocketStream) -> None:
            await self._handle(stream, item.door)

        await trio.serve_listeners(handle, [item.listener], handler_nursery=connections)

    async def _cut_writes(self) -> None:
        """When the grace ends, or the server is cancelled, no write is waited for any longer."""
        try:
            await self._stopped.wait()
            await trio.sleep_until(self._grace_ends)
        finally:
            self._cut = True
            for scope in list(self._writes):
                scope.cancel(reason="the grace has ended")


def _peer_uid(stream: trio.SocketStream) -> int:
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])


async def open_listeners(settings: WebSettings, stack: ExitStack) -> tuple[list[Listener], Bound]:
    """Open every door that `settings` names.

    Args:
        settings: Where.
        stack: Removes the socket files on exit.

    Raises:
        HostError: An address or path cannot be bound.
    """
    listeners: list[Listener] = []
    url = ""
    try:
        if settings.listen:
            host, port = settings.address
            opened = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
            listeners.extend(Listener(listener, "tcp") for listener in opened)
            bound_port = listeners[0].listener.socket.getsockname()[1]
            url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        for path, door, mode in (
            (settings.service_socket, "service", 0o666),  # whoever reaches it needs a token all the same
            (settings.admin_socket, "admin", 0o600),
        ):
            if path:
                listeners.append(Listener(_bind_unix(path, mode), door))
                stack.callback(_remove_socket, path)
    except OSError as error:
        for item in listeners:
            item.listener.socket.close()
        where = settings.listen or settings.service_socket
        raise HostError("listen", where, error.errno or 0, "is another service there?") from error
    return listeners, Bound(url, settings.service_socket, settings.admin_socket)


def _bind_unix(path: str, mode: int) -> trio.SocketListener:
    """Bind with `mode` from the first moment on; a stale socket of the same name goes first."""
    _remove_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o777 & ~mode)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(previous)
    sock.listen(BACKLOG)
    sock.setblocking(False)  # its only form
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _remove_socket(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


__all__ = ["Bound", "Listener", "Server", "open_listeners"]
