"""The statistics that a plan needs: from the catalog, or measured once by reading the models, and then kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import squared_norm, to_float
from mergefs.blocks.reader import BlockReader, Depths, Kind, ReadCounter
from mergefs.catalog.environment import Transaction
from mergefs.errors import BudgetError
from mergefs.hashing import Buffer
from mergefs.manifest import LowRank, Tensor
from mergefs.merge.expert import BaseBlock, ExpertReader, FactorCache, block_id, is_base_block, is_changed
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.plan import EXACT
from mergefs.statistics.measure import (
    BlockMeasure,
    Collector,
    coarse_sample,
    measure_block,
    measure_delta,
    unchanged_block,
)
from mergefs.statistics.sample import positions
from mergefs.statistics.stored import with_stored_bytes
from mergefs.statistics.tensor import (
    TensorStatistics,
    bin_value,
    load,
    products_key,
    statistics_key,
    statistics_prefix,
)
from mergefs.store import Store


class Measurer:
    """Statistics of some experts against a base.

    Args:
        store: the repository.
        base, experts: manifest ids.
        counter: where bytes are counted that have to be read because the catalog does not know.
        baseless: the base is the first expert, and its bytes count as an expert's.
        factors: of adapters that have been read for this run.
    """

    def __init__(
        self,
        store: Store,
        base: str,
        experts: tuple[str, ...],
        counter: ReadCounter,
        *,
        baseless: bool = False,
        factors: FactorCache | None = None,
    ) -> None:
        self.block_elements = store.block_elements
        self._base_kind = Kind.EXPERT if baseless else Kind.BASE
        self._store = store
        self._base = base
        self._experts = experts
        self.reader = BlockReader(store.catalog, store.backend, counter)
        self._expert_reader = ExpertReader(self.reader, store.block_elements, factors, keeps=True)
        self._factors = factors
        self._spare: int | None = None
        self._cost: Callable[[int, str], int] = lambda expert, tensor: 0
        self._known: dict[str, dict[str, TensorStatistics]] = {}
        self._thresholds: dict[str, dict[bytes, bytes]] = {}
        self._found: dict[bytes, bytes] = {}

    def limit(self, spare: int, cost: Callable[[int, str], int]) -> None:
        """Limit what may be read from now on; beyond it, what is unknown is estimated or refused.

        Args:
            spare: in bytes.
            cost: tells the bytes that reading one tensor of an expert takes.
        """
        self._spare = spare
        self._cost = cost

    def stored(self, expert: int, tensor: str) -> TensorStatistics | None:
        """Return what the catalog has on one tensor of an expert."""
        return self._of(expert).get(tensor)

    def statistics(self, expert: int, tensor: str) -> TensorStatistics:
        """Return the statistics of one tensor of an expert.

        Raises:
            BudgetError: when the catalog has none and the tensor may not be read.
        """
        known = self._of(expert)
        if tensor not in known:
            identity = self._experts[expert]
            if not self._affords(expert, tensor):
                raise BudgetError(
                    f"the repository has no statistics of {identity[:12]} against the base {self._base[:12]}, which a"
                    " budget needs: ingest that expert's checkpoint again with --base (nothing is stored twice)"
                )
            known[tensor] = self._measure(identity, tensor)
        return known[tensor]

    def threshold(self, expert: int, tensor: Tensor, rank: int) -> float:
        """Return the magnitude of the `rank`-th largest |delta| of a tensor: exact, or, under a budget where the
        catalog does not know it, the lower end of its histogram bin (less than 1 % too low)."""
        identity = self._experts[expert]
        key = statistics_key(identity, self._base, tensor.name) + rank.to_bytes(8, "big")
        kept = self._kept_thresholds(identity).get(key)
        if kept is not None:
            return float(np.frombuffer(kept, "<f4")[0])
        distribution = self.statistics(expert, tensor.name).distribution
        found = distribution.threshold(rank)
        if found is None:
            where = distribution.bin_of_rank(rank)
            assert where is not None
            first = int(distribution.bins[where[0]])
            if not self._affords(expert, tensor.name):
                return bin_value(first)
            found = float(self._search(identity, tensor.name, first, where[1]))
        self._thresholds[identity][key] = self._found[key] = np.float32(found).tobytes()
        return found

    def keep_thresholds(self) -> None:
        """Keep the thresholds that were found, so that the next plan need not look at the distributions."""
        if self._found and not self._store.readonly:
            found, self._found = self._found, {}

            def put(txn: Transaction) -> None:
                for key, value in found.items():
                    txn.put("thresholds", key, value)

            self._store.catalog.write(put)

    def _kept_thresholds(self, identity: str) -> dict[bytes, bytes]:
        if identity not in self._thresholds:
            with self._store.catalog.read() as txn:
                mine = txn.items("thresholds", statistics_prefix(identity, self._base))
                self._thresholds[identity] = dict(mine)
        return self._thresholds[identity]

    def products(self, tensor: Tensor) -> NDArray[np.float64]:
        """Return the inner products of a tensor of the base and the experts' deltas, float64[1 + K, 1 + K].

        They are read off the tensor once, and kept.

        Raises:
            BudgetError: when they are not known and may not be read.
        """
        # An expert that is the base itself has no delta; its id stands for the base's elements.
        others = [expert for expert, identity in enumerate(self._experts) if identity != self._base]
        names = (self._base, *(self._experts[expert] for expert in others))
        keys = [[products_key(min(a, b), max(a, b), self._base, tensor.name) for b in names] for a in names]
        with self._store.catalog.read() as txn:
            kept = [[txn.get("products", key) for key in row] for row in keys]
        known = np.array(
            [[np.nan if value is None else np.frombuffer(value, "<f8")[0] for value in row] for row in kept]
        )
        for row, expert in enumerate(others, start=1):
            own = self._own_products(expert, tensor) if np.isnan(known[row, [0, row]]).any() else None
            if own is not None:
                known[row, row] = own[0]
                known[0, row] = known[row, 0] = own[1]
        if any(value is None for row in kept for value in row) and np.isnan(known).any():
            known = self._find_products(tensor, known, others)
            self._store.catalog.write(lambda txn: _keep_products(txn, keys, known))
        found = np.zeros((1 + len(self._experts), 1 + len(self._experts)))
        places = [0, *(1 + expert for expert in others)]
        found[np.ix_(places, places)] = known
        return found

    def _find_products(self, tensor: Tensor, known: NDArray[np.float64], others: list[int]) -> NDArray[np.float64]:
        """Return all products, of which those that are not known yet are not numbers, by reading what they need.

        Raises:
            BudgetError: see `products`.
        """
        if not np.isnan(known[1:]).any():
            known[0, 0] = self._square(tensor)
            return known
        for expert in others:
            if not self._affords(expert, tensor.name):
                raise BudgetError(
                    f"this method needs the angles between the models' tensors '{tensor.name}', which are not known"
                    " yet: merge once without a budget, which keeps them"
                )
        return self._multiply(tensor, others)

    def _own_products(self, expert: int, tensor: Tensor) -> tuple[float, float] | None:
        """Return the inner products of an expert's delta with itself and with the base, from the statistics; None where
        they do not say, or leave elements out that are not finite."""
        found = self._of(expert).get(tensor.name)
        if found is None or int(found.distribution.counts.sum()) != found.elements:
            return None
        return float(found.blocks["energy"].sum()), float(found.blocks["inner"].sum())

    def _square(self, tensor: Tensor) -> float:
        """Return the inner product of the base's elements with themselves, by reading it."""
        return sum(
            ordered(
                lambda block: squared_norm(self.reader.read(bytes.fromhex(block or ""), self._base_kind), tensor.dtype),
                tensor.blocks,
                threads=available_cores(),
                window=4,
            )
        )

    def allow_pass(self, tensor: str) -> None:
        """Take from what may be read what reading a tensor of all experts takes.

        Raises:
            BudgetError: when that is too much.
        """
        for expert in range(len(self._experts)):
            if not self._affords(expert, tensor):
                raise BudgetError(
                    f"this method needs to know more of the whole tensor '{tensor}', which has not been measured yet:"
                    " merge once without a budget, which keeps it"
                )

    def _multiply(self, tensor: Tensor, others: list[int]) -> NDArray[np.float64]:
        """Return the products of a tensor of the base and of some experts by reading it."""
        twins = [self._store.manifest(self._experts[expert]).tensor_by_name[tensor.name] for expert in others]
        blocks = range(len(tensor.blocks))
        total = np.zeros((1 + len(twins), 1 + len(twins)))
        for part in ordered(
            lambda number: self._multiply_block(tensor, twins, number), blocks, threads=available_cores(), window=4
        ):
            total += part
        return total

    def _multiply_block(self, tensor: Tensor, twins: list[Tensor], number: int) -> NDArray[np.float64]:
        below = self._below(tensor, number)
        base = to_float(below.raw, tensor.dtype).astype(np.float64)
        vectors = np.zeros((1 + len(twins), base.size))
        vectors[0] = base
        for row, twin in enumerate(twins, start=1):
            if is_changed(twin, tensor, number):
                self._expert_reader.delta(twin, tensor, number, EXACT, below, base, vectors[row])
        return np.asarray(vectors @ vectors.T)

    def _of(self, expert: int) -> dict[str, TensorStatistics]:
        identity = self._experts[expert]
        if identity not in self._known:
            manifest = self._store.manifest(identity)
            with self._store.catalog.read() as txn:
                self._known[identity] = load(txn, identity, self._base, manifest.tensor_by_name)
        return self._known[identity]

    def _affords(self, expert: int, tensor: str) -> bool:
        """Tell whether a tensor of an expert may be read, and take it from what is spare."""
        if self._spare is not None and not self._is_factored(expert, tensor):
            cost = self._cost(expert, tensor)
            if cost > self._spare:
                return False
            self._spare -= cost
        return True

    def _is_factored(self, expert: int, name: str) -> bool:
        """Tell whether a tensor is the base's and what an adapter adds, whose factors are read in any case."""
        tensor = self._store.manifest(self._experts[expert]).tensor_by_name[name]
        base = self._store.manifest(self._base).tensor_by_name[name]
        blocks = range(len(base.blocks))
        return isinstance(tensor.added, LowRank) and all(is_base_block(tensor, base, number) for number in blocks)

    def _below(self, base: Tensor, number: int) -> BaseBlock:
        """Read a block of the base."""
        block = block_id(base, number)
        known = self.reader.read_with_root(block, self._base_kind)
        return BaseBlock(known[block], known)

    def _measure(self, identity: str, name: str) -> TensorStatistics:
        tensor = self._store.manifest(identity).tensor_by_name[name]
        twin = self._store.manifest(self._base).tensor_by_name[name]
        collector = Collector(tensor.elements)
        extents = enumerate(tensor.grid(self._store.block_elements).elements())
        for found in ordered(
            lambda place: self._measure_block(tensor, twin, *place), extents, threads=available_cores(), window=4
        ):
            collector.add(*found)
        with self._store.catalog.read() as txn:
            statistics = with_stored_bytes(txn, collector.finish(), tensor, twin)
        key = statistics_key(identity, self._base, name)
        self._store.catalog.write(lambda txn: txn.put("statistics", key, statistics.encode()))
        return statistics

    def _measure_block(
        self, tensor: Tensor, twin: Tensor, number: int, extent: tuple[int, int]
    ) -> tuple[BlockMeasure, tuple[float, ...], NDArray[np.float32] | None]:
        """Return what `Collector.add` takes of one block."""
        first, stop = extent
        sample = positions(tensor.elements, first, stop)
        if not is_changed(tensor, twin, number):
            return unchanged_block(stop - first, sample), (), None
        if tensor.added is not None:
            below = self._below(twin, number)
            values = to_float(below.raw, twin.dtype)
            delta = self._expert_reader.delta(tensor, twin, number, EXACT, below, values)
            return measure_delta(delta, values, first, sample), (), None
        depths, base = self._pair(tensor, twin, number, sample)
        root = base if depths.root is None else depths.root
        measure = measure_block(depths.raw, tensor.dtype, base, twin.dtype, first, sample)
        return measure, depths.errors, coarse_sample(depths.sampled, root, tensor.dtype, base, twin.dtype, sample)

    def _search(self, identity: str, name: str, index: int, rank: int) -> np.float32:
        """Return the `rank`-th largest magnitude among those of one histogram bin, by reading the tensor."""
        tensor = self._store.manifest(identity).tensor_by_name[name]
        twin = self._store.manifest(self._base).tensor_by_name[name]
        inside = []
        for number in range(len(tensor.blocks)):
            if not is_changed(tensor, twin, number):
                continue
            below = self._below(twin, number)
            values = to_float(below.raw, twin.dtype).astype(np.float32)
            delta = self._expert_reader.delta(tensor, twin, number, EXACT, below, values)
            bits = np.abs(delta).view(np.uint32)
            inside.append(bits[bits >> 16 == index])
        found = np.sort(np.concatenate(inside))
        return np.float32(found[len(found) - rank : len(found) - rank + 1].view(np.float32)[0])

    def _pair(self, tensor: Tensor, twin: Tensor, number: int, sample: NDArray[np.int64]) -> tuple[Depths, Buffer]:
        """Return one block of an expert at all depths, and the bytes of its base."""
        below = self._below(twin, number)
        block = block_id(tensor, number)
        depths = self.reader.read_with_depths(block, Kind.EXPERT, below.known, sample)
        if self._factors is not None:
            self._factors.keep(block, depths.raw)
        return depths, below.raw


def _keep_products(txn: Transaction, keys: list[list[bytes]], found: NDArray[np.float64]) -> None:
    for row, values in zip(keys, found, strict=True):
        for key, value in zip(row, values, strict=True):
            txn.put("products", key, np.float64(value).tobytes())
