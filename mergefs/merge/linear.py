"""Weighted averages of models, and of deltas: `linear` (model soups, arXiv 2203.05482) and `task_arithmetic`
(arXiv 2212.04089)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.canonical import Json
from mergefs.merge.method import BlockInputs, Method, TierLoop, exactly
from mergefs.merge.parameters import INT8_MASK, OF_DELTAS, OFF, ON, WEIGHT
from mergefs.planner.plan import Numbers, Plan, TensorPlan


def combine(inputs: BlockInputs, base_scale: float, coefficients: tuple[float, ...]) -> NDArray[Any]:
    """Return base_scale * base + the sum of coefficient * delta, with float64 sums."""
    chosen = np.array([coefficients[e] for e in inputs.experts], np.float64)
    out = np.empty_like(inputs.base)
    inputs.loops.combine(inputs.base, base_scale, inputs.deltas, chosen, out)
    return out


def combine_tiers(
    base_scale: float,
    coefficients: tuple[float, ...],
    experts: tuple[int, ...],
    first: int = 0,
    drops: NDArray[np.uint64] | None = None,
) -> TierLoop:
    """Return the loop that does what `combine` does.

    Args:
        base_scale, coefficients: see `combine`.
        experts: which are read.
        first, drops: see `tier_kernels.elect_tiers`.
    """
    from mergefs.merge import tier_kernels

    chosen = np.array([coefficients[e] for e in experts], np.float64)
    dropped = np.empty((0, 3), np.uint64) if drops is None else drops

    def loop(tiers: NDArray[np.int64], base: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
        tier_kernels.combine_tiers(tiers, base, first, dropped, np.empty(0, np.float32), base_scale, chosen, out)

    return loop


def delta_scale(numbers: Numbers) -> float:
    """Return lambda, divided by the sum of the weights when `normalize` (not where that is near 0, as mergekit
    has it)."""
    total = sum(numbers.weights)
    divisor = total if numbers.shared["normalize"] and abs(total) >= 1e-8 else 1.0
    return float(numbers.shared.get("lambda", 1.0)) / divisor


class SumMethod(Method):
    """A method whose result is `base_scale` times the base and the deltas times their `coefficients`."""

    placed = False
    decides = False
    by_parts = True

    def depends_on(self, numbers: Numbers, tensor: TensorPlan, experts: tuple[int, ...]) -> Json:
        """See `Method.depends_on`: here the experts that are read have factors, and nothing else counts."""
        factors = self.coefficients(numbers, tensor)
        return [exactly(self.base_scale(numbers, tensor)), *(exactly(factors[expert]) for expert in experts)]

    def loop(self, plan: Plan, tensor: TensorPlan, experts: tuple[int, ...], first: int) -> TierLoop:
        """See `Method.loop`."""
        numbers = plan.numbers_of(tensor)
        return combine_tiers(self.base_scale(numbers, tensor), self.coefficients(numbers, tensor), experts)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        scale = self.base_scale(inputs.numbers, inputs.tensor)
        return combine(inputs, scale, self.coefficients(inputs.numbers, inputs.tensor))


class Linear(SumMethod):
    """sum w_i x_i, divided by sum w_i when `normalize`. With x_i = base + d_i this is a sum of deltas, so
    that an average is exact whatever lies between base and experts."""

    name = "linear"
    parameters: ClassVar = {"weight": WEIGHT, "normalize": ON, INT8_MASK: OFF}
    needs_base = False
    base_is_model = True

    def base_scale(self, numbers: Numbers, tensor: TensorPlan) -> float:
        """See `Method.base_scale`."""
        return 1.0 if numbers.shared["normalize"] else sum(numbers.weights)

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`: here they are known exactly."""
        divisor = sum(numbers.weights) if numbers.shared["normalize"] else 1.0
        return tuple(w / divisor for w in numbers.weights)


class TaskArithmetic(SumMethod):
    """base + lambda * sum w_i d_i, the sum divided by sum w_i when `normalize`."""

    name = "task_arithmetic"
    parameters: ClassVar = {**OF_DELTAS, "normalize": OFF}

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`: here they are known exactly."""
        scale = delta_scale(numbers)
        return tuple(w * scale for w in numbers.weights)
