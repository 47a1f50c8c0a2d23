"""A volume of a few GiB that a test fills to the last block, or makes read-only.

Promises that it is mounted only while its block runs, with its space really allocated. It must not know what
is on it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Final

from microvm.host.volume import free_bytes, make_loop_volume, remove_loop_volume

GIB: Final = 1 << 30
SIZE_BYTES: Final = 4 * GIB
"""The base image (0.7 GiB), a template and a few VMs of 256 MiB, above a reserve of 1 GiB."""
_SMALLEST_BYTES: Final = 4096  # XFS's block


class SmallVolume:
    """One volume; made by `open_small_volume`.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast: Final = path / "ballast"

    @property
    def free_bytes(self) -> int:
        """What the service would count as free."""
        return free_bytes(self.path)

    def fill(self, leave_bytes: int) -> None:
        """Takes all but `leave_bytes`; with 0, all that anybody can have."""
        with self._ballast.open("ab") as file:
            step = GIB
            while step >= _SMALLEST_BYTES and not (leave_bytes and self.free_bytes <= leave_bytes):
                size = min(step, max(self.free_bytes - leave_bytes, _SMALLEST_BYTES))
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), size)
                except OSError:
                    step //= 2
                    continue
                file.seek(size, os.SEEK_CUR)

    def empty(self) -> None:
        """Gives it all back."""
        self._ballast.unlink(missing_ok=True)

    @contextlib.contextmanager
    def read_only(self) -> Generator[None]:
        """Nothing on it can be changed inside the block. Nobody may have a file of it open for writing."""
        self._remount("ro")
        try:
            yield
        finally:
            self._remount("rw")

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", self.path], check=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def open_small_volume(directory: Path) -> Generator[SmallVolume]:
    """A new volume, kept in `directory`; file and mount are gone after the block."""
    file, mountpoint = directory / "small.xfs", directory / "small"
    make_loop_volume(file, mountpoint, SIZE_BYTES)
    try:
        yield SmallVolume(mountpoint)
    finally:
        remove_loop_volume(mountpoint)
        file.unlink()
