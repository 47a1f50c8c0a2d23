"""Files and archives of any size through the doors: ranges, back-pressure, and what a cut leaves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator

import httpx2
import pytest
import trio

from microvm.errors import GuestError
from tests.daemon.web.conftest import PIECE, VM_ID, Doors

FILE = f"/v1/vms/{VM_ID}/files/file"
MIB = 1 << 20


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_file_comes_whole_with_what_is_known_of_it(doors: Doors) -> None:
    doors.streams.content = os.urandom(5 * MIB + 1)
    async with doors.http() as http:
        answer = await http.get(FILE)
        assert answer.content == doors.streams.content
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.headers["etag"] == '"tag-1"'
        assert answer.headers["last-modified"] == "Sun, 09 Sep 2001 01:46:40 GMT"
        assert answer.headers["microvm-mode"] == "0755"
        head = await http.head(FILE)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(answer.content)))
    assert doors.streams.reading == 0


async def test_a_part_resumes_a_cut_download(doors: Doors) -> None:
    async with doors.http() as http:
        part = await http.get(FILE, headers={"Range": "bytes=4-", "If-Range": '"tag-1"'})
        assert (part.status_code, part.content) == (206, b"456789")
        assert part.headers["content-range"] == "bytes 4-9/10"
        other = await http.get(FILE, headers={"Range": "bytes=4-", "If-Range": '"tag-0"'})
        assert (other.status_code, other.content) == (200, b"0123456789")
        beyond = await http.get(FILE, headers={"Range": "bytes=10-"})
        assert code(beyond) == (416, "invalid_argument")
        assert beyond.headers["content-range"] == "bytes */10"


async def test_an_error_before_the_first_byte_is_an_answer(doors: Doors) -> None:
    async with doors.http() as http:
        assert code(await http.get(f"/v1/vms/{VM_ID}/files/none")) == (404, "not_found")
        assert code(await http.get(f"/v1/vms/{VM_ID}/archive/none")) == (404, "not_found")
        assert code(await http.get(f"/v1/vms/vm_{'c' * 20}/files/file")) == (404, "not_found")
        doors.streams.content = b""
        doors.streams.wrong = GuestError("invalid_state", "the file changed")
        assert code(await http.get(FILE)) == (409, "invalid_state")
    async with doors.http("bob-token") as http:
        assert code(await http.get(FILE)) == (404, "not_found")
        assert code(await http.put(FILE, content=b"x")) == (404, "not_found")
    async with doors.http(None) as http:
        assert code(await http.get(FILE)) == (401, "unauthenticated")
        assert code(await http.put(FILE, content=b"x")) == (401, "unauthenticated")


@pytest.mark.parametrize("path", [FILE, f"/v1/vms/{VM_ID}/archive/dir"])
async def test_an_error_after_the_first_byte_cuts_the_connection(doors: Doors, path: str) -> None:
    doors.streams.content = os.urandom(3 * PIECE)
    doors.streams.wrong = GuestError("invalid_state", "the file changed while it was read")
    async with doors.http() as http:
        with pytest.raises(httpx2.RemoteProtocolError):
            await http.get(path)
        assert (await http.get("/healthz")).status_code == 200
    assert doors.streams.reading == 0


async def test_a_client_that_leaves_ends_the_read(doors: Doors) -> None:
    doors.streams.content = bytes(64 * MIB)
    with trio.fail_after(10):
        async with doors.http() as http, http.stream("GET", FILE) as answer:
            assert answer.status_code == 200
            assert doors.streams.reading == 1
        while doors.streams.reading:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upload_of_any_size_arrives_as_it_was(doors: Doors, chunked: bool) -> None:
    content = os.urandom(9 * MIB + 5)  # more than any other body may hold

    async def pieces() -> AsyncGenerator[bytes]:
        for at in range(0, len(content), 100_000):
            yield content[at : at + 100_000]

    async with doors.http() as http:
        answer = await http.put(f"{FILE}?mode=0600", content=pieces() if chunked else content)
    assert answer.json() == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    [(path, kept, told)] = doors.streams.written
    assert (path, kept) == ("file", content)
    assert told == {"size": None if chunked else len(content), "mode": "0600", "make_parents": True}


async def test_an_upload_is_taken_as_slowly_as_it_is_read(doors: Doors, nursery: trio.Nursery) -> None:
    go_on = trio.Event()
    doors.streams.hold = go_on.wait
    answers: list[httpx2.Response] = []

    async def send() -> None:
        async with doors.http() as http:
            answers.append(await http.put(FILE, content=bytes(32 * MIB)))

    with trio.fail_after(20):
        nursery.start_soon(send)
        while not doors.streams.taken:
            await trio.lowlevel.checkpoint()
        for _ in range(2000):
            await trio.lowlevel.checkpoint()
        assert doors.streams.taken <= MIB
        go_on.set()
        while not answers:
            await trio.lowlevel.checkpoint()
    assert answers[0].status_code == 200


async def raw_put(doors: Doors, head: str, body: bytes) -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", doors.port)
    head = f"PUT {FILE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice-token\r\n{head}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream


@pytest.mark.parametrize(
    ("head", "body"),
    [("Content-Length: 1000", b"x" * 999), ("Transfer-Encoding: chunked", b"3e7\r\n" + b"x" * 999 + b"\r\n")],
)
async def test_a_short_body_is_an_error_and_writes_nothing(doors: Doors, head: str, body: bytes) -> None:
    with trio.fail_after(10):
        stream = await raw_put(doors, head, body)
        while doors.streams.taken < 999:
            await trio.lowlevel.checkpoint()
        await stream.send_eof()
        answer = b""
        while data := await stream.receive_some(4096):
            answer += data
        assert not answer.startswith(b"HTTP/1.1 200")
        await stream.aclose()
        other = await raw_put(doors, head, body)
        await other.aclose()
        async with doors.http() as http:
            assert (await http.get("/healthz")).status_code == 200
    assert doors.streams.written == []


async def test_an_upload_that_is_refused_gets_its_error(doors: Doors) -> None:
    async with doors.http() as http:
        full = await http.put(f"/v1/vms/{VM_ID}/files/full", content=bytes(MIB))
        assert code(full) == (507, "disk_full")
        for query in ("?mode=0600&size=3", "?make_parents=maybe"):
            assert code(await http.put(FILE + query, content=b"x")) == (400, "invalid_argument")
        zipped = await http.put(FILE, content=b"x", headers={"Content-Encoding": "gzip"})
        assert code(zipped) == (400, "invalid_argument")
    assert doors.streams.written == []


@pytest.mark.parametrize(
    ("path", "named"), [("archive/", "."), ("archive/dir", "dir"), ("archive/a/b", "a/b")]
)
async def test_archives_go_both_ways(doors: Doors, path: str, named: str) -> None:
    doors.streams.content = os.urandom(100_000)
    async with doors.http() as http:
        sent = await http.put(f"/v1/vms/{VM_ID}/{path}", content=b"tar" * 1000)
        assert sent.json() == {"archive_bytes": 3000}
        assert doors.streams.written == [(named, b"tar" * 1000, {"size": 3000})]
        if named != "a/b":
            got = await http.get(f"/v1/vms/{VM_ID}/{path}")
            assert (got.content, got.headers["content-type"]) == (doors.streams.content, "application/x-tar")


async def test_a_workspaces_vms_end_through_the_admin_door_alone(doors: Doors) -> None:
    asked = {"workspace": "alice", "destroy": True}
    async with doors.http("root-token") as http:
        assert code(await http.post("/v1/admin/end-workspace", json=asked)) == (404, "not_found")
    async with doors.http("root-token", uds=doors.bound.admin_socket) as http:
        assert code(await http.post("/v1/admin/end-workspace", json=asked)) == (404, "not_found")
    assert doors.streams.ended == []
    async with doors.http(None, uds=doors.bound.admin_socket) as http:
        answer = await http.post("/v1/admin/end-workspace", json=asked)
        assert answer.json() == {"destroyed": [VM_ID]}
        assert code(await http.post("/v1/admin/end-workspace", json={"workspace": "a"})) == (
            400,
            "invalid_argument",
        )
    assert doors.streams.ended == [("alice", True)]
