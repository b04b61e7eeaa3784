"""TIES: trim, elect sign, merge (arXiv 2306.01708)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.canonical import Json
from mergefs.merge.method import BlockInputs, TierLoop, exactly
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ON
from mergefs.merge.trimming import TrimmingMethod, trim
from mergefs.planner.plan import Numbers, Plan, TensorPlan


def elect(inputs: BlockInputs, weights: tuple[float, ...], thresholds: tuple[float, ...]) -> NDArray[Any]:
    """Return base + lambda * the weighted deltas whose sign is that of their sum (positive when it is 0).

    With `normalize` they are divided by the sum of the weights that took part.
    """
    out = np.empty_like(inputs.base)
    loop = inputs.loops.elect_singles if out.dtype == np.float32 else inputs.loops.elect
    loop(inputs.base, inputs.deltas, *_election(inputs.numbers, inputs.experts, weights, thresholds), out)
    return out


def elect_tiers(
    numbers: Numbers,
    experts: tuple[int, ...],
    weights: tuple[float, ...],
    thresholds: tuple[float, ...],
    first: int = 0,
    drops: NDArray[np.uint64] | None = None,
    factors: tuple[float, ...] = (),
) -> TierLoop:
    """Return the loop that does what `elect` does.

    Args:
        numbers: the method's parameters.
        experts: which are read.
        weights, thresholds: see `elect`.
        first, drops: see `tier_kernels.elect_tiers`.
        factors: of the experts' deltas, none for 1.
    """
    from mergefs.merge import tier_kernels

    dropped = np.empty((0, 3), np.uint64) if drops is None else drops
    rescaled = np.array([factors[e] for e in experts] if factors else [], np.float32)
    election = _election(numbers, experts, weights, thresholds)

    def loop(tiers: NDArray[np.int64], base: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
        tier_kernels.elect_tiers(tiers, base, first, dropped, rescaled, *election, out)

    return loop


def _election(
    numbers: Numbers, experts: tuple[int, ...], weights: tuple[float, ...], thresholds: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64], bool, float]:
    """Return thresholds, weights, normalize and scale as `kernels.elect` takes them."""
    return (
        np.array([thresholds[e] if thresholds else 0.0 for e in experts], np.float64),
        np.array([weights[e] for e in experts], np.float64),
        bool(numbers.shared["normalize"]),
        float(numbers.shared["lambda"]),
    )


class Ties(TrimmingMethod):
    """Deltas are trimmed below the magnitude that leaves `density` of the tensor's elements (at least one);
    elements equal to that magnitude are all kept."""

    name = "ties"
    parameters: ClassVar = {**OF_DELTAS, "density": DENSITY, "normalize": ON, "rescale": OFF}
    placed = False
    by_parts = True

    def depends_on(self, numbers: Numbers, tensor: TensorPlan, experts: tuple[int, ...]) -> Json:
        """See `Method.depends_on`: here only the experts that are read count."""
        return {
            "weights": [exactly(numbers.weights[expert]) for expert in experts],
            "thresholds": [exactly(tensor.thresholds[expert]) for expert in experts] if tensor.thresholds else [],
            "factors": [exactly(tensor.factors[expert]) for expert in experts] if tensor.factors else [],
            "shared": {name: exactly(value) for name, value in numbers.shared.items()},
        }

    def loop(self, plan: Plan, tensor: TensorPlan, experts: tuple[int, ...], first: int) -> TierLoop | None:
        """See `Method.loop`."""
        if tensor.factors:
            return None
        numbers = plan.numbers_of(tensor)
        return elect_tiers(numbers, experts, numbers.weights, tensor.thresholds)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        if inputs.tensor.factors:
            trim(inputs)
            return elect(inputs, inputs.numbers.weights, ())
        return elect(inputs, inputs.numbers.weights, inputs.tensor.thresholds)
