"""Methods whose result is a sum of whole models, with factors that depend on the angles between them.

Every vector that these methods handle lies in the span of the base b and the deltas d_1 ... d_K, so that it is a row of
1 + K coordinates, and every norm and inner product follows from the products of b and the deltas: the method
runs on those at plan time, and a block of the result is one sum.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import RecipeError
from mergefs.merge.linear import SumMethod
from mergefs.planner.plan import Numbers, TensorPlan

Vector = NDArray[np.float64]
"""float64[1 + K]: coordinates of b and the deltas."""


@dataclass(frozen=True)
class Span:
    """The span of a base and K deltas.

    Attributes:
        products: float64[1 + K, 1 + K]: the inner products of b, d_1, ..., d_K.
        with_base: whether the recipe names the base: vectors are then taken from it.
    """

    products: NDArray[np.float64]
    with_base: bool

    @property
    def base(self) -> Vector:
        """b."""
        return np.asarray(np.eye(len(self.products))[0])

    @property
    def deltas(self) -> list[Vector]:
        """d_1 ... d_K."""
        return list(np.eye(len(self.products))[1:])

    @property
    def models(self) -> list[Vector]:
        """b + d_1 ... b + d_K."""
        return [self.base + delta for delta in self.deltas]

    def dot(self, a: Vector, b: Vector) -> float:
        """Return an inner product."""
        return float(a @ self.products @ b)

    def norm(self, a: Vector) -> float:
        """Return a norm."""
        return float(np.sqrt(max(0.0, self.dot(a, a))))

    def cosine(self, a: Vector, b: Vector) -> float:
        """Return the cosine of an angle; 0 where a vector is 0."""
        norms = self.norm(a) * self.norm(b)
        return float(np.clip(self.dot(a, b) / norms, -1.0, 1.0)) if norms > 0.0 else 0.0


class SpanMethod(SumMethod):
    """A method of this kind."""

    @abstractmethod
    def result(self, numbers: Numbers, span: Span) -> Vector:
        """Return the coordinates of the merged tensor.

        Raises:
            RecipeError: when there is no result, as of vectors that cancel each other.
        """

    def factors(self, numbers: Numbers, span: Span) -> tuple[float, ...]:
        """Return the factors of the base's elements and of each expert's deltas."""
        found = self.result(numbers, span)
        if not np.isfinite(found).all():
            raise RecipeError(f"{self.name} has no finite result: a tensor has elements that are not finite")
        return tuple(float(x) for x in found)

    def base_scale(self, numbers: Numbers, tensor: TensorPlan) -> float:
        """See `Method.base_scale`."""
        return tensor.factors[0]

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`: here they are known exactly."""
        return tensor.factors[1:]
