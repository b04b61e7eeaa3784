"""Compiled loops of the methods that choose elements by what all models' deltas are there. Every function releases the
interpreter lock. Sums are float64 in the order of the experts."""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit

_jit = njit(nogil=True)


@_jit
def _variance(deltas, count, i):
    """The variance of `count` deltas at element i, of which those without a row are 0."""
    mean = 0.0
    for k in range(len(deltas)):
        mean += np.float64(deltas[k, i])
    mean /= count
    total = (count - len(deltas)) * mean * mean
    for k in range(len(deltas)):
        apart = np.float64(deltas[k, i]) - mean
        total += apart * apart
    return np.float32(total / count)


@_jit
def variances(deltas, count, out):
    """out[i] = the variance of the deltas at element i, over `count` experts.

    Args:
        deltas: float32[k, n] or float64[k, n]; experts that have no row have a delta of 0.
        out: float32[n].
    """
    for i in range(out.size):
        out[i] = _variance(deltas, count, i)


@_jit
def selected_squares(deltas, count, limit, out):
    """out[k] = the sum of deltas[k, i] squared over the elements whose variance is at least `limit`; float64[k]."""
    out[:] = 0.0
    for i in range(deltas.shape[1]):
        if limit <= 0.0 or _variance(deltas, count, i) >= limit:
            for k in range(len(deltas)):
                out[k] += np.float64(deltas[k, i]) ** 2


@_jit
def consensus(base, deltas, count, limit, weights, out):
    """out[i] = base[i] + the weighted mean of the deltas that have the sign of their sum (positive when it is 0).

    Args:
        base, out: float32[n] or float64[n].
        deltas: the same dtype, [k, n].
        count, limit: elements whose variance over `count` experts is below `limit` stay the base's.
        weights: float64[k].
    """
    for i in range(base.size):
        out[i] = base[i]
        if limit > 0.0 and not _variance(deltas, count, i) >= limit:
            continue
        total = 0.0
        for k in range(len(deltas)):
            total += np.float64(deltas[k, i])
        merged = 0.0
        divisor = 0.0
        for k in range(len(deltas)):
            d = np.float64(deltas[k, i])
            if (d > 0.0 and total >= 0.0) or (d < 0.0 and total < 0.0):
                merged += weights[k] * d
                divisor += weights[k]
        out[i] = np.float64(base[i]) + merged / max(divisor, 1e-6)


@_jit
def overlaps(deltas, epsilon, unique, shared):
    """Count for each expert the elements that it alone changes by more than epsilon, and those that others do as well.

    Args:
        deltas: float32[k, n] or float64[k, n].
        unique, shared: int64[k].
    """
    for i in range(deltas.shape[1]):
        changed = 0
        for k in range(len(deltas)):
            changed += abs(np.float64(deltas[k, i])) > epsilon
        for k in range(len(deltas)):
            if abs(np.float64(deltas[k, i])) > epsilon:
                if changed == 1:
                    unique[k] += 1
                else:
                    shared[k] += 1


@_jit
def reinforce(base, deltas, epsilon, factors, out):
    """out[i] = base[i] + the mean of the deltas beyond epsilon; where there is only one, that one times its factor.

    Args:
        base, out: float32[n] or float64[n].
        deltas: the same dtype, [k, n].
        factors: float64[k].
    """
    for i in range(base.size):
        changed = 0
        alone = 1.0
        total = 0.0
        for k in range(len(deltas)):
            d = np.float64(deltas[k, i])
            if abs(d) > epsilon:
                changed += 1
                alone = factors[k]
                total += d
        if changed > 1:
            total /= changed
        else:
            total *= alone
        out[i] = np.float64(base[i]) + total


@_jit
def importance(base, delta, length, out):
    """out[i] = |delta[i]| times the divergence KL(p || q) of its row: p the softmax of base + delta, q that of the
    base, 1e-8 added to each.

    Args:
        base, delta: float32[rows * length] or float64[...].
        length: elements of a row.
        out: float32[rows * length].
    """
    for start in range(0, base.size, length):
        stop = start + length
        if not np.any(delta[start:stop]):
            out[start:stop] = 0.0
            continue
        top_p = -np.inf
        top_q = -np.inf
        for i in range(start, stop):
            q = np.float64(base[i])
            top_q = max(top_q, q)
            top_p = max(top_p, q + np.float64(delta[i]))
        sum_p = 0.0
        sum_q = 0.0
        for i in range(start, stop):
            q = np.float64(base[i])
            sum_q += np.exp(q - top_q)
            sum_p += np.exp(q + np.float64(delta[i]) - top_p)
        divergence = 0.0
        for i in range(start, stop):
            q = np.float64(base[i])
            p = np.exp(q + np.float64(delta[i]) - top_p) / sum_p + 1e-8
            divergence += p * np.log(p / (np.exp(q - top_q) / sum_q + 1e-8))
        divergence = max(divergence, 0.0)
        for i in range(start, stop):
            out[i] = np.float32(abs(np.float64(delta[i])) * divergence)
