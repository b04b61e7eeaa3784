"""Differences from the base in units in the last place, of a byte or a nibble for each element.

What is decoded is written for vectors in LLVM's intermediate code, as numba computes small integers in 64 bits: see
`wide`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import int16, int32, int64, types, uint8, uint16, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels.floats import ordered, unordered, value

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)
_short = numba.njit(cache=True, boundscheck=False)
"""For what takes less time than to wait for the interpreter's lock, and so keeps it."""
_inline = numba.njit(nogil=True, cache=True, inline="always")
_intrinsic: Any = intrinsic
_numba: Any = numba

LANES = 32
RUN = 64
"""Elements whose low nibbles lie in 32 bytes: of each the one and of the element 32 places on the other."""

TILE = 2048
"""Elements that are worked on at a time, so that what is noted of each stays in the near cache; a multiple of RUN."""

BYTES, NIBBLES = 0, 1
"""What the first plane has for each element."""

COLUMNS = 11
"""Of the table that `deltas` and `bits` read."""

HIGH_BYTES = np.uint64(0xFF00FF00FF00FF00)
HIGH_NIBBLES = np.uint64(0xFFF0FFF0FFF0FFF0)
"""What of four elements the first plane does not hold."""


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
def count_below(base, top):
    """Return how many elements of uint16[n] have a class below `top`."""
    limit = uint32(top)
    count = 0
    for i in range(base.size):
        count += _class(base[i]) < limit
    return count


@_jit
def find_below(base, top, places, starts):
    """Find the elements whose class is below `top`.

    Args:
        base: uint16[n].
        places: uint32[count + 1], written to: where they are.
        starts: uint32[ceil(n / RUN) + 1], written to: how many lie before each run, and before the end.
    """
    limit = uint32(top)
    count = 0
    for run in range(starts.size - 1):
        starts[run] = count
        for i in range(RUN * run, min(RUN * run + RUN, base.size)):
            places[count] = i
            count += _class(base[i]) < limit
    starts[starts.size - 1] = count


