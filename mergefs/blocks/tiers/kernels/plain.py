"""Some loops as ordinary code: what `wide` does with vectors and words, for the last elements and for comparison.

Both give the same bytes and the same values.
"""

from __future__ import annotations

import numpy as np
from numba import int8, int32, int64, uint16, uint32, uint64

from mergefs.blocks.tiers.kernels.centroids import size
from mergefs.blocks.tiers.kernels.floats import ordered, rounded, step, value
from mergefs.blocks.tiers.kernels.quantise import LANES, PAGE, add_squares, total
from mergefs.blocks.tiers.kernels.streams import following
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)


@_jit
def table(codes, unit, grid):
    """What `delta` looks up: float32[4096], the delta of class e and quantised q at 16 e + (q modulo 16)."""
    found = np.zeros(4096, np.float32)
    for exponent in range(256):
        for magnitude in range(1, 8):
            code = int32(codes >> uint64(8 * magnitude)) & int32(255)
            bits = size(code, unit, exponent, grid)
            found[16 * exponent + magnitude] = value(bits)
            found[16 * exponent + 16 - magnitude] = -value(bits)
    return found


@_jit
def delta(base, q, sizes, out):
    """Write the delta (float32[n]) that coarse tiers predict; sizes: from `table`."""
    for i in range(base.size):
        out[i] = sizes[uint32(uint32(base[i] & uint16(0x7F80)) >> uint32(3)) | (uint32(q[i]) & uint32(15))]


@_jit
def predict(base, q, codes, unit, out):
    """Write the ordered bits (uint16[n]) of the predicted expert; where q is 0 that is the base itself."""
    for i in range(base.size):
        bits = rounded(np.float32(value(base[i]) + step(base[i], int32(q[i]), codes, unit)))
        out[i] = ordered(bits if q[i] != 0 else base[i])


@_jit
def remaining(expert, base, q, sizes, page):
    """Return the squared error of the predicted delta; page: float32[1024]."""
    sums = np.zeros(LANES, np.float64)
    n = base.size
    for start in range(0, n, PAGE):
        count = min(PAGE, n - start)
        b = base[start : start + count]
        x = expert[start : start + count]
        errors = page[:count]
        delta(b, q[start : start + count], sizes, errors)
        for i in range(count):
            errors[i] = np.float32(value(x[i]) - value(b[i])) - errors[i]
        add_squares(errors, sums)
    return total(sums)


@_jit
def split(q, before, base, limit, changes, signs, bits):
    """Write what refines elements of classes below `limit`, a bit each, in three streams.

    Args:
        q, before: int8[n] after and before the tier.
        base: uint16[n].
        limit: the tier's first class that takes no part.
        changes: uint64[n // 64 + 2], the lowest bit first: whether q is not 0, where `before` is.
        signs: the same: whether q is negative, where it is not 0 and `before` is.
        bits: the same: the next bit of the magnitude, where `before` is not 0.

    Returns:
        (changes written, signs written, bits written). What is left of a stream's last word is 0.
    """
    changes[0], signs[0], bits[0] = 0, 0, 0
    return split_from(0, q, before, base, limit, changes, signs, bits, 0, 0, 0)


@_jit
def split_from(start, q, before, base, limit, changes, signs, bits, x, s, y):
    """`split` from element `start` on, after so many of each."""
    bound = min(int32(limit) << 7, 0x7FFF)
    last = uint64(63)
    x, s, y = uint64(x), uint64(s), uint64(y)
    held = changes[x >> uint64(6)]
    held_signs = signs[s >> uint64(6)]
    held_bits = bits[y >> uint64(6)]
    # Every word is stored again and again, and only the right stream moves on: no branch to mispredict.
    for i in range(start, q.size):
        signed = int32(q[i])
        active = uint64((int32(base[i]) & 0x7F80) < bound)
        zero = active & uint64(before[i] == 0)
        other = active ^ zero
        change = zero & uint64(signed != 0)
        held |= change << (x & last)
        held_signs |= (change & uint64(signed < 0)) << (s & last)
        held_bits |= (other & uint64(signed & 1)) << (y & last)
        changes[x >> uint64(6)] = held
        signs[s >> uint64(6)] = held_signs
        bits[y >> uint64(6)] = held_bits
        x += zero
        s += change
        y += other
        held = uint64(0) if (x & last) < zero else held
        held_signs = uint64(0) if (s & last) < change else held_signs
        held_bits = uint64(0) if (y & last) < other else held_bits
    return int64(x), int64(s), int64(y)


@_jit
def refine(q, base, limit, changes, signs, bits, used):
    """Take one tier's streams into q: 2 q plus 0, 1 or -1 where q is 0, away from 0 by a bit elsewhere.

    Args:
        q: int8[k], changed.
        base: uint16[k].
        limit: the tier's first class that takes no part.
        changes, signs, bits: see `split`.
        used: uint64[3], how many of each are used already; changed.
    """
    refine_from(0, q, base, limit, changes, signs, bits, used)


@_jit
def refine_from(start, q, base, limit, changes, signs, bits, used):
    """`refine` from element `start` on."""
    bound = min(int32(limit) << 7, 0x7FFF)
    x, s, y = used[0], used[1], used[2]
    for first in range(start, q.size, 64):
        next_changes, next_signs, next_bits = following(changes, x), following(signs, s), following(bits, y)
        for i in range(first, min(first + 64, q.size)):
            signed = int32(q[i])
            active = uint64((int32(base[i]) & 0x7F80) < bound)
            zero = active & uint64(signed == 0)
            other = active ^ zero
            change = zero & next_changes
            bit = other & next_bits
            negative = (signed >> 31) | -int32(change & next_signs)
            q[i] = int8(2 * signed + ((int32(change | bit) ^ negative) - negative))
            next_changes >>= zero
            next_signs >>= change
            next_bits >>= other
            x += zero
            s += change
            y += other
    used[0], used[1], used[2] = x, s, y
