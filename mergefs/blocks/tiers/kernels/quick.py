"""Differences from the base in units in the last place, of a byte or a nibble for each element.

What is done to many elements at once is in `quick_vectors`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int16, int32, int64, uint8, uint16, uint32, uint64

from mergefs.blocks.tiers.kernels.floats import ordered, unordered, value
from mergefs.blocks.tiers.kernels.quick_vectors import (
    LANES,
    below64,
    bits32,
    bytes32,
    clear64,
    deltas32,
    lowest,
    move64,
    nibbles64,
    pointer,
    take64,
    word16,
    word32,
)
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)
_short = njit(boundscheck=False)
"""For what takes less time than to wait for the interpreter's lock, and so keeps it."""
_inline = njit(nogil=True, inline="always")
_numba: Any = numba

RUN = 64
"""Elements whose low nibbles lie in 32 bytes: of each the one and of the element 32 places on the other."""

TILE = 2048
"""Elements that are worked on at a time, so that what is noted of each stays in the near cache; a multiple of RUN that
fits 16 bits."""

BYTES, NIBBLES = 0, 1
"""What the first plane has for each element."""

COLUMNS = 11
EXPECTED, FOUND = [4, 7], [10, 9]
"""Of the table that `deltas` and `bits` read; and which of them are as which others when a whole block was read."""


@_inline
def _folded(expert, base):
    difference = int32(int16(ordered(expert) - ordered(base)))
    return uint16((difference << 1) ^ (difference >> 15))


@_inline
def _other(folded, base):
    difference = (folded >> 1) ^ -(folded & 1)
    return unordered(uint16(int32(ordered(base)) + difference))


@_inline
def _class(base):
    return (uint32(base) >> uint32(7)) & uint32(255)


@_jit
def survey(expert, base, step, counts):
    """Count elements of each class by the size of their zigzag differences.

    Args:
        expert, base: uint16[n].
        step: RUN of so many elements are counted.
        counts: int64[256, 3], added to: all, those of more than a nibble, those of more than a byte.
    """
    for start in range(0, base.size, step):
        for i in range(start, min(start + RUN, base.size)):
            folded = _folded(expert[i], base[i])
            row = counts[_class(base[i])]
            row[0] += 1
            row[1] += folded > uint16(15)
            row[2] += folded > uint16(255)


@_jit
def take_bytes(expert, base, low, places, values):
    """Write the zigzag differences of the ordered bits (uint16[n]), a byte an element.

    Args:
        expert, base: uint16[n].
        low: uint8[n], written to: the lower bytes.
        places, values: uint32[n], uint16[n], written to: which elements take more than a byte, and their differences.

    Returns:
        How many take more.
    """
    count = 0
    room = np.empty(TILE, np.uint16)
    for start in range(0, base.size, TILE):
        stop = min(start + TILE, base.size)
        # In a loop of its own, so that it compiles to vector instructions.
        for i in range(start, stop):
            folded = _folded(expert[i], base[i])
            room[i - start] = folded
            low[i] = uint8(folded)
        for i in range(start, stop):
            if room[i - start] > uint16(255):
                places[count] = i
                values[count] = room[i - start]
                count += 1
    return count


@_short
def fits(payload, at, count, n):
    """Tell whether `count` places (uint32) from byte `at` on are below n, and each above the one before."""
    last = int64(-1)
    address = payload.ctypes.data + at
    for i in range(count):
        place = int64(word32(address + 4 * i))
        if place <= last or place >= n:
            return False
        last = place
    return True


@_inline
def _array(address, size, dtype):
    return _numba.carray(pointer(uint64(address)), (size,), dtype)


@_inline
def _below_run(base, start, limit):
    """`below64` of the run that begins at `start`, which may be cut."""
    if start + RUN <= base.size:
        return below64(base.ctypes.data + 2 * start, limit)
    found = uint64(0)
    for i in range(start, base.size):
        if int64(base[i] & uint16(0x7FFF)) < limit:
            found |= uint64(1) << uint64(i - start)
    return found


