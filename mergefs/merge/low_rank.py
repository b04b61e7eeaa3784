"""Compiled loops over the factors of adapters. Every function releases the interpreter lock.

Sums are float64 in a fixed order, so that a block has the same bits on any machine and any number of threads.
"""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit

_jit = njit(nogil=True)


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
    tile = 256
    for start in range(0, columns, tile):
        n = min(columns - start, tile)
        part = right[:, start : start + n].astype(np.float64)
        for i in range(rows):
            row = out[i, start : start + n]
            for j in range(n):
                row[j] = 0.0
            k = 0
            # Four at a time, added one after the other, for fewer loads and stores.
            while k + 4 <= rank:
                a, b, c, d = (
                    np.float64(left[i, k]),
                    np.float64(left[i, k + 1]),
                    np.float64(left[i, k + 2]),
                    np.float64(left[i, k + 3]),
                )
                r0, r1, r2, r3 = part[k], part[k + 1], part[k + 2], part[k + 3]
                for j in range(n):
                    row[j] = (((row[j] + a * r0[j]) + b * r1[j]) + c * r2[j]) + d * r3[j]
                k += 4
            while k < rank:
                a = np.float64(left[i, k])
                r0 = part[k]
                for j in range(n):
                    row[j] += a * r0[j]
                k += 1
            for j in range(n):
                row[j] *= scale


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
