"""How long a service takes from its start to its first answer, empty and with sleeping machines.

    sudo python -m bench.restart --config /etc/microvm/microvm.toml [--machines 100] [--rounds 5]

Starts services of its own from the configuration (none may be running). The sleeping machines are records
with an empty disk each; both are removed again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import trio

from bench.suspend import sleeping
from microvm.daemon.settings import Settings, load_settings
from microvm.fleet import Layout
from microvm.fleet.layout import DISK
from microvm.model import VmRecord
from microvm.store import open_store, writes


def start_ms(config: Path, settings: Settings) -> float:
    """Milliseconds from a service's start until it says that it is ready; then it is stopped."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "microvm", "serve", "--config", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        transport = httpx2.HTTPTransport(uds=str(settings.admin_socket))
        with httpx2.Client(transport=transport, base_url="http://localhost") as client:
            while not _is_ready(client):
                time.sleep(0.01)
        return (time.perf_counter() - began) * 1000
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx2.HTTPError:
        return False


async def put(settings: Settings, records: list[VmRecord]) -> None:
    """Makes machines that sleep, as far as a start looks at them."""
    layout = Layout(settings.state_dir, settings.vm_dir)
    for record in records:
        layout.vm(record.vm_id).mkdir(mode=0o700)
        os.close(os.open(layout.vm(record.vm_id) / DISK, os.O_CREAT | os.O_WRONLY, 0o600))
    async with open_store(settings.state_dir) as store:
        await store.commit(*(writes.insert_vm(record) for record in records))


async def take_away(settings: Settings, records: list[VmRecord]) -> None:
    """Removes them again; a later start sweeps their directories."""
    async with open_store(settings.state_dir) as store:
        await store.commit(*(writes.remove_vm(record.vm_id) for record in records))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    settings = load_settings(given.config)
    start_ms(given.config, settings)  # copies, hashes and probes what later starts remember
    empty = [start_ms(given.config, settings) for _ in range(given.rounds)]
    records = [sleeping() for _ in range(given.machines)]
    trio.run(put, settings, records)
    try:
        crowded = [start_ms(given.config, settings) for _ in range(given.rounds)]
    finally:
        trio.run(take_away, settings, records)
    for name, series in (("no machines", empty), (f"{given.machines} sleeping machines", crowded)):
        print(f"start with {name:<30} median {statistics.median(series):8.1f} ms, most {max(series):8.1f} ms")


if __name__ == "__main__":
    main()
