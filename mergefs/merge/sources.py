"""Where `derive` gets its inputs: the base's blocks, and the experts' deltas that a plan holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers import class_order
from mergefs.blocks.tiers.scratch import room
from mergefs.errors import CorruptionError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.expert import BaseBlock, ExpertReader, FactorCache, block_id
from mergefs.merge.fitting import check_fits
from mergefs.planner.plan import EXACT, Plan, TensorPlan

if TYPE_CHECKING:
    from mergefs.blocks.tiers.delta import Delta


class Sources:
    """The models of a plan, opened for reading. Safe to use from many threads.

    Attributes:
        catalog: of the repository.
        known_facts: facts about whole tensors that were looked up last; see `merge.passes`.
        facts_lock: to be held while looking facts up.

    Args:
        plan: what is to be merged.
        base: the base's manifest.
        experts: the experts' manifests, in the plan's order.
        reader: of the repository; it counts.
        factors: of adapters that have been read for this run.
    """

    def __init__(
        self,
        plan: Plan,
        base: Manifest,
        experts: tuple[Manifest, ...],
        reader: BlockReader,
        factors: FactorCache | None = None,
    ) -> None:
        check_fits(plan, base, experts)
        self.plan = plan
        self.base = base
        self.experts = experts
        self.catalog = reader.catalog
        self.known_facts: OrderedDict[bytes, NDArray[np.float64]] = OrderedDict()
        self.facts_lock = threading.Lock()
        self._reader = reader
        self._experts = ExpertReader(reader, base.block_elements, factors or FactorCache.of(base, experts))
        self._base_kind = Kind.EXPERT if plan.baseless else Kind.BASE

    def base_block(self, tensor: Tensor, number: int) -> BaseBlock:
        """Read a block of the base.

        Raises:
            CorruptionError: see `BlockReader.read`.
        """
        identity = block_id(tensor, number)
        known = self._reader.read_with_root(identity, self._base_kind)
        return BaseBlock(known[identity], known)

    def expert_delta(
        self,
        expert: int,
        tensor: str,
        number: int,
        depth: int,
        base: BaseBlock,
        values: NDArray[Any],
        out: NDArray[Any] | None,
    ) -> NDArray[Any]:
        """Read a block of an expert to some depth and return expert minus base, [n] of the base values' dtype.

        Raises:
            BudgetExceededError, CorruptionError: see `ExpertReader.delta`.
        """
        found, twin = (model.tensor_by_name[tensor] for model in (self.experts[expert], self.base))
        return self._experts.delta(found, twin, number, depth, base, values, out)

    def opens(self, expert: int, tensor: str, number: int) -> bool:
        """Tell whether a block of an expert can be opened; see `ExpertReader.opens`."""
        found, twin = (model.tensor_by_name[tensor] for model in (self.experts[expert], self.base))
        return self._experts.opens(found, twin, number)

    def open_delta(self, expert: int, tensor: str, number: int, depth: int, base: BaseBlock, slot: int) -> Delta:
        """Read a block of an expert as `expert_delta` does, to be written part by part; see `ExpertReader.open`."""
        return self._experts.open(self.experts[expert].tensor_by_name[tensor], number, depth, base, slot)


class DeltaIterator:
    """Yields the planned deltas of one block, expert by expert in the plan's order.

    It reads only experts whose depth in the plan is not 0: no other expert can be reached through it.

    Args:
        sources: the models.
        tensor, number: which block.
        base: the base's block at that place.
        values: its values as float32[n] (or float64[n]).
        out: an array [k, n] of their dtype whose rows are to hold the deltas, or None.
    """

    def __init__(
        self,
        sources: Sources,
        tensor: TensorPlan,
        number: int,
        base: BaseBlock,
        values: NDArray[Any],
        out: NDArray[Any] | None = None,
    ) -> None:
        self._out = out
        self._sources = sources
        self._tensor = tensor
        self._number = number
        self._base = base
        self._values = values
        self.experts = tensor.planned(number)

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Yield expert minus base, [n] of the base values' dtype, for each of `experts`.

        Raises:
            CorruptionError: see `Sources.expert_delta`; it names the expert, the tensor and the block.
        """
        sources, tensor, number = self._sources, self._tensor, self._number
        base = _ordered(sources, tensor, number, self._base)
        for row, expert in enumerate(self.experts):
            out = None if self._out is None else self._out[row]
            with _naming(sources, expert, tensor, number):
                depth = tensor.depth(expert, number)
                delta = sources.expert_delta(expert, tensor.name, number, depth, base, self._values, out)
            yield delta


