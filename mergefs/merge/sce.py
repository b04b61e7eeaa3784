"""SCE: select the elements where models differ most, weight models by how far they went there, erase the minority
(arXiv 2408.07990)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.merge.method import BlockInputs, Method, Whole
from mergefs.merge.parameters import INT8_MASK, OFF, ParameterSpec
from mergefs.merge.passes import Part, Passes
from mergefs.merge.ranks import Ranks
from mergefs.merge.span import finite
from mergefs.planner.plan import Numbers, TensorPlan


class Sce(Method):
    """Of the elements where the deltas differ at all, the share `select_topk` with the largest variance is selected
    (those equal to the last one as well); the others stay the base's. A model's weight is its share of all models'
    squared deltas there, the same for all where these are near 0. What is added is the weighted mean of the deltas that
    have the sign of their sum.

    The plan's factors are the least variance that is selected, and the weights.
    """

    name = "sce"
    parameters: ClassVar = {"select_topk": ParameterSpec(1.0, lowest=0.0, highest=1.0), INT8_MASK: OFF}

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """See `Method.factors`."""
        if not whole.changed:
            return ()
        share = float(numbers.shared["select_topk"])
        limit, *means = whole.facts(f"sce {share!r}", partial(_measure, share=share)).tolist()
        total = sum(means)
        weights = [mean / total if abs(total) >= 1e-6 else 1.0 / len(means) for mean in means]
        return limit, *finite(self.name, np.array(weights))

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`."""
        return tensor.factors[1:] or super().coefficients(numbers, tensor)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        from mergefs.merge import selection_kernels

        limit, *weights = inputs.tensor.factors
        out = np.empty_like(inputs.base)
        chosen = np.array([weights[e] for e in inputs.experts], np.float64)
        selection_kernels.consensus(inputs.base, inputs.deltas, len(weights), limit, chosen, out)
        return out


def _measure(passes: Passes, share: float) -> NDArray[np.float64]:
    """Return the least variance that is selected (0: all, inf: none), and each expert's mean squared delta there."""
    limit = _limit(passes, share)
    squares = np.zeros(passes.experts)
    for experts, found in passes.each(partial(_squares, count=passes.experts, limit=limit)):
        squares[list(experts)] += found
    return np.array([limit, *(squares / passes.elements)])


def _limit(passes: Passes, share: float) -> float:
    if share >= 1.0:
        return 0.0
    ranks = Ranks(passes, partial(_variances, count=passes.experts))
    selected = int(ranks.nonzero * share)
    return ranks.smallest([passes.elements - selected])[0] if selected else float("inf")


def _variances(part: Part, count: int) -> NDArray[np.float32]:
    from mergefs.merge import selection_kernels

    out = np.empty(part.base.size, np.float32)
    selection_kernels.variances(part.deltas, count, out)
    return out


def _squares(part: Part, count: int, limit: float) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    from mergefs.merge import selection_kernels

    out = np.empty(len(part.deltas), np.float64)
    selection_kernels.selected_squares(part.deltas, count, limit, out)
    return part.experts, out
