"""What a merge method is: a pure function of a base block, the experts' deltas there, and a plan's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.canonical import Json
from mergefs.merge.parameters import ParameterSpec, Scalar
from mergefs.planner.plan import Numbers, Plan, TensorPlan
from mergefs.statistics.tensor import trim_rank

if TYPE_CHECKING:
    from mergefs.merge.passes import Facts


@dataclass(frozen=True)
class Whole:
    """A whole tensor, as a method may ask about it when it is planned.

    Attributes:
        shape: of the tensor.
        experts: how many there are.
        with_base: whether the recipe names the base.
        changed: whether any expert differs from the base here.
        content: a number that stands for the tensor's content in all models.
        cuts: the tensor's thresholds and ceilings; see `TensorPlan`.
        products: returns the inner products of the base and the experts' deltas, float64[1 + K, 1 + K].
        facts: returns what a measurement of the method's own finds.
    """

    shape: tuple[int, ...]
    experts: int
    with_base: bool
    changed: bool
    content: int
    cuts: tuple[tuple[float, ...], tuple[float, ...]]
    products: Callable[[], NDArray[np.float64]]
    facts: Facts


@dataclass(frozen=True)
class BlockInputs:
    """All that a method may look at.

    Attributes:
        plan, tensor: what is to be done.
        numbers: the method's parameters for this tensor.
        base: float32[n] (float64[n] where a float64 tensor is involved): the base's elements.
        deltas: [k, n] of the same dtype: expert minus base, of the experts that the plan reads here.
        experts: which experts those are.
        first: the number of the block's first element in its tensor.
        shape: of the tensor.
        facts: returns what a measurement of the method's own finds, where that is too much for a plan; None where only
            a sample is merged.
        compiled: whether compiled loops are used; a planner's sample is too small to load the compiler for.
    """

    plan: Plan
    tensor: TensorPlan
    numbers: Numbers
    base: NDArray[Any]
    deltas: NDArray[Any]
    experts: tuple[int, ...]
    first: int
    shape: tuple[int, ...]
    facts: Facts | None = None
    compiled: bool = True

    @property
    def loops(self) -> Any:
        """The module of the loops to use: `kernels`, or `arrays`, which has the same."""
        if self.compiled:
            from mergefs.merge import kernels

            return kernels
        from mergefs.merge import arrays

        return arrays


TierLoop = Callable[[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]], None]
"""Takes the experts' tiers as compiled loops read them (see `tier_kernels`), the base's bits (uint16[n]), and where the
result's are to be written (uint16[n])."""


class Method(ABC):
    """A merge method. Instances hold no state.

    Attributes:
        name: as in a recipe's `merge_method`.
        parameters: what a recipe may give it.
        needs_base: whether a recipe has to name a `base_model`.
        base_is_model: whether a base that is named is a model among the others, with parameters of its own.
        is_random: whether the seed matters.
        trims: whether deltas are trimmed at thresholds that the plan holds; see `kept`.
        fewest, most: how many models it can merge, the base not counted where it has to be named.
        placed: whether the seed, the experts' names, or the place of elements in their tensor may matter, and not only
            the elements and what `depends_on` returns.
        version: raised when the method gives other results for the same inputs, so that blocks that earlier ones gave
            are not taken for its own.
        by_parts: whether any part of a block may be merged by itself, as if it were one.
        decides: whether anything but a sum of deltas with fixed factors comes out: elements are dropped or elected.
    """

    name: ClassVar[str]
    parameters: ClassVar[Mapping[str, ParameterSpec]]
    needs_base: ClassVar[bool] = True
    base_is_model: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    trims: ClassVar[bool] = False
    placed: ClassVar[bool] = True
    version: ClassVar[int] = 1
    by_parts: ClassVar[bool] = False
    decides: ClassVar[bool] = True
    fewest: ClassVar[int] = 1
    most: ClassVar[int] = 1 << 16

    def loop(self, plan: Plan, tensor: TensorPlan, experts: tuple[int, ...], first: int) -> TierLoop | None:
        """Return a loop that merges a block of bf16 as `merge` does, bit for bit, straight from tiers; None where there
        is none.

        Args:
            plan, tensor: what is to be done.
            experts: which experts the plan reads there.
            first: the number of the block's first element in its tensor.
        """
        return None

    @abstractmethod
    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """Return the merged elements, [n] of the base's dtype, unrounded. May overwrite the deltas."""

    def check(self, numbers: Numbers, shape: tuple[int, ...], block_elements: int) -> None:
        """Check that a tensor of this shape can be merged with these parameters, in blocks of so many elements.

        Raises:
            RecipeError: when not.
        """
        return

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """Return what the plan of a tensor holds for this method; see `TensorPlan.factors`.

        Raises:
            RecipeError: when the tensor has no result.
            BudgetError: when that is not known yet, and the tensor may not be read for it.
        """
        return ()

    def taken(self, numbers: Numbers) -> int | None:
        """Return which expert's tensor the result is as it stands; None where it has to be computed."""
        return None

    def base_scale(self, numbers: Numbers, tensor: TensorPlan) -> float:
        """Return the factor of the base's elements in a tensor, of which the depths do not matter: 1 unless the method
        is an unnormalised average. Near 1 where it is not the same for all elements."""
        return 1.0

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """Return for each expert the factor by which its delta enters the result, as far as that is known
        beforehand; the planner weighs what it reads by it."""
        return tuple(w * float(numbers.shared.get("lambda", 1.0)) for w in numbers.weights)

    def depends_on(self, numbers: Numbers, tensor: TensorPlan, experts: tuple[int, ...]) -> Json:
        """Return all numbers that a block's result depends on where these experts are read, real ones as `exactly`
        gives them; results are remembered by it."""
        return {
            "experts": list(experts),
            "own": [{name: exactly(value) for name, value in own.items()} for own in numbers.experts],
            "shared": {name: exactly(value) for name, value in numbers.shared.items()},
            "thresholds": [exactly(x) for x in tensor.thresholds],
            "ceilings": [exactly(x) for x in tensor.ceilings],
            "factors": [exactly(x) for x in tensor.factors],
        }

    def kept(self, own: Mapping[str, Scalar], elements: int) -> tuple[int, int] | None:
        """Return for a method that trims which elements of a tensor's delta stay: None for all, or two numbers: so many
        of the largest magnitudes go, and so many of the next ones stay.

        Args:
            own: one expert's parameters.
            elements: of the tensor.
        """
        density = float(own["density"])
        if density >= 1.0:
            return None
        return 0, trim_rank(density, elements) if density > 0.0 else 0


def exactly(value: Scalar) -> Json:
    """Return a parameter as it is hashed: a flag, or the shortest text of a number that reads back the same."""
    return value if isinstance(value, bool) else repr(float(value))
