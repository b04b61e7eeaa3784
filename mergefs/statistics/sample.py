"""A sample of a tensor's elements, the same ones in every model: what methods that decide element by element do to
experts together can be computed on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import from_float
from mergefs.dtypes import DTYPES

LEAST_RUN = 1 << 13
"""Of so many elements at least one is sampled,"""

MOST_SAMPLED = 1 << 10
"""and of a tensor no more than so many in all."""


def run_length(elements: int) -> int:
    """Return of how many elements of a tensor one is sampled: a power of two."""
    return max(LEAST_RUN, 1 << (-(-elements // MOST_SAMPLED) - 1).bit_length())


def positions(elements: int, first: int, stop: int) -> NDArray[np.int64]:
    """Return which elements from number `first` to `stop` are in a tensor's sample, counted from `first`.

    One of each run of `run_length` elements, at a place that depends on the run's number alone.

    Args:
        elements: of the tensor.
        first, stop: a part of it.
    """
    length = run_length(elements)
    runs = np.arange(first // length, -(-stop // length), dtype=np.uint64)
    with np.errstate(over="ignore"):
        h = runs * np.uint64(0x9E3779B97F4A7C15)
        h = ((h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(32)
    found = (runs * np.uint64(length) + h % np.uint64(length)).astype(np.int64) - first
    return found[(found >= 0) & (found < stop - first)]


def to_bfloat16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return float values as the bits of the nearest bfloat16."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return np.frombuffer(from_float(single.ravel(), DTYPES["BF16"]), "<u2").reshape(values.shape)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
