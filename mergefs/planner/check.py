"""Whether a stored plan still is for what the catalog holds."""

from __future__ import annotations

import numpy as np

from mergefs.blocks.reader import ReadCounter
from mergefs.errors import PlanError
from mergefs.merge import registry
from mergefs.planner.candidates import Candidates, factors_cost, find_candidates
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import EXACT, Numbers, Plan
from mergefs.planner.resolve import cut_offs
from mergefs.store import Store


def check_plan(store: Store, plan: Plan) -> None:
    """Check that a plan's depths, budget and thresholds are what the catalog's statistics allow.

    Args:
        store: the repository.
        plan: the plan; its models are under a lease of the caller's.

    Raises:
        PlanError: when it was made for other statistics: for tiers that there are not, or that take more bytes now.
    """
    base, experts = store.manifest(plan.base), tuple(store.manifest(expert) for expert in plan.experts)
    measured = Measurer(store, plan.base, plan.experts, ReadCounter())
    numbers = {planned.name: plan.numbers_of(planned) for planned in plan.tensors}
    nothing = Numbers(tuple({"weight": 0.0} for _ in experts), {})
    every = {tensor.name: numbers.get(tensor.name, nothing) for tensor in base.tensors}
    found = find_candidates(store.catalog, base, experts, every, measured)
    measured.limit(0, found.cost_of)
    depth = _depths(found, plan)
    needed = int(found.cost_at(depth).sum()) + factors_cost(store.catalog, experts, every)
    if plan.budget is not None and needed > plan.budget:
        raise _stale(plan, f"it would read {needed} bytes now, and its budget is {plan.budget}")
    method = registry.method(plan.method)
    tensors = {tensor.name: tensor for tensor in found.tensors}
    for planned in plan.tensors:
        if (planned.thresholds, planned.ceilings) != cut_offs(
            numbers[planned.name], method, measured, tensors[planned.name]
        ):
            raise _stale(plan, f"the deltas of tensor '{planned.name}' would be trimmed elsewhere now")


def _depths(found: Candidates, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the depth of each candidate, checked against how many tiers it has."""
    depth = np.zeros(len(found), np.int64)
    numbers = {tensor.name: number for number, tensor in enumerate(found.tensors)}
    for planned in plan.tensors:
        number = numbers.get(planned.name)
        if number is None:
            raise _stale(plan, f"there is no tensor '{planned.name}' to merge")
        mine = found.of_tensor(number)
        shape = (found.experts, found.block_counts[number])
        if len(planned.depths) != shape[0] or any(len(digits) != shape[1] for digits in planned.depths):
            raise _stale(plan, f"tensor '{planned.name}' has other blocks")
        grid = np.array([list(digits) for digits in planned.depths]).astype(np.int64).reshape(shape)
        tiers = found.grid(number, found.tiers)
        if ((grid != EXACT) & (grid >= np.maximum(tiers, 1)) | (grid > 0) & (tiers == 0)).any():
            raise _stale(plan, f"tensor '{planned.name}' has blocks with other tiers")
        chosen = grid[found.expert[mine], found.block[mine]]
        depth[mine] = np.where(chosen == EXACT, found.tiers[mine], chosen)
    return depth


def _stale(plan: Plan, why: str) -> PlanError:
    return PlanError(
        f"plan {plan.id[:12]} was made for other statistics than the repository has now ({why}): make it again"
    )
