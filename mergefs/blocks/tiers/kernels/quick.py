"""Differences from the base in units in the last place, a byte for each element in the order of the elements.

What is decoded is written for vectors in LLVM's intermediate code, as numba computes small integers in 64 bits: see
`wide`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import int16, int32, types, uint8, uint16, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels.floats import ordered, unordered, value

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)
_inline = numba.njit(nogil=True, cache=True, inline="always")
_intrinsic: Any = intrinsic
_numba: Any = numba

LANES = 32

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


def _vector(width):
    return ir.VectorType(ir.IntType(width), LANES)


def _load(builder, address, width):
    loaded = builder.load(builder.inttoptr(address, _vector(width).as_pointer()))
    loaded.align = width // 8
    return loaded


def _others(builder, low, base):
    """`_other` of the elements at these addresses: the base's bits and the expert's, both uint16[LANES]."""

    def const(number):
        return ir.Constant(_vector(16), [number] * LANES)

    sign = const(0x8000)
    folded = builder.zext(_load(builder, low, 8), _vector(16))
    below = _load(builder, base, 16)
    # What is done to the bits of a negative number is found by filling a word with its sign.
    order = builder.xor(below, builder.or_(sign, builder.ashr(below, const(15))))
    odd = builder.sub(const(0), builder.and_(folded, const(1)))
    order = builder.add(order, builder.xor(builder.lshr(folded, const(1)), odd))
    positive = builder.xor(builder.ashr(order, const(15)), const(0xFFFF))
    return below, builder.xor(order, builder.or_(sign, positive))


@_intrinsic
def _bits32(typingctx, low, base, out):
    """`bits` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        _, found = _others(builder, args[0], args[1])
        builder.store(found, builder.inttoptr(args[2], found.type.as_pointer())).align = 2
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_intrinsic
def _deltas32(typingctx, low, base, out):
    """`deltas` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        floats = ir.VectorType(ir.FloatType(), LANES)

        def value(bits):
            wide = builder.shl(builder.zext(bits, _vector(32)), ir.Constant(_vector(32), [16] * LANES))
            return builder.bitcast(wide, floats)

        below, found = _others(builder, args[0], args[1])
        delta = builder.fsub(value(found), value(below))
        builder.store(delta, builder.inttoptr(args[2], floats.as_pointer())).align = 4
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_jit
def bits(low, places, high, base, out):
    """Undo `take`: write the expert's bits, uint16[n]. The places have to fit."""
    whole = base.size // LANES * LANES
    at_low, at_base, at_out = low.ctypes.data, base.ctypes.data, out.ctypes.data
    for i in range(0, whole, LANES):
        _bits32(at_low + i, at_base + 2 * i, at_out + 2 * i)
    for i in range(whole, base.size):
        out[i] = _other(int32(low[i]), base[i])
    for k in range(places.size):
        i = places[k]
        out[i] = _other(int32(low[i]) | int32(high[k]) << 8, base[i])


@_intrinsic
def _pointer(typingctx, address):
    """An address (uint64) as one."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@_inline
def _array(address, size, dtype):
    return _numba.carray(_pointer(uint64(address)), (size,), dtype)


@_jit
def deltas(tiers, base, first, rows, out):
    """Write the exact deltas of a part of a block, of several experts at once.

    One call for all of them: each gives back the interpreter's lock, for which other threads wait, and has to wait
    for it again.

    Args:
        tiers: uint64[k, 5]: of each expert's tier the addresses of low, places and high, how many places there are, and
            how many have been used, which is changed; the parts are asked for one after the other.
        base: uint16[m], of the part.
        first: the place of the part's first element.
        rows: int64[k]: which rows of `out` are theirs.
        out: float32[.., m].
    """
    n = base.size
    whole = n // LANES * LANES
    at_base = base.ctypes.data
    for k in range(rows.size):
        row = out[rows[k]]
        at_low, at_out = tiers[k, 0] + uint64(first), row.ctypes.data
        for i in range(0, whole, LANES):
            _deltas32(at_low + i, at_base + 2 * i, at_out + 4 * i)
        low = _array(at_low, n, np.uint8)
        for i in range(whole, n):
            row[i] = np.float32(value(_other(int32(low[i]), base[i])) - value(base[i]))
        count = tiers[k, 3]
        places, high = _array(tiers[k, 1], count, np.uint32), _array(tiers[k, 2], count, np.uint8)
        at = tiers[k, 4]
        while at < count and int(places[at]) < first + n:
            i = int(places[at]) - first
            row[i] = np.float32(value(_other(int32(low[i]) | int32(high[at]) << 8, base[i])) - value(base[i]))
            at += uint64(1)
        tiers[k, 4] = at
