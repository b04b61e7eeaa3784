"""Trimming deltas at thresholds that the plan holds, and making up for what is gone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.merge.method import BlockInputs, Method, Whole
from mergefs.merge.passes import Part, Passes
from mergefs.merge.span import finite
from mergefs.planner.plan import Numbers

Cuts = tuple[tuple[float, ...], tuple[float, ...]]
"""Thresholds and ceilings; see `TensorPlan`."""

_LEAST = 1e-7


class TrimmingMethod(Method):
    """A method that trims deltas. With `rescale` the plan's factors are those by which each expert's trimmed delta gets
    back the L1 norm that it had in this tensor (as mergekit has it: not where one of the norms is below 1e-7)."""

    trims = True

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """See `Method.factors`."""
        if not numbers.shared["rescale"] or not any(any(cuts) for cuts in whole.cuts):
            return ()
        norms = whole.facts(f"trimmed {whole.cuts!r}", partial(_measure, cuts=whole.cuts)).reshape(2, -1)
        small = norms.min(axis=0) < _LEAST
        return finite(self.name, np.where(small, 1.0, norms[0] / np.where(small, 1.0, norms[1])))


def trim(inputs: BlockInputs) -> None:
    """Set the elements of the deltas beyond the plan's thresholds and ceilings to zero, in place, and rescale the
    others where the plan has factors."""
    tensor = inputs.tensor
    for row, expert in enumerate(inputs.experts):
        _cut(inputs.deltas[row], expert, (tensor.thresholds, tensor.ceilings), inputs.loops)
        if tensor.factors:
            inputs.deltas[row] *= tensor.factors[expert]


def _cut(delta: NDArray[Any], expert: int, cuts: Cuts, loops: Any) -> None:
    low = cuts[0][expert] if cuts[0] else 0.0
    high = cuts[1][expert] if cuts[1] else float("inf")
    if low > 0.0 or high < float("inf"):
        loops.cut(delta, low, high)


def _measure(passes: Passes, cuts: Cuts) -> NDArray[np.float64]:
    """Return the L1 norms of the experts' deltas, then those of the trimmed ones."""
    norms = np.zeros((2, passes.experts))
    for experts, found in passes.each(partial(_norms, cuts=cuts)):
        norms[:, list(experts)] += found
    return norms.ravel()


def _norms(part: Part, cuts: Cuts) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    from mergefs.merge import kernels

    before = np.abs(part.deltas).sum(axis=1, dtype=np.float64)
    for row, expert in enumerate(part.experts):
        _cut(part.deltas[row], expert, cuts, kernels)
    return part.experts, np.stack([before, np.abs(part.deltas).sum(axis=1, dtype=np.float64)])
