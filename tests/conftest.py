"""Fixtures that every tier shares: the image and the reflink volume that `tools/test` prepared, and a state
directory.

A missing image or volume fails the test with the command to run; nothing is skipped. It must not make
images or mount volumes itself. Neighbour: `tools/suite.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HOW: str = "run it by `sudo tools/test [pytest arguments]`, which prepares what real guests need"


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
