"""The host's clocks: wall time, and the rate of its time stamp counter.

Promises the counter's rate to better than 100 ppm, as guests are told it (`tsc_early_khz`) and as
checkpoints record it. Must not be imported by policy, which is given times. Neighbour: `native/clock.c`
reads the counter.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

from microvm._native import ffi, lib

WINDOW_SECONDS: Final = 0.04
"""Distance of two samples. Reading both clocks takes some 50 ns, so one window errs by about 2 ppm."""

WINDOWS: Final = 3
"""The median of three survives one sample that a hypervisor interrupted in the wrong place."""


def measure_tsc_khz() -> int:
    """Measures the counter against CLOCK_MONOTONIC_RAW, which no time daemon slews.

    Takes about 120 ms, asleep: in a worker thread.
    """
    return round(statistics.median(_tsc_khz_of_one_window() for _ in range(WINDOWS)))


def host_tsc_khz() -> int:
    """The counter's rate in kHz: what the processor states, else what is measured (then about 120 ms)."""
    return lib.mvm_cpuid_tsc_khz() or measure_tsc_khz()


def realtime_ns() -> int:
    """Wall time, nanoseconds since the epoch, UTC."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _tsc_khz_of_one_window() -> float:
    first_tsc, first_ns = _sample()
    time.sleep(WINDOW_SECONDS)
    last_tsc, last_ns = _sample()
    return (last_tsc - first_tsc) * 1_000_000 / (last_ns - first_ns)


def _sample() -> tuple[int, int]:
    tsc = ffi.new("uint64_t *")
    monotonic_raw_ns = ffi.new("int64_t *")
    lib.mvm_tsc_sample(tsc, monotonic_raw_ns)
    return int(tsc[0]), int(monotonic_raw_ns[0])
