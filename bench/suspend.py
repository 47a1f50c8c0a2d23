"""Hibernation and wake in series: sizes, dirty memory, page cache, restarts, and what idle machines cost.

    sudo python -m bench.suspend --config /etc/microvm/microvm.toml [--rounds 9] [--json FILE]

Runs a service of its own from the configuration (none may be running). The page cache is dropped for the
files of the machine under test alone. The thousand sleeping machines are records without files.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import trio
import trio.testing

from bench.harness import Bench, Series, run
from microvm.host.files import drop_pages
from microvm.model import Generation, VmId, VmRecord, VmSpec, VmState, WorkspaceId
from microvm.store import new_vm_id, writes

SIZES_MIB: Final = (256, 1024, 2048)
DIRTY_MIB: Final = (10, 100, 500)
CROWD: Final = 1000

DIRTY = """python3 - <<'END' >/dev/null 2>&1 &
import os, time
block = bytearray(os.urandom(1 << 20)) * {mib}
open("ready", "w").write("x")
while True:
    for at in range(0, len(block), 4096):
        block[at] = (block[at] + 1) & 255
    time.sleep(3600)
END
while [ ! -e ready ]; do sleep 0.05; done; rm ready"""

BUSY: Final = """python3 - <<'END' >/dev/null 2>&1 &
block = bytearray(100 << 20)
while True:
    for at in range(0, len(block), 4096):
        block[at] = (block[at] + 1) & 255
END"""


async def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """All series; the answer is the ratios and what idle machines cost."""
    for memory_mib in SIZES_MIB:
        vm_id = await bench.create(memory_mib)
        await bench.run(vm_id)
        await series(bench, vm_id, f"{memory_mib} MiB", rounds)
        await bench.call("vm_destroy", vm_id=vm_id)
    for dirty_mib in DIRTY_MIB:
        vm_id = await bench.create(1024)
        await bench.run(vm_id, DIRTY.format(mib=dirty_mib))
        await series(bench, vm_id, f"1024 MiB, {dirty_mib} MiB dirtied", max(rounds // 3, 2))
        await bench.call("vm_destroy", vm_id=vm_id)
    await status_beside_hibernations(bench)
    facts = await bytes_written(bench)
    facts |= await crowd(bench)
    median = {name: each.median for name, each in bench.rows.items()}
    return {
        "hibernate 2048 / 256 MiB": median["hibernate, 2048 MiB"] / median["hibernate, 256 MiB"],
        "wake 2048 / 256 MiB": median["wake, warm, 2048 MiB"] / median["wake, warm, 256 MiB"],
        "wake cold / warm cache, 1024 MiB": median["wake, cold, 1024 MiB"] / median["wake, warm, 1024 MiB"],
        **facts,
    }


async def series(bench: Bench, vm_id: str, what: str, rounds: int) -> None:
    """Hibernate and wake with the page cache warm, then cold."""
    for cache in ("warm", "cold"):
        for _ in range(rounds):
            await bench.timed(f"hibernate, {what}", lambda: bench.call("vm_suspend", vm_id=vm_id, force=True))
            if cache == "cold":
                forget_pages(bench, vm_id)
            await bench.timed(f"wake, {cache}, {what}", lambda: bench.call("vm_resume", vm_id=vm_id))


def forget_pages(bench: Bench, vm_id: str) -> None:
    """Has the kernel forget the pages of a sleeping machine's files."""
    directory = bench.running.fleet.parts.host.layout.vm(VmId(vm_id))
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            drop_pages(fd)
        finally:
            os.close(fd)


async def status_beside_hibernations(bench: Bench) -> None:
    """vm_status while nothing else happens, and while four machines hibernate at once."""
    vms = [await bench.create(256) for _ in range(4)]
    watched = await bench.create(256)
    for _ in range(100):
        await bench.timed("vm_status, alone", lambda: bench.call("vm_status", vm_id=watched))
    for _ in range(3):
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                while True:
                    await bench.timed(
                        "vm_status, 4 hibernating", lambda: bench.call("vm_status", vm_id=watched)
                    )

            nursery.start_soon(look)
            async with trio.open_nursery() as sleepers:
                for vm_id in vms:
                    sleepers.start_soon(bench.suspend, vm_id)
            nursery.cancel_scope.cancel()
        for vm_id in vms:
            await bench.call("vm_resume", vm_id=vm_id)
    for vm_id in (*vms, watched):
        await bench.call("vm_destroy", vm_id=vm_id)


async def bytes_written(bench: Bench, seconds: float = 90.0) -> dict[str, float]:
    """What an idle and a busy machine write to the volume per minute, over three periods of write-back."""
    vm_id = await bench.create(512)
    await bench.run(vm_id)
    directory = bench.running.fleet.parts.host.layout.vm_dir
    facts: dict[str, float] = {}
    for what in ("idle", "busy (100 MiB dirtied again and again)"):
        if what != "idle":
            await bench.run(vm_id, BUSY)
        before = written_sectors(directory)
        await trio.sleep(seconds)
        sectors = written_sectors(directory) - before
        facts[f"MiB written per minute, {what}"] = sectors * 512 / (1 << 20) * 60 / seconds
    await bench.call("vm_destroy", vm_id=vm_id)
    return facts


def written_sectors(directory: Path) -> int:
    """Sectors of 512 bytes written to the device below a directory, since the host's boot."""
    device = directory.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    return int(stat.split()[6])


async def crowd(bench: Bench) -> dict[str, float]:
    """What a thousand sleeping machines add to the service's memory, and to its start."""
    fleet = bench.running.fleet
    before = rss_mib()
    began = time.perf_counter()
    records = [sleeping() for _ in range(CROWD)]
    await bench.running.store.commit(*(writes.insert_vm(record) for record in records))
    for record in records:
        fleet.start(fleet.adopt(record, []))
    await trio.testing.wait_all_tasks_blocked()
    adopted = (time.perf_counter() - began) * 1000
    facts = {f"RSS of {CROWD} sleeping machines, MiB (< 30)": rss_mib() - before}
    bench.rows["adopting 1000 sleeping machines"] = Series("adopting 1000 sleeping machines", [adopted])
    for record in records:
        del fleet.vms[record.vm_id]
    await bench.running.store.commit(*(writes.remove_vm(record.vm_id) for record in records))
    return facts


def sleeping() -> VmRecord:
    """A record of a hibernated machine without files."""
    now = time.time()
    return VmRecord(
        vm_id=new_vm_id(),
        workspace_id=WorkspaceId("operator"),
        state=VmState.HIBERNATED,
        since=now,
        created_at=now,
        last_activity_at=now,
        spec=VmSpec(memory_mib=256),
        checkpoint_generation=Generation(1),
    )


def rss_mib() -> float:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    run(measure, __doc__)
