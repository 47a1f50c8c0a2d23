"""Files and directories of any size, to and from real guests: exact, flat, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from microvm.cli.app import run
from tests.vm.live_service import Machine, Service
from tests.vm.waiting import until

MIB = 1 << 20
CHUNK = 1 << 18
FLAT_KIB = 24 * 1024  # some buffers of each transfer; a 64 MiB body in memory would be far beyond

pytestmark = pytest.mark.vm


def url(vm: Machine, path: str, kind: str = "files") -> str:
    return f"/v1/vms/{vm.vm_id}/{kind}/{path}"


class Content:
    """Bytes of any length that nobody has to hold, and their hash once they were all given."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._seed = seed
        self.digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        source = random.Random(self._seed)
        block = source.randbytes(CHUNK)
        for at in range(0, self.size, CHUNK):
            data = (at.to_bytes(8, "big") + block[8:])[: self.size - at]
            self.digest.update(data)
            yield data


def put(vm: Machine, path: str, content: Content, kind: str = "files") -> httpx2.Response:
    headers = {"Content-Length": str(content.size)}
    return vm.client.http.put(url(vm, path, kind), content=iter(content), headers=headers)


def error(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def peak_kib(service: Service) -> int:
    lines = Path(f"/proc/{service.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def hidden(vm: Machine) -> str:
    return vm.text("find . -name '.microvm-*'")


def test_a_large_file_travels_both_ways_at_flat_memory(
    service: Service, shared_vm: Machine, rounds: Callable[[int, int], int]
) -> None:
    content = Content(rounds(64, 1024) * MIB + 12_345)
    Path(f"/proc/{service.pid}/clear_refs").write_text("5")  # the peak is from now on: proc(5)
    before = peak_kib(service)
    answer = put(shared_vm, "large", content)
    assert answer.json() == {"size": content.size, "sha256": content.digest.hexdigest()}
    back, size = hashlib.sha256(), 0
    with shared_vm.client.http.stream("GET", url(shared_vm, "large")) as download:
        assert download.headers["content-length"] == str(content.size)
        for data in download.iter_raw():
            back.update(data)
            size += len(data)
    assert (size, back.hexdigest()) == (content.size, content.digest.hexdigest())
    assert peak_kib(service) - before < FLAT_KIB
    shared_vm.text("rm large")


def test_a_cut_download_goes_on_by_range(shared_vm: Machine) -> None:
    content = b"".join(Content(3 * MIB))
    shared_vm.client.http.put(url(shared_vm, "f"), content=content)
    http = shared_vm.client.http
    with http.stream("GET", url(shared_vm, "f")) as download:
        begun = next(download.iter_raw(100_000))
        etag = download.headers["etag"]
    wanted = {"Range": f"bytes={len(begun)}-", "If-Range": etag}
    rest = http.get(url(shared_vm, "f"), headers=wanted)
    assert (rest.status_code, begun + rest.content == content) == (206, True)
    last = http.get(url(shared_vm, "f"), headers={"Range": "bytes=-7"})
    assert (last.status_code, last.content) == (206, content[-7:])
    assert error(http.get(url(shared_vm, "f"), headers={"Range": f"bytes={len(content)}-"}))[0] == 416
    shared_vm.text("echo else > f")
    other = http.get(url(shared_vm, "f"), headers=wanted)
    assert (other.status_code, other.content) == (200, b"else\n")
    assert http.head(url(shared_vm, "f")).headers["content-length"] == "5"


def cut_put(service: Service, vm: Machine, target: str, size: int, body: bytes) -> None:
    """An upload whose client dies before its end."""
    authorization = vm.client.http.headers["Authorization"]
    head = (
        f"PUT {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {authorization}\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(service.socket))
        connection.sendall(head.encode() + body)


async def test_a_cut_upload_leaves_the_old_file(service: Service, shared_vm: Machine) -> None:
    shared_vm.write("old", b"the old one")
    for sent in (0, 1, 100_000, 2 * MIB - 1):
        cut_put(service, shared_vm, url(shared_vm, "old"), 2 * MIB, b"x" * sent)
        cut_put(service, shared_vm, url(shared_vm, "dir", "archive"), 2 * MIB, b"\0" * sent)
    await until(lambda: hidden(shared_vm) == "")
    assert shared_vm.read("old") == b"the old one"
    assert shared_vm.text("test -e dir || echo none") == "none\n"


def test_a_file_that_changes_while_it_is_read_cuts_the_download(shared_vm: Machine) -> None:
    shared_vm.text("head -c 8M /dev/zero > changing")
    with shared_vm.client.http.stream("GET", url(shared_vm, "changing")) as download:
        pieces = download.iter_raw()
        next(pieces)
        shared_vm.text("echo more >> changing")
        with pytest.raises(httpx2.RemoteProtocolError):
            for _ in pieces:
                pass


def test_a_full_guest_refuses_an_upload_and_keeps_the_old_file(vm: Machine) -> None:
    vm.write("kept", b"kept")
    free = int(vm.text("stat -f -c '%a %S' . | awk '{print $1 * $2}'"))
    vm.text(f"fallocate -l {free - 6 * MIB} filler")
    assert error(put(vm, "kept", Content(20 * MIB))) == (507, "disk_full")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("kept")
        member.size = 20 * MIB
        tar.addfile(member, io.BytesIO(b"x" * member.size))
    answer = vm.client.http.put(url(vm, "", "archive"), content=archive.getvalue())
    assert error(answer) == (507, "disk_full")
    assert vm.read("kept") == b"kept"
    assert hidden(vm) == ""


def test_refusals_come_before_any_byte(shared_vm: Machine) -> None:
    http = shared_vm.client.http
    shared_vm.text("mkdir -p dir && ln -sfn /etc out && mkfifo -m 600 pipe 2> /dev/null || true")
    assert error(http.get(url(shared_vm, "none"))) == (404, "not_found")
    assert error(http.get(url(shared_vm, "none", "archive"))) == (404, "not_found")
    for path in ("dir", "out/passwd", "pipe"):
        assert error(http.get(url(shared_vm, path))) == (400, "invalid_argument"), path
        assert error(http.put(url(shared_vm, path), content=b"x")) == (400, "invalid_argument"), path
    for path in ("out", "pipe"):
        assert error(http.get(url(shared_vm, path, "archive"))) == (400, "invalid_argument"), path
        assert error(http.put(url(shared_vm, path, "archive"), content=b"")) == (400, "invalid_argument"), (
            path
        )
    assert error(http.put(url(shared_vm, "dir", "archive"), content=b"no tar" * 999)) == (
        400,
        "invalid_argument",
    )


def test_a_directory_goes_out_and_into_another_vm(shared_vm: Machine, vm: Machine) -> None:
    shared_vm.text(
        "mkdir -p tree/deep/er && head -c 300000 /dev/urandom > tree/deep/er/f && ln -s er/f tree/deep/link\n"
        "echo '#!/bin/sh' > tree/run && chmod 0750 tree/run && mkdir tree/locked && echo x > tree/locked/f\n"
        "chmod 0555 tree/locked && truncate -s 1G tree/sparse"
    )
    show = "cd tree && find . ! -name sparse -printf '%p %y %m %l %T@\\n' | sort && sha256sum deep/link run"
    archive = shared_vm.client.http.get(url(shared_vm, "tree", "archive")).content
    assert len(archive) < 2 * MIB
    vm.suspend()
    assert vm.client.http.put(url(vm, "tree", "archive"), content=archive).json() == {
        "archive_bytes": len(archive)
    }
    assert vm.text(show) == shared_vm.text(show)
    assert vm.text("stat -c %s tree/sparse; stat -c '%u %g' tree tree/locked/f").split() == [
        str(1 << 30), "1000", "1000", "1000", "1000",
    ]  # fmt: skip
    vm.text("echo mine > tree/other; rm tree/run")
    assert vm.client.http.put(url(vm, "tree", "archive"), content=archive).status_code == 200
    assert vm.text("cat tree/other; test -x tree/run") == "mine\n"
    assert hidden(vm) == ""
    shared_vm.text("chmod -R u+w tree && rm -r tree")


def test_tar_runs_as_the_guests_user(shared_vm: Machine) -> None:
    seen: list[str] = []

    def body() -> Iterator[bytes]:
        yield b"\0" * 512
        seen.append(shared_vm.text("ps -o uid=,oom= -C tar"))
        yield b"\0" * 512

    answer = shared_vm.client.http.put(url(shared_vm, "as-user", "archive"), content=body())
    assert answer.status_code == 200, answer.text
    assert [line.split()[0] for line in seen[0].splitlines()] == ["1000"]


async def test_a_vm_that_streams_is_not_suspended(vm: Machine) -> None:
    vm.text("head -c 4M /dev/urandom > f")
    suspended: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: suspended.append(vm.suspend()))
    with vm.client.http.stream("GET", url(vm, "f")) as download:
        pieces = download.iter_raw()
        size = len(next(pieces))
        asking.start()
        size += sum(len(data) for data in pieces)
    asking.join()
    assert size == 4 * MIB
    assert suspended[0]["state"] == "hibernated"
    assert len(vm.client.http.get(url(vm, "f")).content) == 4 * MIB  # and it wakes for the next


def test_the_command_line_moves_files_and_directories(service: Service, tmp_path: Path) -> None:
    vm = service.client().create()
    cli = ["vm", "--config", str(service.config)]
    (tmp_path / "source" / "sub").mkdir(parents=True)
    (tmp_path / "source" / "sub" / "f").write_bytes(os.urandom(MIB))
    (tmp_path / "source" / "link").symlink_to("sub/f")
    file = tmp_path / "source" / "sub" / "f"
    assert run([*cli, "push", vm.vm_id, str(file), "new/f"]) == 0
    assert run([*cli, "pull", vm.vm_id, "new/f", str(tmp_path / "f")]) == 0
    assert (tmp_path / "f").read_bytes() == file.read_bytes()
    assert run([*cli, "push", "-r", vm.vm_id, str(tmp_path / "source"), "tree"]) == 0
    assert run([*cli, "pull", "-r", vm.vm_id, "tree", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "link").read_bytes() == file.read_bytes()
    assert run([*cli, "pull", vm.vm_id, "none", str(tmp_path / "none")]) == 1
    vm.destroy()
