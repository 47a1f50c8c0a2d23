/* The host's time stamp counter beside its clock. Arithmetic is microvm/host/clock.py's. */
#define _GNU_SOURCE
#include "shim.h"

#include <cpuid.h>
#include <time.h>
#include <x86intrin.h>

/* The rate that the processor itself states, in kHz, or 0 where it states none.
 *
 * Leaf 0x15 only: TSC = crystal * numerator / denominator, all three given. Leaf 0x16 is a
 * marketing figure in whole MHz (the kernel calls it a first guess), so it is not used.
 * Source: Intel SDM vol. 2A, CPUID; arch/x86/kernel/tsc.c, native_calibrate_tsc(). */
uint32_t mvm_cpuid_tsc_khz(void)
{
    unsigned denominator = 0, numerator = 0, crystal_hz = 0, reserved = 0;
    if (!__get_cpuid(0x15, &denominator, &numerator, &crystal_hz, &reserved))
        return 0;
    if (!denominator || !numerator || !crystal_hz)
        return 0;
    return (uint32_t)((uint64_t)crystal_hz * numerator / denominator / 1000);
}

/* One moment on both clocks. Of 64 attempts the one with the narrowest bracket counts: an
 * interrupt or a busy neighbour between the reads then costs nothing. */
void mvm_tsc_sample(uint64_t *tsc, int64_t *monotonic_raw_ns)
{
    uint64_t narrowest = UINT64_MAX;
    for (int attempt = 0; attempt < 64; attempt++) {
        struct timespec now;
        unsigned cpu;
        uint64_t before = __rdtscp(&cpu);
        clock_gettime(CLOCK_MONOTONIC_RAW, &now);
        uint64_t after = __rdtscp(&cpu);
        if (after - before >= narrowest)
            continue;
        narrowest = after - before;
        *tsc = before + narrowest / 2;
        *monotonic_raw_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
}
