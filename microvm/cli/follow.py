"""A job's output over a WebSocket, as it comes.

Promises each kept byte once and in order per stream, from a cursor on, as far as the connection carries;
`execute` goes on from there by pages where it does not. Neighbours: `execute`, `client`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import quote, urlsplit

import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_client_stream

from microvm.cli.client import CONNECT_TIMEOUT_S, Endpoint

STREAMS: Final = {1: "stdout", 2: "stderr"}
HEAD: Final = struct.Struct(">BQ")
"""A binary frame's beginning (`web.follow`): stream and offset."""

Sink = Callable[[str, bytes], None]


def follow_job(
    endpoint: Endpoint, vm_id: str, job_id: str, cursor: dict[str, int], sink: Sink
) -> dict[str, Any] | None:
    """Passes a job's output on until its end.

    Args:
        endpoint: The service.
        vm_id: The VM.
        job_id: The job.
        cursor: Where to begin; moved on behind each byte that was passed on.
        sink: Takes a stream's name and its next bytes.

    Returns:
        The job as it ended; None when the service does not speak this way, or the connection was lost.

    Raises:
        KeyboardInterrupt: Ctrl-C; the job goes on.
    """
    follower = _Follower(endpoint, vm_id, job_id, cursor, sink)
    try:
        trio.run(follower.run)
    except* KeyboardInterrupt:
        raise KeyboardInterrupt from None
    return follower.job


class _Follower:
    def __init__(
        self, endpoint: Endpoint, vm_id: str, job_id: str, cursor: dict[str, int], sink: Sink
    ) -> None:
        self.job: dict[str, Any] | None = None
        self._endpoint = endpoint
        self._path = (
            f"/v1/vms/{quote(vm_id, safe='')}/jobs/{quote(job_id, safe='')}/stream"
            f"?stdout={cursor['stdout']}&stderr={cursor['stderr']}"
        )
        self._cursor = cursor
        self._sink = sink

    async def run(self) -> None:
        """One connection, to the job's end or its own."""
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                stream = await self._connect()
        except (OSError, trio.TooSlowError, trio.BrokenResourceError):
            return
        token = self._endpoint.token
        headers = [(b"Authorization", f"Bearer {token}".encode())] if token else []
        try:
            async with stream, trio.open_nursery() as nursery:
                with trio.fail_after(CONNECT_TIMEOUT_S):
                    connection = await wrap_client_stream(
                        nursery, stream, self._host, self._path, extra_headers=headers
                    )
                await self._receive(connection)
                nursery.cancel_scope.cancel(reason="all was said")
        except* (HandshakeError, ConnectionClosed, trio.TooSlowError, trio.BrokenResourceError):
            pass  # a refused handshake is told to the nursery, not to who waits for it

    async def _receive(self, connection: WebSocketConnection) -> None:
        while True:
            message = await connection.get_message()
            if isinstance(message, str):
                said = cast("dict[str, Any]", json.loads(message))
                self.job = None if "error" in said else said
                return
            number, offset = HEAD.unpack_from(message)
            name = STREAMS[number]
            assert offset == self._cursor[name], "the service skipped output"
            self._cursor[name] += len(message) - HEAD.size
            self._sink(name, message[HEAD.size :])

    @property
    def _host(self) -> str:
        return "localhost" if self._endpoint.socket else urlsplit(self._endpoint.url).netloc

    async def _connect(self) -> Any:
        if self._endpoint.socket is not None:
            return await trio.open_unix_socket(str(self._endpoint.socket))
        url = urlsplit(self._endpoint.url)
        host = url.hostname or "localhost"
        if url.scheme == "https":
            stream = await trio.open_ssl_over_tcp_stream(host, url.port or 443, https_compatible=True)
            await stream.do_handshake()
            return stream
        return await trio.open_tcp_stream(host, url.port or 80)
