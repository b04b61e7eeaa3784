"""Coarse symbols in bytes: gaps between the elements of tier 0, five trits or eight bits in a byte."""

from __future__ import annotations

import numba
import numpy as np
from numba import int8, int32, int64, uint8

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)

SKIP = 127
"""The longest gap that has a byte of its own."""


def _spread_trits():
    table = np.zeros(256, np.uint64)
    for byte in range(243):
        for place in range(5):
            digit = byte // 3**place % 3
            table[byte] |= np.uint64((0, 1, 255)[digit]) << np.uint64(8 * place)
    return table


TRITS = _spread_trits()
"""uint64[256]: the five trits of a byte as int8, the first lowest; digit 2 is -1."""

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").copy().view("<u8").ravel()
"""uint64[256]: the eight bits of a byte as bytes, the first lowest."""


@_jit
def write_gaps(q, places, out):
    """Write the places and signs of int8[n] that are not 0 as gaps.

    Args:
        q: int8[n].
        places: room, uint32[n + 1].
        out: uint8[n + n // 127 + 1], written to.

    Returns:
        How many bytes were written.
    """
    count = 0
    for i in range(q.size):  # without a branch, which would often be mispredicted
        places[count] = i
        count += q[i] != 0
    k = 0
    last = int64(-1)
    for j in range(count):
        place = int64(places[j])
        gap = place - last - 1
        last = place
        while gap >= SKIP:
            out[k] = 2 * SKIP
            k += 1
            gap -= SKIP
        out[k] = 2 * gap + (q[place] < 0)
        k += 1
    return k


@_jit
def read_gaps(gaps, q):
    """Set elements of q (int8[n], all 0) from `write_gaps`; return whether they fit."""
    i = 0
    n = q.size
    invalid = 0
    for k in range(gaps.size):
        byte = int64(gaps[k])
        i += byte >> 1
        if byte < 2 * SKIP:
            if i >= n:
                return False
            q[i] = int8(1 - 2 * (byte & 1))
            i += 1
        else:
            invalid |= byte & 1
    return invalid == 0


@_jit
def pack_trits(trits, count, out):
    """Five of uint8[count + 5 or more] in a byte of `out` (uint8[ceil(count / 5)]), the first as the units digit."""
    for i in range(count, count + 5):
        trits[i] = 0
    for k in range((count + 4) // 5):
        i = 5 * k
        out[k] = trits[i] + 3 * trits[i + 1] + 9 * trits[i + 2] + 27 * trits[i + 3] + 81 * trits[i + 4]


@_jit
def pack_bits(bits, count, out):
    """Eight of uint8[count + 8 or more] in a byte of `out` (uint8[ceil(count / 8)]), the first as the lowest bit."""
    for i in range(count, count + 8):
        bits[i] = 0
    for k in range((count + 7) // 8):
        byte = 0
        for place in range(8):
            byte |= int32(bits[8 * k + place]) << place
        out[k] = uint8(byte)


@_jit
def unpack_bits(packed, table, out):
    """Write the bits of uint8[k] to `out` (int8[8 k] or more); table: `BITS`."""
    eights = out[: 8 * packed.size].view(np.uint64)
    for k in range(packed.size):
        eights[k] = table[packed[k]]
