"""No order of requests, endings, failures, deaths and lost commits makes a driver lose a call or a lease.

The driver is the real one; effects and journal are scripted. No clock is waited for: each step of the test is
over when every task waits for something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from microvm.errors import MicrovmError
from microvm.fleet import driver as driver_module
from microvm.model import Generation, SuspendMode, VmState
from microvm.policy.lifecycle import SETTLED, Compact, Destroy, Drain, Event, Resume, Stop, Suspend
from tests.daemon.scripted import OUTCOMES, Rig, a_record

S = VmState
LONG_S = 10.0

Op = tuple[str, Any]

_EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Suspend, st.sampled_from(SuspendMode), st.booleans()),
    st.builds(Resume, st.booleans(), st.booleans()),
    st.builds(Stop, st.booleans()),
)
_RARE: st.SearchStrategy[Op] = st.sampled_from(
    [(name, None) for name in ("died", "no space", "low space", "compact", "destroy", "drain")]
)
_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), _EVENTS),
        st.tuples(st.just("use"), st.none()),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 7)),
        st.tuples(st.just("idle"), st.sampled_from([1.0, 11.0])),
        st.tuples(st.just("unhang"), st.none()),
        st.tuples(st.just("settle"), st.none()),
        _RARE,
    ),
    max_size=30,
)
_SCRIPT = st.lists(st.sampled_from([*OUTCOMES, "well", "well", "hang then refused"]), max_size=12)
_LOST_COMMITS = st.frozensets(st.integers(1, 30), max_size=4)


class Player:
    """Plays the operations against one driver."""

    def __init__(self, nursery: trio.Nursery, rig: Rig) -> None:
        self.rig = rig
        self.nursery = nursery
        self.waiting: dict[int, trio.CancelScope] = {}
        self.inside: dict[int, trio.Event] = {}
        self.number = 0

    async def play(self, op: Op) -> None:
        name, value = op
        rig = self.rig
        match name:
            case "submit":
                self._spawn(value)
            case "use":
                self._spawn(None)
            case "leave":
                for leave in list(self.inside.values())[:1]:
                    leave.set()
            case "cancel":
                for scope in list(self.waiting.values())[value : value + 1]:
                    scope.cancel()
            case "idle":
                rig.pass_time(value)
            case "unhang":
                self._unhang()
            case "settle":
                await wait_all_tasks_blocked()
            case _:
                self._strike(name)

    def _strike(self, name: str) -> None:
        rig = self.rig
        match name:
            case "destroy":
                self._spawn(Destroy())
            case "drain":
                rig.effects.may_cut = True
                rig.driver.begin_drain()
                self._spawn(Drain())
            case "died":
                if rig.effects.live is not None:
                    rig.driver.vmm_died("a test wants it")
            case "compact":
                self._spawn(Compact())
            case "low space":
                rig.driver.low_on_space()
            case _:
                if rig.state is S.RUNNING and not rig.driver.busy:
                    rig.driver.out_of_space()

    def _unhang(self) -> None:
        self.rig.effects.hold.set()
        self.rig.effects.hold = trio.Event()

    def _spawn(self, event: Event | None) -> None:
        self.number += 1
        self.nursery.start_soon(self._call, self.number, event)

    async def _call(self, number: int, event: Event | None) -> None:
        driver = self.rig.driver
        with trio.CancelScope() as scope:
            self.waiting[number] = scope
            try:
                if event is None:
                    await self._use(number)
                else:
                    await driver.submit(event)
            except MicrovmError:
                pass
            finally:
                self.waiting.pop(number, None)

    async def _use(self, number: int) -> None:
        effects = self.rig.effects
        async with self.rig.driver.use() as live:
            assert live is not None
            leave = self.inside[number] = trio.Event()
            effects.in_guest += 1
            try:
                await leave.wait()
            finally:
                effects.in_guest -= 1
                del self.inside[number]

    async def end(self) -> None:
        """Everything that was asked for has an answer, whatever happened; then the VM can be destroyed."""
        rig = self.rig
        await wait_all_tasks_blocked()
        rig.effects.script.clear()
        while self.waiting or rig.driver.busy:
            for leave in list(self.inside.values()):
                leave.set()
            self._unhang()
            await wait_all_tasks_blocked()
        assert rig.driver.gone.is_set() or rig.state in SETTLED | {S.DESTROYING}
        rig.journal.fail.clear()
        if not rig.driver.gone.is_set() and rig.state is S.RUNNING:
            await self._no_lease_is_left()
        if not rig.driver.gone.is_set():
            assert rig.effects.live is None or rig.state in {S.RUNNING, S.PAUSED}
            await rig.driver.submit(Destroy())
        assert rig.driver.gone.is_set()
        assert rig.effects.live is None
        assert rig.journal.stored is None

    async def _no_lease_is_left(self) -> None:
        """Were a call still counted, this would wait for its end."""
        with suppress(MicrovmError):  # the service drains
            await self.rig.driver.submit(Suspend(SuspendMode.PAUSE, force=True))
            assert self.rig.state is S.PAUSED


@settings(deadline=None)
@given(_OPS, _SCRIPT, _LOST_COMMITS, st.booleans())
def test_every_call_is_answered_and_every_lease_comes_back(
    ops: list[Op], script: list[str], lost: frozenset[int], created: bool
) -> None:
    trio.run(_play, ops, script, lost, created)


async def _play(ops: list[Op], script: list[str], lost: frozenset[int], created: bool) -> None:
    record = a_record(idle_seconds=10.0)
    if created:
        record = record.with_(state=S.CREATING, checkpoint_generation=Generation(0))
    rig = Rig(record, fail=lost - {1})
    rig.effects.script.extend(script)
    with mock.patch.object(driver_module, "time", rig.time), trio.fail_after(LONG_S):
        intent = await rig.journal.intent(rig.driver.record, "create") if created else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: rig.driver.serve(create_intent=intent))
            player = Player(nursery, rig)
            for op in ops:
                await player.play(op)
            await player.end()
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The scripted bugs are logged with their tracebacks, thousands of times."""
    with caplog.at_level("CRITICAL", logger="microvm.fleet"):
        yield
