"""What a merge does to the sampled elements: the error of methods that trim, drop or elect, element by element.

The statistics hold a sample of every expert's delta, the same elements of each, exactly and as its coarse tiers give
them (see `statistics.sample`). Merging the sample both ways estimates the merged delta's error without bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergefs.manifest import Tensor
from mergefs.merge.method import BlockInputs, Method
from mergefs.planner.measured import Measurer
from mergefs.planner.plan import Plan, TensorPlan
from mergefs.statistics.sample import from_bfloat16, positions
from mergefs.statistics.tensor import SKETCHED_FROM, TIERS

MOST = 1 << 21
"""Sampled elements times experts that are merged: more of them would only take longer."""

FEWEST = 256
"""Fewer sampled elements say too little."""


@dataclass(frozen=True)
class _Sampled:
    """The sample of one tensor.

    Attributes:
        plan: for the trim thresholds.
        number: of the tensor among the candidates'.
        block: int64[m]: which block each element lies in.
        deltas: float32[experts, depths, m]: by depth, from unread to exact.
        weight: float64[m]: how many elements each stands for, times their importance.
        exact: float64[m]: the merged delta.
    """

    plan: TensorPlan
    number: int
    block: NDArray[np.int64]
    deltas: NDArray[np.float32]
    weight: NDArray[np.float64]
    exact: NDArray[np.float64]


class Simulation:
    """The sampled elements of a merge.

    Args:
        plan: with all the numbers but the depths.
        method: its method.
        tensors: the plans of tensors for their thresholds, and which of the candidates' tensors each is.
        measured: the experts' statistics.
        block_elements: of the repository.
        weights: float64 for each block of a tensor, by its number: the importance.
    """

    def __init__(
        self,
        plan: Plan,
        method: Method,
        tensors: list[tuple[int, Tensor, TensorPlan]],
        measured: Measurer,
        block_elements: int,
        weights: list[NDArray[np.float64]],
    ) -> None:
        self._plan = plan
        self._method = method
        self._experts = tuple(
            e for e in range(len(plan.experts)) if any(numbers.weights[e] != 0.0 for numbers in plan.numbers)
        )
        large = [item for item in tensors if item[1].elements >= SKETCHED_FROM]
        total = sum(len(positions(tensor.elements, 0, tensor.elements)) for _, tensor, _ in large)
        self._stride = max(1, -(-total * len(self._experts) // MOST))
        self._parts = []
        for number, tensor, planned in large:
            found = self._sampled(number, tensor, planned, measured, block_elements, weights[number])
            if len(found.block):
                self._parts.append(found)
        self.count = sum(len(part.block) for part in self._parts)
        self._norm = sum(float(part.weight @ part.exact**2) for part in self._parts)

    @property
    def tells(self) -> bool:
        """Whether there are enough elements to go by."""
        return self.count >= FEWEST and self._norm > 0.0

    def error(self, depths: dict[int, NDArray[np.int64]]) -> float:
        """Return the squared error of the merged delta, relative to its squared norm.

        Args:
            depths: for each tensor by its number int64[experts, blocks]: 0 to 3 coarse tiers, 4 for exact.
        """
        return self._error(lambda part: depths[part.number][:, part.block])

    def uniform(self, depth: int) -> float:
        """Return the same with every expert read to one depth."""
        return self._error(lambda part: np.full((len(self._plan.experts), len(part.block)), depth))

    def _error(self, choose: Callable[[_Sampled], NDArray[np.int64]]) -> float:
        left = 0.0
        for part in self._parts:
            depth = choose(part)[list(self._experts)]
            deltas = np.take_along_axis(part.deltas, depth[:, None, :], axis=1)[:, 0]
            left += float(part.weight @ (self._merge(part.plan, deltas) - part.exact) ** 2)
        return left / self._norm

    def _sampled(
        self,
        number: int,
        tensor: Tensor,
        planned: TensorPlan,
        measured: Measurer,
        block_elements: int,
        weight: NDArray[np.float64],
    ) -> _Sampled:
        places = positions(tensor.elements, 0, tensor.elements)[:: self._stride]
        block = tensor.grid(block_elements).numbers(places)
        deltas = np.zeros((len(self._experts), TIERS + 1, len(places)), np.float32)
        for row, expert in enumerate(self._experts):
            if self._plan.numbers_of(planned).weights[expert] != 0.0:
                sample = measured.statistics(expert, tensor.name).distribution.sample[:: self._stride]
                deltas[row, 1:] = from_bfloat16(sample).T
        exact = self._merge(planned, deltas[:, -1].copy())
        each = tensor.elements / max(1, len(places))
        return _Sampled(planned, number, block, deltas, each * weight[block], exact)

    def _merge(self, planned: TensorPlan, deltas: NDArray[np.float32]) -> NDArray[np.float64]:
        base = np.zeros(deltas.shape[1], np.float64)
        numbers = self._plan.numbers_of(planned)
        values = np.ascontiguousarray(deltas, np.float64)
        merged = self._method.merge(
            BlockInputs(self._plan, planned, numbers, base, values, self._experts, 0, base.shape, compiled=False)
        )
        return np.asarray(merged, np.float64)