def opens_all(sources: Sources, tensor: TensorPlan, number: int) -> bool:
    """Tell whether `OpenDeltas` can read a block."""
    return all(sources.opens(expert, tensor.name, number) for expert in tensor.planned(number))


class OpenDeltas:
    """The planned deltas of one block, read and not decoded yet, expert by expert in the plan's order.

    Args:
        sources, tensor, number, base: see `DeltaIterator`; `opens_all` has to be true.

    Attributes:
        tiers: int64[k, ..]: all of them as compiled loops read them (see `tier_kernels`), after which they are to be
            checked; None where that cannot be.

    Raises:
        CorruptionError: see `DeltaIterator.__iter__`.
    """

    def __init__(self, sources: Sources, tensor: TensorPlan, number: int, base: BaseBlock) -> None:
        from mergefs.blocks.tiers.delta import Together

        self._sources = sources
        self._tensor = tensor
        self._number = number
        self._elements = len(base.raw) // 2
        self._experts = tensor.planned(number)
        base = _ordered(sources, tensor, number, base)
        self._opened: list[Delta] = []
        for slot, expert in enumerate(self._experts):
            with self._naming(expert):
                depth = tensor.depth(expert, number)
                self._opened.append(sources.open_delta(expert, tensor.name, number, depth, base, slot))
        self._together = Together(self._opened)
        self.tiers = self._together.table

    def parts(self, size: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield what `DeltaIterator` does in parts: each with the place of its first element, float32[k, m].

        Each is valid until the next one, and may be overwritten.

        Args:
            size: m, a multiple of 64, less in the last part. There is one part alone where most of the deltas are
                decoded at once.

        Raises:
            CorruptionError: see `DeltaIterator.__iter__`.
        """
        opened, together, elements = self._opened, self._together, self._elements
        size = min(size, elements) if together.in_parts else elements
        flat = room("deltas-float32", len(opened) * size, np.float32)
        for first in range(0, elements, size):
            count = min(size, elements - first)
            part = flat[: len(opened) * count].reshape(len(opened), count)
            together.write(first, part)
            for row in together.apart:
                with self._naming(self._experts[row]):
                    opened[row].write(first, part[row])
            yield first, part
        self.check()

    def check(self) -> None:
        """Check what was read, once all of it was used.

        Raises:
            CorruptionError: when a tier was made for another base; it names the expert, the tensor and the block.
        """
        for row in self._together.foreign:
            with self._naming(self._experts[row]):
                self._together.check(row)

    def _naming(self, expert: int) -> AbstractContextManager[None]:
        return _naming(self._sources, expert, self._tensor, self._number)


def _ordered(sources: Sources, tensor: TensorPlan, number: int, base: BaseBlock) -> BaseBlock:
    """Return the base's block, with the order of its elements where several experts are decoded against it."""
    exact = 0
    for expert in tensor.planned(number):
        stored = sources.experts[expert].tensor_by_name[tensor.name].added is None
        exact += stored and tensor.depth(expert, number) == EXACT
    return replace(base, order=class_order(base.raw)) if exact > 1 else base


@contextmanager
def _naming(sources: Sources, expert: int, tensor: TensorPlan, number: int) -> Iterator[None]:
    """Have errors name the expert, the tensor and the block."""
    try:
        yield
    except CorruptionError as error:
        whose = sources.plan.experts[expert][:12]
        raise CorruptionError(f"expert {whose}, tensor '{tensor.name}', block {number}: {error}") from error


def wants_double(sources: Sources, tensor: Tensor, experts: tuple[int, ...]) -> bool:
    """Tell whether a tensor is to be computed in float64 because one of its models has it so."""
    return tensor.dtype.name == "F64" or any(
        sources.experts[e].tensor_by_name[tensor.name].dtype.name == "F64" for e in experts
    )
