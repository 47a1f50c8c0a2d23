"""Files of a real guest: exact bytes, whole or in place, and nothing outside of the workspace."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.vm.live_service import Machine, ToolError

pytestmark = [pytest.mark.vm, pytest.mark.root]

CALL_BYTES = 131072


def refusal(vm: Machine, tool: str, **arguments: Any) -> str:
    """The code with which a call is refused."""
    with pytest.raises(ToolError) as refused:
        vm.call(tool, **arguments)
    return refused.value.code


@pytest.mark.parametrize("size", [0, 1, 4096, CALL_BYTES])
def test_files_come_back_exactly_as_they_were_written(shared_vm: Machine, size: int) -> None:
    data = os.urandom(size)
    written = shared_vm.write(f"size/{size}", data)
    assert written == {"size": size, "sha256": hashlib.sha256(data).hexdigest()}
    part = shared_vm.call("vm_read_file", path=f"size/{size}")
    assert base64.b64decode(part["content_base64"]) == data
    assert (part["size"], part["offset"], part["next_offset"], part["eof"]) == (size, 0, size, True)
    assert shared_vm.text(f"sha256sum < size/{size}").split()[0] == written["sha256"]


def test_more_than_one_call_takes_is_refused_and_changes_nothing(shared_vm: Machine) -> None:
    shared_vm.write("big", b"before")
    encoded = base64.b64encode(bytes(CALL_BYTES + 1)).decode()
    assert refusal(shared_vm, "vm_write_file", path="big", content_base64=encoded) == "payload_too_large"
    assert refusal(shared_vm, "vm_read_file", path="big", length=CALL_BYTES + 1) == "payload_too_large"
    assert shared_vm.read("big") == b"before"


def test_larger_files_are_appended_and_read_in_parts(shared_vm: Machine) -> None:
    data = os.urandom(3 * CALL_BYTES + 17)
    for offset in range(0, len(data), CALL_BYTES):
        shared_vm.write("parts", data[offset : offset + CALL_BYTES], offset=offset)
    assert shared_vm.read("parts") == data
    part = shared_vm.call("vm_read_file", path="parts", offset=CALL_BYTES - 3, length=7)
    assert base64.b64decode(part["content_base64"]) == data[CALL_BYTES - 3 : CALL_BYTES + 4]
    assert (part["eof"], part["next_offset"]) == (False, CALL_BYTES + 4)
    end = shared_vm.call("vm_read_file", path="parts", offset=len(data) + 5)
    assert (end["content_base64"], end["eof"]) == ("", True)


def test_a_write_without_offset_replaces_the_file_in_one_step(shared_vm: Machine) -> None:
    shared_vm.write("whole", b"the old text, which is longer")
    shared_vm.text("ln -f whole other-name")
    shared_vm.write("whole", b"new")
    assert shared_vm.read("whole") == b"new"
    assert shared_vm.read("other-name") == b"the old text, which is longer"
    assert shared_vm.text("ls -A | grep -c '^.microvm-' || true") == "0\n"


def test_a_write_with_offset_changes_the_file_in_place(shared_vm: Machine) -> None:
    shared_vm.write("place", b"0123456789")
    shared_vm.text("ln -f place same-file")
    assert shared_vm.write("place", b"ab", offset=3)["size"] == 10
    assert shared_vm.read("same-file") == b"012ab56789"
    assert shared_vm.write("place", b"cd", offset=5, truncate=True)["size"] == 7
    assert shared_vm.write("place", b"!", offset=7)["size"] == 8
    assert shared_vm.read("same-file") == b"012abcd!"
    assert shared_vm.write("place", b"z", offset=12)["size"] == 13
    assert shared_vm.read("place") == b"012abcd!\0\0\0\0z"


def test_files_are_the_users_with_the_mode_that_was_asked_for(shared_vm: Machine) -> None:
    shared_vm.write("owned", b"")
    shared_vm.write("script", b"#!/bin/sh\necho ran\n", mode="0755")
    shared_vm.write("new/made/private", b"", mode="600")
    names = "owned script new/made new/made/private"
    assert shared_vm.text(f"stat -c '%u %g %a' {names}").splitlines() == [
        "1000 1000 644",
        "1000 1000 755",
        "1000 1000 755",
        "1000 1000 600",
    ]
    assert shared_vm.text("./script") == "ran\n"
    assert shared_vm.call("vm_read_file", path="script")["mode"] == "0755"


def test_parents_are_made_only_when_wanted(shared_vm: Machine) -> None:
    arguments = {"path": "absent/file", "content": "x", "make_parents": False}
    assert refusal(shared_vm, "vm_write_file", **arguments) == "not_found"
    shared_vm.write("a-file", b"")
    assert refusal(shared_vm, "vm_write_file", path="a-file/below", content="x") == "invalid_argument"


def test_text_is_written_and_read_page_by_page_without_splitting_characters(shared_vm: Machine) -> None:
    text = "zwölf €uro ☃ 𝄞\n" * 5
    shared_vm.call("vm_write_file", path="text", content=text)
    read, offset = "", 0
    while True:
        part = shared_vm.call("vm_read_file", path="text", offset=offset, length=5, encoding="utf-8")
        assert not part["decoding_error"]
        read, offset = read + part["content"], part["next_offset"]
        if part["eof"]:
            break
    assert read == text
    shared_vm.write("binary", b"a\xffb")
    part = shared_vm.call("vm_read_file", path="binary", encoding="utf-8")
    assert (part["content"], part["decoding_error"]) == ("a\ufffdb", True)


def test_paths_may_begin_with_the_workspace_and_use_dots_inside_it(shared_vm: Machine) -> None:
    shared_vm.write("/workspace/dots/file", b"here")
    for path in ("dots/file", "./dots/./file", "dots/../dots/file", "/workspace//dots/file"):
        assert shared_vm.read(path) == b"here", path


@pytest.fixture(scope="module")
def traps(shared_vm: Machine) -> Iterator[None]:
    """Names in the workspace that lead out of it or are no regular files; all as before in the end."""
    shared_vm.text(
        "mkdir dir && ln -s /etc to-etc && ln -s /etc/passwd to-passwd && ln -s /dev/zero to-zero\n"
        "ln -s ../etc/passwd relative-out && ln -s loop loop && mkfifo pipe\n"
        "ln -s /proc to-proc && ln -s /proc/self/cwd/dots magic\n"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'"
    )
    show = "ls -ld dir to-* relative-out loop pipe magic socket /etc/passwd; ls -lA dir"
    before = shared_vm.run(show)["stdout"]
    yield
    assert shared_vm.run(show)["stdout"] == before


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../etc/passwd",
        "dir/../../etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "/workspace/../etc/passwd",
        "to-etc/passwd",
        "to-passwd",
        "relative-out",
        "to-zero",
        "pipe",
        "socket",
        ".",
        "dir",
        "dir/",
        "loop",
        "to-proc/self/environ",
        "magic",
    ],
)
def test_what_is_no_regular_file_of_the_workspace_is_neither_read_nor_written(
    shared_vm: Machine, traps: None, path: str
) -> None:
    assert refusal(shared_vm, "vm_read_file", path=path) == "invalid_argument"
    for offset in ({}, {"offset": 0}):
        assert refusal(shared_vm, "vm_write_file", path=path, content="x", **offset) == "invalid_argument"


def test_links_that_stay_inside_are_read_but_never_written_through(shared_vm: Machine) -> None:
    shared_vm.text("mkdir -p real && echo inside > real/file && ln -sf real/file link && ln -sfn real way")
    assert shared_vm.read("link") == b"inside\n"
    assert shared_vm.read("way/file") == b"inside\n"
    for offset in ({}, {"offset": 0}):
        assert refusal(shared_vm, "vm_write_file", path="link", content="x", **offset) == "invalid_argument"
    shared_vm.write("way/new", b"through a directory")
    assert shared_vm.read("real/new") == b"through a directory"
    assert shared_vm.read("real/file") == b"inside\n"


def test_a_missing_or_unreadable_file_says_so(shared_vm: Machine) -> None:
    assert refusal(shared_vm, "vm_read_file", path="never-made") == "not_found"
    shared_vm.text("echo x > closed && chmod 0 closed")
    assert refusal(shared_vm, "vm_read_file", path="closed") == "invalid_argument"
    assert refusal(shared_vm, "vm_read_file", path="n" * 300) == "invalid_argument"
    assert refusal(shared_vm, "vm_write_file", path="never-made", content="x", offset=5) == "not_found"


def test_file_names_may_be_any_text(shared_vm: Machine) -> None:
    name = "a b'\"$(id)\\\n☃ -rf"
    shared_vm.write(name, b"named")
    assert shared_vm.read(name) == b"named"
    assert shared_vm.text('cat -- "$NAME"', env={"NAME": name}) == "named"


def test_file_calls_wake_a_hibernated_vm(vm: Machine) -> None:
    vm.write("kept", b"kept")
    vm.suspend()
    assert vm.read("kept") == b"kept"
    assert vm.state == "running"
    vm.suspend("pause")
    vm.write("kept", b"kept on")
    assert vm.read("kept") == b"kept on"


async def test_many_calls_at_once_are_all_answered_rightly(vm: Machine) -> None:
    """More than there are file workers in the guest and streams in the channel."""
    contents = [os.urandom(CALL_BYTES - number) for number in range(8)]
    for number, content in enumerate(contents):
        vm.write(f"many/{number}", content)
    job_id = vm.start("cat many/0 | head -c 1000; sleep 600", output_limit_kib=1)
    vm.wait_output(job_id, contents[0][:1])

    async def read(number: int) -> None:
        part = await vm.acall("vm_read_file", path=f"many/{number}")
        assert base64.b64decode(part["content_base64"]) == contents[number]

    async def write(number: int) -> None:
        text = f"{number}" * 50_000
        written = await vm.acall("vm_write_file", path="many/contested", content=text)
        assert written["size"] == len(text)

    async def follow() -> None:
        cursor = {"stdout": 1000, "stderr": 0}
        page = await vm.acall("vm_job_output", job_id=job_id, cursor=cursor, wait_seconds=1)
        assert (page["stdout"], page["state"]) == ("", "running")

    with trio.fail_after(180):
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(read, number)
                nursery.start_soon(write, number)
                nursery.start_soon(read, 7 - number)
                nursery.start_soon(follow)
    contested = vm.read("many/contested")
    assert contested == contested[:1] * 50_000
    vm.call("vm_job_cancel", job_id=job_id)
