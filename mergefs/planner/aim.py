"""What a plan is to keep to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import BudgetError
from mergefs.planner.plan import Plan

Planner = Literal["tiers", "blocks", "hash"]
"""How a budget is spent: on tiers of blocks; on whole blocks, the ones with most error per byte first; or on whole
blocks as a hash samples them. The last two are for comparison."""

PLANNERS: tuple[Planner, ...] = get_args(Planner)


@dataclass(frozen=True)
class Aim:
    """What may be read, or how much error may be left.

    Attributes:
        budget: the most expert bytes to read: `10%` of the experts' raw bytes, `2GiB`, or None for no limit.
        max_error: the largest predicted error of the merged delta, relative to its norm, or None; the fewest bytes that
            keep to it are read.
        planner: see `Planner`.
        importance: for tensors by name, float64[1] or float64[rows]: how much errors matter there; 1 for the others.
        floor: a plan of the same recipe whose depths are to be read at least, or None.
    """

    budget: str | None = None
    max_error: float | None = None
    planner: Planner = "tiers"
    importance: Mapping[str, NDArray[np.float64]] | None = None
    floor: Plan | None = None

    def __post_init__(self) -> None:
        if self.max_error is not None and not 0.0 <= self.max_error < 1.0:
            raise BudgetError(
                f"an error of {self.max_error:g} cannot be aimed at: 0 is exact, and 1 is what reading nothing leaves"
            )
        if self.planner not in PLANNERS:
            raise BudgetError(f"unknown planner '{self.planner}': there are {', '.join(PLANNERS)}")
