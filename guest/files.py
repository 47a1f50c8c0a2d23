"""The supervisor's end of the file workers.

They are children with the guest user's rights that may block, so that the supervisor never does. One worker
is kept; more are forked while calls overlap. A worker that dies (the guest's user may kill it) fails its call
and is replaced; one whose reader is gone is made to. What they do is `worker`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from guest import fileops
from guest.channel import Stream
from guest.errors import OpError
from guest.loop import READ, WRITE, Loop
from guest.worker import READS, WRITES, serve

_MAX_WORKERS: Final = 4
"""Calls in progress at once; a fifth waits. Each is a forked interpreter of about 3 MiB of its own."""
_AHEAD_PACKETS: Final = 2
"""Packets of a file that are read before the stream has room for them."""
_PACKET_MAX: Final = fileops.PACKET_BYTES + 4096


class FileCall:
    """One call, queued or in a worker."""

    def __init__(self, stream: Stream, op: str, args: dict[str, Any]) -> None:
        self.stream = stream
        self.op = op
        self.args = args
        self.body: deque[bytes] = deque()
        self.ahead: deque[bytes] = deque()
        self.result: dict[str, Any] | None = None
        self.worker: Worker | None = None
        self._body_ended = False
        stream.on_body = self._on_body
        stream.on_abandoned = self._on_abandoned
        stream.stream_body(self.source)

    def _on_body(self, data: bytes, end: bool) -> None:  # noqa: FBT001 - Stream.on_body's signature
        if self.op not in WRITES:
            self.stream.consumed(len(data))
            return
        if data:
            self.body.append(b"D" + data)
        if end and not self._body_ended:
            self._body_ended = True
            self.body.append(b"E")
        if self.worker is not None:
            self.worker.flush()

    def _on_abandoned(self) -> None:
        self.ahead.clear()
        if self.op in WRITES and not self._body_ended:
            self._body_ended = True
            self.body.clear()
            self.body.append(b"X")
        if self.worker is None:
            return
        if self.op in READS:
            self.worker.give_up()
        else:
            self.worker.flush()

    def source(self, limit: int) -> bytes | None:
        """The body of the answer, as it comes from the worker."""
        if not self.ahead:
            return None if self.result is not None else b""
        data = self.ahead.popleft()
        if len(data) > limit:
            self.ahead.appendleft(data[limit:])
            data = data[:limit]
        if self.worker is not None:
            self.worker.watch()
        return data


class Worker:
    """One child process and its socket."""

    def __init__(self, pool: FilePool, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.call: FileCall | None = None
        self._pool = pool
        self._sock = sock
        self._to_send: deque[bytes] = deque()
        self._events = 0
        self.watch()

    def begin(self, call: FileCall) -> None:
        """Gives it a call; it must have none."""
        self.call = call
        call.worker = self
        self._to_send.append(b"C" + json.dumps({"op": call.op, "args": call.args}).encode())
        self.flush()
        self.watch()

    def flush(self) -> None:
        """Sends what the socket takes, and gives the stream credit for it."""
        call = self.call
        try:
            while call is not None and (self._to_send or call.body):
                packet = self._to_send[0] if self._to_send else call.body[0]
                self._sock.send(packet)
                if self._to_send:
                    self._to_send.popleft()
                else:
                    call.body.popleft()
                    call.stream.consumed(len(packet) - 1)
        except BlockingIOError:
            pass
        except OSError:
            return  # its death is reported by the read side
        self.watch()

    def watch(self) -> None:
        """Listens to what matters now: packets while there is room for them, room while there are packets."""
        call = self.call
        events = 0
        if call is None or len(call.ahead) < _AHEAD_PACKETS:
            events |= READ
        if call is not None and (self._to_send or call.body):
            events |= WRITE
        if events != self._events:
            self._events = events
            if events:
                self._pool.loop.watch(self._sock.fileno(), events, self._on_event)
            else:
                self._pool.loop.forget(self._sock.fileno())

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self.flush()
        if events & READ:
            self._receive()

    def _receive(self) -> None:
        try:
            packet = self._sock.recv(_PACKET_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        call = self.call
        if not packet:
            self.close()
            self._pool.lost(self)
        elif call is not None and packet[:1] == b"D":
            if call.stream.open:
                call.ahead.append(packet[1:])
                call.stream.pump()
                self.watch()
        elif call is not None:
            self._finish(call, packet[:1], json.loads(packet[1:]))

    def _finish(self, call: FileCall, kind: bytes, result: dict[str, Any]) -> None:
        self.call = None
        call.worker = None
        call.result = result
        if kind == b"F":
            call.stream.fail(OpError(result["code"], result["message"]))
        else:
            call.stream.conclude(result)
        self.watch()
        self._pool.idle(self)

    def give_up(self) -> None:
        """Nobody wants the rest of what it reads: it ends at its next packet, and another takes its place."""
        self.close()
        self._pool.lost(self)

    def close(self) -> None:
        """Closes its socket, at which it exits."""
        if self._events:
            self._pool.loop.forget(self._sock.fileno())
            self._events = 0
        self._sock.close()


class FilePool:
    """Runs file calls in workers.

    Args:
        uid, gid: The workers' rights; -1 keeps the supervisor's own.
        workspace_fd: The directory that every path lies beneath.
    """

    def __init__(self, loop: Loop, *, uid: int, gid: int, workspace_fd: int) -> None:
        self.loop = loop
        self._uid = uid
        self._gid = gid
        self._workspace_fd = workspace_fd
        self._workers: list[Worker] = []
        self._queue: deque[FileCall] = deque()

    def prepare(self) -> None:
        """Forks the worker that is kept, so that the first call does not wait for it."""
        if not self._workers:
            self._fork()

    def run(self, stream: Stream, op: str, args: dict[str, Any]) -> None:
        """Answers `stream` with what a worker makes of the call."""
        call = FileCall(stream, op, args)
        worker = next((worker for worker in self._workers if worker.call is None), None)
        try:
            if worker is None and len(self._workers) < _MAX_WORKERS:
                worker = self._fork()
        except OSError as error:
            if not self._workers:
                stream.fail(OpError("internal", f"no file worker: {error.strerror}"))
                return
        if worker is None:
            self._queue.append(call)
        else:
            worker.begin(call)

    def idle(self, worker: Worker) -> None:
        """A worker has nothing to do: the next call, or the end when it is one too many."""
        while self._queue:
            call = self._queue.popleft()
            if call.stream.open:
                worker.begin(call)
                return
        if worker is not self._workers[0]:
            worker.close()
            self._workers.remove(worker)

    def lost(self, worker: Worker) -> None:
        """A worker died: its call fails, another takes what waits."""
        self._workers.remove(worker)
        if worker.call is not None:
            worker.call.worker = None
            worker.call.stream.fail(OpError("internal", "the file worker was killed in the guest; try again"))
        try:
            if self._queue or not self._workers:
                self.idle(self._fork())
        except OSError as error:
            while self._queue:
                self._queue.popleft().stream.fail(OpError("internal", f"no file worker: {error.strerror}"))

    def close(self) -> None:
        """Lets every worker exit."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _fork(self) -> Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Pages shared with the child stay shared: the collector no longer writes to what exists now.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs)
        theirs.close()
        ours.setblocking(False)
        worker = Worker(self, ours, pid)
        self._workers.append(worker)
        return worker

    def _become_worker(self, sock: socket.socket) -> None:
        """In the child: drops everything but the socket and the workspace, serves, exits."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            sock_fd = os.dup2(sock.detach(), 1000, inheritable=False)
            root_fd = os.dup2(self._workspace_fd, 1001, inheritable=False)
            os.closerange(3, sock_fd)
            os.closerange(root_fd + 1, 65536)
            if self._uid >= 0:
                os.setgroups([])
                os.setresgid(self._gid, self._gid, self._gid)
                os.setresuid(self._uid, self._uid, self._uid)
            os.umask(0o022)
            channel = socket.socket(fileno=sock_fd)
            channel.setblocking(True)
            with contextlib.suppress(ConnectionError):
                serve(fileops.Workspace(root_fd), lambda: channel.recv(_PACKET_MAX), _sender(channel))
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into the loop
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)


def _sender(channel: socket.socket) -> Callable[[bytes], None]:
    def send(packet: bytes) -> None:
        channel.send(packet)

    return send
