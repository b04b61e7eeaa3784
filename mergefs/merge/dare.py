"""DARE: drop elements of the deltas at random and rescale the rest (arXiv 2311.03099)."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

from numpy.typing import NDArray

from mergefs.hashing import digest
from mergefs.merge.linear import combine, delta_scale
from mergefs.merge.method import BlockInputs, Method
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ON
from mergefs.merge.ties import elect
from mergefs.planner.plan import Numbers, Plan

PARAMETERS = {**OF_DELTAS, "density": DENSITY, "normalize": OFF, "rescale": ON}


def drop(inputs: BlockInputs) -> None:
    """Set the dropped elements of the deltas to zero, in place."""
    for row, expert in enumerate(inputs.experts):
        density = inputs.numbers.densities[expert]
        if density < 1.0:
            key0, key1 = mask_key(inputs.plan, expert, inputs.tensor.name)
            inputs.loops.drop(inputs.deltas[row], inputs.first, key0, key1, round(density * 2**32))


def mask_key(plan: Plan, expert: int, tensor: str) -> tuple[int, int]:
    """Return the generator's key (two 32-bit halves) of one expert and tensor under a plan's seed.

    An expert that takes part several times draws differently each time.
    """
    identity = plan.experts[expert]
    time = plan.experts[:expert].count(identity)
    text = f"mergefs-mask\0{plan.seed}\0{identity}\0{time}\0{tensor}"
    low, high = struct.unpack("<II", digest(text.encode())[:8])
    return low, high


def rescaled(numbers: Numbers) -> tuple[float, ...]:
    """Return the weights, divided by the density when `rescale`, so that the expected delta is unchanged."""
    if not numbers.shared["rescale"]:
        return numbers.weights
    return tuple(w / d if d > 0 else 0.0 for w, d in zip(numbers.weights, numbers.densities, strict=True))


class DareLinear(Method):
    """The rescaled deltas are added up."""

    name = "dare_linear"
    parameters: ClassVar = PARAMETERS
    is_random = True
    by_parts = True

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        drop(inputs)
        scale = delta_scale(inputs.numbers)
        return combine(inputs, 1.0, tuple(w * scale for w in rescaled(inputs.numbers)))


class DareTies(Method):
    """The rescaled deltas are merged after electing signs, as in TIES.

    With `normalize` the divisor is the sum of the weights as given, so the deltas carry the rescaling.
    """

    name = "dare_ties"
    parameters: ClassVar = PARAMETERS
    is_random = True
    by_parts = True

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        drop(inputs)
        numbers = inputs.numbers
        if numbers.shared["rescale"]:
            for row, expert in enumerate(inputs.experts):
                density = numbers.densities[expert]
                inputs.deltas[row] *= 1.0 / density if density > 0 else 0.0
        return elect(inputs, numbers.weights, ())
