"""A process in a guest that holds data and a count in its memory only, and tells when it is asked.

It must not know how a test suspends the VM between two questions.
"""

from __future__ import annotations

import hashlib
import json
import random
from functools import cache
from typing import Final

from tests.vm.live_service import Machine

HELD_MIB: Final = 50
_SEED: Final = 2603

_PROGRAM: Final = f"""
import hashlib, json, os, random
held = random.Random({_SEED}).randbytes({HELD_MIB} << 20)
os.mkfifo("asked"); os.mkfifo("told")
print("ready", flush=True)
count = 0
while True:
    with open("asked") as asked:
        asked.read()
    count += 1
    with open("told", "w") as told:
        json.dump({{"count": count, "pid": os.getpid(), "sha256": hashlib.sha256(held).hexdigest()}}, told)
"""


@cache
def held_sha256() -> str:
    """What the process holds, as it must be for ever."""
    return hashlib.sha256(random.Random(_SEED).randbytes(HELD_MIB << 20)).hexdigest()


class Resident:
    """Such a process, started as a job of `vm`."""

    def __init__(self, vm: Machine) -> None:
        vm.write("resident.py", _PROGRAM.encode())
        self._vm = vm
        self.job_id = vm.start("exec python3 -u resident.py")
        vm.wait_output(self.job_id, b"ready\n")
        self.pid: int = self._ask(1)["pid"]
        self._asked = 1

    def check(self) -> None:
        """It is the same process with the same data, and has counted on from where it was."""
        self._asked += 1
        assert self._ask(self._asked)["pid"] == self.pid

    def go_on(self, vm: Machine) -> None:
        """`check`, after a restart of the service: `vm` is the same VM as before."""
        self._vm = vm
        self.check()

    def _ask(self, count: int) -> dict[str, int]:
        told = json.loads(self._vm.text("echo > asked; cat told"))
        assert told["count"] == count
        assert told["sha256"] == held_sha256()
        return told
