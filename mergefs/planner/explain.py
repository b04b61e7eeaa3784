"""Explaining a plan: what it reads and skips, and what error that leaves, per expert, layer and kind of tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.planner.candidates import Candidates
from mergefs.planner.layers import kind_of, layer_of
from mergefs.planner.quality import relative
from mergefs.planner.resolve import Planned

CURVE_SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3)
"""Of the experts' raw bytes: where the curve of error against bytes is computed."""


@dataclass(frozen=True)
class Explanation:
    """Rows with name, blocks, blocks_read, bytes, bytes_read, tier_bytes, error and cancelled.

    `tier_bytes` are the bytes read of the first, second, third and exact tiers; `error` is the predicted one of the
    merged delta there, relative to its norm there, `cancelled` the share of the deltas' own energy that other
    experts cancel. The last two are None where the plan did not have to choose.

    Attributes:
        experts, layers, kinds: one row for each; the layer `-` is what belongs to none, and a kind is a tensor's name
            without the layer's number.
    """

    experts: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    kinds: list[dict[str, Any]]


def explain_plan(planned: Planned) -> Explanation:
    """Explain a plan."""
    found = planned.candidates
    numbers = found.tensor
    experts = [
        _row(planned, f"{number + 1} {identity[:12]}", found.expert == number)
        for number, identity in enumerate(planned.plan.experts)
    ]
    of_tensors = [layer_of(tensor.name) for tensor in found.tensors]
    layer = np.array([-1 if layer is None else layer for layer in of_tensors], np.int64)[numbers]
    layers = [
        _row(planned, "-" if number < 0 else str(number), layer == number) for number in np.unique(layer).tolist()
    ]
    names = [kind_of(tensor.name) for tensor in found.tensors]
    kinds = list(dict.fromkeys(names))
    kind = np.array([kinds.index(name) for name in names], np.int64)[numbers]
    return Explanation(experts, layers, [_row(planned, kinds[k], kind == k) for k in np.unique(kind).tolist()])


def tier_bytes(found: Candidates, depth: NDArray[np.int64]) -> list[int]:
    """Return the bytes read of all blocks' first, second, third and exact tiers."""
    sizes = np.where(np.arange(COARSE_TIERS + 1) < depth[:, None], found.rows["bytes"], 0).astype(np.int64)
    # The last tier is the exact one, however many there are.
    last = found.tiers - 1
    exact = int(sizes[np.arange(len(found)), last].sum())
    sizes[np.arange(len(found)), last] = 0
    return [*sizes[:, :COARSE_TIERS].sum(axis=0).tolist(), exact]


def curve(planned: Planned) -> list[dict[str, float]]:
    """Return what other budgets would give: `bytes` read of experts and `error` of the merged delta, as predicted.

    Empty where the plan did not have to choose.
    """
    if planned.frontier is None or planned.quality is None:
        return []
    found = planned.candidates
    rows = [{"bytes": 0.0, "error": 1.0}]
    for share in CURVE_SHARES:
        budget = int(planned.expert_raw_bytes * share)
        if planned.frontier.floor_cost <= budget <= int(found.full_cost.sum()):
            depth = planned.frontier.within(budget)
            rows.append(_point(planned, depth))
    return [*rows, _point(planned, found.tiers)]


def _point(planned: Planned, depth: NDArray[np.int64]) -> dict[str, float]:
    assert planned.quality is not None
    found = planned.candidates
    error = planned.quality.predict(depth)
    return {"bytes": int(found.cost_at(depth).sum()), "error": 1.0 if error is None else error}


def _row(planned: Planned, name: str, mine: NDArray[np.bool_]) -> dict[str, Any]:
    found, depth, quality = planned.candidates, planned.depth, planned.quality
    row = {
        "name": name,
        "blocks": int(mine.sum()),
        "blocks_read": int((mine & (depth > 0)).sum()),
        "bytes": int(found.full_cost[mine].sum()),
        "bytes_read": int(found.cost_at(depth)[mine].sum()),
        "tier_bytes": tier_bytes(found, np.where(mine, depth, 0)),
        "error": 0.0 if planned.everything else None,
        "cancelled": None,
    }
    if quality is not None and not planned.everything:
        own = float(quality.own[mine].sum())
        whole = float(quality.norm_terms[mine].sum())
        row["error"] = relative(float(quality.error_terms(depth)[mine].sum()), whole)
        row["cancelled"] = max(0.0, 1 - whole / own) if own > 0 else None
    return row
