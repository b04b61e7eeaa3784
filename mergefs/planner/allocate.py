"""Spending the budget: every expert block that differs from the base's is worth something and costs bytes.

A block is read whole or not at all here. Its worth is its Shapley value in the squared norm of the merged
delta: the mean, over all orders of adding blocks, of what it adds. For the quadratic form |sum c_i d_i|^2 that
is exactly c_i <d_i, sum_j c_j d_j>: a block that the other experts cancel is worth little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergefs.catalog.tables import Catalog
from mergefs.manifest import Manifest
from mergefs.planner.measured import Measurer

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
        cost: physical bytes that reading it takes.
        worth: see the module; zeros before anything was chosen.
        own: the energy of the block's own weighted delta; zeros likewise.
        chosen: whether it is read.
        experts: how many there are.
    """

    tensors: tuple[str, ...]
    block_counts: tuple[int, ...]
    tensor: NDArray[np.int64]
    expert: NDArray[np.int64]
    block: NDArray[np.int64]
    cost: NDArray[np.int64]
    worth: NDArray[np.float64]
    own: NDArray[np.float64]
    chosen: NDArray[np.bool_]
    experts: int

    @property
    def total_cost(self) -> int:
        """Bytes of all of them."""
        return int(self.cost.sum())

    @property
    def chosen_cost(self) -> int:
        """Bytes of those that are read."""
        return int(self.cost[self.chosen].sum())

    @property
    def everything(self) -> bool:
        """Whether all of them are read."""
        return bool(self.chosen.all())

    def cost_of(self, expert: int, tensor: str) -> int:
        """Bytes of all changed blocks of one tensor of an expert."""
        start, stop = np.searchsorted(self.tensor, (self._numbers[tensor], self._numbers[tensor] + 1))
        mine = slice(int(start), int(stop))
        return int(self.cost[mine][self.expert[mine] == expert].sum())

    def depths(self, tensor: str) -> tuple[str, ...]:
        """Return the depths of a tensor's blocks as a plan has them: a string of digits for each expert."""
        number = self._numbers[tensor]
        start, stop = np.searchsorted(self.tensor, (number, number + 1))
        grid = np.full((self.experts, self.block_counts[number]), ord("0"), np.uint8)
        mine = slice(int(start), int(stop))
        grid[self.expert[mine], self.block[mine]] += self.chosen[mine].astype(np.uint8)
        return tuple(row.tobytes().decode() for row in grid)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tensors)}


def candidates(catalog: Catalog, base: Manifest, base_id: str, experts: tuple[Manifest, ...]) -> Candidates:
    """Return every expert block that differs from the base's, all of them chosen."""
    rows: list[tuple[int, int, int]] = []
    pairs: list[tuple[bytes, bytes]] = []
    floats = [tensor for tensor in base.tensors if tensor.dtype.is_float]
    for number, tensor in enumerate(floats):
        for e, expert in enumerate(experts):
            twin = expert.tensor_by_name[tensor.name]
            same_dtype = twin.dtype is tensor.dtype
            for b, (mine, its) in enumerate(zip(tensor.blocks, twin.blocks, strict=True)):
                assert mine is not None
                assert its is not None
                if mine != its or not same_dtype:
                    rows.append((number, e, b))
                    pairs.append((bytes.fromhex(mine), bytes.fromhex(its)))
    located = catalog.locate_all({block for pair in pairs for block in pair})
    roots = {mine: located[mine].record.base for mine, _ in pairs if mine in located}
    extra = catalog.locate_all({location.record.base for location in located.values()})

    def cost(mine: bytes, its: bytes) -> int:
        if its not in located:
            return 0  # missing: the merge will say so
        record = located[its].record
        if record.base in extra and record.base not in (mine, roots.get(mine)):
            return record.length + extra[record.base].record.length
        return record.length

    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return Candidates(
        tuple(tensor.name for tensor in floats),
        tuple(len(tensor.blocks) for tensor in floats),
        table[:, 0],
        table[:, 1],
        table[:, 2],
        np.array([cost(*pair) for pair in pairs], np.int64),
        np.zeros(len(rows)),
        np.zeros(len(rows)),
        np.ones(len(rows), bool),
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
    """Choose the blocks that are worth most per byte, until no other fits the budget.

    Args:
        found: all candidates.
        measured: the experts' statistics.
        importance: each expert's factor in the result.
        budget: in bytes.
    """
    worth, own = np.zeros(len(found.cost)), np.zeros(len(found.cost))
    for number, name in enumerate(found.tensors):
        start, stop = (int(x) for x in np.searchsorted(found.tensor, (number, number + 1)))
        if start < stop:
            tables = _worth(measured, name, found.block_counts[number], importance)
            place = found.expert[start:stop], found.block[start:stop]
            worth[start:stop], own[start:stop] = (values[place] for values in tables)
    order = np.argsort(-worth / np.maximum(found.cost, 1), kind="stable")
    ahead = np.cumsum(found.cost[order])
    fits = int(np.searchsorted(ahead, budget, side="right"))
    chosen = np.zeros(len(worth), bool)
    chosen[order[:fits]] = True
    left = budget - (int(ahead[fits - 1]) if fits else 0)
    for i in order[fits:]:
        if found.cost[i] <= left:
            chosen[i] = True
            left -= int(found.cost[i])
    return replace(found, worth=worth, own=own, chosen=chosen)


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
