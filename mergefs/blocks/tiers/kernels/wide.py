"""The loops over coarse tiers, for vectors in LLVM's intermediate code and for 64 elements as the bits of a word.

Predictions are written so because numba computes small integers in 64 bits, which halves what fits in a vector. Some
instructions of x86 speed things up where they are: see `DEPOSITS`, `PERMUTES` and `LOOKS_UP`. Addresses and lengths
come from the arrays, so nothing outside them is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import int16, int32, types, uint32, uint64
from numba.core import cgutils, config
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels import plain, rests, symbols, vectors
from mergefs.blocks.tiers.kernels.centroids import size
from mergefs.blocks.tiers.kernels.floats import value
from mergefs.blocks.tiers.kernels.quantise import LANES, PAGE, add_squares, total
from mergefs.blocks.tiers.kernels.streams import append, count, deposit, extract, following
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)
_intrinsic: Any = intrinsic
_config: Any = config

_FEATURES = (_config.CPU_FEATURES or binding.get_host_cpu_features().flatten()).split(",")
_SLOW = ("bdver4", "znver1", "znver2")

DEPOSITS = "+bmi2" in _FEATURES and (_config.CPU_NAME or binding.get_host_cpu_name()) not in _SLOW
"""Whether this processor spreads and gathers the bits of a word in one instruction, pdep and pext of BMI2.

