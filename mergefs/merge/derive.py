"""`derive`: the bytes of one block of a merge, from the plan and the models alone.

The eager engine, a lazy view and anything else that needs a block call this one function; it may run in any
order, on any thread, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import from_float, to_float, unsigned
from mergefs.blocks.tiers.scratch import room
from mergefs.dtypes import DTYPES, DType
from mergefs.hashing import Buffer
from mergefs.manifest import Manifest, Tensor
from mergefs.merge import registry
from mergefs.merge.expert import BaseBlock
from mergefs.merge.method import BlockInputs
from mergefs.merge.passes import find_facts
from mergefs.merge.sources import DeltaIterator, OpenDeltas, Sources, opens_all, wants_double
from mergefs.planner.plan import EXACT, Plan, TensorPlan

PART = 1 << 16
"""Elements that are merged at a time where a method allows it, a multiple of 64: the deltas of all experts take 4 bytes
an element. In smaller parts they would stay in nearer caches, but each part costs calls, after which threads wait for
each other."""


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
    dtype = output_dtype(plan, tensor)
    planned = plan.tensor_by_name.get(tensor.name)
    opened = _opened(sources, tensor, planned, number, base)
    if planned is not None and opened is not None and opened.tiers is not None and dtype.name == "BF16":
        first, _ = tensor.grid(sources.base.block_elements).extent(number)
        loop = registry.method(plan.method).loop(plan, planned, planned.planned(number), first)
        if loop is not None:
            out = np.empty(len(base.raw) // 2, np.uint16)
            loop(opened.tiers, unsigned(base.raw, 2), out)
            opened.check()
            return memoryview(out).cast("B")
    return b"".join(from_float(part, dtype) for part in _merged(sources, tensor, number, base, opened))


def merged_values(sources: Sources, tensor: Tensor, number: int, base: BaseBlock) -> NDArray[Any]:
    """Return block `number` of the merged tensor before it is rounded: float32[n], or float64[n] where one of the
    tensors is F64.

    Args, Raises: see `derive`; the tensor is of a float dtype.
    """
    # A part may lie in room that is this thread's for the next one.
    opened = _opened(sources, tensor, sources.plan.tensor_by_name.get(tensor.name), number, base)
    return np.concatenate([part.copy() for part in _merged(sources, tensor, number, base, opened)])


def _opened(
    sources: Sources, tensor: Tensor, planned: TensorPlan | None, number: int, base: BaseBlock
) -> OpenDeltas | None:
    """Return the deltas of a block where they can be opened."""
    if planned is None or tensor.dtype.name != "BF16" or not planned.planned(number):
        return None
    return OpenDeltas(sources, planned, number, base) if opens_all(sources, planned, number) else None


def _merged(
    sources: Sources, tensor: Tensor, number: int, base: BaseBlock, opened: OpenDeltas | None
) -> Iterator[NDArray[Any]]:
    """Yield what `merged_values` returns in parts, each valid until the next one."""
    plan = sources.plan
    planned = plan.tensor_by_name.get(tensor.name)
    if planned is None:
        yield to_float(base.raw, tensor.dtype)
        return
    method, numbers = registry.method(plan.method), plan.numbers_of(planned)
    experts = planned.planned(number)
    first, stop = tensor.grid(sources.base.block_elements).extent(number)
    facts = partial(find_facts, sources, tensor)

    def merge(place: int, values: NDArray[Any], deltas: NDArray[Any]) -> NDArray[Any]:
        return method.merge(BlockInputs(plan, planned, numbers, values, deltas, experts, place, tensor.shape, facts))

    if opened is not None:
        size = PART if method.by_parts else stop - first
        raw = memoryview(base.raw).cast("B")
        for start, deltas in opened.parts(size):
            part = raw[2 * start : 2 * (start + deltas.shape[1])]
            yield merge(first + start, to_float(part, tensor.dtype), deltas)
        return
    values = to_float(base.raw, tensor.dtype)
    if wants_double(sources, tensor, experts):
        values = values.astype(np.float64)
    deltas = room(f"deltas-{values.dtype}", len(experts) * values.size, values.dtype.type)
    deltas = deltas.reshape(len(experts), values.size)
    for _ in DeltaIterator(sources, planned, number, base, values, out=deltas):
        pass
    yield merge(first, values, deltas)


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
    return twin.blocks[number] if twin.added is None and twin.dtype is output_dtype(plan, tensor) else None


def base_scale(plan: Plan, planned: TensorPlan) -> float:
    """Return the factor of the base's elements in a tensor's result, where that is a sum; else 1."""
    return registry.method(plan.method).base_scale(plan.numbers_of(planned), planned)
