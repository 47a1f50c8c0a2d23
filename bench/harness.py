"""What every runner of `bench/` shares: a service of its own, timed calls through its HTTP door, tables.

Absolute times are this machine's at this moment and are printed for orientation only: machines are shared and
noisy, ratios of one run count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
import trio

from microvm.daemon.service import Running, run_service
from microvm.daemon.settings import load_settings


@dataclass
class Series:
    """Milliseconds of one row."""

    name: str
    ms: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def p99(self) -> float:
        return sorted(self.ms)[min(len(self.ms) - 1, round(len(self.ms) * 0.99))]

    def __str__(self) -> str:
        spread = f"{min(self.ms):9.1f} {self.median:9.1f} {self.p99:9.1f}"
        return f"{self.name:<52} {len(self.ms):4d} {spread}"


class Bench:
    """Calls a running service and keeps what it took."""

    def __init__(self, client: httpx2.AsyncClient, running: Running) -> None:
        self.client = client
        self.running = running
        self.rows: dict[str, Series] = {}

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self.client.post(f"/v1/tools/{tool}", json=arguments)
        body = cast("dict[str, Any]", answer.json())
        if answer.status_code != 200:
            raise SystemExit(f"{tool}: {body}")
        return body

    async def timed(self, row: str, work: Callable[[], Awaitable[Any]]) -> Any:
        began = time.perf_counter()
        result = await work()
        self.rows.setdefault(row, Series(row)).ms.append((time.perf_counter() - began) * 1000)
        return result

    async def create(self, memory_mib: int) -> str:
        vm = await self.call("vm_create", request_id=uuid.uuid4().hex, memory_mib=memory_mib, idle_seconds=0)
        return str(vm["vm_id"])

    async def run(self, vm_id: str, command: str = "true") -> str:
        job = await self.call(
            "vm_exec", vm_id=vm_id, request_id=uuid.uuid4().hex, command=command, wait_seconds=30
        )
        if job.get("exit_code") != 0:
            raise SystemExit(f"{command!r}: {job}")
        return str(job["output"]["stdout"])

    async def suspend(self, vm_id: str) -> None:
        await self.call("vm_suspend", vm_id=vm_id)


Measure = Callable[[Bench, int], Awaitable[dict[str, float]]]


async def _main(measure: Measure, config: Path, rounds: int, output: Path | None) -> None:
    async with trio.open_nursery() as nursery:
        running: Running = await nursery.start(run_service, load_settings(config))
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        transport = httpx2.AsyncHTTPTransport(uds=running.bound.admin_socket)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=180
        ) as client:
            bench = Bench(client, running)
            ratios = await measure(bench, rounds)
        nursery.cancel_scope.cancel()
    print(f"{'row':<52} {'n':>4} {'min ms':>9} {'median':>9} {'p99':>9}")
    for series in bench.rows.values():
        print(series)
    print()
    for name, value in ratios.items():
        print(f"{name:<52} {value:9.3f}")
    if output is not None:
        rows = {name: series.ms for name, series in bench.rows.items()}
        output.write_text(json.dumps({"rows_ms": rows, "ratios": ratios}, indent=1))


def run(measure: Measure, description: str | None, rounds: int = 9) -> None:
    """Runs `measure` on a service of the configuration named on the command line, and prints its tables."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(_main, measure, given.config, given.rounds, given.json)
