"""A jail root with a probe in it, and a volume that shares blocks, both gone when the tests end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROBE_SOURCE = Path(__file__).with_name("jail_probe.c")

# Runs in a mount namespace of its own and hands over a descriptor of the mounted directory. The mount lives
# as long as that descriptor: a killed test run leaves no mount and no loop device.
MOUNT_SCRIPT = """
import socket, subprocess, sys, os
from pathlib import Path
base, fd = Path(sys.argv[1]), int(sys.argv[2])
(base / "mnt").mkdir()
os.truncate(os.open(base / "xfs.img", os.O_CREAT | os.O_RDWR, 0o600), 400 << 20)
subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", base / "xfs.img"], check=True)
subprocess.run(["mount", "-o", "loop", base / "xfs.img", base / "mnt"], check=True)
directory = os.open(base / "mnt", os.O_RDONLY | os.O_DIRECTORY)
socket.send_fds(socket.socket(fileno=fd), [b"x"], [directory])
"""


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


@pytest.fixture(scope="session")
def reflink_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on an XFS volume."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", "-c", MOUNT_SCRIPT,
             str(tmp_path_factory.mktemp("xfs")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()], check=True,
        )  # fmt: skip
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    try:
        yield Path(f"/proc/self/fd/{descriptors[0]}")
    finally:
        os.close(descriptors[0])
