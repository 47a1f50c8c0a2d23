"""A guest without memory, process ids or disk space: the supervisor lives, and the job's result says so."""

from __future__ import annotations

import pytest

from tests.vm.live_service import Machine, ToolError

pytestmark = [pytest.mark.vm, pytest.mark.root]


HOG = "exec python3 -c 'kept = []\nwhile True: kept.append(bytearray(b\"x\") * (1 << 20))'"
"""Takes memory in small pieces: the kernel refuses large ones before anything is short."""


def assert_sound(vm: Machine, boot_id: str) -> None:
    """The same guest still runs commands and moves files."""
    assert vm.text("cat /proc/sys/kernel/random/boot_id") == boot_id
    vm.write("sound", b"sound")
    assert vm.read("sound") == b"sound"


def boot_id_of(vm: Machine) -> str:
    return vm.text("cat /proc/sys/kernel/random/boot_id")


def test_a_job_that_takes_all_memory_is_killed_and_says_why(vm: Machine) -> None:
    boot_id = boot_id_of(vm)
    job = vm.run(f"echo before; {HOG}")
    assert (job["exit_code"], job["signal"]) == (137, 9)
    assert "out of memory" in job["message"]
    assert job["stdout"] == b"before\n"
    assert (job["timed_out"], job["cancelled"]) == (False, False)
    assert_sound(vm, boot_id)


def test_jobs_that_take_all_memory_together_do_not_take_the_supervisors(vm: Machine) -> None:
    boot_id = boot_id_of(vm)
    jobs = [vm.start(HOG) for _ in range(4)]
    ended = [vm.wait(job_id) for job_id in jobs]
    assert any("out of memory" in job.get("message", "") for job in ended)
    assert all(job["state"] == "completed" for job in ended)
    assert_sound(vm, boot_id)


def test_a_job_that_takes_all_process_ids_gets_an_error_and_says_so(vm: Machine) -> None:
    boot_id = boot_id_of(vm)
    # Threads have ids too, and are small enough for memory to last.
    script = (
        b"import os, threading, time\n"
        b"threading.stack_size(65536)\n"
        b"never = threading.Lock()\n"
        b"never.acquire()\n"
        b"try:\n"
        b"    while True:\n"
        b"        threading.Thread(target=never.acquire, daemon=True).start()\n"
        b"except RuntimeError as error:\n"
        b"    print(threading.active_count() > 1000, error, flush=True)\n"
        b"while not os.path.exists('go'):\n"
        b"    time.sleep(0.1)\n"
        b"os._exit(3)\n"
    )
    vm.write("threads.py", script)
    job_id = vm.start("exec python3 threads.py")
    assert vm.wait_output(job_id, b"\n") == b"True can't start new thread\n"
    assert vm.text("echo another job still starts") == "another job still starts\n"
    vm.write("go", b"")
    job = vm.wait(job_id)
    assert job["exit_code"] == 3
    assert "process ids" in job["message"]
    assert_sound(vm, boot_id)


def test_a_fork_bomb_is_ended_by_a_cancel_and_others_go_on(vm: Machine) -> None:
    boot_id = boot_id_of(vm)
    witness = vm.start("echo up; until [ -e go ]; do read -rt 0.2 < <(:) ; done; echo survived")
    vm.wait_output(witness, b"up")
    bomb = vm.start("bomb() { bomb | bomb & }; bomb; echo lit; wait; sleep 600")
    vm.wait_output(bomb, b"lit")
    vm.call("vm_job_cancel", job_id=bomb)
    job = vm.wait(bomb)
    assert job["cancelled"]
    assert job["background_processes"] == 0
    vm.write("go", b"")
    assert vm.wait(witness)["state"] == "completed"
    assert_sound(vm, boot_id)


def test_a_full_disk_is_reported_and_does_not_stop_commands(vm: Machine) -> None:
    boot_id = boot_id_of(vm)
    job = vm.run(
        "fallocate -l $(($(df --output=avail -B1 . | tail -1) - 1048576)) big\n"
        "head -c 8M /dev/zero > rest; echo $?"
    )
    assert job["stdout"] == b"1\n"
    assert b"No space left" in job["stderr"]
    assert "disk is full" in job["message"]
    with pytest.raises(ToolError) as refused:
        vm.write("more", bytes(131072))
    assert (refused.value.code, refused.value.status) == ("disk_full", 507)
    assert vm.text("ls -A | sort") == "big\nrest\n"
    noisy = vm.run("head -c 200000 /dev/zero | tr '\\0' x")
    assert (noisy["totals"]["stdout"], noisy["exit_code"]) == (200_000, 0)
    assert noisy["stdout"] == b"x" * len(noisy["stdout"])
    assert vm.suspend()["state"] == "hibernated"
    vm.text("rm big rest")
    assert_sound(vm, boot_id)
