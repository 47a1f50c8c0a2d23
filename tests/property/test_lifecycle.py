"""No order of requests, news and endings of effects makes a VM lose, repeat or resurrect anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from microvm.model import SuspendMode, VmState
from microvm.policy import lifecycle
from microvm.policy.lifecycle import (
    SETTLED,
    STAY,
    Compact,
    Destroy,
    Done,
    Drain,
    Effect,
    Event,
    Facts,
    Failed,
    Idle,
    LowSpace,
    OutOfSpace,
    Refusal,
    Resume,
    Step,
    Stop,
    Suspend,
    Use,
    VmmDied,
)

S = VmState
_MODES = st.sampled_from(SuspendMode)
_REQUESTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Use()),
    st.builds(Suspend, _MODES, st.booleans()),
    st.builds(Resume, st.booleans(), st.booleans()),
    st.builds(Stop, st.booleans()),
    st.builds(Idle, st.integers(0, 2), _MODES),
    st.just(VmmDied("died")),
    st.sampled_from([OutOfSpace(), LowSpace(), Compact()]),
    st.just(Drain()),
)
_ENDS = st.builds(Failed, st.just("why"), st.booleans(), st.booleans()) | st.just(Done())


@dataclass
class World:
    """A VM as its driver would have it, and what is true of its files and its VMM."""

    facts: Facts
    effect: Effect | None = lifecycle.CREATE
    then: VmState | None = None  # entered when the effect has ended well
    saved: int = 0
    spent: int = 0
    vmm: bool = True
    gone: bool = False

    def take(self, event: Event) -> None:
        """One request or news, while no effect runs."""
        answer = lifecycle.decide(self.facts, event)
        if isinstance(event, Use) and answer is STAY:
            assert self.facts.state is S.RUNNING
            assert self.vmm
        if isinstance(event, Idle) and event.seen != self.facts.activity:
            assert not isinstance(answer, Step)
        if isinstance(answer, Refusal):
            return
        if isinstance(answer, Step):
            self.step(answer)

    def step(self, step: Step) -> None:
        if self.facts.state is S.DESTROYING:
            assert step.state is S.DESTROYING
        before = self.facts.state if self.facts.state in SETTLED else self.facts.before
        if step.effect is None:
            self.effect = None
            self.gone = step.gone
            self.facts = replace(self.facts, state=step.state, before=None)
            self.check_settled()
            return
        self.effect = step.effect
        self.then = step.state if step.effect.settles_after else None
        state = self.facts.state if step.effect.settles_after else step.state
        self.facts = replace(self.facts, state=state, before=before)

    def end(self, ending: Done | Failed) -> None:
        """The running effect ends, with what it did to files and VMM."""
        assert self.effect is not None
        ending = self.act(self.effect, ending)
        effect, then, self.effect, self.then = self.effect, self.then, None, None
        self.facts = replace(self.facts, checkpoint=self.saved > self.spent)
        if isinstance(ending, Done) and then is not None:
            self.facts = replace(self.facts, state=then, before=None)
            self.check_settled()
            return
        if isinstance(ending, Done) and effect is lifecycle.RELEASE:
            return
        answer = lifecycle.decide(self.facts, ending)
        assert not isinstance(answer, Refusal)
        if isinstance(answer, Step):
            self.step(answer)

    def act(self, effect: Effect, ending: Done | Failed) -> Done | Failed:
        well = isinstance(ending, Done)
        committed = not well and ending.committed
        if effect is lifecycle.RELEASE:  # never fails
            self.vmm = False
            return Done()
        if effect is lifecycle.HIBERNATE:
            self.saved += well or committed
            self.vmm = not (well or committed) and self.vmm
        elif effect in {lifecycle.WAKE, lifecycle.BOOT}:
            if well or committed:
                assert effect is lifecycle.BOOT or self.saved > self.spent, "a spent checkpoint was loaded"
                self.spent = self.saved
            self.vmm = well or committed
        elif effect in {lifecycle.POWER_OFF, lifecycle.REMOVE} and well:
            self.vmm = False
        return ending

    def check_settled(self) -> None:
        state = self.facts.state
        if state is S.HIBERNATED:
            assert self.saved > self.spent, "hibernated without a checkpoint"
        if state in {S.RUNNING, S.PAUSED}:
            assert self.vmm
            assert self.saved == self.spent, "it runs on from a checkpoint that could be loaded again"
        if state in {S.STOPPED, S.HIBERNATED}:
            assert not self.vmm


def _started(ended: Done | Failed) -> World:
    world = World(Facts(S.CREATING))
    world.end(ended)
    return world


@given(st.lists(st.tuples(_REQUESTS | st.just(Destroy()), _ENDS), max_size=40), st.booleans())
def test_what_is_saved_is_loaded_once_and_what_runs_has_a_vmm(
    ops: list[tuple[Event, Done | Failed]], draining: bool
) -> None:
    world = _started(Done())
    for event, ending in ops:
        if world.gone:
            break
        world.take(event)
        # what follows an effect by itself (a release, a removal) ends well; what was asked for, as drawn
        while world.effect is not None:
            world.end(ending)
            ending = Done()
    if draining and not world.gone:
        _drains(world)


def _drains(world: World) -> None:
    world.facts = replace(world.facts, draining=True)
    was = world.facts.state
    for event in (Use(), Resume(), Suspend(), Stop(), Idle(world.facts.activity, SuspendMode.PAUSE)):
        world.take(event)
        assert world.facts.state is was
        assert world.effect is None
    world.take(Drain())
    while world.effect is not None:
        world.end(Done())
    assert world.facts.state in SETTLED - {S.RUNNING, S.PAUSED} | {S.DESTROYING}


@given(st.lists(st.tuples(_REQUESTS, _ENDS), max_size=20), st.lists(_ENDS, max_size=4))
def test_a_destroyed_vm_is_gone_as_soon_as_one_removal_works(
    ops: list[tuple[Event, Done | Failed]], removals: list[Done | Failed]
) -> None:
    world = _started(Done())
    for event, ending in ops:
        world.take(event)
        while world.effect is not None:
            world.end(ending)
            ending = Done()
    for ending in [*removals, Done()]:
        world.take(Destroy())
        assert world.effect is lifecycle.REMOVE
        world.end(ending)
        assert world.facts.state is S.DESTROYING
        assert world.gone is isinstance(ending, Done)
        if world.gone:
            return
    raise AssertionError("it is still there")


@given(st.lists(_REQUESTS, max_size=10))
def test_a_destroy_takes_over_from_any_effect_whatever_waits(waiting: list[Event]) -> None:
    for state in set(S) - SETTLED:
        for event in waiting:
            lifecycle.decide(Facts(state), event)
        answer = lifecycle.decide(Facts(state), Destroy())
        assert answer == Step(S.DESTROYING, lifecycle.REMOVE)
