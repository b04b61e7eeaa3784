"""DELLA: drop elements of the deltas at random, the smaller ones of each row more often (arXiv 2406.11617)."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

from numpy.typing import NDArray

from mergefs.errors import RecipeError
from mergefs.merge.dare import mask_key
from mergefs.merge.linear import combine, delta_scale
from mergefs.merge.method import BlockInputs, Method
from mergefs.merge.parameters import DENSITY, OF_DELTAS, OFF, ON, ParameterSpec
from mergefs.merge.ties import elect
from mergefs.planner.plan import Numbers

PARAMETERS = {
    **OF_DELTAS,
    "density": DENSITY,
    "epsilon": ParameterSpec(0.15, lowest=0.0, highest=0.5, per_model=True),
    "rescale": ON,
}


def row_length(shape: tuple[int, ...]) -> int:
    """Return the elements of a row: of what lies behind one index of the first axis; a vector is one row."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def check_rows(numbers: Numbers, shape: tuple[int, ...], block_elements: int) -> None:
    """Check that a tensor can be pruned.

    Raises:
        RecipeError: when density - epsilon and density + epsilon are not between 0 and 1, or rows do not fit a block.
    """
    for own in numbers.experts:
        density, epsilon = float(own["density"]), float(own["epsilon"])
        if 0.0 < density < 1.0 and not 0.0 < density - epsilon <= density + epsilon < 1.0:
            raise RecipeError(
                f"a density of {density:g} with an epsilon of {epsilon:g} gives chances that are not between 0 and 1:"
                " lower epsilon"
            )
    if row_length(shape) > block_elements:
        raise RecipeError("its rows are longer than a block, and DELLA ranks whole rows")


def prune(inputs: BlockInputs) -> None:
    """Set the dropped elements of the deltas to zero, in place, and divide the others by their chance to stay."""
    length = row_length(inputs.shape)
    for row, expert in enumerate(inputs.experts):
        own = inputs.numbers.experts[expert]
        density, epsilon = float(own["density"]), float(own["epsilon"])
        if density <= 0.0:
            inputs.deltas[row] = 0.0
        elif density < 1.0:
            key0, key1 = mask_key(inputs.plan, expert, inputs.tensor.name)
            rescale = bool(inputs.numbers.shared["rescale"])
            inputs.loops.prune(inputs.deltas[row], length, inputs.first, key0, key1, density, epsilon, rescale)


class Della(Method):
    """The pruned deltas are merged after electing signs, as in TIES.

    In a row (of what lies behind one index of the first axis; a vector is one row) of n elements the r-th smallest
    magnitude, of equal ones the first one first, stays with the chance density - epsilon + 2 epsilon (r - 1) / (n - 1).
    With `rescale` what stays is divided by that, so that the expected delta is unchanged.
    """

    name = "della"
    parameters: ClassVar = {**PARAMETERS, "normalize": ON}
    is_random = True

    def check(self, numbers: Numbers, shape: tuple[int, ...], block_elements: int) -> None:
        """See `Method.check`."""
        check_rows(numbers, shape, block_elements)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        prune(inputs)
        return elect(inputs, inputs.numbers.weights, ())


class DellaLinear(Della):
    """The pruned deltas are added up; see `Della`."""

    name = "della_linear"
    parameters: ClassVar = {**PARAMETERS, "normalize": OFF}

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        prune(inputs)
        scale = delta_scale(inputs.numbers)
        return combine(inputs, 1.0, tuple(w * scale for w in inputs.numbers.weights))
