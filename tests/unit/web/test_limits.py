from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microvm.web.limits import MAX_ADDRESSES, AddressLimiter


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    limiter = AddressLimiter(per_s=2.0, burst=3.0)
    assert [limiter.take("a", 0.0) for _ in range(4)] == [None, None, None, 0.5]
    assert limiter.take("a", 0.4) is not None
    assert limiter.take("a", 0.5) is None


def test_addresses_do_not_share() -> None:
    limiter = AddressLimiter(per_s=1.0, burst=1.0)
    assert limiter.take("a", 0.0) is None
    assert limiter.take("b", 0.0) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_never_more_than_the_burst_and_the_rate_together(times: list[float]) -> None:
    limiter = AddressLimiter(per_s=2.0, burst=5.0)
    taken = [now for now in sorted(times) if limiter.take("a", now) is None]
    assert len(taken) <= 5.0 + 2.0 * (max(times) - min(times)) + 1e-6


def test_the_addresses_that_are_remembered_are_bounded() -> None:
    limiter = AddressLimiter(per_s=1.0, burst=1.0)
    for number in range(MAX_ADDRESSES + 1):
        limiter.take(str(number), 0.0)
    assert limiter.take("0", 0.0) is None  # forgotten, the oldest first
    assert limiter.take(str(MAX_ADDRESSES), 0.0) is not None
