"""Compiled loops of the merge methods over one block. Every function releases the interpreter lock.

Sums over experts are float64 in the order of the experts, so that elections at exact cancellation agree with
the float64 definition; a result is rounded once, by the caller.
"""

from __future__ import annotations

import numba
import numpy as np

_jit = numba.njit(nogil=True, cache=True)


@_jit
def combine(base, base_scale, deltas, coefficients, out):
    """out[i] = base_scale base[i] + sum_k coefficients[k] deltas[k, i].

    Args:
        base, out: float32[n] or float64[n].
        deltas: the same dtype, [k, n].
        coefficients: float64[k].
    """
    total = np.empty(2048, np.float64)
    n = base.size
    for start in range(0, n, 2048):
        stop = min(2048, n - start)
        for i in range(stop):
            total[i] = 0.0
        for k in range(coefficients.size):
            c = coefficients[k]
            row = deltas[k]
            for i in range(stop):
                total[i] += c * np.float64(row[start + i])
        for i in range(stop):
            out[start + i] = base_scale * np.float64(base[start + i]) + total[i]


@_jit
def elect(base, deltas, thresholds, weights, normalize, scale, out):
    """Trim, elect signs, and merge the deltas that agree (TIES, arXiv 2306.01708).

    Args:
        base, out: float32[n] or float64[n].
        deltas: the same dtype, [k, n].
        thresholds: float64[k]; elements of smaller magnitude are trimmed.
        weights: float64[k].
        normalize: divide by the sum of the weights that agree (not where that is below 1e-8, as mergekit has it).
        scale: factor of the merged delta.
    """
    n = base.size
    tile = 1024
    total = np.empty(tile, np.float64)
    merged = np.empty(tile, np.float64)
    divisor = np.empty(tile, np.float64)
    for start in range(0, n, tile):
        stop = min(tile, n - start)
        total[:] = 0.0
        merged[:] = 0.0
        divisor[:] = 0.0
        for k in range(weights.size):
            w = weights[k]
            limit = thresholds[k]
            row = deltas[k, start : start + stop]
            for i in range(stop):
                d = np.float64(row[i])
                total[i] += w * d if abs(d) >= limit else 0.0
        for k in range(weights.size):
            w = weights[k]
            limit = thresholds[k]
            row = deltas[k, start : start + stop]
            for i in range(stop):
                # Without branches, so that it compiles to vector instructions. A total that is not a number
                # elects the negative sign.
                d = np.float64(row[i])
                wd = w * d
                up = total[i] >= 0.0
                agrees = (abs(d) >= limit) & ((up & (wd > 0.0)) | ((not up) & (wd < 0.0)))
                merged[i] += wd if agrees else 0.0
                divisor[i] += w if agrees else 0.0
        if normalize:
            for i in range(stop):
                merged[i] /= divisor[i] if abs(divisor[i]) >= 1e-8 else 1.0
        for i in range(stop):
            out[start + i] = np.float64(base[start + i]) + scale * merged[i]


@_jit
def cut(delta, low, high):
    """Set to zero the elements of a delta (float32[n] or float64[n], in place) whose magnitude is below `low` or above
    `high`."""
    for i in range(delta.size):
        magnitude = abs(np.float64(delta[i]))
        if magnitude < low or magnitude > high:
            delta[i] = 0.0


@_jit
def draw(counter, key0, key1, lanes):
    """Write the four numbers of Philox4x32-10 (Salmon et al., SC 2011, doi 10.1145/2063384.2063405) for the counter
    (`counter` as 64 bits, 0, 0) and a key of two 32-bit halves into `lanes` (uint64[4])."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0 = counter & mask
    c1 = counter >> shift
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    k0 = np.uint64(key0)
    k1 = np.uint64(key1)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0 = (p1 >> shift) ^ c1 ^ k0
        c1 = p1 & mask
        c2 = (p0 >> shift) ^ c3 ^ k1
        c3 = p0 & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    lanes[0] = c0
    lanes[1] = c1
    lanes[2] = c2
    lanes[3] = c3


@_jit
def drop(delta, first, key0, key1, limit):
    """Set to zero the elements whose random number is `limit` or more.

    Element number e of the tensor has lane e mod 4 of `draw` with the counter e div 4, so that any part of a tensor
    can be drawn alone.

    Args:
        delta: float32[n] or float64[n], changed in place.
        first: number of the first element in its tensor.
        key0, key1: the 32-bit halves of the key.
        limit: an integer 0 .. 2**32: the share that is kept, times 2**32.
    """
    n = delta.size
    lanes = np.empty(4, np.uint64)
    i = 0
    while i < n:
        element = np.uint64(first) + np.uint64(i)
        draw(element >> np.uint64(2), key0, key1, lanes)
        lane = np.int64(element & np.uint64(3))
        while lane < 4 and i < n:
            if lanes[lane] >= np.uint64(limit):
                delta[i] = 0.0
            lane += 1
            i += 1


@_jit
def prune(delta, length, first, key0, key1, density, epsilon, rescale):
    """Set to zero elements at random, by the ranks of their magnitudes in their rows; divide the others by their chance
    to stay when `rescale`.

    The r-th smallest of a row of n elements stays when its number (see `drop`) is below its chance
    density - epsilon + 2 epsilon (r - 1) / (n - 1), times 2**32 and rounded.

    Args:
        delta: float32[rows * length] or float64[...], changed in place.
        length: elements of a row.
        first: number of the first element in its tensor.
        key0, key1: the 32-bit halves of the key.
    """
    lanes = np.empty(4, np.uint64)
    drawn = np.uint64(0xFFFFFFFFFFFFFFFF)
    chances = np.empty(length, np.float64)
    for start in range(0, delta.size, length):
        order = np.argsort(np.abs(delta[start : start + length]), kind="mergesort")
        for rank in range(length):
            share = rank / (length - 1) if length > 1 else 0.0
            chances[order[rank]] = density - epsilon + 2.0 * epsilon * share
        for i in range(length):
            element = np.uint64(first) + np.uint64(start + i)
            if element >> np.uint64(2) != drawn:
                drawn = element >> np.uint64(2)
                draw(drawn, key0, key1, lanes)
            chance = chances[i]
            if lanes[element & np.uint64(3)] >= np.uint64(np.round(chance * 4294967296.0)):
                delta[start + i] = 0.0
            elif rescale:
                delta[start + i] /= chance
