"""Compiled loops of the merge methods over one block. Every function releases the interpreter lock.

Sums over experts are float64 in the order of the experts, so that elections at exact cancellation agree with
the float64 definition; a result is rounded once, by the caller.
"""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit
from mergefs.merge.wide import LANES, elect_vector

_jit = njit(nogil=True)


@_jit
def _add(total, coefficient, row):
    for i in range(total.size):
        total[i] += coefficient * np.float64(row[i])


@_jit
def _add_four(total, c, r0, r1, r2, r3):
    """`_add` of four rows, one after the other."""
    c0, c1, c2, c3 = c[0], c[1], c[2], c[3]
    for i in range(total.size):
        two = (total[i] + c0 * np.float64(r0[i])) + c1 * np.float64(r1[i])
        total[i] = (two + c2 * np.float64(r2[i])) + c3 * np.float64(r3[i])


@_jit
def combine(base, base_scale, deltas, coefficients, out):
    """out[i] = base_scale base[i] + sum_k coefficients[k] deltas[k, i].

    Args:
        base, out: float32[n] or float64[n].
        deltas: the same dtype, [k, n].
        coefficients: float64[k].
    """
    tile = 1024
    room = np.empty(tile, np.float64)
    for start in range(0, base.size, tile):
        stop = min(base.size, start + tile)
        total = room[: stop - start]
        total[:] = 0.0
        k = 0
        while k + 4 <= coefficients.size:
            _add_four(
                total,
                coefficients[k : k + 4],
                deltas[k][start:stop],
                deltas[k + 1][start:stop],
                deltas[k + 2][start:stop],
                deltas[k + 3][start:stop],
            )
            k += 4
        while k < coefficients.size:
            _add(total, coefficients[k], deltas[k][start:stop])
            k += 1
        below = base[start:stop]
        found = out[start:stop]
        for i in range(total.size):
            found[i] = base_scale * np.float64(below[i]) + total[i]


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
def elect_singles(base, deltas, thresholds, weights, normalize, scale, out):
    """`elect` of float32 whose rows are contiguous; see `wide`."""
    whole = base.size // LANES * LANES
    at_base, at_deltas, at_out = base.ctypes.data, deltas.ctypes.data, out.ctypes.data
    at_thresholds, at_weights, stride = thresholds.ctypes.data, weights.ctypes.data, deltas.strides[0]
    for i in range(0, whole, LANES):
        at = 4 * i
        elect_vector(
            at_base + at,
            at_deltas + at,
            stride,
            weights.size,
            at_thresholds,
            at_weights,
            normalize,
            scale,
            at_out + at,
        )
    elect(base[whole:], deltas[:, whole:], thresholds, weights, normalize, scale, out[whole:])


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
def _draw_many(counter, key0, key1, lanes, out):
    """Write `draw` of `counter` and the next ones, one after the other, to out (uint32[4 m]).

    Args:
        lanes: room, uint32[4, m].
    """
    c0, c1, c2, c3 = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(c0.size):
        number = np.uint64(counter) + np.uint64(i)
        c0[i] = np.uint32(number)
        c1[i] = np.uint32(number >> np.uint64(32))
        c2[i] = np.uint32(0)
        c3[i] = np.uint32(0)
    k0 = np.uint32(key0)
    k1 = np.uint32(key1)
    for _ in range(10):
        # So that products of 32 bits are made, several at a time.
        for i in range(c0.size):
            p0 = np.uint64(0xD2511F53) * np.uint64(c0[i])
            p1 = np.uint64(0xCD9E8D57) * np.uint64(c2[i])
            c0[i] = np.uint32(p1 >> np.uint64(32)) ^ c1[i] ^ k0
            c2[i] = np.uint32(p0 >> np.uint64(32)) ^ c3[i] ^ k1
            c1[i] = np.uint32(p1)
            c3[i] = np.uint32(p0)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    for i in range(c0.size):
        out[4 * i] = c0[i]
        out[4 * i + 1] = c1[i]
        out[4 * i + 2] = c2[i]
        out[4 * i + 3] = c3[i]


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
    if np.uint64(limit) > np.uint64(0xFFFFFFFF):
        return
    many = 256
    lanes = np.empty((4, many), np.uint32)
    drawn = np.empty(4 * many, np.uint32)
    bound = np.uint32(limit)
    counter = first // 4
    skipped = first % 4
    i = 0
    while i < delta.size:
        _draw_many(counter, key0, key1, lanes, drawn)
        count = min(drawn.size - skipped, delta.size - i)
        part = delta[i : i + count]
        numbers = drawn[skipped : skipped + count]
        for j in range(count):
            part[j] = part[j] if numbers[j] < bound else 0.0
        i += count
        counter += many
        skipped = 0


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
