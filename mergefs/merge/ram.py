"""Reinforced agent merging: average what several models change, keep what only one does (arXiv 2601.13572)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.merge.method import BlockInputs, Method, Whole
from mergefs.merge.parameters import ParameterSpec
from mergefs.merge.passes import Part, Passes
from mergefs.planner.plan import Numbers

EPSILON = ParameterSpec(1e-5, lowest=0.0)


class Ram(Method):
    """Deltas up to `epsilon` count as 0. Where several models have others, their mean is added; where one has, its
    delta."""

    name = "ram"
    parameters: ClassVar = {"epsilon": EPSILON}

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        return _reinforce(inputs, np.ones(len(inputs.experts)))


class RamPlusTl(Ram):
    """`ram` with what only one model changes times 1 + r min(rho, alpha): rho is how many elements of the tensor that
    model shares with others for each that it does not. The plan's factors are these."""

    name = "ramplus_tl"
    parameters: ClassVar = {
        "epsilon": EPSILON,
        "r": ParameterSpec(0.1),
        "alpha": ParameterSpec(0.2, lowest=0.0),
    }

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """See `Method.factors`."""
        if not whole.changed:
            return ()
        epsilon, r, alpha = (float(numbers.shared[name]) for name in ("epsilon", "r", "alpha"))
        found = whole.facts(f"overlaps {epsilon!r}", partial(_measure, epsilon=epsilon))
        unique, shared = found.reshape(2, -1)
        rho = shared / np.maximum(unique, epsilon if epsilon > 0.0 else 1.0)
        return tuple((1.0 + r * np.clip(rho, 0.0, alpha)).tolist())

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        return _reinforce(inputs, np.array([inputs.tensor.factors[e] for e in inputs.experts], np.float64))


def _reinforce(inputs: BlockInputs, factors: NDArray[np.float64]) -> NDArray[Any]:
    from mergefs.merge import selection_kernels

    out = np.empty_like(inputs.base)
    epsilon = float(inputs.numbers.shared["epsilon"])
    selection_kernels.reinforce(inputs.base, inputs.deltas, epsilon, factors, out)
    return out


def _measure(passes: Passes, epsilon: float) -> NDArray[np.float64]:
    """Return how many elements each expert alone changes, and how many it and others do."""
    counts = np.zeros((2, passes.experts), np.int64)
    for experts, found in passes.each(partial(_count, epsilon=epsilon)):
        counts[:, list(experts)] += found
    return counts.astype(np.float64).ravel()


def _count(part: Part, epsilon: float) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    from mergefs.merge import selection_kernels

    counts = np.zeros((2, len(part.deltas)), np.int64)
    selection_kernels.overlaps(part.deltas, epsilon, counts[0], counts[1])
    return part.experts, counts
