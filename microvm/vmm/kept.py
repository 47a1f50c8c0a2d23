"""Closures that outlive their image: an upgrade strands no checkpoint.

    <directory>/<digest>/        the closure, as the image had it
    <directory>/<digest>.json    version and binary

A closure is copied here when a service first uses it, and removed when neither the service nor a checkpoint
needs it; images may be rebuilt and deleted meanwhile. This module must not know which checkpoints exist.
Neighbour: `closure` opens and verifies what is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from microvm.errors import HostError
from microvm.host.files import host_errors, write_durably
from microvm.vmm.closure import Closure, open_closure

VERIFIED: Final = "verified.json"


class KeptClosures:
    """The closures of one service.

    Args:
        directory: Private to the service; made when missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, root: Path, digest: str, *, version: str, binary: str) -> None:
        """Copies a closure here unless it is here already (65 MB, a fraction of a second).

        Raises:
            HostError: Nothing half-made is left.
        """
        if self.has(digest):
            return
        facts = self._directory / f"{digest}.json"
        target, work = self._directory / digest, self._directory / f"{digest}.copying"
        with host_errors("keep the VMM's closure", target):
            # The jail's users pass through: names are digests, and there are no secrets in a VMM.
            self._directory.mkdir(mode=0o711, exist_ok=True)
            for leftover in (work, target):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                shutil.copytree(root, work, symlinks=True)
                os.rename(work, target)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
        write_durably(facts, json.dumps({"version": version, "binary": binary}).encode())

    def has(self, digest: str) -> bool:
        """Whether a closure is kept."""
        return (self._directory / f"{digest}.json").exists()

    @contextmanager
    def open(self, digest: str) -> Generator[Closure]:
        """Opens a kept closure, verified.

        Raises:
            HostError: It is not kept, or not what its name says.
        """
        path = self._directory / f"{digest}.json"
        with host_errors("open the VMM's closure", path):
            raw = path.read_bytes()
        try:
            facts: dict[str, Any] = json.loads(raw)
            version, binary = str(facts["version"]), str(facts["binary"])
        except (ValueError, KeyError, TypeError) as error:
            raise HostError("open the VMM's closure", str(path), 0, "its description is damaged") from error
        with open_closure(
            self._directory / digest,
            digest,
            version=version,
            binary=binary,
            verified_file=self._directory / VERIFIED,
        ) as closure:
            yield closure

    def sweep(self, needed: Collection[str]) -> list[str]:
        """Removes every kept closure whose digest is not in `needed`.

        Returns:
            The digests that were removed.
        """
        removed: list[str] = []
        for facts in sorted(self._directory.glob("*.json")):
            digest = facts.stem
            if facts.name == VERIFIED or digest in needed:
                continue
            with contextlib.suppress(OSError):
                facts.unlink()
                shutil.rmtree(self._directory / digest)
                removed.append(digest)
        return removed
