"""A jail root with a probe in it, gone when the tests end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROBE_SOURCE = Path(__file__).with_name("jail_probe.c")


@pytest.fixture(scope="session")
def jail_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closure: /bin/probe and the places that a jail needs."""
    root = tmp_path_factory.mktemp("jail")
    root.chmod(0o755)  # the jailed uid passes through it
    for name in ("bin", "dev", "vm"):
        (root / name).mkdir()
    for name in ("ram", "disk", "kernel"):
        (root / "vm" / name).touch()
    subprocess.run(
        [
            "gcc",
            "-static",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-o",
            str(root / "bin/probe"),
            str(PROBE_SOURCE),
        ],
        check=True,
    )
    return root
