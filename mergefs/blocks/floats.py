"""Between the stored bytes of float elements and arrays to compute with."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.dtypes import DType
from mergefs.hashing import Buffer

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def unsigned(raw: Buffer | NDArray[np.uint8], itemsize: int) -> NDArray[Any]:
    """View bytes as unsigned integers of `itemsize` bytes, without a copy (little-endian)."""
    return np.frombuffer(raw, dtype=_UNSIGNED[itemsize])


def to_float(raw: Buffer, dtype: DType) -> NDArray[Any]:
    """Return the elements of `raw` as float32[n], or float64[n] for F64. Exact.

    Args:
        raw: the bytes of n elements.
        dtype: a float dtype.
    """
    if dtype.name == "F64":
        return np.frombuffer(raw, np.float64)
    if dtype.name == "F32":
        return np.frombuffer(raw, np.float32)
    from mergefs.blocks import kernels

    bits = unsigned(raw, dtype.itemsize)
    out = np.empty(bits.size, np.float32)
    if dtype.name == "BF16":
        kernels.widen_bf16(bits, out.view(np.uint32))
    else:
        kernels.look_up(bits, _table(dtype), out)
    return out


def from_float(values: NDArray[Any], dtype: DType) -> bytes:
    """Round float32[n] or float64[n] once to `dtype` (nearest, ties to even) and return the bytes."""
    if dtype.name == "BF16":
        from mergefs.blocks import kernels

        single = np.ascontiguousarray(values, np.float32)
        out = np.empty(single.size, np.uint16)
        kernels.narrow_bf16(single.view(np.uint32), out)
        return out.tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype.numpy).tobytes()


def squared_norm(raw: Buffer, dtype: DType) -> float:
    """Return the sum of the squares of the elements, in float64."""
    from mergefs.blocks import kernels

    return float(kernels.squares(to_float(raw, dtype)))


@functools.cache
def _table(dtype: DType) -> NDArray[np.float32]:
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=_UNSIGNED[dtype.itemsize])
    with np.errstate(invalid="ignore"):
        return np.asarray(bits.view(dtype.numpy).astype(np.float32))
