"""The loops of `plain` as vectors of LLVM's intermediate code: everything that depends on it is in this module.

Predictions are written so because numba computes small integers in 64 bits, which halves what fits in a vector: 0.3 ns
an element instead of 0.55. Splitting and refining need LLVM's masked compressstore and expandload, which are one
instruction each where AVX-512 VBMI2 is (0.1 ns an element) and a chain of branches, slower than the plain loops,
elsewhere: see `EXPANDS`. Addresses and lengths come from the arrays, so nothing outside them is touched.
"""

from __future__ import annotations

import sys
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import int16, int32, types, uint32, uint64
from numba.core import cgutils, config
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels import plain
from mergefs.blocks.tiers.kernels.floats import value
from mergefs.blocks.tiers.kernels.quantise import LANES, PAGE, add_squares, total

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)
_intrinsic: Any = intrinsic
_config: Any = config

EXPANDS = "+avx512vbmi2" in (_config.CPU_FEATURES or binding.get_host_cpu_features().flatten())
"""Whether this processor expands and compresses vectors of bytes in one instruction."""

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_F32 = ir.FloatType()


def _splat(builder, scalar, vector):
    undefined = ir.Constant(vector, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, ir.Constant(_I32, 0)), undefined, lanes)


def _load(builder, address, vector, align):
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
    loaded.align = align
    return loaded


def _store(builder, vector, address, align):
    stored = builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()))
    stored.align = align


class _Predicted:
    """What both predictions share, for 16 elements: `floats.step` and the sum with the base, as vectors of 32 bits."""

    def __init__(self, builder, q, base, low, high, unit):
        self.i16, self.i32, self.f32 = (ir.VectorType(t, 16) for t in (_I16, _I32, _F32))
        self.q = q = builder.sext(_load(builder, q, ir.VectorType(_I8, 16), 1), self.i32)
        base = builder.zext(_load(builder, base, self.i16, 2), self.i32)
        self.base = base = builder.shl(base, self.const(16))
        negative = builder.icmp_signed("<", q, self.const(0))
        magnitude = builder.select(negative, builder.sub(self.const(0), q), q)
        below4 = builder.icmp_signed("<", magnitude, self.const(4))
        half = builder.select(below4, _splat(builder, low, self.i32), _splat(builder, high, self.i32))
        shift = builder.shl(builder.and_(magnitude, self.const(3)), self.const(3))
        code = builder.and_(builder.lshr(half, shift), self.const(255))
        centroid = builder.fmul(builder.sitofp(code, self.f32), _splat(builder, unit, self.f32))
        centroid = builder.bitcast(centroid, self.i32)
        self.exponent = exponent = builder.and_(base, self.const(0x7F800000))
        least = self.const(8 << 23)
        ulp = builder.select(builder.icmp_signed(">", exponent, least), exponent, least)
        ulp = builder.sub(ulp, self.const(7 << 23))
        # Positive floats are in the order of their bits.
        size = builder.select(builder.icmp_signed(">", centroid, ulp), centroid, ulp)
        self.zero = zero = builder.icmp_signed("==", q, self.const(0))
        step = builder.or_(size, builder.and_(q, self.const(0x80000000)))
        self.step = builder.select(zero, self.const(0), step)
        found = builder.fadd(builder.bitcast(base, self.f32), builder.bitcast(self.step, self.f32))
        found = builder.bitcast(found, self.i32)
        odd = builder.and_(builder.lshr(found, self.const(16)), self.const(1))
        self.rounded = builder.add(builder.add(found, self.const(0x7FFF)), odd)

    def const(self, number):
        return ir.Constant(self.i32, [number] * 16)


@_intrinsic
def _delta16(typingctx, q, base, low, high, unit, bound, out):
    """`plain.delta` for 16 elements at these addresses; bound: the first grid class as float32 bits."""
    signature = types.int64(
        types.int64, types.int64, types.uint32, types.uint32, types.float32, types.uint32, types.int64
    )

    def generate(context, builder, signature, args):
        p = _Predicted(builder, *args[:5])
        on_grid = builder.bitcast(builder.and_(p.rounded, p.const(0xFFFF0000)), p.f32)
        on_grid = builder.bitcast(builder.fsub(on_grid, builder.bitcast(p.base, p.f32)), p.i32)
        coarse = builder.icmp_signed(">=", p.exponent, _splat(builder, args[5], p.i32))
        found = builder.select(coarse, on_grid, p.step)
        _store(builder, builder.select(p.zero, p.const(0), found), args[6], 4)
        return ir.Constant(_I64, 0)

    return signature, generate


@_intrinsic
def _predict16(typingctx, q, base, low, high, unit, out):
    """`plain.predict` for 16 elements at these addresses."""
    signature = types.int64(types.int64, types.int64, types.uint32, types.uint32, types.float32, types.int64)

    def generate(context, builder, signature, args):
        p = _Predicted(builder, *args[:5])
        bits = builder.lshr(builder.select(p.zero, p.base, p.rounded), p.const(16))
        bits = builder.trunc(bits, p.i16)
        sign = builder.ashr(bits, ir.Constant(p.i16, [15] * 16))
        _store(builder, builder.xor(bits, builder.or_(sign, ir.Constant(p.i16, [0x8000] * 16))), args[5], 2)
        return ir.Constant(_I64, 0)

    return signature, generate


