"""Differences from the base in units in the last place, a byte for each element in the order of the elements."""

from __future__ import annotations

import numba
import numpy as np
from numba import int16, int32, uint8, uint16

from mergefs.blocks.tiers.kernels.floats import ordered, unordered, value

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)
_inline = numba.njit(nogil=True, cache=True, inline="always")

TILE = 4096
"""Elements that are worked on at a time, so that what is noted of each stays in the near cache."""

HIGH = np.uint64(0xFF00FF00FF00FF00)
"""The upper bytes of four."""


@_jit
def take(expert, base, low, places, high):
    """Write the zigzag differences of the ordered bits (uint16[n]).

    Args:
        expert, base: uint16[n].
        low: uint8[n], written to: the lower bytes.
        places, high: uint32[n], uint8[n], written to: where the upper byte is not 0, and that byte.

    Returns:
        How many upper bytes are not 0.
    """
    count = 0
    room = np.zeros(TILE, np.uint16)
    fours = room.view(np.uint64)
    for start in range(0, base.size, TILE):
        part = expert[start : start + TILE]
        below = base[start : start + TILE]
        found = low[start : start + TILE]
        for i in range(part.size):
            folded = _folded(part[i], below[i])
            room[i] = folded
            found[i] = uint8(folded)
        for four in range((part.size + 3) // 4):
            if fours[four] & HIGH:
                for i in range(4 * four, min(4 * four + 4, part.size)):
                    if room[i] > uint16(255):
                        places[count] = start + i
                        high[count] = uint8(room[i] >> uint16(8))
                        count += 1
    return count


@_inline
def _folded(expert, base):
    difference = int32(int16(ordered(expert) - ordered(base)))
    return uint16((difference << 1) ^ (difference >> 15))


@_jit
def _other(folded, base):
    difference = (folded >> 1) ^ -(folded & 1)
    return unordered(uint16(int32(ordered(base)) + difference))


@_jit
def fits(places, n):
    """Tell whether places are below n, and each above the one before."""
    last = -1
    for place in places:
        if place <= last or place >= n:
            return False
        last = int(place)
    return True


@_jit
def bits(low, places, high, base, out):
    """Undo `take`: write the expert's bits, uint16[n]. The places have to fit."""
    for i in range(base.size):
        out[i] = _other(int32(low[i]), base[i])
    for k in range(places.size):
        i = places[k]
        out[i] = _other(int32(low[i]) | int32(high[k]) << 8, base[i])


@_jit
def deltas(low, places, high, base, out):
    """Write the exact delta, float32[n]; see `bits`."""
    for i in range(base.size):
        out[i] = np.float32(value(_other(int32(low[i]), base[i])) - value(base[i]))
    for k in range(places.size):
        i = places[k]
        out[i] = np.float32(value(_other(int32(low[i]) | int32(high[k]) << 8, base[i])) - value(base[i]))
