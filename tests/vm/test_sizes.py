"""Every memory size is created, runs, hibernates and wakes, also on a host with no idle core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.vm.live_service import Client

pytestmark = [pytest.mark.vm, pytest.mark.root]

SLOW = pytest.mark.slow
SIZES = [
    128,
    256,
    pytest.param(512, marks=SLOW),
    pytest.param(1024, marks=SLOW),
    2048,  # above 1 GiB, where a guest of this VMM may take the initrd for free memory
    pytest.param(4096, marks=SLOW),
]


@pytest.fixture
def busy_host() -> Iterator[None]:
    """A process that computes for ever on every core."""
    spin = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    yield
    for process in spinners:
        process.kill()
    for process in spinners:
        process.wait()


@pytest.mark.parametrize("memory_mib", SIZES)
def test_a_vm_of_every_size_lives_its_whole_life(client: Client, memory_mib: int) -> None:
    live(client, memory_mib)


@pytest.mark.slow
@pytest.mark.usefixtures("busy_host")
@pytest.mark.parametrize("memory_mib", [128, 256, 512, 1024, 2048, 4096])
def test_a_vm_of_every_size_lives_its_whole_life_while_every_core_is_busy(
    client: Client, memory_mib: int
) -> None:
    live(client, memory_mib)


def live(client: Client, memory_mib: int) -> None:
    """Create, run, hibernate, wake; twice, since what a wake loads was saved by what a template loaded."""
    vm = client.create(memory_mib=memory_mib)
    try:
        total_kib = int(vm.text("awk '/^MemTotal/ {print $2}' /proc/meminfo"))
        assert 0.6 * memory_mib * 1024 < total_kib <= memory_mib * 1024
        vm.text("head -c 16M /dev/urandom > /dev/shm/held; sha256sum /dev/shm/held > /dev/shm/sum")
        for _ in range(2):
            assert vm.suspend()["state"] == "hibernated"
            assert vm.text("sha256sum --check --quiet /dev/shm/sum; uname") == "Linux\n"
    finally:
        vm.destroy()
