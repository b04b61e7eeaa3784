"""The least error for the bytes: steps that read blocks deeper, in the order in which a budget is to be spent.

Every block's curve of bytes against remaining error is replaced by its lower convex hull; with one multiplier for the
whole merge, taking the hulls' segments in the order of error removed per byte leaves the least error (as in
post-compression rate-distortion optimisation, Taubman 2000).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_FILLING = 1024
"""Steps that are tried on what a budget leaves over."""


@dataclass(frozen=True)
class Frontier:
    """Steps in the order in which they are to be taken.

    Attributes:
        floor: int64[n]: the depths before any step.
        floor_cost: bytes that those take.
        row, start, end: which block each step takes from which depth to which.
        price: int64: bytes that it takes.
        gain: error that it removes.
    """

    floor: NDArray[np.int64]
    floor_cost: int
    row: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    price: NDArray[np.int64]
    gain: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.row)

    def after(self, steps: int) -> NDArray[np.int64]:
        """Return the depths after the first so many steps."""
        depth = self.floor.copy()
        np.maximum.at(depth, self.row[:steps], self.end[:steps])
        return depth

    def within(self, budget: int) -> NDArray[np.int64]:
        """Return the depths that a budget in bytes allows, used to within one step; it covers the floor's cost."""
        left = budget - self.floor_cost
        ahead = np.cumsum(self.price)
        fits = int(np.searchsorted(ahead, left, side="right"))
        depth = self.after(fits)
        left -= int(ahead[fits - 1]) if fits else 0
        # Then what still fits of the next ones, the best first; a step only where the one before it was taken, and
        # none that removes no error: it would only be read because it is small.
        filling = (self.price[fits:] <= left) & (self.gain[fits:] > 0.0)
        for i in fits + np.flatnonzero(filling)[:_MOST_FILLING]:
            if self.price[i] <= left and depth[self.row[i]] == self.start[i]:
                depth[self.row[i]] = self.end[i]
                left -= int(self.price[i])
        return depth


def by_tiers(
    cost: NDArray[np.int64], error: NDArray[np.float64], tiers: NDArray[np.int64], floor: NDArray[np.int64]
) -> Frontier:
    """Return the steps along the lower convex hulls.

    Args:
        cost, error: [n, depths]; cost does not fall from depth to depth, and depths from `tiers` on are alike.
        tiers: [n]: the largest depth of a row.
        floor: [n]: the depth that each begins at.
    """
    count, depths = error.shape
    every = np.arange(count)
    costs, errors = np.ascontiguousarray(cost.T), np.ascontiguousarray(error.T)
    at = floor.astype(np.int8)
    last = tiers.astype(np.int8)
    limit = np.full(count, np.inf)
    found: list[tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int8], NDArray[np.float64]]] = []
    for _ in range(depths - 1):
        cost_here, error_here = costs[at, every], errors[at, every]
        best, target = np.full(count, -1.0), at.copy()
        # Of equally steep segments the longest, so that what costs nothing more is taken along.
        for deeper in range(depths - 1, 0, -1):
            slope = (error_here - errors[deeper]) / np.maximum(costs[deeper] - cost_here, 1)
            steeper = (slope > best) & np.isfinite(slope) & (deeper > at) & (deeper <= last)
            best[steeper], target[steeper] = slope[steeper], deeper
        # Rounding must not make a later segment of a row look better than an earlier one.
        best = np.minimum(best, limit)
        moves = best >= 0.0
        limit = np.where(moves, best, -1.0)
        found.append((every[moves], at[moves], target[moves], best[moves]))
        at = np.where(moves, target, at)
    row, start, end, slopes = (np.concatenate(part) for part in zip(*found, strict=True))
    return _sorted(cost, error, floor, row, start.astype(np.int64), end.astype(np.int64), slopes)


def by_blocks(
    cost: NDArray[np.int64],
    error: NDArray[np.float64],
    tiers: NDArray[np.int64],
    floor: NDArray[np.int64],
    rank: NDArray[np.float64] | None = None,
) -> Frontier:
    """Return steps that read a block whole, for comparison: the most error per byte first, or the highest rank."""
    row = np.flatnonzero(floor < tiers)
    start, end = floor[row], tiers[row]
    if rank is None:
        rank = (error[row, start] - error[row, end]) / np.maximum(cost[row, end] - cost[row, start], 1)
    else:
        rank = rank[row]
    return _sorted(cost, error, floor, row, start, end, rank)


def hash_rank(seed: int, count: int) -> NDArray[np.float64]:
    """Return a rank for each block that depends on a seed and its place alone, as if sampled by a hash."""
    with np.errstate(over="ignore"):
        h = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        h ^= np.uint64(seed) * np.uint64(0xD6E8FEB86659FD93)
        for _ in range(2):
            h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (h >> np.uint64(11)).astype(np.float64)


def _sorted(
    cost: NDArray[np.int64],
    error: NDArray[np.float64],
    floor: NDArray[np.int64],
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    rank: NDArray[np.float64],
) -> Frontier:
    order = np.argsort(-rank, kind="stable")
    row, start, end = row[order], start[order], end[order]
    return Frontier(
        floor,
        int(cost[np.arange(len(cost)), floor].sum()),
        row,
        start,
        end,
        cost[row, end] - cost[row, start],
        error[row, start] - error[row, end],
    )
