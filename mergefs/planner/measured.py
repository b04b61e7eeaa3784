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
from mergefs.manifest import Tensor
from mergefs.pipeline import available_cores, ordered
from mergefs.statistics.measure import Collector, coarse_sample, measure_block, unchanged_block
from mergefs.statistics.sample import positions
from mergefs.statistics.stored import with_stored_bytes
from mergefs.statistics.tensor import TensorStatistics, bin_value, load, products_key, statistics_key
from mergefs.store import Store


class Measurer:
    """Statistics of some experts against a base.

    Args:
        store: the repository.
        base, experts: manifest ids.
        counter: where bytes are counted that have to be read because the catalog does not know.
        baseless: the base is the first expert, and its bytes count as an expert's.
    """

    def __init__(
        self, store: Store, base: str, experts: tuple[str, ...], counter: ReadCounter, *, baseless: bool = False
    ) -> None:
        self.block_elements = store.block_elements
        self._base_kind = Kind.EXPERT if baseless else Kind.BASE
        self._store = store
        self._base = base
        self._experts = experts
        self._reader = BlockReader(store.catalog, store.backend, counter)
        self._spare: int | None = None
        self._cost: Callable[[int, str], int] = lambda expert, tensor: 0
        self._known: dict[str, dict[str, TensorStatistics]] = {}

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
        distribution = self.statistics(expert, tensor.name).distribution
        exact = distribution.threshold(rank)
        if exact is not None:
            return exact
        where = distribution.bin_of_rank(rank)
        assert where is not None
        identity = self._experts[expert]
        key = statistics_key(identity, self._base, tensor.name) + rank.to_bytes(8, "big")
        with self._store.catalog.read() as txn:
            kept = txn.get("thresholds", key)
        if kept is not None:
            return float(np.frombuffer(kept, "<f4")[0])
        if not self._affords(expert, tensor.name):
            return bin_value(int(distribution.bins[where[0]]))
        found = self._search(identity, tensor.name, int(distribution.bins[where[0]]), where[1])
        self._store.catalog.write(lambda txn: txn.put("thresholds", key, found.tobytes()))
        return float(found)

    def products(self, tensor: Tensor) -> NDArray[np.float64]:
        """Return the inner products of a tensor of the base and the experts' deltas, float64[1 + K, 1 + K].

        They are read off the tensor once, and kept.

        Raises:
            BudgetError: when they are not known and may not be read.
        """
        names = (self._base, *self._experts)
        keys = [[products_key(min(a, b), max(a, b), self._base, tensor.name) for b in names] for a in names]
        with self._store.catalog.read() as txn:
            kept = [[txn.get("products", key) for key in row] for row in keys]
        known = np.array(
            [[np.nan if value is None else np.frombuffer(value, "<f8")[0] for value in row] for row in kept]
        )
        missing = np.array([[value is None for value in row] for row in kept])
        for row, expert in enumerate(range(len(self._experts)), start=1):
            own = self._own_products(expert, tensor) if missing[row, row] or missing[0, row] else None
            if own is not None:
                known[row, row], known[0, row] = own
                known[row, 0] = known[0, row]
                missing[row, row] = missing[0, row] = missing[row, 0] = False
        if not missing.any():
            return known
        if missing[1:].any():
            for expert in range(len(self._experts)):
                if not self._affords(expert, tensor.name):
                    raise BudgetError(
                        f"this method needs the angles between the models' tensors '{tensor.name}', which are not known"
                        " yet: merge once without a budget, which keeps them"
                    )
            known = self._multiply(tensor)
        else:
            known[0, 0] = self._square(tensor)

        def keep(txn: Transaction) -> None:
            for row, values in zip(keys, known, strict=True):
                for key, value in zip(row, values, strict=True):
                    txn.put("products", key, np.float64(value).tobytes())

        self._store.catalog.write(keep)
        return known

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
                lambda block: squared_norm(
                    self._reader.read(bytes.fromhex(block or ""), self._base_kind), tensor.dtype
                ),
                tensor.blocks,
                threads=available_cores(),
                window=4,
            )
        )

    def _multiply(self, tensor: Tensor) -> NDArray[np.float64]:
        """Return the products of a tensor by reading it."""
        twins = [self._store.manifest(expert).tensor_by_name[tensor.name] for expert in self._experts]
        blocks = range(len(tensor.blocks))
        total = np.zeros((1 + len(twins), 1 + len(twins)))
        for part in ordered(
            lambda number: self._multiply_block(tensor, twins, number), blocks, threads=available_cores(), window=4
        ):
            total += part
        return total

    def _multiply_block(self, tensor: Tensor, twins: list[Tensor], number: int) -> NDArray[np.float64]:
        below = bytes.fromhex(tensor.blocks[number] or "")
        known = self._reader.read_with_root(below, self._base_kind)
        base = to_float(known[below], tensor.dtype)
        vectors = np.zeros((1 + len(twins), base.size))
        vectors[0] = base
        for row, twin in enumerate(twins, start=1):
            block = bytes.fromhex(twin.blocks[number] or "")
            if block != below or twin.dtype is not tensor.dtype:
                vectors[row] = to_float(self._reader.read(block, Kind.EXPERT, known), twin.dtype)
                vectors[row] -= base
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
        if self._spare is not None:
            cost = self._cost(expert, tensor)
            if cost > self._spare:
                return False
            self._spare -= cost
        return True

    def _measure(self, identity: str, name: str) -> TensorStatistics:
        tensor = self._store.manifest(identity).tensor_by_name[name]
        twin = self._store.manifest(self._base).tensor_by_name[name]
        collector = Collector(tensor.elements)
        for number, (first, stop) in enumerate(tensor.grid(self._store.block_elements).elements()):
            sample = positions(tensor.elements, first, stop)
            if tensor.blocks[number] == twin.blocks[number] and tensor.dtype is twin.dtype:
                collector.add(unchanged_block(stop - first, sample))
                continue
            depths, base = self._pair(tensor, twin, number, sample)
            root = base if depths.root is None else depths.root
            collector.add(
                measure_block(depths.raw, tensor.dtype, base, twin.dtype, first, sample),
                depths.errors,
                coarse_sample(depths.sampled, root, tensor.dtype, base, twin.dtype, sample),
            )
        with self._store.catalog.read() as txn:
            found = with_stored_bytes(txn, collector.finish(), tensor, twin)
        key = statistics_key(identity, self._base, name)
        self._store.catalog.write(lambda txn: txn.put("statistics", key, found.encode()))
        return found

    def _search(self, identity: str, name: str, index: int, rank: int) -> np.float32:
        """Return the `rank`-th largest magnitude among those of one histogram bin, by reading the tensor."""
        tensor = self._store.manifest(identity).tensor_by_name[name]
        twin = self._store.manifest(self._base).tensor_by_name[name]
        inside = []
        for number in range(len(tensor.blocks)):
            if tensor.blocks[number] == twin.blocks[number] and tensor.dtype is twin.dtype:
                continue
            block, base = tensor.blocks[number], twin.blocks[number]
            assert block is not None
            assert base is not None
            known = self._reader.read_with_root(bytes.fromhex(base), self._base_kind)
            raw = self._reader.read(bytes.fromhex(block), Kind.EXPERT, known)
            values = to_float(raw, tensor.dtype).astype(np.float32)
            below = to_float(known[bytes.fromhex(base)], twin.dtype).astype(np.float32)
            bits = np.abs(values - below).view(np.uint32)
            inside.append(bits[bits >> 16 == index])
        found = np.sort(np.concatenate(inside))
        return np.float32(found[len(found) - rank : len(found) - rank + 1].view(np.float32)[0])

    def _pair(self, tensor: Tensor, twin: Tensor, number: int, sample: NDArray[np.int64]) -> tuple[Depths, Buffer]:
        """Return one block of an expert at all depths, and the bytes of its base."""
        base_block, block = twin.blocks[number], tensor.blocks[number]
        assert base_block is not None
        assert block is not None
        base_id = bytes.fromhex(base_block)
        known = self._reader.read_with_root(base_id, self._base_kind)
        depths = self._reader.read_with_depths(bytes.fromhex(block), Kind.EXPERT, known, sample)
        return depths, known[base_id]