AMD's before Zen 3 have them too, but as programs that take longer than tables.
"""

PERMUTES = "+avx512bw" in _FEATURES
"""Whether it looks up 32 numbers of 16 bits in a table of 64 in one instruction."""

LOOKS_UP = "+avx2" in _FEATURES
"""Whether it looks up 8 floats in a table of 8 in one instruction."""

TILE = 8192
"""So many elements are refined and predicted before the next ones: their q and base stay in the near caches."""

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()


@_intrinsic
def _delta32(typingctx, q, base, sizes, first, out):
    """`delta` for 32 elements at these addresses; sizes, first: see `_rows`."""

    def generate(context, builder, signature, args):
        i16, i32 = ir.VectorType(_I16, 32), ir.VectorType(_I32, 32)

        def const(number):
            return ir.Constant(i16, [number] * 32)

        def call(name, *operands):
            function = ir.FunctionType(i16, [i16] * len(operands))
            return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)

        q = builder.sext(vectors.load(builder, args[0], ir.VectorType(_I8, 32), 1), i16)
        negative = builder.icmp_signed("<", q, const(0))
        magnitude = builder.select(negative, builder.sub(const(0), q), q)
        exponents = builder.and_(vectors.load(builder, args[1], i16, 2), const(0x7F80))
        row = call("llvm.usub.sat.v32i16", exponents, vectors.splat(builder, args[3], i16))
        row = call("llvm.umin.v32i16", row, const(7 << 7))
        index = builder.or_(builder.lshr(row, const(4)), magnitude)
        low, high = (vectors.load(builder, builder.add(args[2], ir.Constant(_I64, at)), i16, 2) for at in (0, 64))
        found = call("llvm.x86.avx512.vpermi2var.hi.512", low, index, high)
        ulps = builder.sub(call("llvm.umax.v32i16", exponents, const(8 << 7)), const(7 << 7))
        found = call("llvm.umax.v32i16", found, ulps)
        found = builder.or_(found, builder.and_(q, const(0x8000)))
        found = builder.select(builder.icmp_signed("==", q, const(0)), const(0), found)
        found = builder.shl(builder.zext(found, i32), ir.Constant(i32, [16] * 32))
        vectors.store(builder, found, args[4], 4)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64, types.int64, types.uint16, types.int64), generate


def _centroids(builder, magnitude, low, high, unit):
    """The centroids (float32[16]) of magnitudes (int32[16]), from their codes: 4 bytes in `low`, 4 in `high`."""
    i32 = magnitude.type

    def const(number):
        return ir.Constant(i32, [number] * 16)

    below4 = builder.icmp_signed("<", magnitude, const(4))
    half = builder.select(below4, vectors.splat(builder, low, i32), vectors.splat(builder, high, i32))
    shift = builder.shl(builder.and_(magnitude, const(3)), const(3))
    code = builder.and_(builder.lshr(half, shift), const(255))
    f32 = ir.VectorType(_F32, 16)
    return builder.fmul(builder.sitofp(code, f32), vectors.splat(builder, unit, f32))


def _looked_up(builder, magnitude, low, high, unit):
    """The same by looking them up, eight at a time."""
    i8, f8 = ir.VectorType(_I32, 8), ir.VectorType(_F32, 8)

    def shuffled(one, other, places):
        mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
        return builder.shuffle_vector(one, other, mask)

    shifts = ir.Constant(i8, [0, 8, 16, 24] * 2)
    halves = shuffled(vectors.splat(builder, low, i8), vectors.splat(builder, high, i8), [0, 1, 2, 3, 12, 13, 14, 15])
    codes = builder.and_(builder.lshr(halves, shifts), ir.Constant(i8, [255] * 8))
    table = builder.fmul(builder.sitofp(codes, f8), vectors.splat(builder, unit, f8))
    function = ir.FunctionType(f8, [f8, i8])
    permute = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx2.permps")
    one, other = (
        builder.call(permute, [table, shuffled(magnitude, magnitude, list(range(first, first + 8)))])
        for first in (0, 8)
    )
    return shuffled(one, other, list(range(16)))


@_intrinsic
def _predict16(typingctx, q, base, low, high, unit, out):
    """`plain.predict` for 16 elements at these addresses."""

    def generate(context, builder, signature, args):
        i16, i32, f32 = (ir.VectorType(t, 16) for t in (_I16, _I32, _F32))
        low, high, unit = args[2:5]

        def const(number):
            return ir.Constant(i32, [number] * 16)

        q = builder.sext(vectors.load(builder, args[0], ir.VectorType(_I8, 16), 1), i32)
        base = builder.shl(builder.zext(vectors.load(builder, args[1], i16, 2), i32), const(16))
        negative = builder.icmp_signed("<", q, const(0))
        magnitude = builder.select(negative, builder.sub(const(0), q), q)
        centroids = _looked_up if LOOKS_UP else _centroids
        centroid = builder.bitcast(centroids(builder, magnitude, low, high, unit), i32)
        exponent = builder.and_(base, const(0x7F800000))
        least = const(8 << 23)
        ulp = builder.select(builder.icmp_signed(">", exponent, least), exponent, least)
        ulp = builder.sub(ulp, const(7 << 23))
        # Positive floats are in the order of their bits.
        step = builder.select(builder.icmp_signed(">", centroid, ulp), centroid, ulp)
        step = builder.or_(step, builder.and_(q, const(0x80000000)))
        found = builder.fadd(builder.bitcast(base, f32), builder.bitcast(step, f32))
        found = builder.bitcast(found, i32)
        odd = builder.and_(builder.lshr(found, const(16)), const(1))
        rounded = builder.add(builder.add(found, const(0x7FFF)), odd)
        zero = builder.icmp_signed("==", q, const(0))
        bits = builder.trunc(builder.lshr(builder.select(zero, base, rounded), const(16)), i16)
        sign = builder.ashr(bits, ir.Constant(i16, [15] * 16))
        vectors.store(builder, builder.xor(bits, builder.or_(sign, ir.Constant(i16, [0x8000] * 16))), args[5], 2)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.int64, types.uint32, types.uint32, types.float32, types.int64), generate


class _Bytes:
    """The types of 64 elements."""

    i1, i8, i16 = (ir.VectorType(t, 64) for t in (_I1, _I8, _I16))
    none, one = (ir.Constant(ir.VectorType(_I8, 64), [number] * 64) for number in (0, 1))


@_intrinsic
def _zeros64(typingctx, q):
    """A bit for each of 64 elements: whether q at this address is 0."""

    def generate(context, builder, signature, args):
        found = builder.icmp_signed("==", vectors.load(builder, args[0], _Bytes.i8, 1), _Bytes.none)
        return builder.bitcast(found, _I64)

    return types.uint64(types.int64), generate


@_intrinsic
def _negatives64(typingctx, q):
    """The same: whether it is negative."""

    def generate(context, builder, signature, args):
        found = builder.icmp_signed("<", vectors.load(builder, args[0], _Bytes.i8, 1), _Bytes.none)
        return builder.bitcast(found, _I64)

    return types.uint64(types.int64), generate


@_intrinsic
def _odd64(typingctx, q):
    """The same: whether it is odd."""

    def generate(context, builder, signature, args):
        odd = builder.and_(vectors.load(builder, args[0], _Bytes.i8, 1), _Bytes.one)
        return builder.bitcast(builder.icmp_signed("!=", odd, _Bytes.none), _I64)

    return types.uint64(types.int64), generate


@_intrinsic
def _active64(typingctx, base, bound):
    """The same: whether the exponent's bits of the base at this address are below `bound`."""

    def generate(context, builder, signature, args):
        exponents = builder.and_(vectors.load(builder, args[0], _Bytes.i16, 2), ir.Constant(_Bytes.i16, [0x7F80] * 64))
        found = builder.icmp_signed("<", exponents, vectors.splat(builder, args[1], _Bytes.i16))
        return builder.bitcast(found, _I64)

    return types.uint64(types.int64, types.int16), generate


