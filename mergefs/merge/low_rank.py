"""Compiled loops over the factors of adapters. Every function releases the interpreter lock.

Sums are float64 in a fixed order, so that a block has the same bits on any machine and any number of threads.
"""

from __future__ import annotations

import numba
import numpy as np

_jit = numba.njit(nogil=True, cache=True)


@_jit
def multiply(left, right, scale, out):
    """out[i, j] = scale sum_k left[i, k] right[k, j], k ascending.

    Args:
        left, right: [rows, rank] and [rank, columns], float32 or float64.
        scale: a float64.
        out: float64[rows, columns].
    """
    rows, rank = left.shape
    columns = right.shape[1]
    tile = 512
    for start in range(0, columns, tile):
        stop = min(columns, start + tile)
        for i in range(rows):
            for j in range(start, stop):
                out[i, j] = 0.0
            for k in range(rank):
                factor = np.float64(left[i, k])
                for j in range(start, stop):
                    out[i, j] += factor * np.float64(right[k, j])
            for j in range(start, stop):
                out[i, j] *= scale


@_jit
def rescale_rows(values, magnitude):
    """Divide each row by its norm and multiply it by its magnitude.

    Args:
        values: float64[rows, columns], overwritten.
        magnitude: [rows], float32 or float64.
    """
    rows, columns = values.shape
    for i in range(rows):
        total = 0.0
        for j in range(columns):
            total += values[i, j] * values[i, j]
        factor = np.float64(magnitude[i]) / np.sqrt(total)
        for j in range(columns):
            values[i, j] *= factor


@_jit
def rescale_columns(values, magnitude):
    """The same with columns, of which the magnitude has one element each."""
    rows, columns = values.shape
    factor = np.zeros(columns, np.float64)
    for i in range(rows):
        for j in range(columns):
            factor[j] += values[i, j] * values[i, j]
    for j in range(columns):
        factor[j] = np.float64(magnitude[j]) / np.sqrt(factor[j])
    for i in range(rows):
        for j in range(columns):
            values[i, j] *= factor[j]
