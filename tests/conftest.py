"""Fixtures that every tier shares: the image and the reflink volume that `tools/test` prepared, a state
directory, and a small reflink volume for tests without guests.

A missing image or volume fails the test with the command to run; nothing is skipped. It must not make
images, nor mount anything that others see. Neighbour: `tools/suite.py`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOW: str = "run it by `sudo tools/test [pytest arguments]`, which prepares what real guests need"


# Runs in a mount namespace of its own and hands over a descriptor of the mounted directory. The mount lives
# as long as that descriptor: a killed test run leaves no mount and no loop device.
MOUNT_SCRIPT = """
import socket, subprocess, sys, os
from pathlib import Path
base, fd = Path(sys.argv[1]), int(sys.argv[2])
(base / "mnt").mkdir()
os.truncate(os.open(base / "xfs.img", os.O_CREAT | os.O_RDWR, 0o600), 4 << 30)
subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", base / "xfs.img"], check=True)
subprocess.run(["mount", "-o", "loop", base / "xfs.img", base / "mnt"], check=True)
directory = os.open(base / "mnt", os.O_RDONLY | os.O_DIRECTORY)
socket.send_fds(socket.socket(fileno=fd), [b"x"], [directory])
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="scale rounds up to what the contract names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def _prepared(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value or not Path(value).is_dir():
        pytest.fail(f"{variable} names no directory: {HOW}", pytrace=False)
    return Path(value)


@pytest.fixture(scope="session")
def image_dir() -> Path:
    """The built guest image."""
    return _prepared("MICROVM_TEST_IMAGE")


@pytest.fixture(scope="session")
def vm_volume() -> Path:
    """A directory on an XFS volume with reflinks, one for all tests: name what you make there."""
    return _prepared("MICROVM_TEST_VOLUME")


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """An empty state directory of a service."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`rounds(usual, full)`: the number of repetitions for this run; full with `tools/test --all`."""
    full_run = bool(request.config.getoption("--all"))
    return lambda usual, full: full if full_run else usual


@pytest.fixture(scope="session")
def reflink_volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sparse XFS volume of 4 GiB; needs root and leaves no mount behind."""
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


@pytest.fixture
def reflink_directory(reflink_volume: Path) -> Iterator[Path]:
    """An empty directory on an XFS volume, gone after the test."""
    directory = Path(tempfile.mkdtemp(dir=reflink_volume))
    yield directory
    shutil.rmtree(directory)
