"""Spending the budget: a rate-distortion allocation over tiers.

Every expert block that differs from the base's can be read to some depth. Its curve of bytes against the error that
remains in the merged result is replaced by its lower convex hull, and the hulls' segments are taken in the order of
error removed per byte until the budget is used: with one multiplier for the whole merge this is the least error
for the bytes (as in post-compression rate-distortion optimisation, Taubman 2000).

Not reading a block costs its Shapley value in the squared norm of the merged delta: the mean, over all orders of
adding blocks, of what it adds. For |sum c_i d_i|^2 that is exactly c_i <d_i, sum_j c_j d_j>: a block that the other
experts cancel is worth little. What remains after coarse tiers is noise of the quantiser, independent from expert to
expert, and counts with c_i^2 alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.catalog.tables import Catalog, get_tiers
from mergefs.manifest import Manifest
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import EXACT

DEPTHS = COARSE_TIERS + 2
"""Depths that a block can be read to: not at all, its coarse tiers, exactly."""

_LEAST_WORTH = 0.05
"""A block's worth is at least this share of its own energy, however much the others seem to cancel it: the
inner products are estimates."""


@dataclass(frozen=True)
class Candidates:
    """Every changed expert block of a merge; arrays of one length.

    Attributes:
        tensors: names, in the base's order.
        block_counts: blocks of each tensor.
        tensor, expert, block: numbers of the tensor, the expert and the block in it.
        cost: int64[n, 5]: physical bytes of reading it to depth 0 to 4; depths from `tiers` on cost the same.
        tiers: int64[n]: the depth at which it is exact.
        worth: the error in the merged result when it is not read; zeros before anything was chosen.
        own: the energy of the block's own weighted delta; zeros likewise.
        remaining: the error in the merged result at the chosen depth; zeros likewise.
        depth: the depth to which it is read.
        experts: how many there are.
    """

    tensors: tuple[str, ...]
    block_counts: tuple[int, ...]
    tensor: NDArray[np.int64]
    expert: NDArray[np.int64]
    block: NDArray[np.int64]
    cost: NDArray[np.int64]
    tiers: NDArray[np.int64]
    worth: NDArray[np.float64]
    own: NDArray[np.float64]
    remaining: NDArray[np.float64]
    depth: NDArray[np.int64]
    experts: int

    @property
    def full_cost(self) -> NDArray[np.int64]:
        """Bytes of each, read whole."""
        return np.asarray(self.cost[:, -1])

    @property
    def spent(self) -> NDArray[np.int64]:
        """Bytes of each at its chosen depth."""
        return np.asarray(self.cost[np.arange(len(self.cost)), self.depth])

    @property
    def total_cost(self) -> int:
        """Bytes of all of them, read whole."""
        return int(self.full_cost.sum())

    @property
    def chosen_cost(self) -> int:
        """Bytes of what is read."""
        return int(self.spent.sum())

    @property
    def everything(self) -> bool:
        """Whether all of them are read whole."""
        return bool((self.depth == self.tiers).all())

    @property
    def predicted_error(self) -> float | None:
        """The merged delta's error relative to its norm; None where there was nothing to choose by."""
        if self.everything:
            return 0.0
        whole = float(self.worth.sum())
        return float(np.sqrt(min(1.0, self.remaining.sum() / whole))) if whole > 0 else None

    def cost_of(self, expert: int, tensor: str) -> int:
        """Bytes of all changed blocks of one tensor of an expert."""
        mine = self.of_tensor(self._numbers[tensor])
        return int(self.full_cost[mine][self.expert[mine] == expert].sum())

    def of_tensor(self, number: int) -> slice:
        """Return where a tensor's blocks lie in the arrays."""
        start, stop = np.searchsorted(self.tensor, (number, number + 1))
        return slice(int(start), int(stop))

    def depths(self, tensor: str) -> tuple[str, ...]:
        """Return the depths of a tensor's blocks as a plan has them: a string of digits for each expert."""
        number = self._numbers[tensor]
        mine = self.of_tensor(number)
        grid = np.zeros((self.experts, self.block_counts[number]), np.uint8)
        exact = self.depth[mine] == self.tiers[mine]
        grid[self.expert[mine], self.block[mine]] = np.where(exact, EXACT, self.depth[mine])
        return tuple((row + ord("0")).astype(np.uint8).tobytes().decode() for row in grid)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tensors)}


