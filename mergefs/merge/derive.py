"""`derive`: the bytes of one block of a merge, from the plan and the models alone.

The eager engine, a lazy view and anything else that needs a block call this one function; it may run in any
order, on any thread, any number of times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import from_float, to_float
from mergefs.blocks.tiers.scratch import room
from mergefs.dtypes import DTYPES, DType
from mergefs.hashing import Buffer
from mergefs.manifest import Manifest, Tensor
from mergefs.merge import registry
from mergefs.merge.method import BlockInputs
from mergefs.merge.sources import BaseBlock, DeltaIterator, Sources, wants_double
from mergefs.planner.plan import EXACT, Plan, TensorPlan


def derive(sources: Sources, tensor: Tensor, number: int, base: BaseBlock | None = None) -> Buffer:
    """Return the bytes of block `number` of the merged tensor.

    Args:
        sources: the plan and its models.
        tensor: the base's tensor.
        number: of the block.
        base: the base's block where the caller has read it already.

    Raises:
        CorruptionError: when a block that is needed is missing or damaged.
    """
    plan = sources.plan
    base = base or sources.base_block(tensor, number)
    if not needs_arithmetic(plan, tensor, number):
        return base.raw
    return from_float(merged_values(sources, tensor, number, base), output_dtype(plan, tensor))


def merged_values(sources: Sources, tensor: Tensor, number: int, base: BaseBlock) -> NDArray[Any]:
    """Return block `number` of the merged tensor before it is rounded: float32[n], or float64[n] where one of the
    tensors is F64.

    Args, Raises: see `derive`; the tensor is of a float dtype.
    """
    plan = sources.plan
    planned = plan.tensor_by_name.get(tensor.name)
    values = to_float(base.raw, tensor.dtype)
    if planned is None:
        return values
    experts = planned.planned(number)
    if wants_double(sources, tensor, experts):
        values = values.astype(np.float64)
    deltas = room(f"deltas-{values.dtype}", len(experts) * values.size, values.dtype.type)
    deltas = deltas.reshape(len(experts), values.size)
    for _ in DeltaIterator(sources, planned, number, base, values, out=deltas):
        pass
    first, _ = tensor.grid(sources.base.block_elements).extent(number)
    numbers = plan.numbers_of(planned)
    merged = registry.method(plan.method).merge(
        BlockInputs(plan, planned, numbers, values, deltas, experts, first, tensor.shape)
    )
    # The deltas' room is this thread's for its next block.
    return merged.copy() if np.may_share_memory(merged, deltas) else merged


def output_dtype(plan: Plan, tensor: Tensor) -> DType:
    """Return the dtype of a merged tensor: the plan's for floats, the base's for everything else."""
    return DTYPES[plan.dtype] if plan.dtype and tensor.dtype.is_float else tensor.dtype


def needs_arithmetic(plan: Plan, tensor: Tensor, number: int) -> bool:
    """Tell whether a block of the merged tensor differs from the base's."""
    if not tensor.dtype.is_float:
        return False
    if output_dtype(plan, tensor) is not tensor.dtype:
        return True
    planned = plan.tensor_by_name.get(tensor.name)
    if planned is None:
        return False
    return bool(planned.planned(number)) or base_scale(plan, planned) != 1.0


def stored_block(plan: Plan, experts: tuple[Manifest, ...], tensor: Tensor, number: int) -> str | None:
    """Return the id of the base's or an expert's block that a block of the merged tensor is; None where it has to be
    computed."""
    if not needs_arithmetic(plan, tensor, number):
        return tensor.blocks[number]
    planned = plan.tensor_by_name.get(tensor.name)
    taken = None if planned is None else registry.method(plan.method).taken(plan.numbers_of(planned))
    if planned is None or taken is None or planned.depth(taken, number) != EXACT:
        return None
    twin = experts[taken].tensor_by_name[tensor.name]
    return twin.blocks[number] if twin.dtype is output_dtype(plan, tensor) else None


def base_scale(plan: Plan, planned: TensorPlan) -> float:
    """Return the factor of the base's elements in a tensor's result, where that is a sum; else 1."""
    return registry.method(plan.method).base_scale(plan.numbers_of(planned), planned)
