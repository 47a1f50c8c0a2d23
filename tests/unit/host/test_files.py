"""Durable files: the order of effects, and what is left when one fails."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from microvm.errors import HostError
from microvm.host import files
from microvm.host.files import (
    drop_pages,
    flush,
    fsync_fd,
    hold_lock,
    rename_durably,
    unlink_durably,
    write_durably,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records fsync, rename and unlink in their order, and does them."""
    recorded: list[str] = []

    def record(name: str, function: Callable[..., Any]) -> None:
        def recording(*arguments: Any) -> Any:
            subject = arguments[-1]
            if name == "fsync":
                subject = os.readlink(f"/proc/self/fd/{subject}")
            recorded.append(f"{name} {Path(subject).name}")
            return function(*arguments)

        monkeypatch.setattr(files.os, name, recording)

    for name in ("fsync", "rename", "unlink"):
        record(name, getattr(os, name))
    return recorded


def test_content_is_durable_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, calls: list[str]
) -> None:
    write_durably(tmp_path / "manifest", b"new")
    assert calls == ["fsync .manifest.new", "rename manifest", f"fsync {tmp_path.name}"]
    assert (tmp_path / "manifest").read_bytes() == b"new"


def test_mode_is_as_asked_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_durably(tmp_path / "open", b"", mode=0o644)
    finally:
        os.umask(before)
    write_durably(tmp_path / "closed", b"")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "closed").stat().st_mode) == 0o600


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_a_failure_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "manifest"
    write_durably(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, failing, fail)
        with pytest.raises(HostError, match="ENOSPC") as caught:
            write_durably(target, b"new content")
    assert caught.value.code == "disk_full"
    assert target.read_bytes() == b"old"
    write_durably(target, b"next")
    assert os.listdir(tmp_path) == ["manifest"]


def test_what_a_crash_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".manifest.new").write_bytes(b"half a manifest, longer than the next")
    write_durably(tmp_path / "manifest", b"whole")
    assert (tmp_path / "manifest").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["manifest"]


def test_renames_and_removals_are_durable(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "a").touch()
    rename_durably(tmp_path / "a", tmp_path / "b")
    unlink_durably(tmp_path / "b")
    unlink_durably(tmp_path / "b")
    assert calls == [
        "rename b",
        f"fsync {tmp_path.name}",
        "unlink b",
        f"fsync {tmp_path.name}",
        "unlink b",
    ]


def test_flushing_and_dropping_keep_the_content(tmp_path: Path) -> None:
    with (tmp_path / "ram").open("w+b") as file:
        os.write(file.fileno(), b"x" * 100_000)
        flush(file.fileno())
        fsync_fd(file.fileno(), "ram")
        drop_pages(file.fileno())
        assert os.pread(file.fileno(), 100_000, 0) == b"x" * 100_000


def test_errors_of_the_kernel_are_host_errors() -> None:
    for call in (flush, fsync_fd, drop_pages):
        with pytest.raises(HostError, match="EBADF"):
            call(4000)


def test_a_lock_has_one_holder_and_is_dropped_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path) as fd:
        assert not os.get_inheritable(fd)
        with pytest.raises(HostError, match="another process holds it") as caught, hold_lock(path):
            pass
        assert caught.value.errno == errno.EWOULDBLOCK
    with hold_lock(path):
        pass


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import fcntl, os, sys, signal; fcntl.flock(os.open(sys.argv[1], 66), 2); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False)
    with hold_lock(tmp_path / "lock"):
        pass