def candidates(
    catalog: Catalog, base: Manifest, experts: tuple[Manifest, ...], weights: tuple[float, ...]
) -> Candidates:
    """Return every expert block that differs from the base's, all to be read whole.

    Experts of weight 0 have none: their deltas do not enter any result.
    """
    rows: list[tuple[int, int, int]] = []
    pairs: list[tuple[bytes, bytes]] = []
    floats = [tensor for tensor in base.tensors if tensor.dtype.is_float]
    for number, tensor in enumerate(floats):
        for e, expert in enumerate(experts):
            twin = expert.tensor_by_name[tensor.name]
            if weights[e] == 0.0:
                continue
            same_dtype = twin.dtype is tensor.dtype
            for b, (mine, its) in enumerate(zip(tensor.blocks, twin.blocks, strict=True)):
                assert mine is not None
                assert its is not None
                if mine != its or not same_dtype:
                    rows.append((number, e, b))
                    pairs.append((bytes.fromhex(mine), bytes.fromhex(its)))
    with catalog.read() as txn:
        located = {block: get_tiers(txn, block) for block in {block for pair in pairs for block in pair}}
    roots = {block: tiers[0].record.base for block, tiers in located.items() if tiers}
    extra = catalog.locate_all(set(roots.values()))
    cost = np.zeros((len(rows), DEPTHS), np.int64)
    tiers = np.ones(len(rows), np.int64)
    for row, (base_block, block) in enumerate(pairs):
        if not located[block]:
            continue  # missing: the merge will say so
        lengths = [location.record.length for location in located[block]]
        root = roots[block]
        if root in extra and root not in (base_block, roots.get(base_block)):
            lengths[0] += extra[root].record.length
        tiers[row] = len(lengths)
        cost[row, 1 : len(lengths) + 1] = np.cumsum(lengths)
        cost[row, len(lengths) + 1 :] = sum(lengths)
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return Candidates(
        tuple(tensor.name for tensor in floats),
        tuple(len(tensor.blocks) for tensor in floats),
        table[:, 0],
        table[:, 1],
        table[:, 2],
        cost,
        tiers,
        np.zeros(len(rows)),
        np.zeros(len(rows)),
        np.zeros(len(rows)),
        tiers.copy(),
        len(experts),
    )


def base_cost(catalog: Catalog, base: Manifest) -> int:
    """Return the physical bytes that reading all float tensors of the base takes."""
    blocks = [bytes.fromhex(b) for tensor in base.tensors if tensor.dtype.is_float for b in tensor.blocks if b]
    located = catalog.locate_all(set(blocks))
    roots = catalog.locate_all({location.record.base for location in located.values()})
    return sum(
        location.record.length + (roots[location.record.base].record.length if location.record.base in roots else 0)
        for location in (located[block] for block in blocks if block in located)
    )


def choose(found: Candidates, measured: Measurer, importance: tuple[float, ...], budget: int) -> Candidates:
    """Choose the depths that leave the least error in the merged result for the bytes.

    Args:
        found: all candidates.
        measured: the experts' statistics.
        importance: each expert's factor in the result.
        budget: in bytes.
    """
    count = len(found.cost)
    worth, own = np.zeros(count), np.zeros(count)
    error = np.full((count, DEPTHS), np.inf)
    for number, name in enumerate(found.tensors):
        mine = found.of_tensor(number)
        if mine.start == mine.stop:
            continue
        place = found.expert[mine], found.block[mine]
        tables = _worth(measured, name, found.block_counts[number], importance)
        worth[mine], own[mine] = (values[place] for values in tables)
        for expert, factor in enumerate(importance):
            rows = np.flatnonzero(found.expert[mine] == expert) + mine.start
            coarse = measured.statistics(expert, name).errors[found.block[rows]].astype(np.float64)
            error[rows, 1 : 1 + COARSE_TIERS] = np.where(np.isnan(coarse), np.inf, factor**2 * coarse)
    error[np.arange(DEPTHS)[None, :] >= found.tiers[:, None]] = 0.0
    error[:, 0] = np.maximum(worth, np.where(np.isinf(error[:, 1]), 0.0, error[:, 1]))
    depth = _allocate(found.cost, error, found.tiers, budget)
    remaining = error[np.arange(count), depth]
    return replace(found, worth=worth, own=own, depth=depth, remaining=remaining)


