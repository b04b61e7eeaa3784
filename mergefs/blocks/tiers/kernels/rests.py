"""The exact rest: what separates the expert from its prediction, and its grouping by class for the `fast` coding."""

from __future__ import annotations

import numpy as np
from numba import int16, int32, uint8, uint16, uint64

from mergefs.blocks.tiers.kernels.floats import ordered, unordered, value
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)


@_jit
def take(expert, predicted, q, out):
    """Write the zigzag rests uint16[n]: ordered expert minus `predicted`, mirrored where q is negative.

    Mirrored, a positive rest always leads away from the base, so that both signs of q share one distribution.
    """
    for i in range(expert.size):
        rest = int32(int16(ordered(expert[i]) - predicted[i]))
        sign = int32(int32(q[i]) >> 31)
        rest = int32(int16((rest ^ sign) - sign))
        out[i] = uint16((rest << 1) ^ (rest >> 15))


@_jit
def apply(rests, predicted, q, out):
    """Undo `take`: write the expert's bits uint16[n]."""
    for i in range(rests.size):
        folded = int32(rests[i])
        rest = (folded >> 1) ^ -(folded & 1)
        sign = int32(q[i]) >> 31
        rest = (rest ^ sign) - sign
        out[i] = unordered(uint16(int32(predicted[i]) + rest))


@_jit
def count_classes(base, starts):
    """Write where each class begins when all elements lie in the order of their classes: uint64[257]."""
    counts = np.zeros((4, 256), np.int64)  # four, because neighbours are often of one class
    whole = base.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, (base[i] >> 7) & 255] += 1
        counts[1, (base[i + 1] >> 7) & 255] += 1
        counts[2, (base[i + 2] >> 7) & 255] += 1
        counts[3, (base[i + 3] >> 7) & 255] += 1
    for i in range(whole, base.size):
        counts[0, (base[i] >> 7) & 255] += 1
    total = 0
    for c in range(256):
        starts[c] = total
        total += counts[0, c] + counts[1, c] + counts[2, c] + counts[3, c]
    starts[256] = total


@_jit
def group(rests, base, places, out):
    """Write rests (uint16[n]) in the order of their classes.

    Args:
        places: uint64[257], where each class begins; each ends up at its class's end.

    Returns:
        The least class from which on all rests are below 256.
    """
    used = np.zeros(256, np.uint16)
    for i in range(base.size):
        c = (base[i] >> 7) & 255
        rest = rests[i]
        used[c] |= rest
        k = places[c]
        out[k] = rest
        places[c] = k + uint64(1)
    c = 256
    while c > 0 and used[c - 1] < 256:
        c -= 1
    return c


@_jit
def planes(grouped, low, high):
    """Write the low bytes of uint16[n] to uint8[n] and the high bytes of the first ones to `high`."""
    for i in range(low.size):
        low[i] = uint8(grouped[i])
    for i in range(high.size):
        high[i] = uint8(grouped[i] >> uint16(8))


@_jit
def join(low, high, out):
    """Undo `planes`; elements past the end of `high` have a high byte of 0."""
    for i in range(low.size):
        out[i] = low[i]
    for i in range(high.size):
        out[i] |= uint16(uint16(high[i]) << uint16(8))


@_jit
def ungroup(grouped, base, places, out):
    """Undo `group`. Room: `grouped` has 2 n elements, so that no class of a wrong base can run past its end."""
    for i in range(base.size):
        c = (base[i] >> uint16(7)) & uint16(255)
        k = places[c]
        out[i] = grouped[k]
        places[c] = k + uint64(1)


@_jit
def subtract(expert, base, out):
    """Write the exact delta, float32[n]."""
    for i in range(base.size):
        out[i] = np.float32(value(expert[i]) - value(base[i]))


@_jit
def subtract_rest(rests, predicted, q, base, out):
    """`apply` and `subtract` in one: write the exact delta, float32[n]."""
    for i in range(rests.size):
        folded = int32(rests[i])
        rest = (folded >> 1) ^ -(folded & 1)
        sign = int32(q[i]) >> 31
        rest = (rest ^ sign) - sign
        out[i] = np.float32(value(unordered(uint16(int32(predicted[i]) + rest))) - value(base[i]))


@_jit
def order(base, places, out):
    """Write where each element lies when all lie in the order of their classes, uint32[n].

    Args:
        places: uint64[257], where each class begins; changed.
    """
    for i in range(base.size):
        c = (base[i] >> uint16(7)) & uint16(255)
        k = places[c]
        out[i] = k
        places[c] = k + uint64(1)


@_jit
def gather(grouped, order, out):
    """`ungroup` by the places that `order` found."""
    for i in range(order.size):
        out[i] = grouped[order[i]]