class _Masks:
    """Which of 32 elements take a trit, and which a bit."""

    def __init__(self, builder, q, base, bound):
        self.i1, self.i8, self.i16 = (ir.VectorType(t, 32) for t in (_I1, _I8, _I16))
        self.q = _load(builder, q, self.i8, 1)
        exponents = builder.and_(_load(builder, base, self.i16, 2), ir.Constant(self.i16, [0x7F80] * 32))
        active = builder.icmp_signed("<", exponents, _splat(builder, bound, self.i16))
        self.none = ir.Constant(self.i8, [0] * 32)
        zero = builder.icmp_signed("==", self.q, self.none)
        self.trits = builder.and_(active, zero)
        self.bits = builder.and_(active, builder.not_(zero))

    def counts(self, builder):
        """How many of each: trits in the lower half of 64 bits, bits in the upper."""
        trits = builder.zext(builder.ctpop(builder.bitcast(self.trits, _I32)), _I64)
        bits = builder.zext(builder.ctpop(builder.bitcast(self.bits, _I32)), _I64)
        return builder.or_(trits, builder.shl(bits, ir.Constant(_I64, 32)))


@_intrinsic
def _split32(typingctx, q, before, base, trits, bits, bound):
    """`plain.split` for 32 elements at these addresses; returns `_Masks.counts`."""
    signature = types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int16)

    def generate(context, builder, signature, args):
        masks = _Masks(builder, args[1], args[2], args[5])
        q = _load(builder, args[0], masks.i8, 1)
        negative = builder.icmp_signed("<", q, masks.none)
        trit = builder.select(negative, ir.Constant(masks.i8, [2] * 32), q)
        bit = builder.and_(q, ir.Constant(masks.i8, [1] * 32))
        compress = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [masks.i8, _I8.as_pointer(), masks.i1]),
            "llvm.masked.compressstore.v32i8",
        )
        builder.call(compress, [trit, builder.inttoptr(args[3], _I8.as_pointer()), masks.trits])
        builder.call(compress, [bit, builder.inttoptr(args[4], _I8.as_pointer()), masks.bits])
        return masks.counts(builder)

    return signature, generate


@_intrinsic
def _refine32(typingctx, q, base, trits, bits, bound):
    """`plain.refine` for 32 elements at these addresses; returns `_Masks.counts`."""
    signature = types.int64(types.int64, types.int64, types.int64, types.int64, types.int16)

    def generate(context, builder, signature, args):
        masks = _Masks(builder, args[0], args[1], args[4])
        expand = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(masks.i8, [_I8.as_pointer(), masks.i1, masks.i8]),
            "llvm.masked.expandload.v32i8",
        )
        trit = builder.call(expand, [builder.inttoptr(args[2], _I8.as_pointer()), masks.trits, masks.none])
        bit = builder.call(expand, [builder.inttoptr(args[3], _I8.as_pointer()), masks.bits, masks.none])
        negative = builder.icmp_signed("<", masks.q, masks.none)
        bit = builder.select(negative, builder.sub(masks.none, bit), bit)
        _store(builder, builder.add(builder.add(builder.add(masks.q, masks.q), trit), bit), args[0], 1)
        return masks.counts(builder)

    return signature, generate


@_intrinsic
def _store64(typingctx, address, number):
    """Store eight bytes at any address, aligned or not."""
    signature = types.int64(types.int64, types.uint64)

    def generate(context, builder, signature, args):
        number = args[1]
        if sys.byteorder == "big":
            number = builder.bswap(number)
        _store(builder, number, args[0], 1)
        return ir.Constant(_I64, 0)

    return signature, generate


@_jit
def delta(base, q, codes, unit, grid, out):
    """See `plain.delta`."""
    low, high = uint32(codes), uint32(codes >> uint64(32))
    bound = uint32(uint32(grid) << uint32(23))
    whole = base.size // 16 * 16
    at_q, at_base, at_out = q.ctypes.data, base.ctypes.data, out.ctypes.data
    for i in range(0, whole, 16):
        _delta16(at_q + i, at_base + 2 * i, low, high, unit, bound, at_out + 4 * i)
    plain.delta(base[whole:], q[whole:], codes, unit, grid, out[whole:])


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
def remaining(expert, base, q, codes, unit, grid, page):
    """See `plain.remaining`."""
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
    """See `plain.split`."""
    bound = int16(min(int32(limit) << 7, 0x7FFF))
    at_q, at_before, at_base = q.ctypes.data, before.ctypes.data, base.ctypes.data
    at_trits, at_bits = trits.ctypes.data, bits.ctypes.data
    whole = q.size // 32 * 32
    written = 0
    for i in range(0, whole, 32):
        written += _split32(
            at_q + i,
            at_before + i,
            at_base + 2 * i,
            at_trits + (written & 0xFFFFFFFF),
            at_bits + (written >> 32),
            bound,
        )
    return plain.split_from(whole, q, before, base, limit, trits, bits, written & 0xFFFFFFFF, written >> 32)


@_jit
def refine(q, trits, bits, base, limit):
    """See `plain.refine`."""
    bound = int16(min(int32(limit) << 7, 0x7FFF))
    at_q, at_base, at_trits, at_bits = q.ctypes.data, base.ctypes.data, trits.ctypes.data, bits.ctypes.data
    whole = q.size // 32 * 32
    used = 0
    for i in range(0, whole, 32):
        used += _refine32(at_q + i, at_base + 2 * i, at_trits + (used & 0xFFFFFFFF), at_bits + (used >> 32), bound)
    return plain.refine_from(whole, q, trits, bits, base, limit, used & 0xFFFFFFFF, used >> 32)


@_jit
def unpack_trits(packed, table, out):
    """See `plain.unpack_trits`. Eight bytes at a time: the next five overwrite the last three."""
    at = out.ctypes.data
    for k in range(packed.size):
        _store64(at + 5 * k, table[packed[k]])
