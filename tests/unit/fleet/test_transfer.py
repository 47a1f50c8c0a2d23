"""Transfers, on a guest that answers at once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import trio

from microvm.fleet.driver import VmDriver
from microvm.fleet.transfer import Transfers

LONG_S = 5.0


class _Call:
    """A body of one piece."""

    def __init__(self) -> None:
        self._data: bytes | None = b"tar"

    async def send(self, _data: bytes, *, end: bool) -> None:
        assert end

    async def receive(self) -> bytes | None:
        data, self._data = self._data, None
        return data

    async def outcome(self) -> dict[str, Any]:
        return {}


class _Driver:
    """Refuses a use within a use, which would wait for a suspension that waits for the outer one."""

    def __init__(self) -> None:
        self.used = 0
        self._inside = False

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncGenerator[Any]:
        assert not self._inside, "a use within a use"
        self.used += 1
        self._inside = True
        try:
            yield SimpleNamespace(link=SimpleNamespace(call=self._look, call_stream=self._stream))
        finally:
            self._inside = False

    async def _look(self, _op: str, args: dict[str, Any], *, timeout_s: float) -> None:
        assert args["look"]
        assert timeout_s

    @contextlib.asynccontextmanager
    async def _stream(self, _op: str, _args: dict[str, Any]) -> AsyncGenerator[_Call]:
        yield _Call()


async def test_an_archive_is_read_without_a_use_within_a_use() -> None:
    driver = _Driver()
    with trio.fail_after(LONG_S):
        async with Transfers(cast("VmDriver", driver)).read_archive("d") as data:
            assert [piece async for piece in data] == [b"tar"]
    assert driver.used == 2
