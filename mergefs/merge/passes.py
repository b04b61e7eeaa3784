"""Going over all blocks of one tensor of all models, for what a method has to know of the whole tensor.

A measurement is a function of `Passes` that returns a few numbers. Every pass reads the blocks once more, counted, and
works on a bounded number of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import to_float
from mergefs.catalog.facts import facts_key, get_facts, put_facts
from mergefs.manifest import Tensor
from mergefs.merge.expert import is_changed
from mergefs.merge.sources import DeltaIterator, Sources, wants_double
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.plan import EXACT, TensorPlan

T = TypeVar("T")

_REMEMBERED = 4


@dataclass(frozen=True)
class Part:
    """One block as the merge sees it when everything is read.

    Attributes:
        base: float32[n] (float64[n] where a float64 tensor is involved): the base's elements.
        deltas: [k, n] of the same dtype: expert minus base, of the experts whose blocks differ from the base's.
        experts: which experts those are.
        first: the number of the block's first element in its tensor.
    """

    base: NDArray[Any]
    deltas: NDArray[Any]
    experts: tuple[int, ...]
    first: int


class Passes:
    """The blocks of one tensor.

    Args:
        sources: the models.
        tensor: the base's tensor.
        allow: called before each pass; raises where the tensor may not be read once more.
    """

    def __init__(self, sources: Sources, tensor: Tensor, allow: Callable[[], None] = lambda: None) -> None:
        self.shape = tensor.shape
        self.elements = tensor.elements
        self.experts = len(sources.experts)
        self._sources = sources
        self._tensor = tensor
        self._allow = allow
        self._plan = TensorPlan(tensor.name, changed_blocks(sources, tensor))

    def each(self, work: Callable[[Part], T]) -> Iterator[T]:
        """Yield what `work` makes of each block, in their order; it runs on several threads.

        Raises:
            BudgetError: when the budget does not allow another pass.
        """
        self._allow()
        cores = available_cores()
        blocks = range(len(self._tensor.blocks))
        return ordered(lambda number: work(self._part(number)), blocks, threads=cores, window=cores + 1)

    def _part(self, number: int) -> Part:
        sources, tensor = self._sources, self._tensor
        base = sources.base_block(tensor, number)
        values = to_float(base.raw, tensor.dtype)
        experts = self._plan.planned(number)
        if wants_double(sources, tensor, experts):
            values = values.astype(np.float64)
        deltas = np.empty((len(experts), values.size), values.dtype)
        for _ in DeltaIterator(sources, self._plan, number, base, values, out=deltas):
            pass
        first, _ = tensor.grid(sources.base.block_elements).extent(number)
        return Part(values, deltas, experts, first)


class Facts(Protocol):
    """Returns what a measurement of a tensor finds, float64[n]: what is known of it, or by measuring."""

    def __call__(self, what: str, measure: Callable[[Passes], NDArray[np.float64]]) -> NDArray[np.float64]:
        """`what` names the measurement, with all the parameters that it depends on."""


def find_facts(
    sources: Sources,
    tensor: Tensor,
    what: str,
    measure: Callable[[Passes], NDArray[np.float64]],
    allow: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Return what a measurement of a tensor finds: as the catalog has it, or measured now and kept there.

    Args:
        sources: the models, to their full depth whatever their plan says.
        tensor: the base's tensor.
        what, measure: see `Facts`.
        allow: see `Passes`.

    Raises:
        BudgetError: see `Passes`.
    """
    models = (sources.plan.base, *sources.plan.experts)
    key = facts_key(models, tensor.name, what)
    catalog = sources.catalog
    with sources.facts_lock:
        found = sources.known_facts.get(key)
        if found is not None:
            return found
        with catalog.read() as txn:
            found = get_facts(txn, key)
        if found is None:
            found = measure(Passes(sources, tensor, allow))
            if not catalog.readonly:
                catalog.write(partial(put_facts, key=key, models=models, found=found))
        sources.known_facts[key] = found
        if len(sources.known_facts) > _REMEMBERED:
            sources.known_facts.popitem(last=False)
        return found


def changed_blocks(sources: Sources, tensor: Tensor) -> tuple[str, ...]:
    """Return for each expert a digit for each block, as in a plan that reads every block that differs."""
    twins = [expert.tensor_by_name[tensor.name] for expert in sources.experts]
    return tuple(
        "".join(str(EXACT) if is_changed(twin, tensor, number) else "0" for number in range(len(tensor.blocks)))
        for twin in twins
    )
