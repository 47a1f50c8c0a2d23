"""Directories go out and come in as tar archives, whole or not at all, and never leave the workspace."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from guest import archive
from guest.errors import OpError
from guest.fileops import CallerGoneError, Workspace

Tree = dict[str, bytes | str | None]


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


@pytest.fixture(autouse=True)
def nothing_hidden_is_left(root: Path) -> Iterator[None]:
    yield
    assert [path for path in root.rglob(".microvm-*") if path.name != ".microvm-of-the-users"] == []


def plant(folder: Path, tree: Tree) -> None:
    """Makes files, links (text) and directories (None)."""
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def harvest(folder: Path) -> Tree:
    def content(path: Path) -> bytes | str | None:
        if path.is_symlink():
            return os.readlink(path)
        return None if path.is_dir() else path.read_bytes()

    return {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*"))}


def packed(folder: Path) -> bytes:
    return subprocess.run(
        ["tar", "--create", "--file=-", f"--directory={folder}", "."], check=True, capture_output=True
    ).stdout


def tarball(*members: tuple[str, dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, facts in members:
            member = tarfile.TarInfo(name)
            for key, value in facts.items():
                setattr(member, key, value)
            tar.addfile(member)
    return out.getvalue()


def read(workspace: Workspace, path: str) -> bytes:
    pieces: list[bytes] = []
    answer = archive.read(workspace, {"path": path}, pieces.append)
    data = b"".join(pieces)
    assert answer == {"size": len(data)}
    return data


def write(workspace: Workspace, path: str, data: bytes, **args: Any) -> dict[str, Any]:
    pieces = (data[at : at + 10_000] for at in range(0, len(data), 10_000))
    return archive.write(workspace, {"path": path, **args}, pieces)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OpError) as caught:
        call()
    return caught.value.code


TREE: Tree = {
    "a": b"one",
    "empty": None,
    "deep/er/b": os.urandom(200_000),
    "deep/link": "er/b",
    "dangling": "/nowhere",
    "name with spaces\n☃": b"",
    ".microvm-of-the-users": b"theirs",
}


def test_a_directory_travels_whole(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    plant(root / "from", TREE)
    (root / "from" / "a").chmod(0o750)
    (root / "from" / ".microvm-0123456789abcdef").write_bytes(b"ours, of a write under way")
    data = read(workspace, "from")
    (root / "from" / ".microvm-0123456789abcdef").unlink()
    assert write(workspace, "to/here", data, size=len(data)) == {"size": len(data)}
    assert harvest(root / "to" / "here") == harvest(root / "from")
    assert stat.S_IMODE((root / "to" / "here" / "a").stat().st_mode) == 0o750
    assert b"0123456789abcdef" not in data


def test_into_a_directory_entries_are_merged(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    plant(tmp_path / "new", {"a": b"new", "deep/er/b": b"new", "deep/new": None, "link": "a"})
    plant(root / "to", {"a": b"old", "deep/er/c": b"kept", "deep/er/b": "c", "other": b"kept"})
    (root / "to" / "deep").chmod(0o770)
    write(workspace, "to", packed(tmp_path / "new"))
    assert harvest(root / "to") == {
        "a": b"new",
        "deep": None,
        "deep/er": None,
        "deep/er/b": b"new",
        "deep/er/c": b"kept",
        "deep/new": None,
        "link": "a",
        "other": b"kept",
    }
    assert stat.S_IMODE((root / "to" / "deep").stat().st_mode) == 0o770


def test_the_workspace_itself_can_be_the_directory(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    plant(tmp_path / "new", {"a": b"new"})
    plant(root, {"b": b"old"})
    write(workspace, ".", packed(tmp_path / "new"))
    assert harvest(root) == {"a": b"new", "b": b"old"}
    assert b"./b" in read(workspace, "/workspace")


def test_directories_that_nobody_may_write_are_moved_as_they_are(
    workspace: Workspace, root: Path, tmp_path: Path
) -> None:
    plant(tmp_path / "new", {"locked/inner/f": b"x", "there/f": b"new"})
    plant(root / "to", {"there/g": b"old"})
    for folder in (tmp_path / "new" / "locked" / "inner", tmp_path / "new" / "locked"):
        folder.chmod(0o555)
    (tmp_path / "new" / "there").chmod(0o555)
    write(workspace, "to", packed(tmp_path / "new"))
    assert harvest(root / "to" / "locked") == {"inner": None, "inner/f": b"x"}
    assert stat.S_IMODE((root / "to" / "locked").stat().st_mode) == 0o555
    assert harvest(root / "to" / "there") == {"f": b"new", "g": b"old"}
    (root / "to" / "there").chmod(0o555)
    write(workspace, "to", packed(tmp_path / "new"))
    assert stat.S_IMODE((root / "to" / "there").stat().st_mode) == 0o555


@pytest.mark.parametrize(
    ("new", "old"), [({"x/f": b"new"}, {"x": b"a file"}), ({"x": b"new"}, {"x/f": b"in a directory"})]
)
def test_files_and_directories_do_not_take_each_others_place(
    workspace: Workspace, root: Path, tmp_path: Path, new: Tree, old: Tree
) -> None:
    plant(tmp_path / "new", {**new, "other": b"new"})
    plant(root / "to", old)
    before = harvest(root)
    assert refusal(lambda: write(workspace, "to", packed(tmp_path / "new"))) == "invalid_argument"
    assert harvest(root) == before


def broken(data: bytes) -> Iterator[bytes]:
    yield data
    raise CallerGoneError


@pytest.mark.parametrize("path", ["to", "new"])
def test_what_does_not_arrive_whole_changes_nothing(
    workspace: Workspace, root: Path, tmp_path: Path, path: str
) -> None:
    plant(tmp_path / "new", TREE)
    plant(root / "to", {"a": b"old"})
    data, before = packed(tmp_path / "new"), harvest(root)
    with pytest.raises(CallerGoneError):
        archive.write(workspace, {"path": path}, broken(data[:-30_000]))
    for short in (data[: len(data) // 2], data[:-1]):
        assert refusal(partial(write, workspace, path, short, size=len(data))) == "invalid_argument"
    assert refusal(lambda: write(workspace, path, data[: len(data) // 2])) == "invalid_argument"
    assert refusal(lambda: write(workspace, path, b"no archive" * 2000)) == "invalid_argument"
    assert harvest(root) == before


def test_nothing_leaves_the_workspace(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    plant(root, {"out": str(outside), "file": b""})
    for path in ("out", "out/x", "../x", "/etc", "file/x"):
        assert refusal_or_errno(lambda path=path: write(workspace, path, tarball(("f", {})))) is not None
        assert refusal_or_errno(lambda path=path: read(workspace, path)) is not None
    through = tarball(("l", {"type": tarfile.SYMTYPE, "linkname": str(outside)}), ("l/f", {}))
    refusal_or_errno(lambda: write(workspace, "evil", through))
    refusal_or_errno(lambda: write(workspace, "evil", tarball(("../../outside/f", {}), ("/tmp/../f", {}))))
    assert list(outside.iterdir()) == []


def refusal_or_errno(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (OpError, OSError) as error:
        return error
    return None


def test_a_missing_directory_or_a_file_is_none(workspace: Workspace, root: Path) -> None:
    plant(root, {"f": b""})
    with pytest.raises(FileNotFoundError):
        read(workspace, "none")
    with pytest.raises(NotADirectoryError):
        read(workspace, "f")
    assert archive.read(workspace, {"path": ".", "look": True}, lambda _data: None) == {}


def test_a_reader_that_is_gone_ends_tar(workspace: Workspace, root: Path) -> None:
    plant(root, {"big": bytes(3_000_000)})

    def send(_data: bytes) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        archive.read(workspace, {"path": "."}, send)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_pipe_is_not_read_from(workspace: Workspace, root: Path) -> None:
    os.mkfifo(root / "pipe")
    write(workspace, "copy", read(workspace, "."))
    assert stat.S_ISFIFO((root / "copy" / "pipe").lstat().st_mode)


def test_a_deep_tree_is_refused_before_anything_is_moved(
    workspace: Workspace, root: Path, tmp_path: Path
) -> None:
    deep = "/".join("d" * 1 for _ in range(300))
    for folder in (tmp_path / "new", root / "to"):
        (folder / deep).mkdir(parents=True)
    plant(tmp_path / "new", {"f": b"new"})
    assert refusal(lambda: write(workspace, "to", packed(tmp_path / "new"))) == "invalid_argument"
    assert not (root / "to" / "f").exists()
    write(workspace, "fresh", packed(tmp_path / "new"))
    assert (root / "fresh" / deep).is_dir()
