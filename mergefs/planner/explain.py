"""Explaining a plan: what it reads and skips, per expert and per layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.planner.resolve import Planned

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Explanation:
    """Rows with name, blocks, blocks_read, bytes, bytes_read, energy_read and cancelled.

    `energy_read` is the share of the worth that is read, `cancelled` the share of the deltas' own energy that
    other experts cancel; both are None where the plan did not have to choose.

    Attributes:
        experts, layers: one row for each; the layer `-` is what belongs to none.
    """

    experts: list[dict[str, Any]]
    layers: list[dict[str, Any]]


def explain_plan(planned: Planned) -> Explanation:
    """Explain a plan."""
    found = planned.candidates
    experts = [
        _row(planned, f"{number + 1} {identity[:12]}", found.expert == number)
        for number, identity in enumerate(planned.plan.experts)
    ]
    layer_of_tensor = np.array([_layer(name) for name in found.tensors], np.int64)
    layer = layer_of_tensor[found.tensor] if len(found.tensor) else np.empty(0, np.int64)
    layers = [
        _row(planned, "-" if number < 0 else str(number), layer == number) for number in np.unique(layer).tolist()
    ]
    return Explanation(experts, layers)


def _row(planned: Planned, name: str, mine: NDArray[np.bool_]) -> dict[str, Any]:
    found = planned.candidates
    read = mine & (found.depth > 0)
    worth = float(found.worth[mine].sum())
    own = float(found.own[mine].sum())
    return {
        "name": name,
        "blocks": int(mine.sum()),
        "blocks_read": int(read.sum()),
        "bytes": int(found.full_cost[mine].sum()),
        "bytes_read": int(found.spent[mine].sum()),
        "energy_read": 1 - float(found.remaining[mine].sum()) / worth if worth > 0 else None,
        "cancelled": max(0.0, 1 - worth / own) if own > 0 else None,
    }


def _layer(name: str) -> int:
    match = _LAYER.search(name)
    return int(match[1]) if match else -1
