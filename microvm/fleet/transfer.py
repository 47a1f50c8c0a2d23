"""Whole files and directories in and out of one VM's guest, as streams of any length.

Each transfer takes the VM through `driver.use`, so that it is awake and stays so; nothing is held here but
one window of the channel, and whoever is slow slows the other end down. A transfer ends when either end moves
nothing for a while. What is written takes effect only when all of it has arrived, which the guest sees to. It
must not look into archives: a guest makes them, and another or the same unpacks them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import trio

from microvm.agentlink.call import CHUNK_BYTES, Call
from microvm.errors import CapacityError, GuestError
from microvm.fleet.driver import VmDriver
from microvm.fleet.live import CALL_TIMEOUT_S, Live
from microvm.model import FileFacts
from microvm.wire.agent import Fields

T = TypeVar("T")

STALL_S: Final = 30.0
"""A transfer that moves nothing for this long is over (the contract's bound)."""
FINISH_S: Final = 120.0
"""From the last byte to the answer: the guest writes its caches out, under emulation at some 50 MB/s."""
AT_ONCE: Final = 3
"""Transfers of one VM at a time: each has a file worker of the guest's four, and single calls need one
too."""

Bytes = AsyncIterator[bytes]


class Transfers:
    """The transfers of one VM.

    Args:
        driver: The VM's.
    """

    def __init__(self, driver: VmDriver) -> None:
        self._driver = driver
        self._places = trio.Semaphore(AT_ONCE)

    async def look(self, path: str) -> FileFacts:
        """What a file below /workspace is now."""
        async with self._driver.use() as live:
            part, _ = await live.link.read_file(path, offset=0, length=0, timeout_s=CALL_TIMEOUT_S)
        return FileFacts(part.size, part.mode, part.modified_at_ns / 1e9, part.tag)

    @contextlib.asynccontextmanager
    async def read_file(self, path: str, *, offset: int, length: int, tag: str) -> AsyncGenerator[Bytes]:
        """The bytes of a file; the last of them come only when the file is known not to have changed.

        Args:
            path: Below /workspace.
            offset: Of the first byte.
            length: How many bytes.
            tag: Of the file that was looked at.
        """
        args = {"path": path, "offset": offset, "length": length, "tag": tag}
        async with self._call("read_file", args) as call, contextlib.aclosing(_pieces(call)) as pieces:
            yield pieces

    @contextlib.asynccontextmanager
    async def read_archive(self, path: str) -> AsyncGenerator[Bytes]:
        """A directory as a tar archive; its last bytes come only when it is known to be whole."""
        async with self._driver.use() as live:
            await live.link.call("read_archive", {"path": path, "look": True}, timeout_s=CALL_TIMEOUT_S)
        # Not within that use: a suspension that came meanwhile waits for it, and the next use for that.
        async with (
            self._call("read_archive", {"path": path}) as call,
            contextlib.aclosing(_pieces(call)) as pieces,
        ):
            yield pieces

    async def write_file(
        self, path: str, body: AsyncIterable[bytes], *, size: int | None, mode: str, make_parents: bool
    ) -> tuple[int, str]:
        """Replaces a file when all of `body` is there; answers with its size and SHA-256.

        Args:
            path: Below /workspace.
            body: What it will hold.
            size: Its length, where that is known; another length changes nothing.
            mode: Octal digits.
            make_parents: Whether missing directories are made.

        Cancellation: before the end of the body nothing was changed; after it the guest goes on.
        """
        args = {"path": path, "size": size, "mode": mode, "make_parents": make_parents}
        fields = Fields(await self._write("write_file", args, body))
        return fields.number("size"), fields.text("sha256", most=64)

    async def write_archive(self, path: str, body: AsyncIterable[bytes], *, size: int | None) -> int:
        """Puts what a tar archive holds into a directory when all of it is unpacked; answers with its length.

        Cancellation: as for `write_file`.
        """
        return Fields(await self._write("write_archive", {"path": path, "size": size}, body)).number("size")

    async def _write(self, op: str, args: dict[str, Any], body: AsyncIterable[bytes]) -> dict[str, Any]:
        async with self._call(op, args) as call:
            async for data in body:
                for at in range(0, len(data), CHUNK_BYTES):
                    await _in_time(lambda piece=data[at : at + CHUNK_BYTES]: call.send(piece))
            await _in_time(lambda: call.send(b"", end=True))
            return await _in_time(call.outcome, FINISH_S)

    @contextlib.asynccontextmanager
    async def _call(self, op: str, args: dict[str, Any]) -> AsyncGenerator[Call]:
        async with self._place() as live, live.link.call_stream(op, args) as call:
            if op.startswith("read"):
                await call.send(b"", end=True)
            yield call

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncGenerator[Live]:
        """A running guest with room for one more transfer."""
        with trio.move_on_after(STALL_S) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            raise CapacityError(
                "rate_limited", f"{AT_ONCE} transfers of this VM are under way; try again when one has ended."
            )
        try:
            async with self._driver.use() as live:
                yield live
        finally:
            self._places.release()


async def _pieces(call: Call) -> AsyncGenerator[bytes]:
    """The guest's body; its last piece only when the guest has said that all of it is right."""
    held = b""
    while (data := await _in_time(call.receive)) is not None:
        if held:
            yield held
        held = data
    await _in_time(call.outcome)
    if held:
        yield held


async def _in_time(wait: Callable[[], Awaitable[T]], limit_s: float = STALL_S) -> T:
    with trio.move_on_after(limit_s):
        return await wait()
    raise GuestError("guest_timeout", f"The guest moved nothing for {limit_s:g} s.")
