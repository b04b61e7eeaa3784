"""DARE: drop elements of the deltas at random and rescale the rest (arXiv 2311.03099)."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.hashing import digest
from mergefs.merge.linear import combine, combine_tiers, delta_scale
from mergefs.merge.method import BlockInputs, Method, TierLoop
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ON
from mergefs.merge.ties import elect, elect_tiers
from mergefs.planner.plan import Numbers, Plan, TensorPlan

PARAMETERS = {**OF_DELTAS, "density": DENSITY, "normalize": OFF, "rescale": ON}

ALL = 1 << 32
"""The limit that every element's number is below."""


def drop(inputs: BlockInputs) -> None:
    """Set the dropped elements of the deltas to zero, in place."""
    for row, found in enumerate(_drops(inputs.plan, inputs.tensor, inputs.numbers, inputs.experts)):
        if found[2] < ALL:
            inputs.loops.drop(inputs.deltas[row], inputs.first, *found)


def _drops(plan: Plan, tensor: TensorPlan, numbers: Numbers, experts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return for each expert the key's halves and the limit of `kernels.drop`."""
    densities = (numbers.densities[expert] for expert in experts)
    return [
        (*mask_key(plan, expert, tensor.name), round(density * ALL) if density < 1.0 else ALL)
        for expert, density in zip(experts, densities, strict=True)
    ]


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


def _factors(numbers: Numbers) -> tuple[float, ...]:
    """Return what the deltas are multiplied by when `rescale`, nothing otherwise."""
    if not numbers.shared["rescale"]:
        return ()
    return tuple(1.0 / density if density > 0 else 0.0 for density in numbers.densities)


class DareLinear(Method):
    """The rescaled deltas are added up."""

    name = "dare_linear"
    parameters: ClassVar = PARAMETERS
    is_random = True
    by_parts = True

    def loop(self, plan: Plan, tensor: TensorPlan, experts: tuple[int, ...], first: int) -> TierLoop:
        """See `Method.loop`."""
        numbers = plan.numbers_of(tensor)
        drops = np.array(_drops(plan, tensor, numbers, experts), np.uint64)
        return combine_tiers(1.0, _weights(numbers), experts, first, drops)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        drop(inputs)
        return combine(inputs, 1.0, _weights(inputs.numbers))


def _weights(numbers: Numbers) -> tuple[float, ...]:
    scale = delta_scale(numbers)
    return tuple(w * scale for w in rescaled(numbers))


class DareTies(Method):
    """The rescaled deltas are merged after electing signs, as in TIES.

    With `normalize` the divisor is the sum of the weights as given, so the deltas carry the rescaling.
    """

    name = "dare_ties"
    parameters: ClassVar = PARAMETERS
    is_random = True
    by_parts = True

    def loop(self, plan: Plan, tensor: TensorPlan, experts: tuple[int, ...], first: int) -> TierLoop:
        """See `Method.loop`."""
        numbers = plan.numbers_of(tensor)
        drops = np.array(_drops(plan, tensor, numbers, experts), np.uint64)
        return elect_tiers(numbers, experts, numbers.weights, (), first, drops, _factors(numbers))

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        drop(inputs)
        factors = _factors(inputs.numbers)
        for row, expert in enumerate(inputs.experts if factors else ()):
            inputs.deltas[row] *= factors[expert]
        return elect(inputs, inputs.numbers.weights, ())
