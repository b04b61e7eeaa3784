"""Arcee Fusion: take over from a model only what matters most (github.com/arcee-ai/mergekit, `arcee_fusion`)."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import RecipeError
from mergefs.merge.method import BlockInputs, Method, Whole
from mergefs.merge.passes import Part, Passes
from mergefs.merge.ranks import Ranks
from mergefs.merge.span import finite
from mergefs.planner.plan import Numbers


class ArceeFusion(Method):
    """The model's elements whose importance is at least the tensor's median plus 1.5 times its interquartile range,
    the base's elsewhere. An element's importance is |d| KL(p || q), with p and q the softmaxes of its row in the model
    and in the base (a vector is one row), 1e-8 added to each.

    The plan's factor is the least importance that counts. A budget's planner takes the method for a sum: importance
    is no property of single elements.
    """

    name = "arcee_fusion"
    parameters: ClassVar = {}
    decides = False
    fewest, most = 1, 1

    def check(self, numbers: Numbers, shape: tuple[int, ...], block_elements: int) -> None:
        """See `Method.check`."""
        if prod(shape[-1:]) > block_elements:
            raise RecipeError("its rows are longer than a block, and arcee_fusion weighs whole rows")

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """See `Method.factors`."""
        return finite(self.name, whole.facts("importance", _measure)) if whole.changed else ()

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        if not len(inputs.deltas):
            return inputs.base
        chosen = importance(inputs.base, inputs.deltas[0], inputs.shape) >= np.float64(inputs.tensor.factors[0])
        return np.where(chosen, inputs.base + inputs.deltas[0], inputs.base)


def importance(base: NDArray[Any], delta: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the importance of a block's elements, float32[n]."""
    from mergefs.merge import selection_kernels

    out = np.empty(base.size, np.float32)
    selection_kernels.importance(base, delta, prod(shape[-1:]), out)
    return out


def _importance(part: Part, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if not len(part.deltas):
        return np.zeros(part.base.size, np.float32)
    return importance(part.base, part.deltas[0], shape)


def _measure(passes: Passes) -> NDArray[np.float64]:
    """Return the median plus 1.5 times the distance of the quartiles."""
    ranks = Ranks(passes, partial(_importance, shape=passes.shape))
    lower, median, upper = ranks.smallest([int(q * (passes.elements - 1)) for q in (0.25, 0.5, 0.75)])
    return np.array([median + 1.5 * (upper - lower)])
