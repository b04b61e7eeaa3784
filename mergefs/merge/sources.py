"""Where `derive` gets its inputs: the base's blocks, and the experts' deltas that a plan holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers import class_order
from mergefs.errors import CorruptionError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.expert import BaseBlock, ExpertReader, FactorCache, block_id
from mergefs.merge.fitting import check_fits
from mergefs.planner.plan import EXACT, Plan, TensorPlan


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
        sources, name = self._sources, self._tensor.name
        depths = [self._tensor.depth(expert, self._number) for expert in self.experts]
        base = self._base
        stored = [sources.experts[expert].tensor_by_name[name].added is None for expert in self.experts]
        if list(zip(depths, stored, strict=True)).count((EXACT, True)) > 1:
            base = replace(base, order=class_order(base.raw))
        for row, expert in enumerate(self.experts):
            out = None if self._out is None else self._out[row]
            try:
                delta = sources.expert_delta(expert, name, self._number, depths[row], base, self._values, out)
            except CorruptionError as error:
                whose = sources.plan.experts[expert][:12]
                raise CorruptionError(f"expert {whose}, tensor '{name}', block {self._number}: {error}") from error
            yield delta


def wants_double(sources: Sources, tensor: Tensor, experts: tuple[int, ...]) -> bool:
    """Tell whether a tensor is to be computed in float64 because one of its models has it so."""
    return tensor.dtype.name == "F64" or any(
        sources.experts[e].tensor_by_name[tensor.name].dtype.name == "F64" for e in experts
    )
