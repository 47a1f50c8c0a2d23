"""Real services and real VMs for tests: one service for all tests, and others for those that kill theirs.

Promises that what a fixture made is gone after it. It must not know what is tested. Neighbour:
`live_service`, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vm.live_service import Client, Machine, Service


@pytest.fixture(scope="session")
def service(image_dir: Path, vm_volume: Path) -> Iterator[Service]:
    """The service that tests share, with the template of the usual size built."""
    service = Service(image_dir, vm_volume)
    try:
        service.start()
        service.client().create().destroy()
        yield service
        service.stop()
    finally:
        service.remove()


@pytest.fixture(scope="session")
def client(service: Service) -> Client:
    """A workspace's client on the shared service."""
    return service.client(service.issue_token("tests"))


@pytest.fixture
def vm(client: Client) -> Iterator[Machine]:
    """A fresh VM of 256 MiB on the shared service, destroyed at the end."""
    machine = client.create()
    yield machine
    machine.destroy()


@pytest.fixture(scope="module")
def shared_vm(client: Client) -> Iterator[Machine]:
    """A VM for those tests of a module that only run commands and keep to files of their own."""
    machine = client.create(idle_seconds=0)
    yield machine
    machine.destroy()


@pytest.fixture
def make_service(image_dir: Path, vm_volume: Path, service: Service) -> Iterator[Callable[..., Service]]:
    """Makes services of the test's own, with more settings; not started, removed at the end."""
    made: list[Service] = []

    def make(**settings: int | str | bool) -> Service:
        made.append(Service(image_dir, vm_volume, like=service, **settings))
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def own_service(make_service: Callable[..., Service]) -> Service:
    """A started service that the test may stop, kill and break."""
    own = make_service()
    own.start()
    return own
