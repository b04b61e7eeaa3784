"""Choosing depths: the steps that a budget or an error allows, by any of the planners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import BudgetError
from mergefs.planner.aim import Aim
from mergefs.planner.candidates import Candidates
from mergefs.planner.frontier import Frontier, by_blocks, by_tiers, hash_rank
from mergefs.planner.plan import EXACT, Plan
from mergefs.planner.quality import Quality
from mergefs.units import format_size

_WEIGHED_BY = 1 << 14
"""Blocks that are planned for to find out how what experts have in common is best weighed."""

_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the other experts' blocks: what may be taken to be left."""


def make_frontier(found: Candidates, quality: Quality, aim: Aim, limit: int | None, seed: int) -> Frontier:
    """Return the steps of the planner that is asked for.

    Args:
        found: all candidates.
        quality: what is known of the error.
        aim: what to keep to.
        limit: the budget in bytes; None where only an error is to be kept to.
        seed: of the planner `hash`.
    """
    floor = np.zeros(len(found), np.int64) if aim.floor is None else planned_depths(found, aim.floor)
    if aim.planner == "hash":
        return by_blocks(found.cost, quality.errors(0.0), found.tiers, floor, hash_rank(seed, len(found)))
    steps = by_tiers if aim.planner == "tiers" else by_blocks
    return steps(found.cost, quality.errors(_others(quality, steps, floor, aim, limit)), found.tiers, floor)


def _others(
    quality: Quality, steps: Callable[..., Frontier], floor: NDArray[np.int64], aim: Aim, limit: int | None
) -> float:
    """Return which share of the other experts' blocks is best taken to be left when a block's errors are weighed."""
    every = max(1, len(quality.found) // _WEIGHED_BY)
    rows = np.flatnonzero(quality.found.places % every == 0)
    some, least = quality.only(rows), floor[rows]
    found = some.found
    best = (np.inf, 0.0)
    for others in _SHARES:
        frontier = steps(found.cost, some.errors(others), found.tiers, least)
        if aim.max_error:
            score = float(found.cost_at(_least(some, frontier, aim.max_error)).sum())
        else:
            assert limit is not None
            part = found.full_cost.sum() / max(1, quality.found.full_cost.sum())
            score = float(some.error_terms(frontier.within(int(limit * part))).sum())
        best = min(best, (score, others))
    return best[1]


def choose(
    found: Candidates,
    quality: Quality,
    frontier: Frontier,
    aim: Aim,
    limit: int | None,
    frontier_for_budget: Callable[[], Frontier],
    reference: int = 0,
) -> tuple[NDArray[np.int64], int]:
    """Return the depths, and the most bytes that they may take.

    Args:
        found, quality, aim, limit: see `make_frontier`.
        frontier: the steps to take.
        frontier_for_budget: makes the steps for the budget alone.
        reference: bytes that are read whatever is chosen, besides the limit.

    Raises:
        BudgetError: when the budget does not cover the floor, or does not allow the error asked for.
    """
    if limit is not None and frontier.floor_cost > limit:
        raise BudgetError(
            f"a budget of {limit + reference} bytes is less than the {frontier.floor_cost + reference} bytes that the"
            " model was made from: give more than that"
        )
    if aim.max_error is None:
        assert limit is not None
        return frontier.within(limit), limit
    # No error is everything, whatever a sample says.
    depth = _least(quality, frontier, aim.max_error) if aim.max_error else found.tiers
    needed = int(found.cost_at(depth).sum())
    if limit is not None and needed > limit:
        # A plan for the budget alone may be another one; and what fits of later steps may do what the next one does.
        filled = frontier_for_budget().within(limit)
        reached = quality.predict(filled) or 0.0
        if reached > aim.max_error or not aim.max_error:
            raise BudgetError(
                f"an error of {aim.max_error:g} takes {format_size(needed + reference)} ({needed + reference} bytes),"
                f" more than the budget of {limit + reference} bytes, which allows an error of {reached:.3f}"
            )
        return filled, limit
    return depth, needed


def _least(quality: Quality, frontier: Frontier, error: float) -> NDArray[np.int64]:
    """Return the depths after the fewest steps that leave no more error than that."""
    low, high = 0, len(frontier)
    while low < high:
        middle = (low + high) // 2
        left = quality.predict(frontier.after(middle))
        if left is not None and left <= error:
            high = middle
        else:
            low = middle + 1
    return frontier.after(high)


def planned_depths(found: Candidates, plan: Plan) -> NDArray[np.int64]:
    """Return the depth of each candidate in a plan of the same models."""
    depth = np.zeros(len(found), np.int64)
    for number, tensor in enumerate(found.tensors):
        planned = plan.tensor_by_name.get(tensor.name)
        if planned is not None:
            grid = np.array([np.frombuffer(mine.encode(), np.uint8) for mine in planned.depths], np.int64) - ord("0")
            mine = found.of_tensor(number)
            depth[mine] = grid[found.expert[mine], found.block[mine]]
    return np.where(depth == EXACT, found.tiers, np.minimum(depth, found.tiers))
