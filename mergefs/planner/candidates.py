"""The expert blocks that a merge could read, what reading them takes, and what is left when they are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.catalog.tables import Catalog
from mergefs.manifest import Manifest, Tensor
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import EXACT, Numbers
from mergefs.statistics.stored import block_bytes, factor_bytes
from mergefs.statistics.tensor import BLOCK, TIERS

DEPTHS = TIERS + 1
"""Depths that a block can be read to: not at all, its coarse tiers, exactly."""


@dataclass(frozen=True)
class Candidates:
    """Every changed expert block of a merge; arrays of one length, in the order of tensors, experts and blocks.

    Attributes:
        tensors: the base's float tensors, in its order.
        block_counts: blocks of each tensor.
        experts: how many there are.
        tensor, expert, block: numbers of the tensor, the expert and the block in it.
        rows: array of `statistics.tensor.BLOCK`: what is known of each; zeros, but for the bytes, where nothing is.
        cost: int64[n, 5]: physical bytes of reading it to depth 0 to 4; depths from `tiers` on cost the same.
        tiers: int64[n]: the depth at which it is exact.
        unknown: (expert, tensor) of which the catalog has no statistics.
    """

    tensors: tuple[Tensor, ...]
    block_counts: tuple[int, ...]
    experts: int
    tensor: NDArray[np.int64]
    expert: NDArray[np.int64]
    block: NDArray[np.int64]
    rows: NDArray[Any]
    cost: NDArray[np.int64]
    tiers: NDArray[np.int64]
    unknown: tuple[tuple[int, str], ...]

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def full_cost(self) -> NDArray[np.int64]:
        """Bytes of each, read whole."""
        return np.asarray(self.cost[:, -1])

    def cost_at(self, depth: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of each at its depth."""
        return np.asarray(self.cost[np.arange(len(self)), depth])

    def only(self, rows: NDArray[np.int64]) -> Candidates:
        """Return some of the candidates, in their order."""
        return replace(
            self,
            tensor=self.tensor[rows],
            expert=self.expert[rows],
            block=self.block[rows],
            rows=self.rows[rows],
            cost=self.cost[rows],
            tiers=self.tiers[rows],
        )

    def cost_of(self, expert: int, tensor: str) -> int:
        """Return the bytes of all changed blocks of one tensor of an expert."""
        mine = self.of_tensor(self._numbers[tensor])
        return int(self.full_cost[mine][self.expert[mine] == expert].sum())

    def of_tensor(self, number: int) -> slice:
        """Return where a tensor's blocks lie in the arrays."""
        return slice(int(self._starts[number]), int(self._starts[number + 1]))

    def grid(self, number: int, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of the candidates of one tensor as [experts, blocks], 0 where there is no candidate."""
        mine = self.of_tensor(number)
        found = np.zeros((self.experts, self.block_counts[number]), values.dtype)
        found[self.expert[mine], self.block[mine]] = values[mine]
        return found

    def digits(self, depth: NDArray[np.int64]) -> dict[str, tuple[str, ...]]:
        """Return the depths of each tensor's blocks as a plan has them: a string of digits for each expert."""
        shown = np.where(depth == self.tiers, EXACT, depth).astype(np.uint8)
        found = {}
        for number, tensor in enumerate(self.tensors):
            rows = self.grid(number, shown) + np.uint8(ord("0"))
            found[tensor.name] = tuple(row.tobytes().decode() for row in rows)
        return found

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The number of each one's block among all blocks of all tensors."""
        first = np.cumsum([0, *self.block_counts])
        return np.asarray(first[self.tensor] + self.block)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}


def find_candidates(
    catalog: Catalog, base: Manifest, experts: tuple[Manifest, ...], numbers: Mapping[str, Numbers], measured: Measurer
) -> Candidates:
    """Return every expert block that differs from the base's.

    Experts have none in tensors where their weight is 0: their deltas do not enter the result.

    Args:
        catalog: where the blocks lie.
        base, experts: the models.
        numbers: the method's parameters of each float tensor, by its name.
        measured: the experts' statistics.
    """
    floats = tuple(tensor for tensor in base.tensors if tensor.dtype.is_float)
    places: list[tuple[int, int]] = []
    rows: list[NDArray[Any]] = []
    unknown: list[tuple[int, str]] = []
    for place, tensor in enumerate(floats):
        for e, expert in enumerate(experts):
            if numbers[tensor.name].weights[e] == 0.0:
                continue
            known = measured.stored(e, tensor.name)
            if known is None and tensor.blocks and expert.id != base.id:
                unknown.append((e, tensor.name))
            places.append((place, e))
            rows.append(
                _located(catalog, tensor, expert.tensor_by_name[tensor.name]) if known is None else known.blocks
            )
    lengths = [len(part) for part in rows]
    every = np.frombuffer(b"".join(rows), BLOCK)  # NumPy would look at the fields of each part
    changed = np.flatnonzero(every["bytes"][:, 0])
    whose = np.repeat(np.array(places, np.int64).reshape(-1, 2), lengths, axis=0)[changed]
    firsts = np.repeat(np.cumsum([0, *lengths])[:-1].astype(np.int64), lengths)
    chosen = every[changed]
    cost = np.zeros((len(chosen), DEPTHS), np.int64)
    np.cumsum(chosen["bytes"], axis=1, dtype=np.int64, out=cost[:, 1:])
    return Candidates(
        floats,
        tuple(len(tensor.blocks) for tensor in floats),
        len(experts),
        whose[:, 0],
        whose[:, 1],
        changed - firsts[changed],
        chosen,
        cost,
        np.count_nonzero(chosen["bytes"], axis=1),
        tuple(unknown),
    )


def factors_cost(catalog: Catalog, experts: tuple[Manifest, ...], numbers: Mapping[str, Numbers]) -> int:
    """Return the physical bytes of the adapters' factors, which are read whatever is chosen.

    Args:
        catalog: where the blocks lie.
        experts: the models.
        numbers: the method's parameters of each float tensor, by its name; see `find_candidates`.
    """
    with catalog.read() as txn:
        return factor_bytes(
            txn,
            (
                (expert, {name for name, mine in numbers.items() if mine.weights[e] != 0.0})
                for e, expert in enumerate(experts)
            ),
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


def _located(catalog: Catalog, tensor: Tensor, twin: Tensor) -> NDArray[Any]:
    """Return rows that hold nothing but the bytes of an expert's blocks, as the catalog has them."""
    rows = np.zeros(len(tensor.blocks), BLOCK)
    with catalog.read() as txn:
        for number in range(len(tensor.blocks)):
            sizes = block_bytes(txn, twin, tensor, number)
            if sizes is not None:
                rows["bytes"][number, : len(sizes)] = sizes
    return rows
