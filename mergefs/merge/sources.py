"""Where `derive` gets its inputs: the base's blocks, and the experts' deltas that a plan holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import to_float
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers import class_order
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer
from mergefs.manifest import Manifest, Tensor
from mergefs.planner.plan import EXACT, Plan, TensorPlan

if TYPE_CHECKING:
    from mergefs.blocks.tiers.exact_fast import ClassOrder


@dataclass(frozen=True)
class BaseBlock:
    """A block of the base, with what is needed to decode deltas against it.

    Attributes:
        raw: its bytes.
        known: the bytes of this block, and of the one that it is encoded against, by id.
        order: of its elements, where several experts are decoded against it; see `tiers.class_order`.
    """

    raw: Buffer
    known: dict[bytes, Buffer]
    order: ClassOrder | None = None


class Sources:
    """The models of a plan, opened for reading. Safe to use from many threads.

    Args:
        plan: what is to be merged.
        base: the base's manifest.
        experts: the experts' manifests, in the plan's order.
        reader: of the repository; it counts.
    """

    def __init__(self, plan: Plan, base: Manifest, experts: tuple[Manifest, ...], reader: BlockReader) -> None:
        self.plan = plan
        self.base = base
        self.experts = experts
        self._reader = reader
        self._base_kind = Kind.EXPERT if plan.baseless else Kind.BASE

    def base_block(self, tensor: Tensor, number: int) -> BaseBlock:
        """Read a block of the base.

        Raises:
            CorruptionError: see `BlockReader.read`.
        """
        identity = _block_id(tensor, number)
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
            BudgetExceededError: when the plan's budget is used up: the plan is wrong.
            CorruptionError: see `BlockReader.read` and `BlockReader.read_coarse`.
        """
        found = self.experts[expert].tensor_by_name[tensor]
        block = _block_id(found, number)
        if out is None:
            out = np.empty_like(values)
        if depth == EXACT:
            raw: Buffer | None
            if out.dtype == np.float32 and found.dtype is self.base.tensor_by_name[tensor].dtype:
                raw = self._reader.read_exact(block, Kind.EXPERT, base.known, base.raw, out, base.order)
            else:
                raw = self._reader.read(block, Kind.EXPERT, base.known)
            if raw is not None:
                np.subtract(to_float(raw, found.dtype), values, out=out, dtype=values.dtype)
            return out
        direct = out if out.dtype == np.float32 else None
        delta, root = self._reader.read_coarse(block, depth, Kind.EXPERT, base.known, direct)
        if root is not base.raw:
            # It is encoded against another block than the base's: what these two differ by comes on top.
            delta = delta + (to_float(root, found.dtype) - values)
        if delta is not out:
            out[:] = delta
        return out


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
        if depths.count(EXACT) > 1:
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


def _block_id(tensor: Tensor, number: int) -> bytes:
    block = tensor.blocks[number]
    if block is None:
        raise CorruptionError(f"tensor '{tensor.name}' has a block that was never materialized")
    return bytes.fromhex(block)
