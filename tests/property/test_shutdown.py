"""Whatever happens, every VM is saved or killed once, and the drain is over by its deadline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microvm.model import VmId
from microvm.policy import shutdown
from microvm.policy.shutdown import (
    CLOSING_S,
    PARALLEL,
    Drain,
    Kill,
    Phase,
    RequestsEnded,
    Rested,
    Save,
    Stop,
    Tick,
)

_OPS = st.lists(
    st.tuples(st.floats(0, 10), st.sampled_from(["ended", "rested", "tick", "stop"]), st.integers(0, 9)),
    max_size=40,
)


@given(st.integers(0, 10), st.floats(0, 90), _OPS)
def test_a_drain_loses_no_vm_and_ends_in_time(
    vms: int, budget_s: float, ops: list[tuple[float, str, int]]
) -> None:
    live = tuple(VmId(f"vm{n}") for n in range(vms))
    now = 0.0
    drain, _ = shutdown.decide(Drain(budget_s), Stop(), now)
    saving: set[VmId] = set()
    settled: list[VmId] = []
    ended_at: float | None = None
    for wait, op, choice in [*ops, *[(100.0, "tick", 0)] * 3]:
        alarm = drain.wake_at
        now = now + wait if alarm is None else max(now, min(now + wait, alarm))  # a timer fires in time
        event: shutdown.Event
        match op:
            case "ended":
                event = RequestsEnded(live)
            case "rested" if saving:
                vm_id = sorted(saving)[choice % len(saving)]
                saving.remove(vm_id)
                settled.append(vm_id)
                event = Rested(vm_id)
            case "stop":
                event = Stop()
            case _:
                event = Tick(live)
        drain, effects = shutdown.decide(drain, event, now)
        for effect in effects:
            if isinstance(effect, Save):
                saving.add(effect.vm_id)
            elif isinstance(effect, Kill):
                saving.discard(effect.vm_id)
                settled.append(effect.vm_id)
        if ended_at is None and drain.phase is Phase.ENDED:
            ended_at = now
        assert saving == drain.saving
        assert len(saving) <= PARALLEL
    assert drain.phase is Phase.ENDED
    assert sorted(settled) == sorted(live)
    assert ended_at is not None
    assert ended_at <= max(budget_s - CLOSING_S, 0.0)
