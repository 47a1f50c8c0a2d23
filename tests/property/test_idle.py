"""No timer of any age puts a VM to rest under a call or a job, or before its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microvm.policy import idle
from microvm.policy.idle import Arm, Disarm, Entered, Fired, Idle, Jobs, Left, PutToRest, Rested, Woke

_OPS = st.lists(
    st.tuples(
        st.floats(0, 20),
        st.one_of(
            st.just(Entered()),
            st.just(Left()),
            st.builds(Jobs, st.integers(0, 2)),
            st.just(Woke()),
            st.just(Rested()),
            st.builds(Fired, st.integers(0, 30)),
        ),
    ),
    max_size=40,
)


@given(st.sampled_from([0.0, 5.0, 10.0]), _OPS)
def test_idle_rests_only_after_its_whole_time_without_anything(
    idle_seconds: float, ops: list[tuple[float, idle.Event]]
) -> None:
    now = 0.0
    state = Idle(idle_seconds)
    quiet_since = 0.0
    armed: Arm | None = None
    for wait, event in ops:
        now += wait
        if isinstance(event, Left) and not state.uses:
            continue
        before = state
        state, effects = idle.decide(state, event, now)
        assert state.activity >= before.activity
        if state.activity > before.activity:
            quiet_since = now
        for effect in effects:
            match effect:
                case Arm():
                    armed = effect
                case Disarm():
                    armed = None
                case PutToRest():
                    assert state.awake
                    assert not state.uses
                    assert not state.active_jobs
                    assert idle_seconds > 0
                    assert now - quiet_since >= idle_seconds - 1e-6
                    assert effect.seen == state.activity
        # the one timer that the caller keeps is always the right one
        expected = None if state.deadline is None else Arm(state.deadline, state.activity)
        assert armed == expected