@_jit
def take_nibbles(expert, base, limit, low, second, places, values):
    """Write the zigzag differences of the ordered bits (uint16[n]), a nibble an element, and two for small numbers.

    Args:
        expert, base: uint16[n].
        limit: elements whose magnitude's bits are below that have a second nibble.
        low: uint8[32 ceil(n / 64)], written to: the lowest nibbles, run by run.
        second: uint8[ceil(n / 2)], written to: the second ones, two in a byte.
        places, values: uint32[n], uint16[n], written to: which elements take more, and their differences.

    Returns:
        How many have a second nibble, and how many take more.
    """
    one = uint64(1)
    wide = more = uint64(0)
    folded = np.empty(RUN, np.uint16)
    last = np.zeros((2, RUN), np.uint16)  # a cut run, filled up
    at_folded = folded.ctypes.data
    for start in range(0, base.size, RUN):
        at_expert, at_base = expert.ctypes.data + 2 * start, base.ctypes.data + 2 * start
        if start + RUN > base.size:
            last[0, : base.size - start] = expert[start:]
            last[1, : base.size - start] = base[start:]
            at_expert, at_base = last.ctypes.data, last.ctypes.data + 2 * RUN
        beyond = take64(at_expert, at_base, at_folded, low.ctypes.data + start // 2)
        below = _below_run(base, start, limit)
        while below:
            i = lowest(below)
            below &= below - one
            nibble = uint8((folded[i] >> uint16(4)) & uint16(15))
            if wide & one:
                second[wide >> one] |= nibble << uint8(4)
            else:
                second[wide >> one] = nibble
            wide += one
            if folded[i] <= uint16(255):
                beyond &= ~(one << i)
        while beyond:
            i = lowest(beyond)
            beyond &= beyond - one
            places[more] = uint32(start) + uint32(i)
            values[more] = folded[i]
            more += one
    return int64(wide), int64(more)


@_jit
def _find_below(base, start, stop, limit, below):
    """Write the places in a tile of the elements whose magnitude's bits are below a limit; return how many there are.

    Args:
        start, stop: the places of the tile's first element, a multiple of RUN, and of the one behind its last.
        below: uint16[TILE], written to.
    """
    one, count = uint64(1), uint64(0)
    for run in range(start, stop, RUN):
        found = _below_run(base, run, limit)
        while found:
            below[count] = uint16(run - start) + uint16(lowest(found))
            found &= found - one
            count += one
    return count


@_jit
def _add_second(below, second, at, folded):
    """Add the second nibbles from number `at` on to the elements of a tile that have one."""
    one, done, count = uint64(1), uint64(0), uint64(below.size)
    if count and at & one:
        folded[uint64(below[0])] |= uint16(second[at >> one] & uint8(0xF0))
        done = one
    first = (at + done) >> one
    pairs = (count - done) >> one
    for pair in range(pairs):
        both = uint16(second[first + pair])
        folded[uint64(below[done])] |= uint16((both & uint16(15)) << uint16(4))
        folded[uint64(below[done + one])] |= uint16(both & uint16(0xF0))
        done += uint64(2)
    if done < count:
        folded[uint64(below[done])] |= uint16((uint16(second[first + pairs]) & uint16(15)) << uint16(4))


@_jit
def _first_plane(tier, start, stop, folded):
    """Write what the first plane holds of elements by their places among those that the tier is about: from `start`, a
    multiple of RUN, to before `stop`, up to the end of its run where it has nibbles."""
    at_folded = folded.ctypes.data
    if tier[0] == NIBBLES:
        for i in range(start, stop, RUN):
            nibbles64(tier[1] + i // 2, at_folded + 2 * (i - start))
        return
    whole = (stop - start) // LANES * LANES
    for i in range(0, whole, LANES):
        bytes32(tier[1] + start + i, at_folded + 2 * i)
    low = _array(tier[1], stop, np.uint8)
    for i in range(start + whole, stop):
        folded[i - start] = low[i]


@_jit
def _replace(tier, begin, end, folded, runs, first):
    """Enter the differences of elements that take more, and note in the tier how many have been used.

    Args:
        begin, end: the tile's elements by their places among those that the tier is about.
        runs: uint32[..], how many runs lie before each that the tier is about; of no element where that is all.
        first: the tile's first run.
    """
    at = tier[9]
    run = first
    while at < tier[7]:
        place = int64(word32(tier[5] + 4 * at))
        if place >= end:
            break
        to = place - begin
        if runs.size:
            while RUN * int64(runs[run + 1]) <= place:
                run += 1
            to = RUN * (run - first) + place % RUN
        if tier[0] == NIBBLES:
            folded[uint64(to)] = word16(tier[6] + 2 * at)
        else:
            high = _array(tier[6], tier[7], np.uint8)
            folded[uint64(to)] |= uint16(uint16(high[uint64(at)]) << uint16(8))
        at += 1
    tier[9] = at


@_jit
def _fold(tier, start, stop, below, folded):
    """Write the zigzag differences of a tile from its tier.

    Args:
        tier: int64[COLUMNS], a row of the table that `deltas` takes, of which what belongs to the tiles before has been
            used.
        start, stop: the places of the tile's first element, a multiple of RUN, and of the one behind its last.
        below: uint16[..], what `_find_below` found.
        folded: uint16[TILE], written to; behind the last element up to the end of its run, too.
    """
    at, second = tier[10], _array(tier[2], (tier[4] + 1) // 2, np.uint8)
    if tier[8] == 0:
        _first_plane(tier, start, stop, folded)
        if at + below.size <= tier[4]:
            _add_second(below, second, uint64(at), folded)
        tier[10] = at + below.size
        _replace(tier, start, stop, folded, np.empty(0, np.uint32), 0)
        return
    first, last = start // RUN, (stop + RUN - 1) // RUN
    runs = _array(tier[8], last + 1, np.uint32)
    at_folded = folded.ctypes.data
    begin, end = RUN * int64(runs[first]), RUN * int64(runs[last])
    if runs[last] > runs[last - 1]:
        end -= RUN * last - stop
    if begin < end:
        _first_plane(tier, begin, end, folded)
    # From the last run on, as none moves to a place before its own.
    for run in range(last - 1, first - 1, -1):
        to = at_folded + 2 * RUN * (run - first)
        if runs[run + 1] > runs[run]:
            move64(at_folded + 2 * (RUN * int64(runs[run]) - begin), to)
        else:
            clear64(to)
    for place in below:
        run = uint64(first) + (uint64(place) >> uint64(6))
        if runs[run + uint64(1)] > runs[run]:
            if at < tier[4]:
                both = uint16(second[uint64(at) >> uint64(1)])
                shift = uint16((at & 1) << 2)
                folded[uint64(place)] |= uint16(((both >> shift) & uint16(15)) << uint16(4))
            at += 1
    tier[10] = at
    _replace(tier, begin, end, folded, runs, first)


@_jit
def bits(tier, base, out):
    """Undo `take_bytes` or `take_nibbles`: write the expert's bits, uint16[n].

    Args:
        tier: int64[COLUMNS], see `deltas`; nothing of it has been used.
        base: uint16[n].
    """
    folded, below = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    for start in range(0, base.size, TILE):
        stop = min(start + TILE, base.size)
        _fold(tier, start, stop, below[: _find_below(base, start, stop, tier[3], below)], folded)
        whole = (stop - start) // LANES * LANES
        at_folded, at_base, at_out = folded.ctypes.data, base.ctypes.data + 2 * start, out.ctypes.data + 2 * start
        for i in range(0, whole, LANES):
            bits32(at_folded + 2 * i, at_base + 2 * i, at_out + 2 * i)
        for i in range(start + whole, stop):
            out[i] = _other(int32(folded[i - start]), base[i])


@_jit
def deltas(tiers, base, first, stop, rows, out):
    """Write the exact deltas of a part of a block, of several experts at once.

    One call for all of them: each gives back the interpreter's lock, for which other threads wait, and has to wait
    for it again.

    Args:
        tiers: int64[k, COLUMNS]: of each expert's tier

            0. what its first plane holds, BYTES or NIBBLES,
            1. the address of that plane,
            2. that of the second nibbles,
            3. the bits of the magnitude below which elements have one (0 for none),
            4. how many have, by the tier,
            5. the address of the places (uint32) of the elements that take more,
            6. that of what replaces them (uint16, a whole difference) or comes on top (uint8, its upper byte),
            7. how many those are,
            8. where the tier is about some runs of RUN elements alone, one behind the other, the address of how many of
               those lie before each run and before the end (uint32); else 0,
            9. how many of those that take more have been used,
            10. how many elements were found that have a second nibble.

            The last two are changed: parts are asked for one after the other. Of a block that was all asked for, the
            latter is column 4, or the tier was made for another base.
        base: uint16[n], the whole block.
        first, stop: the places of the part's first element and of the one behind its last, multiples of RUN but at the
            block's end.
        rows: int64[k]: which rows of `out` are theirs.
        out: float32[.., stop - first].
    """
    folded, below = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    for start in range(first, stop, TILE):
        end = min(start + TILE, stop)
        whole = (end - start) // LANES * LANES
        at_base, at_folded = base.ctypes.data + 2 * start, folded.ctypes.data
        count, limit = uint64(0), int64(0)
        for k in range(rows.size):
            if tiers[k, 3] != limit:  # experts of one base have few of them
                limit = tiers[k, 3]
                count = _find_below(base, start, end, limit, below)
            _fold(tiers[k], start, end, below[:count], folded)
            row = out[rows[k], start - first : end - first]
            at_out = row.ctypes.data
            for i in range(0, whole, LANES):
                deltas32(at_folded + 2 * i, at_base + 2 * i, at_out + 4 * i)
            for i in range(whole, end - start):
                found = _other(int32(folded[i]), base[start + i])
                row[i] = np.float32(value(found) - value(base[start + i]))
