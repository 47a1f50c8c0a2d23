"""The one fake: the real supervisor as an ordinary process, with a scriptable VMM in front of it.

It lacks what a process cannot do: the guest's memory in a checkpoint. Everything else is held to the contract
suite of `tests/contract`, and where it disagrees with a real VMM the fake is the bug.
"""

from tests.fake.guest_process import GuestProcess, open_guest
from tests.fake.vmm import FakeVmm, FakeVmmKind

__all__ = ["FakeVmm", "FakeVmmKind", "GuestProcess", "open_guest"]
