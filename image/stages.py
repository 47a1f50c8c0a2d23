"""Stages: what a build made once and may use again, by its inputs' digest; and the lock that builds take.

A stage is a directory that appears whole, by rename. It must not know what a stage contains; `build` does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from image.digest import digest_of


class Stages:
    """A directory of stages, `<name>-<key>` each; made on first use."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._used: set[str] = set()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep other builds with the same directory out; waits for one that is under way."""
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def stage(self, name: str, key: str, make: Callable[[Path], None]) -> Path:
        """The stage's directory, made by `make` in a temporary one if it is not there.

        Args:
            name: What it is, a word.
            key: Digest of everything that its contents depend on.
            make: Fills an empty directory. When it raises, nothing is left.
        """
        target = self.directory / f"{name}-{key[:32]}"
        self._used.add(target.name)
        if not target.is_dir():
            temporary = self.directory / f".new-{name}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                make(temporary)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return target

    def forget_unused(self) -> None:
        """Remove the stages that this build did not use."""
        for path in self.directory.iterdir():
            if path.is_dir() and path.name not in self._used:
                shutil.rmtree(path, ignore_errors=True)


def key_of_tree(key: str) -> str:
    """The key of an unpacked tree, which is not flushed and so believed until the next boot only."""
    return digest_of([key, Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")])
