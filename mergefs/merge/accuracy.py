"""How far a merge under a budget is from the exact one: derived both ways, and compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.checking import EVERY
from mergefs.blocks.floats import to_float
from mergefs.blocks.reader import BlockReader, ReadCounter, ReadTotals
from mergefs.manifest import Tensor
from mergefs.merge.derive import base_scale, merged_values
from mergefs.merge.lazy import load_plan, merge_plan
from mergefs.merge.sources import Sources
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.aim import Aim
from mergefs.planner.importance import block_weights
from mergefs.planner.models import Models
from mergefs.planner.plan import Plan
from mergefs.planner.resolve import make_plan
from mergefs.recipe import Recipe
from mergefs.store import Store


@dataclass(frozen=True)
class ErrorReport:
    """The error of a merged delta relative to the norm of the exact merge's.

    Attributes:
        predicted_error: by the planner, from statistics; None where it knew nothing.
        actual_error: of the unrounded results; None when the exact merge is the base.
        read: physical bytes that finding it out took, beyond the merge and its budget.
        seconds: wall time.
    """

    predicted_error: float | None
    actual_error: float | None
    read: ReadTotals
    seconds: float


def measure_error(
    store: Store,
    name: str,
    predicted: float | None,
    *,
    importance: Mapping[str, NDArray[np.float64]] | None = None,
    threads: int | None = None,
) -> ErrorReport:
    """Derive a merge by its plan and exactly, and compare. Reads all experts whole.

    Args:
        store: the repository.
        name: the merge: a ref or an id.
        predicted: what the planner said.
        importance: see `Aim`; the error is weighted by it as the planner's is.
        threads: how many to work with; all cores by default.

    Raises:
        UserError: when the model is no merge.
        CorruptionError: when a block that is needed is missing or damaged.
    """
    began = time.monotonic()
    plan = load_plan(store, merge_plan(store.manifest(store.resolve(name)), name, "it has no error"))
    counter = ReadCounter()
    models = Models(plan.base, plan.experts, plan.baseless)
    with store.reading("report", models.all):
        exact = make_plan(store, Recipe.parse(plan.recipe), models, Aim(), seed=plan.seed, counter=counter)
        mine, its = (_sources(store, p, counter) for p in (plan, exact.plan))
        tensors = exact.candidates.tensors
        weights = block_weights(tensors, store.block_elements, importance)
        jobs = [
            (tensor, number, float(weight))
            for tensor, every in zip(tensors, weights, strict=True)
            for number, weight in enumerate(every)
            if tensor.name in exact.plan.tensor_by_name
        ]
        error = norm = 0.0
        work = ordered(lambda job: _compare(mine, its, *job), jobs, threads=threads or available_cores(), window=4)
        for one, other in work:
            error += one
            norm += other
    actual = float(np.sqrt(error / norm)) if norm > 0.0 else None
    return ErrorReport(predicted, actual, counter.totals, time.monotonic() - began)


def _sources(store: Store, plan: Plan, counter: ReadCounter) -> Sources:
    experts = tuple(store.manifest(expert) for expert in plan.experts)
    reader = BlockReader(store.catalog, store.backend, counter, check=EVERY[store.check_blocks])
    return Sources(plan, store.manifest(plan.base), experts, reader)


def _compare(mine: Sources, its: Sources, tensor: Tensor, number: int, weight: float) -> tuple[float, float]:
    """Return the squared error of a block of the merged delta, and its squared norm, both times the weight."""
    base = its.base_block(tensor, number)
    exact = merged_values(its, tensor, number, base).astype(np.float64)
    error = merged_values(mine, tensor, number, base) - exact
    scale = base_scale(its.plan, its.plan.tensor_by_name[tensor.name])
    delta = exact - scale * to_float(base.raw, tensor.dtype)
    return weight * float(error @ error), weight * float(delta @ delta)