@_inline
def _note(room, size, start, mask, places, values, count):
    """Write the place and the value of each element of `room` of which something is in `mask`."""
    fours = room.view(np.uint64)
    for four in range((size + 3) // 4):
        if fours[four] & mask:
            for i in range(4 * four, min(4 * four + 4, size)):
                if room[i] & uint16(mask):
                    places[count] = start + i
                    values[count] = room[i]
                    count += 1
    return count


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
    room = np.zeros(TILE, np.uint16)
    for start in range(0, base.size, TILE):
        part = expert[start : start + TILE]
        below = base[start : start + TILE]
        found = low[start : start + TILE]
        for i in range(part.size):
            folded = _folded(part[i], below[i])
            room[i] = folded
            found[i] = uint8(folded)
        count = _note(room, part.size, start, HIGH_BYTES, places, values, count)
    return count


@_jit
def take_nibbles(expert, base, below, low, second, places, values):
    """Write the zigzag differences of the ordered bits (uint16[n]), a nibble an element, and two in some classes.

    Args:
        expert, base: uint16[n].
        below: uint32[w], the places of the elements that have a second nibble.
        low: uint8[32 ceil(n / 64)], written to: the lowest nibbles, run by run.
        second: uint8[ceil(w / 2)], written to: the second ones, two in a byte.
        places, values: uint32[n], uint16[n], written to: which elements take more, and their differences.

    Returns:
        How many take more.
    """
    count = 0
    at = 0
    second[:] = 0
    room = np.zeros(TILE, np.uint16)
    for start in range(0, base.size, TILE):
        part = expert[start : start + TILE]
        under = base[start : start + TILE]
        size = part.size
        for i in range(size):
            room[i] = _folded(part[i], under[i])
        room[size : (size + RUN - 1) // RUN * RUN] = 0
        at_room, at_low = room.ctypes.data, low.ctypes.data + start // 2
        for i in range(0, size, RUN):
            _pack64(at_room + 2 * i, at_low + i // 2)
        while at < below.size and int64(below[at]) < start + size:
            i = int64(below[at]) - start
            folded = room[i]
            second[at >> 1] |= uint8(((folded >> uint16(4)) & uint16(15)) << uint16((at & 1) << 2))
            if folded <= uint16(255):
                room[i] = 0
            at += 1
        count = _note(room, size, start, HIGH_NIBBLES, places, values, count)
    return count


@_short
def fits(payload, at, count, n):
    """Tell whether `count` places (uint32) from byte `at` on are below n, and each above the one before."""
    last = int64(-1)
    address = payload.ctypes.data + at
    for i in range(count):
        place = int64(_word32(address + 4 * i))
        if place <= last or place >= n:
            return False
        last = place
    return True


def _vector(width):
    return ir.VectorType(ir.IntType(width), LANES)


def _load(builder, address, width):
    loaded = builder.load(builder.inttoptr(address, _vector(width).as_pointer()))
    loaded.align = width // 8
    return loaded


def _store(builder, vector, address, align):
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer())).align = align


def _const(width, number):
    return ir.Constant(_vector(width), [number] * LANES)


def _others(builder, folded, base):
    """`_other` of the elements at these addresses: the base's bits and the expert's, both uint16[LANES]."""
    sign = _const(16, 0x8000)
    folded = _load(builder, folded, 16)
    below = _load(builder, base, 16)
    # What is done to the bits of a negative number is found by filling a word with its sign.
    order = builder.xor(below, builder.or_(sign, builder.ashr(below, _const(16, 15))))
    odd = builder.sub(_const(16, 0), builder.and_(folded, _const(16, 1)))
    order = builder.add(order, builder.xor(builder.lshr(folded, _const(16, 1)), odd))
    positive = builder.xor(builder.ashr(order, _const(16, 15)), _const(16, 0xFFFF))
    return below, builder.xor(order, builder.or_(sign, positive))


def _word(bits):
    def word(typingctx, address):
        """An unsigned integer at an address, wherever it lies."""

        def generate(context, builder, signature, args):
            loaded = builder.load(builder.inttoptr(args[0], ir.IntType(bits).as_pointer()))
            loaded.align = 1
            return loaded

        return (uint32 if bits == 32 else uint16)(types.int64), generate

    return _intrinsic(word)


_word32, _word16 = _word(32), _word(16)


@_intrinsic
def _pack64(typingctx, folded, low):
    """Undo `_nibbles64`."""

    def generate(context, builder, signature, args):
        other = builder.add(args[0], ir.Constant(ir.IntType(64), 2 * LANES))
        lower, upper = (builder.trunc(_load(builder, at, 16), _vector(8)) for at in (args[0], other))
        both = builder.or_(builder.and_(lower, _const(8, 15)), builder.shl(upper, _const(8, 4)))
        _store(builder, both, args[1], 1)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _bytes32(typingctx, low, out):
    """32 bytes at one address to uint16 at another."""

    def generate(context, builder, signature, args):
        _store(builder, builder.zext(_load(builder, args[0], 8), _vector(16)), args[1], 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _nibbles64(typingctx, low, out):
    """The nibbles of 32 bytes at one address to 64 uint16 at another: first the lower ones, then the upper ones."""

    def generate(context, builder, signature, args):
        both = _load(builder, args[0], 8)
        lower = builder.zext(builder.and_(both, _const(8, 15)), _vector(16))
        upper = builder.zext(builder.lshr(both, _const(8, 4)), _vector(16))
        _store(builder, lower, args[1], 2)
        _store(builder, upper, builder.add(args[1], ir.Constant(ir.IntType(64), 2 * LANES)), 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _move64(typingctx, found, out):
    """64 uint16 from one address to another."""

    def generate(context, builder, signature, args):
        other = [builder.add(at, ir.Constant(ir.IntType(64), 2 * LANES)) for at in args]
        lower, upper = _load(builder, args[0], 16), _load(builder, other[0], 16)
        _store(builder, lower, args[1], 2)
        _store(builder, upper, other[1], 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _clear64(typingctx, out):
    """64 uint16 of 0 to an address."""

    def generate(context, builder, signature, args):
        _store(builder, _const(16, 0), args[0], 2)
        _store(builder, _const(16, 0), builder.add(args[0], ir.Constant(ir.IntType(64), 2 * LANES)), 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64), generate


@_intrinsic
def _bits32(typingctx, folded, base, out):
    """`bits` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        _, found = _others(builder, args[0], args[1])
        _store(builder, found, args[2], 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_intrinsic
def _deltas32(typingctx, folded, base, out):
    """`deltas` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        floats = ir.VectorType(ir.FloatType(), LANES)

        def value(bits):
            wide = builder.shl(builder.zext(bits, _vector(32)), _const(32, 16))
            return builder.bitcast(wide, floats)

        below, found = _others(builder, args[0], args[1])
        _store(builder, builder.fsub(value(found), value(below)), args[2], 4)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_intrinsic
def _pointer(typingctx, address):
    """An address (uint64) as one."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@_inline
def _array(address, size, dtype):
    return _numba.carray(_pointer(uint64(address)), (size,), dtype)


@_inline
def _before(places, starts, limit):
    """Return how many places are below `limit`, from what `find_below` found."""
    count = uint64(starts[limit // RUN])
    if limit % RUN:
        while count < uint64(places.size) and places[count] < uint32(limit):
            count += uint64(1)
    return count


@_jit
def _add_second(below, second, at, end, start, folded):
    """Add the second nibbles number `at` up to `end` to the tile that begins at `start`."""
    one, begin = uint64(1), uint32(start)
    if at < end and at & one:
        folded[uint64(below[at] - begin)] |= uint16(second[at >> one] & uint8(0xF0))
        at += one
    pairs = (end - at) >> one
    first = at >> one
    for pair in range(first, first + pairs):
        both = uint16(second[pair])
        folded[uint64(below[uint64(2) * pair] - begin)] |= uint16((both & uint16(15)) << uint16(4))
        folded[uint64(below[uint64(2) * pair + one] - begin)] |= uint16(both & uint16(0xF0))
    if at < end and end & one:
        both = uint16(second[end >> one])
        folded[uint64(below[end - one] - begin)] |= uint16((both & uint16(15)) << uint16(4))


@_jit
def _fold(tier, start, stop, folded):
    """Write the zigzag differences of a tile from its tier, those that were not asked for before.

    Args:
        tier: int64[COLUMNS], a row of the table that `deltas` takes.
        start, stop: the places of the tile's first element, a multiple of RUN, and of the one behind its last.
        folded: uint16[TILE], written to; behind the last element up to the end of its run, too.
    """
    if tier[10] == 0:
        _fold_all(tier, start, stop, folded)
        return
    first, last = start // RUN, (stop + RUN - 1) // RUN
    before = _array(tier[10], last + 1, np.uint32)
    begin, end = RUN * int64(before[first]), RUN * int64(before[last])
    if before[last] > before[last - 1]:
        end -= RUN * last - stop
    if begin < end:
        _fold_all(tier, begin, end, folded)
    # From the last run on, as none moves to a place before its own.
    at = folded.ctypes.data
    for run in range(last - 1, first - 1, -1):
        changed = int64(before[run])
        to = at + 2 * RUN * (run - first)
        if int64(before[run + 1]) > changed:
            _move64(at + 2 * (RUN * changed - begin), to)
        else:
            _clear64(to)


@_jit
def _fold_all(tier, start, stop, folded):
    """`_fold` of elements by their places among those that the tier is about."""
    size = stop - start
    at_folded = folded.ctypes.data
    if tier[0] == NIBBLES:
        at_low = tier[1] + start // 2
        for i in range(0, size, RUN):
            _nibbles64(at_low + i // 2, at_folded + 2 * i)
        below, second = _array(tier[3], tier[5], np.uint32), _array(tier[2], (tier[5] + 1) // 2, np.uint8)
        starts = _array(tier[4], (stop + RUN - 1) // RUN + 1, np.uint32)
        _add_second(below, second, _before(below, starts, start), _before(below, starts, stop), start, folded)
    else:
        at_low = tier[1] + start
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            _bytes32(at_low + i, at_folded + 2 * i)
        low = _array(at_low, size, np.uint8)
        for i in range(whole, size):
            folded[i] = low[i]
    at = tier[9]
    while at < tier[8]:
        place = int64(_word32(tier[6] + 4 * at))
        if place >= stop:
            break
        if place >= start:
            if tier[0] == NIBBLES:
                folded[uint64(place - start)] = _word16(tier[7] + 2 * at)
            else:
                high = _array(tier[7], tier[8], np.uint8)
                folded[uint64(place - start)] |= uint16(uint16(high[uint64(at)]) << uint16(8))
        at += 1
    tier[9] = at


@_jit
def bits(tier, base, out):
    """Undo `take_bytes` or `take_nibbles`: write the expert's bits, uint16[n].

    Args:
        tier: int64[COLUMNS], see `deltas`; nothing of it has been used.
        base: uint16[n].
    """
    folded = np.empty(TILE, np.uint16)
    for start in range(0, base.size, TILE):
        stop = min(start + TILE, base.size)
        _fold(tier, start, stop, folded)
        whole = (stop - start) // LANES * LANES
        at_folded, at_base, at_out = folded.ctypes.data, base.ctypes.data + 2 * start, out.ctypes.data + 2 * start
        for i in range(0, whole, LANES):
            _bits32(at_folded + 2 * i, at_base + 2 * i, at_out + 2 * i)
        for i in range(start + whole, stop):
            out[i] = _other(int32(folded[i - start]), base[i])


@_jit
def deltas(tiers, base, first, stop, rows, out):
    """Write the exact deltas of a part of a block, of several experts at once.

    One call for all of them: each gives back the interpreter's lock, for which other threads wait, and has to wait
    for it again.

    Args:
        tiers: int64[k, COLUMNS]: of each expert's tier what its first plane holds (BYTES or NIBBLES); the addresses of
            that plane, of the second nibbles, and of what `find_below` found of those elements that have one; how
            many those are; the addresses of the places (uint32) of the elements that take more and of what
            replaces them (uint16, a whole difference) or comes on top of them (uint8, its upper byte), how many those
            are, and how many have been used, which is changed: parts are asked for one after the other; and where the
            tier is about some runs of RUN elements alone, one behind the other, the address of how many of those lie
            before each run and before the end (uint32), else 0.
        base: uint16[n], the whole block.
        first, stop: the places of the part's first element and of the one behind its last.
        rows: int64[k]: which rows of `out` are theirs.
        out: float32[.., stop - first].
    """
    folded = np.empty(TILE, np.uint16)
    for begin in range(first // RUN * RUN, stop, TILE):
        start, end = max(begin, first), min(begin + TILE, stop)
        whole = (end - start) // LANES * LANES
        at_base, at_folded = base.ctypes.data + 2 * start, folded.ctypes.data + 2 * (start - begin)
        for k in range(rows.size):
            _fold(tiers[k], begin, end, folded)
            row = out[rows[k], start - first : end - first]
            at_out = row.ctypes.data
            for i in range(0, whole, LANES):
                _deltas32(at_folded + 2 * i, at_base + 2 * i, at_out + 4 * i)
            for i in range(whole, end - start):
                below = base[start + i]
                row[i] = np.float32(value(_other(int32(folded[start - begin + i]), below)) - value(below))
