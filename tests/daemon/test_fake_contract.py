"""The fake keeps the VMM contract, but for the memory that it lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from microvm.vmm.base import BootSource
from tests.contract.rig import Rig
from tests.contract.vmm_contract import VmmContract
from tests.fake import FakeVmmKind
from tests.fake.guest_process import cgroup_mount
from tests.fake.vmm import KEEPS_MEMORY

pytestmark = pytest.mark.root


class TestFake(VmmContract):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        kind = FakeVmmKind()
        group = cgroup_mount() / f"microvm-fake-contract-{os.getpid()}"
        group.mkdir()
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        yield Rig(
            kind=kind,
            folder=tmp_path_factory.mktemp("fake"),
            disk_fd=None,
            boot=BootSource(nothing, nothing, kind.cmdline()),
            uid=0,
            cgroup=group,
            keeps_memory=KEEPS_MEMORY,
        )
        os.close(nothing)
        group.rmdir()
