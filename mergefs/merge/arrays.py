"""The loops of `kernels` as operations on whole arrays: planning merges samples, and need not load a compiler for it.

They compute the same, operation by operation, in float64 wherever `kernels` does. Sums along the first axis of an array
are taken row by row, in the order of the experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[Any]


def combine(base: _Array, base_scale: float, deltas: _Array, coefficients: _Array, out: _Array) -> None:
    """See `kernels.combine`."""
    total = np.add.reduce(coefficients[:, None] * deltas.astype(np.float64), axis=0)
    out[:] = base_scale * base.astype(np.float64) + total


def elect(
    base: _Array, deltas: _Array, thresholds: _Array, weights: _Array, normalize: bool, scale: float, out: _Array
) -> None:
    """See `kernels.elect`."""
    wide = deltas.astype(np.float64)
    weight = weights[:, None]
    parts = np.where(np.abs(wide) >= thresholds[:, None], weight * wide, 0.0)
    up = np.add.reduce(parts, axis=0) >= 0.0
    agrees = np.where(up, parts > 0.0, parts < 0.0)
    merged = np.add.reduce(np.where(agrees, parts, 0.0), axis=0)
    divisor = np.add.reduce(np.where(agrees, weight, 0.0), axis=0)
    if normalize:
        merged /= np.where(np.abs(divisor) >= 1e-8, divisor, 1.0)
    out[:] = base.astype(np.float64) + scale * merged


elect_singles = elect


def cut(delta: _Array, low: float, high: float) -> None:
    """See `kernels.cut`."""
    magnitude = np.abs(delta.astype(np.float64))
    delta[(magnitude < low) | (magnitude > high)] = 0.0


def drop(delta: _Array, first: int, key0: int, key1: int, limit: int) -> None:
    """See `kernels.drop`."""
    delta[_drawn(delta.size, first, key0, key1) >= np.uint64(limit)] = 0.0


def prune(
    delta: _Array, length: int, first: int, key0: int, key1: int, density: float, epsilon: float, rescale: bool
) -> None:
    """See `kernels.prune`."""
    rows = delta.reshape(-1, length)
    order = np.argsort(np.abs(rows), axis=1, kind="stable")
    share = np.arange(length) / (length - 1) if length > 1 else np.zeros(length)
    chances = np.empty(rows.shape)
    np.put_along_axis(chances, order, (density - epsilon + 2.0 * epsilon * share)[None, :], axis=1)
    drawn = _drawn(delta.size, first, key0, key1).reshape(rows.shape)
    stays = drawn < np.round(chances * 4294967296.0).astype(np.uint64)
    rows[:] = np.where(stays, rows / chances if rescale else rows, 0.0)


def _drawn(count: int, first: int, key0: int, key1: int) -> NDArray[np.uint64]:
    """Return the random numbers of `count` elements from element `first` on; see `kernels.draw`."""
    shift, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    begin = first // 4
    counter = np.arange(begin, (first + count + 3) // 4, dtype=np.uint64)
    c0, c1 = counter & mask, counter >> shift
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = key0, key1
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    lanes = np.stack((c0, c1, c2, c3), axis=1).ravel()
    at = first - 4 * begin
    return np.asarray(lanes[at : at + count])
