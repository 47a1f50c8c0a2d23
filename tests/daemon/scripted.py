"""A VM's effects and its journal as a script: the driver between them is the real one.

Each effect does to the VM what the real one does to its VMM and its checkpoint, and ends as the script says.
It must not decide anything. Neighbours: `test_driver`, and `tests/fake` for real effects on a fake VMM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import trio

from microvm.errors import HostError, MicrovmError, VmmError
from microvm.fleet.driver import VmDriver
from microvm.fleet.effects import EffectError, Effects, Turn
from microvm.fleet.jobs import JobTable
from microvm.model import (
    AgentGeneration,
    Generation,
    JobId,
    JobRecord,
    JobState,
    SuspendMode,
    VmId,
    VmRecord,
    VmSpec,
    VmState,
    WorkspaceId,
)
from microvm.policy import lifecycle
from microvm.policy.lifecycle import Effect

VM: Final = VmId("vm_" + "a" * 20)
JOB: Final = JobId("job_" + "a" * 20)
OUTCOMES: Final = ("well", "refused", "committed", "lost", "hang", "crash")
"""Ends well; fails and nothing happened; fails after its commit; the VMM dies of it; waits; has a bug."""
START: Final = 1000.0


def a_record(state: VmState = VmState.HIBERNATED, **changes: Any) -> VmRecord:
    """A VM; at rest with a checkpoint unless told otherwise."""
    record = VmRecord(VM, WorkspaceId("alice"), state, START, START, VmSpec(), idle_seconds=0.0)
    return record.with_(checkpoint_generation=Generation(1), **changes)


def a_job(state: JobState = JobState.RUNNING, **changes: Any) -> JobRecord:
    """A job of the VM."""
    return JobRecord(JOB, VM, state, "true", START).with_(**changes)


class Time:
    """`time.time` for the driver; moves when told."""

    def __init__(self) -> None:
        self.now = START

    def time(self) -> float:
        return self.now


class ScriptedJournal:
    """Commits in memory; fails where told.

    Attributes:
        committed: Every record that was committed, in order, with what it was for.
        fail: Numbers of the commits that fail.
        stored: The record as a restart would find it; None when the VM is gone.
        open: Intents that were not closed.
    """

    def __init__(self, fail: frozenset[int] = frozenset()) -> None:
        self.committed: list[tuple[str, VmRecord]] = []
        self.fail = set(fail)
        self.stored: VmRecord | None = None
        self.open: set[int] = set()
        self.calls = 0

    async def intent(self, record: VmRecord, op: str) -> int:
        number = await self._commit(f"intent {op}", record)
        self.open.add(number)
        return number

    async def step(self, intent: int, record: VmRecord, name: str) -> None:
        assert intent in self.open
        await self._commit(f"step {name}", record)

    async def done(self, intent: int, record: VmRecord, outcome: str) -> None:
        await self._commit("done", record)
        self.open.remove(intent)

    async def gone(self, intent: int, record: VmRecord) -> None:
        await self._commit("gone", record)
        self.open.remove(intent)
        self.stored = None

    async def _commit(self, what: str, record: VmRecord) -> int:
        await trio.lowlevel.checkpoint()
        self.calls += 1
        if self.calls in self.fail:
            raise HostError("commit to", "metadata", 28)
        self.committed.append((what, record))
        self.stored = record
        return self.calls


class ScriptedEffects:
    """What `Effects` offers to a driver, over nothing.

    Attributes:
        script: How the next effects end; "well" when it is empty.
        begun: Names of the effects, in order.
        in_guest: Calls that are in the guest; no effect that stops it may begin then.
        hold: What hanging effects wait for.
        saved, spent: The newest checkpoint, and the newest that the guest has run on from.
    """

    def __init__(self, jobs: JobTable, live: bool, saved: int = 1, spent: int = 0) -> None:
        self.jobs = jobs
        self.live: object | None = object() if live else None
        self.slot = 7
        self.death: VmmError | None = None
        self.script: deque[str] = deque()
        self.begun: list[str] = []
        self.in_guest = 0
        self.may_cut = False
        self.hold = trio.Event()
        self.hanging = trio.Event()
        self.saved, self.spent = saved, spent
        self.died: Callable[[str], None] | None = None
        self._running: Effect | None = None

    def attach(
        self, nursery: trio.Nursery, *, died: Callable[[str], None], out_of_space: Callable[[], None]
    ) -> None:
        self.died = died

    def kill(self) -> None:
        self.hold.set()

    async def release(self) -> None:
        self.live = None
        await trio.lowlevel.checkpoint()

    async def run(self, effect: Effect, turn: Turn) -> dict[str, Any]:
        assert self._running is None, "two effects at once"
        if effect in {lifecycle.PAUSE, lifecycle.HIBERNATE, lifecycle.POWER_OFF} and not self.may_cut:
            assert self.in_guest == 0, "it is put to rest under a call"
        self._running = effect
        self.begun.append(effect.name)
        try:
            return await self._act(effect, turn)
        finally:
            self._running = None

    async def _act(self, effect: Effect, turn: Turn) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        outcome = self.script.popleft() if self.script else "well"
        if outcome.startswith("hang"):
            self.hanging.set()
            await self.hold.wait()
            outcome = outcome.partition(" then ")[2] or "well"
        if effect is lifecycle.REMOVE:
            self.live = None
        if outcome == "crash":
            raise ValueError("a bug")
        if effect is lifecycle.RELEASE:
            outcome = "well"
        if effect is lifecycle.REMOVE and outcome != "well":
            outcome = "refused"
        if outcome == "refused":
            if effect in {lifecycle.CREATE, lifecycle.WAKE, lifecycle.BOOT}:
                self.live = None
            raise EffectError(MicrovmError("no_capacity", "as the script wants it"))
        changes = await self._change(effect, turn)
        if outcome == "well":
            return changes
        lost = outcome == "lost"
        if effect is lifecycle.HIBERNATE and lost:
            raise EffectError(VmmError("died"), guest_lost=True)
        spent = effect in {lifecycle.WAKE, lifecycle.BOOT}
        raise EffectError(VmmError("died"), committed=spent or not lost, guest_lost=lost, **changes)

    async def _change(self, effect: Effect, turn: Turn) -> dict[str, Any]:
        if effect in {lifecycle.WAKE, lifecycle.BOOT}:
            assert self.live is None, "two VMMs"
            assert effect is lifecycle.BOOT or self.saved > self.spent, "a spent checkpoint is loaded"
            try:
                await turn.commit("spent", spent_generation=Generation(self.saved))
            except MicrovmError as error:
                raise EffectError(error) from error
            self.spent = self.saved
        if effect in {lifecycle.CREATE, lifecycle.WAKE, lifecycle.BOOT}:
            self.live = object()
            self.jobs.freeze(frozen=False)
            return {"agent_generation": AgentGeneration(turn.record.agent_generation + 1), "slot": self.slot}
        if effect is lifecycle.HIBERNATE:
            assert self.live is not None
            self.saved += 1
            self.live = None
            self.jobs.freeze(frozen=True)
            return {"checkpoint_generation": Generation(self.saved), "slot": None}
        if effect in {lifecycle.POWER_OFF, lifecycle.RELEASE, lifecycle.REMOVE}:
            self.live = None
            self.jobs.lose_active("gone")
            return {"slot": None}
        if effect is lifecycle.COMPACT:
            assert self.live is None
            return {}
        assert self.live is not None
        self.jobs.freeze(frozen=effect in {lifecycle.PAUSE, lifecycle.HALT})
        return {}


class Rig:
    """A driver between a script and a journal."""

    def __init__(
        self, record: VmRecord | None = None, *jobs: JobRecord, fail: frozenset[int] = frozenset()
    ) -> None:
        record = record or a_record()
        self.time = Time()
        self.table = JobTable(VM, Path("/nowhere"), jobs, save=lambda _job: None, forget=lambda _job_id: None)
        live = record.state in {VmState.RUNNING, VmState.PAUSED}
        self.effects = ScriptedEffects(
            self.table, live, record.checkpoint_generation, record.spent_generation
        )
        self.journal = ScriptedJournal(fail)
        self.driver = VmDriver(record, self.journal, cast("Effects", self.effects))

    @property
    def state(self) -> VmState:
        """Where the VM is."""
        return self.driver.record.state

    def pass_time(self, seconds: float) -> None:
        """Moves the driver's clock and has it look."""
        self.time.now += seconds
        self.driver.jobs_changed()


def running(**changes: Any) -> VmRecord:
    """A VM that goes to rest after ten seconds; `Rig` gives it a VMM. The driver learns of it by a `Use`."""
    return a_record(VmState.HIBERNATED, idle_seconds=10.0, **changes)


MODES: Final = tuple(SuspendMode)
