"""Services that can be broken, sharing one template; nothing of them is left after the tests.

It must not know what is broken. Neighbours: `hooked_service`; `tests/vm/live_service`, which it extends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.hooked_service import HookedService
from tests.vm.live_service import Client


@pytest.fixture(scope="session")
def prepared(image_dir: Path, vm_volume: Path) -> Iterator[HookedService]:
    """A service that built the template of the usual size and then ended; others share its files."""
    service = HookedService(image_dir, vm_volume)
    try:
        service.start()
        service.client().create().destroy()
        service.stop()
        yield service
    finally:
        service.remove()


@pytest.fixture(scope="module")
def service(prepared: HookedService, image_dir: Path, vm_volume: Path) -> Iterator[HookedService]:
    """A started service for one module's tests, which may kill it and must start it again."""
    one = HookedService(image_dir, vm_volume, like=prepared)
    try:
        one.start()
        yield one
    finally:
        one.remove()


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test finds what another one left on the module's service."""
    yield
    if "service" in request.fixturenames:
        request.getfixturevalue("service").clear()


@pytest.fixture
def client(service: HookedService) -> Client:
    """A workspace's client on the module's service."""
    return service.owner


@pytest.fixture
def make_service(
    prepared: HookedService, image_dir: Path, vm_volume: Path
) -> Iterator[Callable[..., HookedService]]:
    """Makes services of the test's own, with more settings; not started, removed at the end."""
    made: list[HookedService] = []

    def make(**settings: int | str | bool) -> HookedService:
        made.append(HookedService(image_dir, vm_volume, like=prepared, **settings))
        return made[-1]

    yield make
    for one in made:
        one.remove()
