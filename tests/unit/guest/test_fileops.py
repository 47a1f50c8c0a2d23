"""Reads and writes stay beneath the workspace, follow no last link, and replace files whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guest import fileops
from guest.errors import OpError
from guest.fileops import CallerGoneError, Workspace, relative_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield Workspace(fd)
    os.close(fd)


def read(workspace: Workspace, path: str, offset: int = 0, length: int = 1 << 20) -> tuple[bytes, Any]:
    pieces: list[bytes] = []
    facts = fileops.read(workspace, {"path": path, "offset": offset, "length": length}, pieces.append)
    return b"".join(pieces), facts


def write(workspace: Workspace, path: str, content: bytes, **args: Any) -> dict[str, Any]:
    pieces = [content[at : at + 32768] for at in range(0, len(content), 32768)]
    return fileops.write(workspace, {"path": path, "mode": "0644", **args}, iter(pieces))


@pytest.mark.parametrize("size", [0, 1, 32768, 131072, 1_000_000])
def test_what_is_written_is_read(workspace: Workspace, root: Path, size: int) -> None:
    content = os.urandom(size)
    answer = write(workspace, "a.bin", content)
    assert answer == {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
    assert (root / "a.bin").read_bytes() == content
    data, facts = read(workspace, "a.bin")
    assert data == content
    assert (facts["size"], facts["eof"], facts["mode"]) == (size, True, "0644")


def test_a_part_is_read_and_the_end_is_said(workspace: Workspace) -> None:
    write(workspace, "f", b"0123456789")
    data, facts = read(workspace, "f", offset=3, length=4)
    assert (data, facts["eof"], facts["offset"]) == (b"3456", False, 3)
    assert read(workspace, "f", offset=10)[1]["eof"]
    assert read(workspace, "f", offset=99)[0] == b""


@pytest.mark.parametrize("path", ["/workspace/a", "a", "./a", "b/../a", "/workspace//a"])
def test_a_path_has_several_spellings(workspace: Workspace, root: Path, path: str) -> None:
    (root / "b").mkdir()
    write(workspace, path, b"x")
    assert (root / "a").read_bytes() == b"x"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "/workspacex", "a\0b", None, 7])
def test_a_path_that_can_name_nothing_here_is_refused(path: object) -> None:
    with pytest.raises(OpError) as caught:
        relative_path(path)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "out/secret", "way/secret", "loop"])
def test_nothing_leads_out(workspace: Workspace, root: Path, path: str) -> None:
    (root.parent / "secret").write_text("s")
    (root / "a").mkdir()
    (root / "out").symlink_to("..")
    (root / "way").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    for attempt in (lambda: read(workspace, path), lambda: write(workspace, path, b"x", make_parents=True)):
        with pytest.raises((OSError, OpError)) as caught:
            attempt()
        assert code_of(caught.value) == "invalid_argument"
    assert (root.parent / "secret").read_text() == "s"


def code_of(error: BaseException) -> str:
    if isinstance(error, OSError):
        return OpError.of_errno(error.errno or 0, "path").code
    assert isinstance(error, OpError)
    return error.code


def test_a_magic_link_is_not_followed(workspace: Workspace, root: Path) -> None:
    (root / "proc").symlink_to("/proc/self/root")
    with pytest.raises((OSError, OpError)) as caught:
        read(workspace, "proc/etc/passwd")
    assert code_of(caught.value) == "invalid_argument"


def test_inner_links_are_followed_by_reads_and_on_the_way_of_writes(workspace: Workspace, root: Path) -> None:
    (root / "real").mkdir()
    (root / "link").symlink_to("real")
    write(workspace, "link/f", b"x")
    (root / "last").symlink_to("real/f")
    assert read(workspace, "last")[0] == b"x"
    for args in ({}, {"offset": 0}):
        with pytest.raises((OSError, OpError)) as caught:
            write(workspace, "last", b"y", **args)
        assert code_of(caught.value) == "invalid_argument"
    assert (root / "last").is_symlink()
    assert (root / "real" / "f").read_bytes() == b"x"


def test_only_regular_files_are_touched(workspace: Workspace, root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(root)
        server.bind("socket")
        os.chdir(here)
        for name in ("fifo", "folder", "socket", "."):
            for attempt in (
                lambda name=name: read(workspace, name),
                lambda name=name: write(workspace, name, b"x"),
                lambda name=name: write(workspace, name, b"x", offset=0),
            ):
                with pytest.raises((OSError, OpError)) as caught:
                    attempt()
                assert code_of(caught.value) == "invalid_argument", name


@pytest.mark.root
def test_a_device_is_not_read_for_ever(workspace: Workspace, root: Path) -> None:
    (root / "zero").symlink_to("/dev/zero")
    os.mknod(root / "real-zero", 0o20666, os.makedev(1, 5))
    for name in ("zero", "real-zero"):
        with pytest.raises((OSError, OpError)) as caught:
            read(workspace, name)
        assert code_of(caught.value) == "invalid_argument"


def test_what_is_missing_is_not_found(workspace: Workspace) -> None:
    for attempt in (
        lambda: read(workspace, "none"),
        lambda: write(workspace, "no/dir", b""),
        lambda: write(workspace, "none", b"x", offset=5),
    ):
        with pytest.raises((OSError, OpError)) as caught:
            attempt()
        assert code_of(caught.value) == "not_found"


def test_parents_are_made_on_demand(workspace: Workspace, root: Path) -> None:
    (root / "a").mkdir()
    write(workspace, "a/b/c/d", b"x", make_parents=True)
    assert (root / "a/b/c/d").read_bytes() == b"x"


def test_a_mode_is_set_kept_and_checked(workspace: Workspace, root: Path) -> None:
    write(workspace, "f", b"x", mode="0755")
    write(workspace, "f", b"y", mode=None)
    assert (root / "f").stat().st_mode & 0o7777 == 0o755
    write(workspace, "f", b"z", mode="600")
    assert (root / "f").stat().st_mode & 0o7777 == 0o600
    for mode in ("", "rwx", "0o644", "123456", 644):
        with pytest.raises(OpError):
            write(workspace, "f", b"", mode=mode)


def test_writing_at_an_offset_is_in_place(workspace: Workspace, root: Path) -> None:
    write(workspace, "f", b"0123456789")
    inode = (root / "f").stat().st_ino
    answer = write(workspace, "f", b"AB", offset=3)
    assert (root / "f").read_bytes() == b"012AB56789"
    assert answer == {"size": 10, "sha256": hashlib.sha256(b"AB").hexdigest()}
    write(workspace, "f", b"end", offset=10)
    assert (root / "f").read_bytes() == b"012AB56789end"
    write(workspace, "f", b"X", offset=1, truncate=True)
    assert (root / "f").read_bytes() == b"0X"
    assert (root / "f").stat().st_ino == inode
    assert write(workspace, "new", b"n", offset=0)["size"] == 1


def broken_body(error: Exception) -> Iterator[bytes]:
    yield b"half"
    raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), CallerGoneError()])
def test_a_write_that_does_not_end_leaves_everything_as_it_was(
    workspace: Workspace, root: Path, error: Exception
) -> None:
    write(workspace, "f", b"the old content")
    for args in ({}, {"offset": 15}):
        with pytest.raises(type(error)):
            fileops.write(workspace, {"path": "f", **args}, broken_body(error))
        assert (root / "f").read_bytes() == b"the old content"
    assert [path.name for path in root.iterdir()] == ["f"]


@pytest.mark.parametrize("name", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, True, 1.5, "1", 1 << 63])
def test_numbers_are_checked(workspace: Workspace, name: str, value: object) -> None:
    with pytest.raises(OpError):
        fileops.read(workspace, {"path": "f", name: value}, lambda _data: None)


def test_a_tag_names_the_very_content(workspace: Workspace, root: Path) -> None:
    write(workspace, "f", b"0123456789")
    tag = read(workspace, "f", length=0)[1]["tag"]
    sent: list[bytes] = []
    wanted = {"path": "f", "offset": 2, "length": 3, "tag": tag}
    assert fileops.read(workspace, wanted, sent.append)["tag"] == tag
    assert sent == [b"234"]
    for change in (lambda: write(workspace, "f", b"9876543210"), lambda: (root / "f").chmod(0o600)):
        change()
        sent.clear()
        with pytest.raises(OpError) as caught:
            fileops.read(workspace, wanted, sent.append)
        assert (caught.value.code, sent) == ("invalid_state", [])
        wanted["tag"] = read(workspace, "f", length=0)[1]["tag"]


def test_a_file_that_changes_while_it_is_read_is_an_error_at_the_end(
    workspace: Workspace, root: Path
) -> None:
    write(workspace, "f", bytes(100_000))
    tag = read(workspace, "f", length=0)[1]["tag"]

    def send(_data: bytes) -> None:
        with (root / "f").open("r+b") as file:
            file.truncate(100_001)

    with pytest.raises(OpError) as caught:
        fileops.read(workspace, {"path": "f", "length": 100_000, "tag": tag}, send)
    assert caught.value.code == "invalid_state"


@pytest.mark.parametrize("size", [0, 4, 6])
def test_a_body_of_another_length_than_promised_changes_nothing(
    workspace: Workspace, root: Path, size: int
) -> None:
    write(workspace, "f", b"old")
    with pytest.raises(OpError) as caught:
        write(workspace, "f", b"12345", size=size)
    assert caught.value.code == "invalid_argument"
    assert (root / "f").read_bytes() == b"old"
    assert write(workspace, "f", b"12345", size=5)["size"] == 5
    assert [path.name for path in root.iterdir()] == ["f"]
