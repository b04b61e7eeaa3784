"""What `quick` does with 32 or 64 elements at a time, in LLVM's intermediate code: numba computes small integers in 64
bits, which halves what fits in a vector and more.

Elements and addresses are as the loops give them: nothing here knows where an array ends.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels import vectors

_intrinsic: Any = intrinsic

LANES = 32


def _vector(width):
    return ir.VectorType(ir.IntType(width), LANES)


def _load(builder, address, width):
    return vectors.load(builder, address, _vector(width), width // 8)


def _const(width, number):
    return vectors.constant(_vector(width), number)


def _others(builder, folded, base):
    """The base's bits and, from the folded differences, the expert's, of the elements at these addresses: uint16[LANES]
    each."""
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


word32, word16 = _word(32), _word(16)


def _mask(builder, lanes):
    """The number whose bits are LANES of 0 or 1."""
    return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), ir.IntType(64))


def _joined(builder, lower, upper):
    return builder.or_(lower, builder.shl(upper, ir.Constant(ir.IntType(64), LANES)))


def _beside(builder, address):
    """The address of uint16 that lie LANES of them on."""
    return builder.add(address, ir.Constant(ir.IntType(64), 2 * LANES))


def _folded32(builder, expert, base):
    """What `quick` calls folded, of the elements at these addresses."""

    def order(bits):
        return builder.xor(bits, builder.or_(_const(16, 0x8000), builder.ashr(bits, _const(16, 15))))

    difference = builder.sub(order(_load(builder, expert, 16)), order(_load(builder, base, 16)))
    return builder.xor(builder.shl(difference, _const(16, 1)), builder.ashr(difference, _const(16, 15)))


@_intrinsic
def take64(typingctx, expert, base, folded, low):
    """Fold the differences of the 64 elements at the first two addresses: write them to the third, and what `nibbles64`
    undoes to the last. Return which of them (a bit each, the lowest one first) take more than a nibble."""

    def generate(context, builder, signature, args):
        expert, base, out, low = args
        lower = _folded32(builder, expert, base)
        upper = _folded32(builder, _beside(builder, expert), _beside(builder, base))
        vectors.store(builder, lower, out, 2)
        vectors.store(builder, upper, _beside(builder, out), 2)
        first, second = (builder.trunc(half, _vector(8)) for half in (lower, upper))
        both = builder.or_(builder.and_(first, _const(8, 15)), builder.shl(second, _const(8, 4)))
        vectors.store(builder, both, low, 1)
        more = [_mask(builder, builder.icmp_unsigned(">", half, _const(16, 15))) for half in (lower, upper)]
        return _joined(builder, *more)

    return types.uint64(types.int64, types.int64, types.int64, types.int64), generate


@_intrinsic
def below64(typingctx, base, limit):
    """Which of the 64 elements at an address (a bit each, the lowest one first) have a magnitude below a limit."""

    def generate(context, builder, signature, args):
        limits = vectors.splat(builder, builder.trunc(args[1], ir.IntType(16)), _vector(16))

        def below(address):
            magnitude = builder.and_(_load(builder, address, 16), _const(16, 0x7FFF))
            return _mask(builder, builder.icmp_signed("<", magnitude, limits))

        return _joined(builder, below(args[0]), below(_beside(builder, args[0])))

    return types.uint64(types.int64, types.int64), generate


@_intrinsic
def lowest(typingctx, bits):
    """The place of the lowest bit that is 1; there has to be one."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), generate


@_intrinsic
def bytes32(typingctx, low, out):
    """32 bytes at one address to uint16 at another."""

    def generate(context, builder, signature, args):
        vectors.store(builder, builder.zext(_load(builder, args[0], 8), _vector(16)), args[1], 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def nibbles64(typingctx, low, out):
    """The nibbles of 32 bytes at one address to 64 uint16 at another: first the lower ones, then the upper ones."""

    def generate(context, builder, signature, args):
        both = _load(builder, args[0], 8)
        lower = builder.zext(builder.and_(both, _const(8, 15)), _vector(16))
        upper = builder.zext(builder.lshr(both, _const(8, 4)), _vector(16))
        vectors.store(builder, lower, args[1], 2)
        vectors.store(builder, upper, _beside(builder, args[1]), 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def move64(typingctx, found, out):
    """64 uint16 from one address to another."""

    def generate(context, builder, signature, args):
        lower, upper = _load(builder, args[0], 16), _load(builder, _beside(builder, args[0]), 16)
        vectors.store(builder, lower, args[1], 2)
        vectors.store(builder, upper, _beside(builder, args[1]), 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def clear64(typingctx, out):
    """64 uint16 of 0 to an address."""

    def generate(context, builder, signature, args):
        vectors.store(builder, _const(16, 0), args[0], 2)
        vectors.store(builder, _const(16, 0), _beside(builder, args[0]), 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64), generate


@_intrinsic
def bits32(typingctx, folded, base, out):
    """`quick.bits` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        _, found = _others(builder, args[0], args[1])
        vectors.store(builder, found, args[2], 2)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_intrinsic
def deltas32(typingctx, folded, base, out):
    """`quick.deltas` of the elements at these addresses."""

    def generate(context, builder, signature, args):
        floats = ir.VectorType(ir.FloatType(), LANES)

        def value(bits):
            wide = builder.shl(builder.zext(bits, _vector(32)), _const(32, 16))
            return builder.bitcast(wide, floats)

        below, found = _others(builder, args[0], args[1])
        vectors.store(builder, builder.fsub(value(found), value(below)), args[2], 4)
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@_intrinsic
def pointer(typingctx, address):
    """An address (uint64) as one."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate
