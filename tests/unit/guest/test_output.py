"""Output is drained, counted and cut, and never blocks who writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from guest.loop import Loop
from guest.output import STDERR, STDOUT, Capture


@pytest.fixture
def null_fd() -> Iterator[int]:
    fd = os.open("/dev/null", os.O_RDWR)
    yield fd
    os.close(fd)


class Writer:
    """The command's side: writes, and lets the loop drain."""

    def __init__(self, loop: Loop, capture: Capture) -> None:
        self.loop = loop
        self.ends = capture.open_pipes()
        for fd in self.ends:
            os.set_blocking(fd, False)

    def write(self, which: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self.ends[which], view[:65536]) :]
            self.loop.soon(lambda: None)  # a turn that does not wait
            self.loop.turn()

    def close(self) -> None:
        for fd in self.ends:
            os.close(fd)


def made(tmp_path: Path, null_fd: int, limit: int) -> tuple[Capture, Writer]:
    loop = Loop()
    capture = Capture(loop, str(tmp_path / "job"), limit, null_fd)
    return capture, Writer(loop, capture)


def test_streams_are_kept_apart_and_whole(tmp_path: Path, null_fd: int) -> None:
    capture, writer = made(tmp_path, null_fd, 1 << 20)
    writer.write(STDOUT, b"out")
    writer.write(STDERR, b"\xff\x00err")
    capture.finish()
    assert capture.read(STDOUT, 0, 100) == b"out"
    assert capture.read(STDERR, 2, 2) == b"er"
    assert (capture.totals, capture.truncated) == ([3, 5], False)
    writer.close()


def test_much_output_goes_to_files_that_only_root_reads(tmp_path: Path, null_fd: int) -> None:
    capture, writer = made(tmp_path, null_fd, 1 << 20)
    data = os.urandom(300_000)
    writer.write(STDERR, b"first")
    writer.write(STDOUT, data)
    capture.finish()
    assert capture.read(STDOUT, 0, 1 << 20) == data
    assert capture.read(STDOUT, 299_990, 100) == data[-10:]
    assert capture.read(STDERR, 0, 100) == b"first"
    assert (tmp_path / "job.out").stat().st_mode & 0o777 == 0o600
    capture.forget()
    assert not list(tmp_path.iterdir())
    writer.close()


def test_beyond_the_limit_all_is_counted_and_nothing_kept(tmp_path: Path, null_fd: int) -> None:
    capture, writer = made(tmp_path, null_fd, 100_000)
    writer.write(STDERR, b"e" * 30_000)
    writer.write(STDOUT, b"o" * 3_000_000)
    capture.finish()
    assert capture.totals == [3_000_000, 30_000]
    assert capture.kept == [70_000, 30_000]
    assert capture.truncated
    writer.close()


def test_exactly_the_limit_is_not_truncated(tmp_path: Path, null_fd: int) -> None:
    capture, writer = made(tmp_path, null_fd, 1000)
    writer.write(STDOUT, b"x" * 1000)
    capture.finish()
    assert (capture.kept, capture.truncated) == ([1000, 0], False)
    writer.close()


def test_what_comes_after_the_end_is_drained_and_not_counted(tmp_path: Path, null_fd: int) -> None:
    capture, writer = made(tmp_path, null_fd, 1 << 20)
    os.write(writer.ends[STDOUT], b"in the pipe at the end")
    capture.finish()
    writer.write(STDOUT, b"late" * 100_000)
    assert capture.totals == [22, 0]
    assert capture.read(STDOUT, 0, 100) == b"in the pipe at the end"
    writer.close()


def test_a_disk_that_takes_nothing_cuts_the_output_and_says_so(null_fd: int) -> None:
    capture, writer = made(Path("/proc/nowhere"), null_fd, 1 << 20)
    writer.write(STDOUT, b"a" * 10_000)
    writer.write(STDOUT, b"b" * 50_000)
    capture.finish()
    assert capture.totals == [60_000, 0]
    assert capture.read(STDOUT, 0, 1 << 20) == b"a" * 10_000
    assert capture.truncated
    assert "cut" in capture.message
    writer.close()
