"""TIES: trim, elect sign, merge (arXiv 2306.01708)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.canonical import Json
from mergefs.merge.method import BlockInputs, exactly
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ON
from mergefs.merge.trimming import TrimmingMethod, trim
from mergefs.planner.plan import Numbers, TensorPlan


def elect(inputs: BlockInputs, weights: tuple[float, ...], thresholds: tuple[float, ...]) -> NDArray[Any]:
    """Return base + lambda * the weighted deltas whose sign is that of their sum (positive when it is 0).

    With `normalize` they are divided by the sum of the weights that took part.
    """
    out = np.empty_like(inputs.base)
    settings = inputs.numbers.shared
    loop = inputs.loops.elect_singles if out.dtype == np.float32 else inputs.loops.elect
    loop(
        inputs.base,
        inputs.deltas,
        np.array([thresholds[e] if thresholds else 0.0 for e in inputs.experts], np.float64),
        np.array([weights[e] for e in inputs.experts], np.float64),
        bool(settings["normalize"]),
        float(settings["lambda"]),
        out,
    )
    return out


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

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        if inputs.tensor.factors:
            trim(inputs)
            return elect(inputs, inputs.numbers.weights, ())
        return elect(inputs, inputs.numbers.weights, inputs.tensor.thresholds)