@_intrinsic
def _move64(typingctx, q, up, down):
    """Double 64 elements of q, and add 1 to those with a bit in `up`, -1 to those with one in `down`."""

    def generate(context, builder, signature, args):
        found = vectors.load(builder, args[0], _Bytes.i8, 1)
        found = builder.add(found, found)
        up, down = (builder.bitcast(bits, _Bytes.i1) for bits in args[1:])
        found = builder.select(up, builder.add(found, _Bytes.one), found)
        found = builder.select(down, builder.sub(found, _Bytes.one), found)
        vectors.store(builder, found, args[0], 1)
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.uint64, types.uint64), generate


def _call64(builder, name, *args):
    function = ir.FunctionType(_I64, [_I64] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


@_intrinsic
def _pdep(typingctx, bits, mask):
    """`streams.deposit` in one instruction."""

    def generate(context, builder, signature, args):
        return _call64(builder, "llvm.x86.bmi.pdep.64", *args)

    return types.uint64(types.uint64, types.uint64), generate


@_intrinsic
def _pext(typingctx, bits, mask):
    """`streams.extract` in one instruction."""

    def generate(context, builder, signature, args):
        return _call64(builder, "llvm.x86.bmi.pext.64", *args)

    return types.uint64(types.uint64, types.uint64), generate


_deposit, _extract = (_pdep, _pext) if DEPOSITS else (deposit, extract)


@_jit
def _rows(codes, unit, grid):
    """What `_delta` looks up: uint16[65], eight rows of sizes by magnitude, and how the exponents of row 0 end.

    Row 0 serves the classes that are not on the grid, rows 1 to 6 the next ones, and row 7 all others, where no size
    is more than an ulp. Sizes below an ulp mean an ulp.
    """
    found = np.zeros(65, np.uint16)
    first = max(int32(grid), int32(1)) - int32(1)
    found[64] = first << 7
    for row in range(7):
        for magnitude in range(1, 8):
            code = int32(codes >> uint64(8 * magnitude)) & int32(255)
            exponent = first + row if row or grid == 0 else 0
            found[8 * row + magnitude] = size(code, unit, exponent, grid)
    return found


@_jit
def _delta(base, q, rows, out):
    """See `plain.delta`; rows: from `_rows`."""
    whole = base.size // 32 * 32
    at_q, at_base, at_out, at_rows = q.ctypes.data, base.ctypes.data, out.ctypes.data, rows.ctypes.data
    first = rows[64]
    for i in range(0, whole, 32):
        _delta32(at_q + i, at_base + 2 * i, at_rows, first, at_out + 4 * i)
    rest = base.size - whole
    if rest:
        last_q, last_base, last_out = np.zeros(32, np.int8), np.zeros(32, np.uint16), np.empty(32, np.float32)
        last_q[:rest], last_base[:rest] = q[whole:], base[whole:]
        _delta32(last_q.ctypes.data, last_base.ctypes.data, at_rows, first, last_out.ctypes.data)
        out[whole:] = last_out[:rest]


table, delta = (_rows, _delta) if PERMUTES else (plain.table, plain.delta)


@_jit
def predict(base, q, codes, unit, out):
    """See `plain.predict`."""
    low, high = uint32(codes), uint32(codes >> uint64(32))
    whole = base.size // 16 * 16
    at_q, at_base, at_out = q.ctypes.data, base.ctypes.data, out.ctypes.data
    for i in range(0, whole, 16):
        _predict16(at_q + i, at_base + 2 * i, low, high, unit, at_out + 2 * i)
    plain.predict(base[whole:], q[whole:], codes, unit, out[whole:])


@_jit
def remaining(expert, base, q, sizes, page):
    """See `plain.remaining`."""
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
    """See `plain.split`."""
    bound = int16(min(int32(limit) << 7, 0x7FFF))
    at_q, at_before, at_base = q.ctypes.data, before.ctypes.data, base.ctypes.data
    whole = q.size // 64 * 64
    x, s, y = uint64(0), uint64(0), uint64(0)
    changes[0], signs[0], bits[0] = 0, 0, 0
    for i in range(0, whole, 64):
        zero = _zeros64(at_before + i)
        active = _active64(at_base + 2 * i, bound)
        other = active & ~zero
        zero &= active
        change = zero & ~_zeros64(at_q + i)
        append(changes, x, _extract(change, zero))
        append(signs, s, _extract(_negatives64(at_q + i), change))
        append(bits, y, _extract(_odd64(at_q + i), other))
        x += count(zero)
        s += count(change)
        y += count(other)
    return plain.split_from(whole, q, before, base, limit, changes, signs, bits, x, s, y)


@_jit
def refine(q, base, limit, changes, signs, bits, used):
    """See `plain.refine`."""
    bound = int16(min(int32(limit) << 7, 0x7FFF))
    at_q, at_base = q.ctypes.data, base.ctypes.data
    whole = q.size // 64 * 64
    x, s, y = used[0], used[1], used[2]
    for i in range(0, whole, 64):
        zero = _zeros64(at_q + i)
        active = _active64(at_base + 2 * i, bound)
        other = active & ~zero
        zero &= active
        change = _deposit(following(changes, x), zero)
        negative = _negatives64(at_q + i) | _deposit(following(signs, s), change)
        moved = change | _deposit(following(bits, y), other)
        _move64(at_q + i, moved & ~negative, moved & negative)
        x += count(zero)
        s += count(change)
        y += count(other)
    used[0], used[1], used[2] = x, s, y
    plain.refine_from(whole, q, base, limit, changes, signs, bits, used)


@_jit
def _refined(coarse, start, base):
    """Take the finer tiers into the q of a tile, whose elements begin at `start`, and return it."""
    q = coarse.q[start : start + base.size]
    for t in range(coarse.limits.size):
        stream = coarse.streams[t]
        refine(q, base, coarse.limits[t], stream[0], stream[1], stream[2], coarse.used[t])
    return q


@_jit
def deltas(base, coarse, codes, unit, grid, out):
    """Write the delta (float32[n]) that a block's coarse tiers predict; return whether its gaps fit.

    Args:
        base: uint16[n].
        coarse: `coarse.Coarse`; its q and what is used of its streams are changed.
        codes, unit, grid: of the last tier.
    """
    n = base.size
    if not symbols.read_gaps(coarse.gaps, coarse.q, n):
        return False
    sizes = table(codes, unit, grid)
    for start in range(0, n, TILE):
        b = base[start : start + TILE]
        delta(b, _refined(coarse, start, b), sizes, out[start : start + TILE])
    return True


@_jit
def predictions(base, coarse, codes, unit, out):
    """Write what `predict` makes of a block's coarse tiers (uint16[n]), otherwise like `deltas`."""
    n = base.size
    if not symbols.read_gaps(coarse.gaps, coarse.q, n):
        return False
    for start in range(0, n, TILE):
        b = base[start : start + TILE]
        predict(b, _refined(coarse, start, b), codes, unit, out[start : start + TILE])
    return True


@_jit
def exact_deltas(base, coarse, codes, unit, grouped, places, order, out):
    """Write the exact delta (float32[n]) from a block's coarse tiers and its rests in the order of their classes.

    Args:
        base: uint16[n].
        coarse: `coarse.Coarse`; its q and what is used of its streams are changed.
        codes, unit: of the last coarse tier.
        grouped: uint16[2 n], see `rests.ungroup`.
        places: uint64[257], where each class begins; changed where there is no `order`.
        order: uint32[n], where each element's rest lies, or uint32[0]: it is then found by going through the classes.
        out: float32[n].

    Returns:
        Whether the gaps fit.
    """
    n = base.size
    if not symbols.read_gaps(coarse.gaps, coarse.q, n):
        return False
    predicted, rest = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    for start in range(0, n, TILE):
        b = base[start : start + TILE]
        size = b.size
        q = _refined(coarse, start, b)
        predict(b, q, codes, unit, predicted[:size])
        if order.size:
            rests.gather(grouped, order[start : start + size], rest)
        else:
            rests.ungroup(grouped, b, places, rest)
        rests.subtract_rest(rest[:size], predicted, q, b, out[start : start + size])
    return True
