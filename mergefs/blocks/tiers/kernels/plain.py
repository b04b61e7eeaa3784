"""The loops that exist twice: here as ordinary code for any processor, in `wide` as vector instructions.

Both give the same bytes and the same values.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import float32, int8, int32, int64, uint8, uint64

from mergefs.blocks.tiers.kernels.floats import ordered, rounded, step, value
from mergefs.blocks.tiers.kernels.quantise import LANES, PAGE, add_squares, total

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)


@_jit
def delta(base, q, codes, unit, grid, out):
    """Write the delta (float32[n]) that coarse tiers predict; classes from `grid` on go to the expert's bf16 grid."""
    for i in range(base.size):
        signed = int32(q[i])
        size = step(base[i], signed, codes, unit)
        b = value(base[i])
        on_grid = value(rounded(np.float32(b + size))) - b
        found = on_grid if (int32(base[i] >> 7) & 255) >= grid else size
        out[i] = found if signed != 0 else float32(0)


@_jit
def predict(base, q, codes, unit, out):
    """Write the ordered bits (uint16[n]) of the predicted expert; where q is 0 that is the base itself."""
    for i in range(base.size):
        bits = rounded(np.float32(value(base[i]) + step(base[i], int32(q[i]), codes, unit)))
        out[i] = ordered(bits if q[i] != 0 else base[i])


@_jit
def remaining(expert, base, q, codes, unit, grid, page):
    """Return the squared error of the predicted delta; page: float32[1024]."""
    sums = np.zeros(LANES, np.float64)
    n = base.size
    for start in range(0, n, PAGE):
        count = min(PAGE, n - start)
        b = base[start : start + count]
        x = expert[start : start + count]
        errors = page[:count]
        delta(b, q[start : start + count], codes, unit, grid, errors)
        for i in range(count):
            errors[i] = np.float32(value(x[i]) - value(b[i])) - errors[i]
        add_squares(errors, sums)
    return total(sums)


@_jit
def split(q, before, base, limit, trits, bits):
    """Write what refines elements of classes below `limit`, one symbol a byte, in two streams.

    Args:
        q, before: int8[n] after and before the tier.
        base: uint16[n].
        limit: the tier's first class that takes no part.
        trits: uint8[n + 1] or more: 0, 1 for +, 2 for -, where `before` is 0.
        bits: uint8[n + 1] or more: the next bit of the magnitude, elsewhere.

    Returns:
        (trits written, bits written).
    """
    return split_from(0, q, before, base, limit, trits, bits, 0, 0)


@_jit
def split_from(start, q, before, base, limit, trits, bits, written_trits, written_bits):
    """`split` from element `start` on, after so many trits and bits."""
    bound = min(int32(limit) << 7, 0x7FFF)
    t = int64(written_trits)
    u = int64(written_bits)
    # Every symbol is written to both streams, and only the right one moves on: no branch to mispredict.
    for i in range(start, q.size):
        signed = int32(q[i])
        active = int64((int32(base[i]) & 0x7F80) < bound)
        zero = int64(before[i] == 0)
        trits[t] = uint8(signed + ((signed >> 31) & 3))
        bits[u] = uint8(signed & 1)
        t += active & zero
        u += active & (1 - zero)
    return t, u


@_jit
def refine(q, trits, bits, base, limit):
    """Take one tier's symbols into q: 2 q plus a trit where q is 0, away from 0 by a bit elsewhere.

    Args:
        q: int8[n], changed.
        trits, bits: int8[n + 1] or more: 0, 1 or -1, and 0 or 1.
        base: uint16[n].
        limit: the tier's first class that takes no part.

    Returns:
        (trits used, bits used).
    """
    return refine_from(0, q, trits, bits, base, limit, 0, 0)


@_jit
def refine_from(start, q, trits, bits, base, limit, used_trits, used_bits):
    """`refine` from element `start` on, after so many trits and bits."""
    bound = min(int32(limit) << 7, 0x7FFF)
    t = int64(used_trits)
    u = int64(used_bits)
    for i in range(start, q.size):
        signed = int32(q[i])
        active = int32((int32(base[i]) & 0x7F80) - int32(bound)) >> 31  # all ones, or 0
        zero = int32(signed == 0)
        negative = signed >> 31
        bit = (int32(bits[u]) ^ negative) - negative
        q[i] = int8(2 * signed + (active & ((int32(trits[t]) & -zero) | (bit & (zero - 1)))))
        t -= int64(active & -zero)
        u -= int64(active & (zero - 1))
    return t, u


@_jit
def unpack_trits(packed, table, out):
    """Write the trits of uint8[k] to `out` (int8[5 k + 3] or more); table: `symbols.TRITS`."""
    for k in range(packed.size):
        five = table[packed[k]]
        i = 5 * k
        out[i] = int8(five)
        out[i + 1] = int8(five >> uint64(8))
        out[i + 2] = int8(five >> uint64(16))
        out[i + 3] = int8(five >> uint64(24))
        out[i + 4] = int8(five >> uint64(32))
