"""The core figures of a service on this machine, as ratios within one run.

    sudo python -m bench.core --config /etc/microvm/microvm.toml [--rounds 9] [--json FILE]

Runs a service of its own from the configuration (none may be running), measures through its HTTP door and,
where a row is about a part of an operation, through the fleet itself.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import trio

from bench.harness import Bench, Series, run
from microvm.fleet import templates
from microvm.model import VmId
from microvm.store import checkpoint

IN_GUEST_SPAWN = """python3 - <<'END'
import os, time
began = time.perf_counter()
for _ in range(20):
    pid = os.posix_spawn("/bin/bash", ["bash", "-c", "true"], os.environ)
    os.waitpid(pid, 0)
print((time.perf_counter() - began) / 20 * 1000)
END"""


async def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """All rows; the answer is the ratios."""
    for memory_mib in (256, 2048):  # templates first: their builds are no creation
        await bench.call("vm_destroy", vm_id=await bench.create(memory_mib))

    async def create_and_run() -> str:
        vm_id = await bench.create(256)
        await bench.run(vm_id)
        return vm_id

    for _ in range(rounds):
        vm_id = await bench.timed("create from template, first command", create_and_run)
        await bench.call("vm_destroy", vm_id=vm_id)
    for memory_mib in (256, 2048):
        vm_id = await bench.create(memory_mib)
        await bench.run(vm_id)
        for _ in range(rounds):
            await bench.timed(f"hibernate, {memory_mib} MiB", lambda vm_id=vm_id: bench.suspend(vm_id))
            await bench.timed(f"wake, first command, {memory_mib} MiB", lambda vm_id=vm_id: bench.run(vm_id))
        await bench.call("vm_destroy", vm_id=vm_id)

    vm_id = await bench.create(256)

    async def cold_boot_and_run() -> None:
        await bench.call("vm_resume", vm_id=vm_id, cold_boot=True, discard_memory=True)
        await bench.run(vm_id)

    for _ in range(max(rounds // 3, 2)):
        await bench.suspend(vm_id)
        await bench.timed("cold boot, first command", cold_boot_and_run)
    await save_without_fsync(bench, vm_id, rounds)
    for _ in range(rounds):
        await bench.timed("exec round trip (HTTP, bash -c true)", lambda: bench.run(vm_id))
        spawn = Series("fork and exec of bash -c true, in the guest")
        bench.rows.setdefault(spawn.name, spawn).ms.append(float(await bench.run(vm_id, IN_GUEST_SPAWN)))
    facts = overhead(bench, vm_id)
    await bench.call("vm_destroy", vm_id=vm_id)
    facts |= await idle_daemon()
    rows = {name: series.median for name, series in bench.rows.items()}
    boot = rows["cold boot, first command"]
    ratios = {
        "create / cold boot (<= 0.1)": rows["create from template, first command"] / boot,
        "wake / cold boot (<= 0.1)": rows["wake, first command, 256 MiB"] / boot,
        "wake 2048 / wake 256 MiB (<= 1.3)": rows["wake, first command, 2048 MiB"]
        / rows["wake, first command, 256 MiB"],
        "exec / in-guest fork+exec (<= 1.5)": rows["exec round trip (HTTP, bash -c true)"]
        / rows["fork and exec of bash -c true, in the guest"],
    }
    return ratios | facts


async def save_without_fsync(bench: Bench, vm_id: str, rounds: int) -> None:
    """Freeze, stop, save and run on, beside the same with the fsyncs of a checkpoint."""
    vm = bench.running.fleet.vms[VmId(vm_id)]
    live = vm.driver.effects.live
    assert live is not None
    path = vm.driver.effects.directory / "bench.state"
    generation = vm.driver.record.agent_generation
    for _ in range(rounds):
        await bench.run(vm_id)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:

            async def save(fd: int = fd) -> None:
                await live.freeze_and_stop()
                await live.vmm.save(fd)

            await bench.timed("freeze, stop, save, no fsync", save)

            async def make_durable(fd: int = fd) -> None:
                os.fsync(fd)
                await live.sync_memory()

            await bench.timed("fsync of state, RAM and disk", make_durable)
        finally:
            os.close(fd)
            path.unlink()
        generation = type(generation)(generation + 1)
        await live.cont()
        await live.greet(generation)
    vm.driver.record = vm.driver.record.with_(agent_generation=generation)


def overhead(bench: Bench, vm_id: str) -> dict[str, float]:
    """What one VM costs the host beside its guest's RAM."""
    vm = bench.running.fleet.vms[VmId(vm_id)]
    live = vm.driver.effects.live
    assert live is not None
    status = Path(f"/proc/{live.vmm.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "VMM anonymous memory, MiB": int(fields["RssAnon"].split()[0]) / 1024,
        "checkpoint state, KiB": (live.ram_fd and _state_kib(bench, vm_id)),
    }


def _state_kib(bench: Bench, vm_id: str) -> float:
    parts = bench.running.fleet.parts
    key = parts.templates.key(bench.running.fleet.vms[VmId(vm_id)].driver.record.spec)
    manifest = checkpoint.read(parts.host.layout.template(key))
    assert manifest is not None
    assert manifest.generation == templates.TEMPLATE_GENERATION
    return manifest.state_bytes / 1024


async def idle_daemon(seconds: float = 10.0) -> dict[str, float]:
    """CPU and memory of the service while nothing happens (this process, its client included)."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    await trio.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "idle daemon, % of one CPU": used / seconds * 100,
        "idle daemon, RSS MiB (<= 90)": rss_pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
    }


if __name__ == "__main__":
    run(measure, __doc__)
