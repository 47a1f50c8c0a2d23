"""The smallest client of the guest's supervisor: enough to see that a guest lives and remembers.

It must not become a second `agentlink`: one call at a time, small bodies, no events. The frames are those of
`microvm.wire.framing`.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Final

import trio

from microvm.wire.framing import (
    CLOSE,
    CREDIT,
    DATA,
    FIN,
    HELLO,
    OPEN,
    RESET,
    Decoder,
    Frame,
    encode_frame,
)

READ_BYTES: Final = 65536


class Guest:
    """The host's end of a guest's agent port."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._decoder = Decoder()
        self._frames: list[Frame] = []
        self._next_stream = 1

    async def send_hello(self, generation: int) -> None:
        """Says hello without waiting; what came before counts no more."""
        hello = {"protocol": 1, "generation": generation, "nonce": os.urandom(8).hex()}
        self._decoder.await_hello()
        self._frames.clear()
        self._next_stream = 1
        await self._send(HELLO, 0, json.dumps(hello).encode())

    async def hello(self, generation: int) -> dict[str, Any]:
        """Says hello; the guest's answer to this very one."""
        await self.send_hello(generation)
        return await self.hear_hello(generation)

    async def hear_hello(self, generation: int) -> dict[str, Any]:
        """Waits for the answer to the hello of `generation`; answers to older ones are passed over."""
        while True:
            frame = await self._receive()
            answer: dict[str, Any] = json.loads(frame.payload) if frame.kind == HELLO else {}
            if answer.get("generation") == generation:
                return answer

    async def ask(self, op: str, args: dict[str, Any], body: bytes = b"") -> int:
        """Sends a call without waiting; its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        await self._send(OPEN, stream, json.dumps({"op": op, "args": args}).encode())
        await self._send(DATA, stream, body, FIN)
        return stream

    async def call(self, op: str, args: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """One call; what it answers and its body."""
        stream = await self.ask(op, args, body)
        received = b""
        while True:
            frame = await self._receive()
            if frame.kind == OPEN:  # the guest tells something; whoever tells wants an answer
                await self._send(CLOSE, frame.stream, b'{"ok":{}}')
            if frame.stream != stream:
                continue
            if frame.kind == DATA:
                received += frame.payload
                await self._send(CREDIT, stream, len(frame.payload).to_bytes(4, "little"))
            elif frame.kind in {CLOSE, RESET}:
                answer = json.loads(frame.payload)
                assert "ok" in answer, answer
                return answer["ok"], received

    async def wake(self, generation: int) -> dict[str, Any]:
        """Hello, clock, entropy, thaw: afterwards jobs run."""
        hello = await self.hello(generation)
        if hello["state"] != "running":
            await self.call("configure", {"realtime_ns": time.time_ns(), "entropy_hex": os.urandom(32).hex()})
            await self.call("thaw", {})
        return hello

    async def start_job(self, job_id: str, command: str) -> None:
        """Starts a shell command in the workspace."""
        spec = json.dumps({"command": command, "env": {}}).encode()
        args = {"job_id": job_id, "cwd": "/workspace", "output_limit_bytes": 1 << 20, "spec_bytes": len(spec)}
        await self.call("exec", args, spec)

    async def job(self, job_id: str) -> dict[str, Any]:
        """What the guest knows of a job."""
        return (await self.call("job_status", {"job_id": job_id}))[0]

    async def run(self, job_id: str, command: str) -> bytes:
        """Runs a command to its end; its standard output."""
        await self.start_job(job_id, command)
        while (await self.job(job_id))["state"] != "completed":  # noqa: ASYNC110 - it takes no events
            await trio.sleep(0.01)
        return await self.output(job_id)

    async def output(self, job_id: str) -> bytes:
        """A job's standard output so far."""
        args = {"job_id": job_id, "stream": "stdout", "offset": 0, "length": 1 << 20}
        return (await self.call("job_output", args))[1]

    async def _send(self, kind: int, stream: int, payload: bytes, flags: int = 0) -> None:
        await self._stream.send_all(encode_frame(kind, flags, stream, payload))

    async def _receive(self) -> Frame:
        while not self._frames:
            data = await self._stream.receive_some(READ_BYTES)
            assert data, "the channel ended"
            self._frames += self._decoder.feed(bytes(data))
        return self._frames.pop(0)
