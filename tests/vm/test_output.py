"""What a command wrote: paging as text and as bytes, bounds and totals, and reading without waking a VM."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest

from tests.vm.live_service import Machine

pytestmark = [pytest.mark.vm, pytest.mark.root]

MIXED = "aé€𝄞\u0000ß☃\U0001f600zü" * 3
"""Characters of one to four bytes side by side."""


def pages_of(vm: Machine, job_id: str, max_bytes: int) -> list[dict[str, Any]]:
    """All text pages of a finished job; the last one no longer moves the cursor."""
    pages: list[dict[str, Any]] = []
    cursor = {"stdout": 0, "stderr": 0}
    while True:
        page = vm.call("vm_job_output", job_id=job_id, cursor=cursor, max_bytes=max_bytes)
        pages.append(page)
        if page["next_cursor"] == cursor:
            return pages
        cursor = page["next_cursor"]


@pytest.mark.parametrize("max_bytes", [1, 2, 3, 5, 16384])
def test_text_pages_of_any_size_never_split_a_character(shared_vm: Machine, max_bytes: int) -> None:
    shared_vm.write("mixed", MIXED.encode())
    job = shared_vm.run("cat mixed; cat mixed >&2")
    pages = pages_of(shared_vm, job["job_id"], max_bytes)
    assert "".join(page["stdout"] for page in pages) == MIXED
    assert "".join(page["stderr"] for page in pages) == MIXED
    assert not any(any(page["decoding_errors"].values()) for page in pages)
    for page in pages:
        assert len(page["stdout"].encode()) <= max(max_bytes, 4)
        assert len(page["stdout"]) <= 1 or len(page["stdout"].encode()) <= max_bytes


def test_half_a_character_waits_for_its_other_half_while_the_command_runs(vm: Machine) -> None:
    job_id = vm.start(
        "printf 'x\\xe2\\x82'; echo ready >&2; until [ -e go ]; do sleep 0.1; done; printf '\\xac'"
    )
    cursor = {"stdout": 0, "stderr": 0}
    while cursor["stderr"] < 6:
        page = vm.call("vm_job_output", job_id=job_id, cursor=cursor, wait_seconds=30)
        assert page["stdout"] in {"x", ""}
        cursor = page["next_cursor"]
    assert cursor["stdout"] == 1
    page = vm.call("vm_job_output", job_id=job_id, cursor=cursor)
    assert (page["stdout"], page["next_cursor"], page["state"]) == ("", cursor, "running")
    vm.write("go", b"")
    vm.wait(job_id)
    page = vm.call("vm_job_output", job_id=job_id, cursor=cursor)
    assert (page["stdout"], page["decoding_errors"]["stdout"]) == ("€", False)


def test_invalid_bytes_become_replacement_characters_and_are_flagged(shared_vm: Machine) -> None:
    job = shared_vm.run(r"printf 'a\xffb\xc3'; printf '\xef\xbf\xbd' >&2")
    page = shared_vm.call("vm_job_output", job_id=job["job_id"])
    assert (page["stdout"], page["stderr"]) == ("a\ufffdb\ufffd", "\ufffd")
    assert page["decoding_errors"] == {"stdout": True, "stderr": False}


def test_base64_gives_exactly_the_bytes_that_were_written(shared_vm: Machine) -> None:
    data, other = os.urandom(100_003), os.urandom(70_001)
    shared_vm.write("random", data)
    shared_vm.write("other", other)
    job = shared_vm.run("cat random; cat other >&2")
    assert (job["stdout"], job["stderr"]) == (data, other)
    page = shared_vm.call("vm_job_output", job_id=job["job_id"], encoding="base64", max_bytes=7)
    assert base64.b64decode(page["stdout_base64"]) == data[:7]
    assert "decoding_errors" not in page


def test_reading_takes_nothing_away_and_any_offset_may_be_read(shared_vm: Machine) -> None:
    job_id = shared_vm.run("printf 0123456789; printf abc >&2")["job_id"]
    cursor = {"stdout": 4, "stderr": 1}
    first, second = (shared_vm.call("vm_job_output", job_id=job_id, cursor=cursor) for _ in range(2))
    assert first == second
    assert (first["stdout"], first["stderr"]) == ("456789", "bc")
    assert first["next_cursor"] == {"stdout": 10, "stderr": 3}
    beyond = shared_vm.call("vm_job_output", job_id=job_id, cursor={"stdout": 1 << 40, "stderr": 3})
    assert (beyond["stdout"], beyond["stderr"]) == ("", "")


def test_the_first_page_comes_with_a_command_that_ended_in_time(shared_vm: Machine) -> None:
    job = shared_vm.call("vm_exec", command="echo hi; exit 3", wait_seconds=30)
    output = job["output"]
    assert (output["stdout"], output["exit_code"], output["state"]) == ("hi\n", 3, "completed")
    assert output == shared_vm.call("vm_job_output", job_id=job["job_id"])


def test_a_waiting_read_returns_when_something_is_written(vm: Machine) -> None:
    job_id = vm.start("until [ -e go ]; do sleep 0.1; done; echo now; sleep 600")
    page = vm.call("vm_job_output", job_id=job_id)
    assert (page["stdout"], page["state"], page["exit_code"]) == ("", "running", None)
    vm.write("go", b"")
    assert vm.wait_output(job_id, b"now") == b"now\n"


def test_300_megabytes_are_counted_exactly_and_never_held(vm: Machine) -> None:
    job = vm.run("head -c 1000003 /dev/zero >&2 & head -c 300000000 /dev/zero; wait; exit 4")
    assert job["totals"] == {"stdout": 300_000_000, "stderr": 1_000_003}
    assert (job["truncated"], job["exit_code"]) == (True, 4)
    assert len(job["stdout"]) + len(job["stderr"]) == 256 * 1024
    peak_kib = int(vm.text("awk '/^VmHWM/ {print $2}' /proc/1/status"))
    assert peak_kib < 40 * 1024


def test_one_line_of_20_megabytes_is_kept_up_to_the_limit(vm: Machine) -> None:
    limit = 16384 * 1024
    job = vm.call(
        "vm_exec", command="head -c 20000000 /dev/zero | tr '\\0' x", output_limit_kib=16384, wait_seconds=30
    )
    job = vm.wait(job["job_id"])
    assert (job["totals"]["stdout"], job["truncated"]) == (20_000_000, True)
    end = vm.call(
        "vm_job_output", job_id=job["job_id"], cursor={"stdout": limit - 10, "stderr": 0}, encoding="utf-8"
    )
    assert end["stdout"] == "x" * 10
    assert end["next_cursor"]["stdout"] == limit
    peak_kib = int(vm.text("awk '/^VmHWM/ {print $2}' /proc/1/status"))
    assert peak_kib < 40 * 1024


def test_the_limit_is_shared_by_both_streams_and_never_blocks_the_command(shared_vm: Machine) -> None:
    job = shared_vm.run("printf %01000d 1; printf %01000d 2 >&2; echo end", output_limit_kib=1)
    assert job["totals"] == {"stdout": 1004, "stderr": 1000}
    assert (job["truncated"], job["exit_code"]) == (True, 0)
    assert len(job["stdout"]) + len(job["stderr"]) == 1024
    exact = shared_vm.run("printf %01024d 1", output_limit_kib=1)
    assert (exact["truncated"], len(exact["stdout"])) == (False, 1024)


def test_what_is_written_after_the_end_is_not_part_of_the_result(vm: Machine) -> None:
    job = vm.run("(until [ -e go ]; do sleep 0.1; done; echo late; echo later > flag) & echo early")
    vm.write("go", b"")
    vm.text("until [ -s flag ]; do sleep 0.1; done")
    again = vm.call("vm_job_status", job_id=job["job_id"])
    assert again["totals"] == {"stdout": 6, "stderr": 0}
    assert vm.output(job["job_id"])[0] == b"early\n"


def test_output_of_finished_commands_is_served_from_the_host_while_the_vm_hibernates(vm: Machine) -> None:
    data = os.urandom(90_000)
    vm.write("data", data)
    short, long = vm.run("echo short")["job_id"], vm.run("cat data; echo e >&2")["job_id"]
    vm.suspend()
    assert vm.output(short) == (b"short\n", b"")
    assert vm.output(long) == (data, b"e\n")
    assert vm.call("vm_job_output", job_id=short)["stdout"] == "short\n"
    assert vm.state == "hibernated"


def test_output_survives_a_suspension_at_the_very_end_of_its_command(vm: Machine) -> None:
    data = os.urandom(90_000)
    vm.write("data", data)
    job = vm.call("vm_exec", command="cat data; echo e >&2", wait_seconds=30)
    vm.suspend()
    assert vm.output(job["job_id"]) == (data, b"e\n")


def test_commands_without_stdout_and_many_writers_end_properly(vm: Machine) -> None:
    assert vm.run("exec >&- 2>&-; sleep 0.1; exit 6")["exit_code"] == 6
    jobs = [vm.start(f"yes {number} | head -c 5000000; exit {number}") for number in range(4)]
    for number, job_id in enumerate(jobs):
        job = vm.wait(job_id)
        assert (job["exit_code"], job["totals"]["stdout"]) == (number, 5_000_000)
        assert vm.output(job_id)[0] == f"{number}\n".encode() * (128 * 1024)


@pytest.mark.parametrize("mode", ["pause", "hibernate"])
def test_polling_wakes_nothing_and_is_no_activity(vm: Machine, mode: str) -> None:
    job_id = vm.start("echo up; sleep 600")
    vm.wait_output(job_id, b"up")
    vm.suspend(mode, force=True)
    before = vm.status
    assert [vm.call("vm_job_status", job_id=job_id)["state"] for _ in range(3)] == ["frozen"] * 3
    assert vm.vm_id in {view["vm_id"] for view in vm.client.call("vm_list")["vms"]}
    after = vm.status
    assert after["state"] == {"pause": "paused", "hibernate": "hibernated"}[mode]
    for name in ("last_activity_at", "transitions_total", "since"):
        assert after[name] == before[name]
