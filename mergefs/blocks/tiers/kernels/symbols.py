"""Tier 0: the gaps between its elements in bytes."""

from __future__ import annotations

from numba import int8, int64, uint64

from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

SKIP = 127
"""The longest gap that has a byte of its own."""

_REACH = 8 * (SKIP + 1)
_ONES = 0x0101010101010101
_LOW = 0x7F7F7F7F7F7F7F7F


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
def read_gaps(gaps, q, n):
    """Write n elements of q from `write_gaps`; return whether they fit.

    Args:
        gaps: uint8[m].
        q: int8[n] or more, overwritten.
    """
    q[:n] = 0
    i, k = uint64(0), uint64(0)  # unsigned: an index that may be negative costs more
    size, end = uint64(gaps.size), uint64(n)
    one = uint64(1)
    while k < size:
        # Eight at a time, as long as no skip is among them and they cannot leave the block.
        while k + uint64(8) <= size and i + uint64(_REACH) < end:
            eight = uint64(0)
            for place in range(8):
                eight |= uint64(gaps[k + uint64(place)]) << uint64(8 * place)
            if eight & ((eight & uint64(_LOW)) + uint64(2 * _ONES)) & ~uint64(_LOW):
                break
            odd = eight & uint64(_ONES)
            signs = odd * uint64(0xFE) | uint64(_ONES)
            for place in range(8):
                i += (eight >> uint64(8 * place + 1)) & uint64(127)
                q[i] = int8(signs >> uint64(8 * place))
                i += one
            k += uint64(8)
        if k == size:
            break
        byte = uint64(gaps[k])
        i += byte >> one
        if byte < uint64(2 * SKIP):
            if i >= end:
                return False
            q[i] = int8(one - ((byte & one) << one))
            i += one
        elif byte > uint64(2 * SKIP):
            return False
        k += one
    return True
