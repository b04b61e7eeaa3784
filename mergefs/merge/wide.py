"""The election of `kernels.elect` for vectors of elements, in LLVM's intermediate code.

All sums of a vector stay in registers while the experts are gone through, which numba's own loops do not: they take
twice as long. Every lane computes what `kernels.elect` does, operation by operation, so that both give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mergefs.blocks.tiers.kernels import vectors

_intrinsic: Any = intrinsic

LANES = 8
"""Elements of a vector: two registers of doubles."""

_I64, _F32, _F64 = ir.IntType(64), ir.FloatType(), ir.DoubleType()
_SINGLES, _DOUBLES = (ir.VectorType(t, LANES) for t in (_F32, _F64))


def _all(number: float) -> Any:
    return vectors.constant(_DOUBLES, number)


def _singles(builder: Any, address: Any) -> Any:
    return builder.fpext(vectors.load(builder, address, _SINGLES, 4), _DOUBLES)


def _double(builder: Any, address: Any, number: Any) -> Any:
    place = builder.add(address, builder.shl(number, ir.Constant(_I64, 3)))
    return vectors.splat(builder, builder.load(builder.inttoptr(place, _F64.as_pointer())), _DOUBLES)


def _magnitude(builder: Any, vector: Any) -> Any:
    function = ir.FunctionType(_DOUBLES, [_DOUBLES])
    name = f"llvm.fabs.v{LANES}f64"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector])


@_intrinsic
def elect_vector(typingctx, base, deltas, stride, count, thresholds, weights, normalize, scale, out):
    """Merge LANES elements; see `kernels.elect`.

    Args:
        base, out: addresses of their float32.
        deltas: address of those of the first expert's; each expert's lie `stride` bytes behind the one before.
        count: of experts.
        thresholds, weights: addresses of float64[count].
        normalize, scale: see `kernels.elect`.
    """

    def generate(context, builder, signature, args):
        base, deltas, stride, count, thresholds, weights, normalize, scale, out = args
        zero = _all(0.0)
        total, up, down, up_weight, down_weight = sums = [cgutils.alloca_once(builder, _DOUBLES) for _ in range(5)]
        for place in sums:
            builder.store(zero, place)

        def add(place, condition, amount):
            more = builder.select(condition, amount, zero)
            builder.store(builder.fadd(builder.load(place), more), place)

        with cgutils.for_range(builder, count, intp=_I64) as loop:
            delta = _singles(builder, builder.add(deltas, builder.mul(loop.index, stride)))
            weight = _double(builder, weights, loop.index)
            kept = builder.fcmp_ordered(">=", _magnitude(builder, delta), _double(builder, thresholds, loop.index))
            part = builder.select(kept, builder.fmul(weight, delta), zero)
            builder.store(builder.fadd(builder.load(total), part), total)
            rises, falls = builder.fcmp_ordered(">", part, zero), builder.fcmp_ordered("<", part, zero)
            add(up, rises, part)
            add(down, falls, part)
            add(up_weight, rises, weight)
            add(down_weight, falls, weight)
        positive = builder.fcmp_ordered(">=", builder.load(total), zero)
        merged = builder.select(positive, builder.load(up), builder.load(down))
        divisor = builder.select(positive, builder.load(up_weight), builder.load(down_weight))
        enough = builder.fcmp_ordered(">=", _magnitude(builder, divisor), _all(1e-8))
        divided = builder.fdiv(merged, builder.select(enough, divisor, _all(1.0)))
        merged = builder.select(cgutils.is_true(builder, normalize), divided, merged)
        found = builder.fadd(_singles(builder, base), builder.fmul(vectors.splat(builder, scale, _DOUBLES), merged))
        vectors.store(builder, builder.fptrunc(found, _SINGLES), out, 4)
        return ir.Constant(_I64, 0)

    address = types.int64
    arguments = (address, address, address, address, address, address, types.boolean, types.float64, address)
    return types.int64(*arguments), generate
