"""The counter's rate: stated or measured."""

from __future__ import annotations

import time
from typing import Any

import pytest

from microvm.host import clock
from microvm.host.clock import host_tsc_khz, measure_tsc_khz, realtime_ns


def test_two_measurements_agree_to_100_ppm() -> None:
    first, second = measure_tsc_khz(), measure_tsc_khz()
    assert abs(first - second) <= first * 100e-6


def test_the_rate_is_that_of_a_window_of_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sampler:
        moment = 0

        def mvm_cpuid_tsc_khz(self) -> int:
            return 0

        def mvm_tsc_sample(self, tsc: Any, monotonic_raw_ns: Any) -> None:
            self.moment += 1
            tsc[0] = 5_000_000_000 + self.moment * 104_000_000
            monotonic_raw_ns[0] = self.moment * 40_000_000

    def sleep_not(seconds: float) -> None:
        assert seconds == clock.WINDOW_SECONDS

    monkeypatch.setattr(clock, "lib", Sampler())
    monkeypatch.setattr(clock.time, "sleep", sleep_not)
    assert measure_tsc_khz() == 2_600_000
    assert host_tsc_khz() == 2_600_000


def test_what_the_processor_states_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stating:
        def mvm_cpuid_tsc_khz(self) -> int:
            return 2_400_000

    monkeypatch.setattr(clock, "lib", Stating())
    assert host_tsc_khz() == 2_400_000


def test_wall_time_is_the_kernels() -> None:
    before = time.time_ns()
    assert before <= realtime_ns() <= time.time_ns()