def _allocate(
    cost: NDArray[np.int64], error: NDArray[np.float64], tiers: NDArray[np.int64], budget: int
) -> NDArray[np.int64]:
    """Return for each row the depth, such that the costs stay within the budget and the errors are least.

    Args:
        cost, error: [n, depths]; cost does not fall from depth to depth, and depths from `tiers` on are alike.
        tiers: [n]: the largest depth of a row.
        budget: bound of the sum of the costs.
    """
    rows, starts, ends, slopes = _hull(cost, error, tiers)
    order = np.argsort(-slopes, kind="stable")
    rows, starts, ends = rows[order], starts[order], ends[order]
    price = cost[rows, ends] - cost[rows, starts]
    ahead = np.cumsum(price)
    fits = int(np.searchsorted(ahead, budget, side="right"))
    depth = np.zeros(len(cost), np.int64)
    np.maximum.at(depth, rows[:fits], ends[:fits])
    left = budget - (int(ahead[fits - 1]) if fits else 0)
    # Then whatever still fits, the best first; a segment only where the one before it was taken.
    for i in fits + np.flatnonzero(price[fits:] <= left):
        if price[i] <= left and depth[rows[i]] == starts[i]:
            depth[rows[i]] = ends[i]
            left -= int(price[i])
    return depth


def _hull(
    cost: NDArray[np.int64], error: NDArray[np.float64], tiers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the segments of the rows' lower convex hulls: row, from depth, to depth, error removed per byte."""
    count, depths = error.shape
    every = np.arange(count)
    at = np.zeros(count, np.int64)
    limit = np.full(count, np.inf)
    segments: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
    for _ in range(depths - 1):
        gain = error[every, at][:, None] - error
        price = np.maximum(cost - cost[every, at][:, None], 1)
        reachable = (np.arange(depths)[None, :] > at[:, None]) & (np.arange(depths)[None, :] <= tiers[:, None])
        slope = np.where(reachable & np.isfinite(gain), gain / price, -1.0)
        # Of equally steep segments the longest, so that what costs nothing more is taken along.
        target = depths - 1 - np.argmax(slope[:, ::-1], axis=1)
        # Rounding must not make a later segment of a row look better than an earlier one.
        best = np.minimum(slope[every, target], limit)
        moves = best >= 0.0
        limit = np.where(moves, best, -1.0)
        segments.append((every[moves], at[moves], target[moves], best[moves]))
        at = np.where(moves, target, at)
    rows, starts, ends, slopes = (np.concatenate(part) for part in zip(*segments, strict=True))
    return rows, starts, ends, slopes


def _worth(
    measured: Measurer, tensor: str, blocks: int, importance: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the worth and the own energy of each expert's blocks of a tensor, [experts, blocks]."""
    own = np.zeros((len(importance), blocks))
    sketches = []
    for expert, factor in enumerate(importance):
        statistics = measured.statistics(expert, tensor)
        own[expert] = factor**2 * statistics.blocks["energy"]
        sketches.append(factor * statistics.sketches.astype(np.float64))
    if any(len(sketch) != blocks for sketch in sketches):
        return own, own
    stacked = np.stack(sketches)
    together = np.einsum("ebs,bs->eb", stacked, stacked.sum(axis=0)) - np.einsum("ebs,ebs->eb", stacked, stacked)
    return np.maximum(own + together, _LEAST_WORTH * own), own
