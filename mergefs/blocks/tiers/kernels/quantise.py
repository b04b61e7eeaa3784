"""The encoder's measurements and its quantiser. No reader needs them."""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, uint16, uint32

from mergefs.blocks.tiers.kernels.floats import value
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

PAGE = 1024
"""Deltas are made a page at a time, in room that stays in the nearest cache."""

LANES = 16


@_jit
def add_squares(deltas, sums):
    """Add the squares of float32[k] to float64[16] sums: fixed lanes, so that every machine adds in the same order."""
    whole = deltas.size // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += np.float64(deltas[i + lane]) * np.float64(deltas[i + lane])
    for i in range(whole, deltas.size):
        sums[0] += np.float64(deltas[i]) * np.float64(deltas[i])


@_jit
def total(sums):
    """Add the lanes up."""
    whole = 0.0
    for lane in range(LANES):
        whole += sums[lane]
    return whole


@_jit
def measure(expert, base, page):
    """Return the delta's squared sum and the largest magnitude's bits in either block; page: float32[1024]."""
    sums = np.zeros(LANES, np.float64)
    largest = uint16(0)
    n = base.size
    for start in range(0, n, PAGE):
        count = min(PAGE, n - start)
        b = base[start : start + count]
        x = expert[start : start + count]
        deltas = page[:count]
        for i in range(count):
            deltas[i] = np.float32(value(x[i]) - value(b[i]))
            largest = max(largest, max(uint16(x[i] & uint16(0x7FFF)), uint16(b[i] & uint16(0x7FFF))))
        add_squares(deltas, sums)
    return total(sums), largest


@_jit
def count_active(base, limit):
    """How many elements have a class below `limit`."""
    bound = int32(limit) << 7
    count = 0
    for i in range(base.size):
        count += (int32(base[i]) & 0x7F80) < bound
    return count


@_jit
def quantise(expert, base, thresholds, limit1, limit2, q0, q1, q2):
    """Write the signed magnitudes after each coarse tier.

    Args:
        expert, base: uint16[n], finite.
        thresholds: float32[7], rising: |delta| at or above the i-th makes the magnitude i + 1.
        limit1, limit2: the classes from which on an element takes no part in tier 1, in tier 2.
        q0, q1, q2: int8[n], written to.
    """
    t0, t1, t2, t3 = thresholds[0], thresholds[1], thresholds[2], thresholds[3]
    t4, t5, t6 = thresholds[4], thresholds[5], thresholds[6]
    first = int32(limit1)
    second = int32(limit2)
    for i in range(base.size):
        delta = np.float32(value(expert[i]) - value(base[i]))
        size = abs(delta)
        exponent = int32(base[i] >> 7) & 255
        m2 = int32(size >= t0) + int32(size >= t1) + int32(size >= t2) + int32(size >= t3)
        m2 += int32(size >= t4) + int32(size >= t5) + int32(size >= t6)
        ulp = np.uint32(uint32(max(exponent, 8) - 7) << uint32(23)).view(np.float32)
        # What no later tier can say about a coarse class, tier 0 says: a change at all, or one of two ulps and more.
        least = np.float32(0.5) * ulp if exponent >= first else np.float32(1.5) * ulp
        m2 = max(m2, int32(4)) if (exponent >= second) & (size > least) else m2
        m1 = m2 >> 1
        m0 = m2 >> 2
        m1 = m1 if exponent < first else 2 * m0
        m2 = m2 if exponent < second else 2 * m1
        negative = delta < float32(0)
        q0[i] = int8(-m0 if negative else m0)
        q1[i] = int8(-m1 if negative else m1)
        q2[i] = int8(-m2 if negative else m2)


@_jit
def sum_bins(expert, base, q, fine, stride, counts, sums):
    """Count the elements and add up |delta| by magnitude, over every stride-th group of four elements.

    Args:
        expert, base, q: of n elements.
        fine: classes below it are counted in row 0, the others in row 1.
        stride: 1 for all elements.
        counts, sums: int64[2, 16] and float64[2, 16], written to.
    """
    # Four lanes, because neighbours often fall in the same bin and would wait for each other.
    lane_counts = np.zeros((4, 32), np.int64)
    lane_sums = np.zeros((4, 32), np.float64)
    for start in range(0, base.size - 3, 4 * stride):
        for lane in range(4):
            i = start + lane
            k = abs(int32(q[i])) | (int32(((base[i] >> 7) & 255) >= fine) << 4)
            lane_counts[lane, k] += 1
            lane_sums[lane, k] += np.float64(abs(np.float32(value(expert[i]) - value(base[i]))))
    for k in range(32):
        counts[k >> 4, k & 15] = lane_counts[0, k] + lane_counts[1, k] + lane_counts[2, k] + lane_counts[3, k]
        sums[k >> 4, k & 15] = lane_sums[0, k] + lane_sums[1, k] + lane_sums[2, k] + lane_sums[3, k]
