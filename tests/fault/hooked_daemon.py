"""The daemon with doors for faults: it dies, or loses its VMMs, at a named point of a VM's life.

Runs the very `run_service` that `python -m microvm serve` runs; the product has no hook, so this wraps its
functions from outside. A point is armed while the daemon runs, by a file that says where and what, and fires
once. `SIGUSR1` stops every running VM, which no tool does yet. It must not change what a wrapped function
does. Neighbour: `hooked_service`, which starts and arms it.

    {"when": "before" | "after", "point": <name>, "act": "kill daemon" | "kill VMM"}

Points: `intent|<step>|done|gone of <effect>` (the journal), `receipt|answer of <tool>`, and the names in
`_POINTS` for what an effect does between its journal's entries.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from microvm.daemon.service import Running, run_service
from microvm.daemon.settings import load_settings
from microvm.errors import MicrovmError
from microvm.fleet import effects, layout, receipts, service
from microvm.fleet.driver import VmDriver
from microvm.fleet.effects import Effects
from microvm.fleet.journal import VmJournal
from microvm.fleet.live import Live
from microvm.fleet.log import log
from microvm.model import VmRecord, VmState
from microvm.policy import lifecycle
from microvm.store import checkpoint
from microvm.vmm.qemu import QemuVmm

KILL_DAEMON: Final = "kill daemon"
KILL_VMM: Final = "kill VMM"

_POINTS: Final[tuple[tuple[Any, str, str], ...]] = (
    (Effects, "_clone", "clone"),
    (QemuVmm, "load", "load"),
    (QemuVmm, "boot", "boot"),
    (Live, "cont", "cont"),
    (Live, "greet", "greet"),
    (Live, "flush_memory", "flush"),
    (Live, "sync_guest", "sync"),
    (Live, "freeze_and_stop", "freeze"),
    (QemuVmm, "save", "save"),
    (Live, "sync_memory", "fsync"),
    (checkpoint, "commit", "manifest"),
    (Effects, "release", "release"),
    (Effects, "_drop_checkpoint", "drop"),
    (layout, "copy_densely", "copy"),
    (effects, "rename_durably", "rename"),
    (layout, "remove_tree", "removal"),
)

_TIMER: Final = "_wait_until"

Name = Callable[[tuple[Any, ...]], str]
"""Names a point by the positional arguments of its call."""


class Faults:
    """What is armed, and what happens there.

    Args:
        armed: The file that arms a point.
    """

    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self.running: Running | None = None

    def reach(self, when: str, point: str) -> None:
        """Fires if this point is armed."""
        try:
            fault = json.loads(self._armed.read_bytes())
        except FileNotFoundError:
            return
        if (fault["when"], fault["point"]) != (when, point):
            return
        self._armed.unlink()
        if fault["act"] == KILL_DAEMON:
            os.kill(os.getpid(), signal.SIGKILL)
        assert self.running is not None
        for vm in self.running.fleet.vms.values():
            live = vm.driver.effects.live
            if live is not None:
                os.kill(live.vmm.pid, signal.SIGKILL)

    def wrap(self, owner: Any, attribute: str, name: Name) -> None:
        """Makes a point of a function."""
        wrapped = getattr(owner, attribute)
        if inspect.iscoroutinefunction(wrapped):

            @functools.wraps(wrapped)
            async def hooked_async(*args: Any, **kwargs: Any) -> Any:
                point = name(args)
                self.reach("before", point)
                result = await wrapped(*args, **kwargs)
                self.reach("after", point)
                return result

            setattr(owner, attribute, hooked_async)
            return

        @functools.wraps(wrapped)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            point = name(args)
            self.reach("before", point)
            result = wrapped(*args, **kwargs)
            self.reach("after", point)
            return result

        setattr(owner, attribute, hooked)


def install(faults: Faults) -> None:
    """Wraps everything that is a point."""
    for owner, attribute, point in _POINTS:
        faults.wrap(owner, attribute, partial(_always, point))
    of: dict[int, str] = {}
    intent = VmJournal.intent

    @functools.wraps(intent)
    async def remembered(self: VmJournal, record: VmRecord, op: str) -> int:
        number = await intent(self, record, op)
        of[number] = op
        return number

    VmJournal.intent = remembered

    def effect(args: tuple[Any, ...]) -> str:
        return of.get(args[1], lifecycle.CREATE.name)  # a creation's intent is committed with its receipt

    faults.wrap(VmJournal, "intent", lambda args: f"intent of {args[2]}")
    faults.wrap(VmJournal, "step", lambda args: f"{args[3]} of {effect(args)}")
    faults.wrap(VmJournal, "done", lambda args: f"done of {effect(args)}")
    faults.wrap(VmJournal, "gone", lambda args: f"gone of {effect(args)}")
    faults.wrap(receipts.Begun, "commit", lambda args: f"receipt of {_tool(args[0]._pending)}")
    faults.wrap(receipts.Receipts, "_save_later", lambda args: f"answer of {_tool(args[1])}")


def _always(point: str, _args: tuple[Any, ...]) -> str:
    return point


def _tool(to_save: Iterable[object]) -> str:
    saved = [each.receipt.tool for each in to_save if isinstance(each, receipts.Save)]
    return saved[-1] if saved else "nothing"


def settle(constants: dict[str, float], *, timers: bool) -> None:
    """Sets constants of `fleet.service`, and takes the idle timers away: what is overdue stays awake."""
    for name, value in constants.items():
        assert hasattr(service, name), name
        setattr(service, name, value)
    if not timers:
        setattr(VmDriver, _TIMER, _never)


def _never(_driver: VmDriver) -> float:
    return math.inf


async def serve(config: Path, faults: Faults) -> None:
    """The service, and the door for stopping VMs."""
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGUSR1) as asked:

            async def run(*, task_status: trio.TaskStatus[Running]) -> None:
                await run_service(load_settings(config), task_status=task_status)
                nursery.cancel_scope.cancel(reason="the service ended")

            running: Running = await nursery.start(run)
            faults.running = running
            async for _ in asked:
                for vm in running.fleet.vms.values():
                    if vm.driver.record.state is VmState.RUNNING:
                        nursery.start_soon(_stop, vm.driver)


async def _stop(driver: VmDriver) -> None:
    try:
        await driver.submit(lifecycle.Stop())
    except MicrovmError as error:
        log.error("not stopped", extra={"vm_id": driver.record.vm_id, "why": error.message})


def main() -> None:
    """`python -m tests.fault.hooked_daemon CONFIG FAULTS`, the second a JSON object."""
    config, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    faults = Faults(Path(told["armed"]))
    install(faults)
    settle(told["constants"], timers=told["timers"])
    trio.run(partial(serve, config, faults))


if __name__ == "__main__":
    main()
