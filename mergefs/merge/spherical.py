"""Interpolation on spheres: `slerp` (Shoemake 1985, doi 10.1145/325334.325242), `nuslerp`, `multislerp`
(goddard.blog/posts/multislerp-wow-what-a-cool-idea) and `karcher` (arXiv 2603.04972)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergefs.errors import RecipeError
from mergefs.merge.parameters import OFF, ON, WEIGHT, ParameterSpec
from mergefs.merge.rows import Along, RowMethod
from mergefs.merge.span import Span, SpanMethod, Vector
from mergefs.planner.plan import Numbers

_NEARLY_PARALLEL = 0.9995
"""Of vectors whose cosine is beyond this, `slerp` takes the line between them."""


class Slerp(SpanMethod):
    """From the base (t = 0) to the other model (t = 1) along the arc between them; along the line where they are
    nearly parallel or opposite."""

    name = "slerp"
    parameters: ClassVar = {"t": ParameterSpec(None)}
    fewest, most = 1, 1

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        (model,) = span.models
        t = float(numbers.shared["t"])
        cosine = span.cosine(span.base, model)
        if abs(cosine) > _NEARLY_PARALLEL:
            return (1.0 - t) * span.base + t * model
        angle = np.arccos(cosine)
        return np.asarray((np.sin((1.0 - t) * angle) * span.base + np.sin(t * angle) * model) / np.sin(angle))


class NuSlerp(RowMethod):
    """`slerp` of two models, or of their deltas where the recipe names a base, at the second weight's share: of whole
    tensors, or with `nuslerp_flatten: false` of each row, of each column where `nuslerp_row_wise` (as mergekit has
    it)."""

    name = "nuslerp"
    parameters: ClassVar = {"weight": WEIGHT, "nuslerp_flatten": ON, "nuslerp_row_wise": OFF}
    needs_base = False
    fewest, most = 2, 2

    def along(self, numbers: Numbers) -> Along:
        """See `RowMethod.along`."""
        if numbers.shared["nuslerp_flatten"]:
            return Along.WHOLE
        return Along.COLUMNS if numbers.shared["nuslerp_row_wise"] else Along.ROWS

    def results(self, numbers: Numbers, products: NDArray[np.float64], *, with_base: bool) -> NDArray[np.float64]:
        """See `RowMethod.results`."""
        total = sum(numbers.weights)
        t = 0.5 if abs(total) < 1e-6 else numbers.weights[1] / total
        base, *vectors = np.eye(3)
        a, b = vectors if with_base else (base + vector for vector in vectors)
        cosines = _cosines(products, a, b)
        parallel = 1.0 - cosines**2 <= 1e-16
        angles = np.arccos(np.where(parallel, 0.0, cosines))
        share_a = np.where(parallel, 1.0 - t, np.sin((1.0 - t) * angles) / np.sin(angles))
        share_b = np.where(parallel, t, np.sin(t * angles) / np.sin(angles))
        found = np.outer(share_a, a) + np.outer(share_b, b)
        return np.asarray(found + base if with_base else found)


class MultiSlerp(SpanMethod):
    """The barycentre of the models' directions, or of their deltas', in the tangent space at their weighted mean; as
    long as the weighted mean of their norms."""

    name = "multislerp"
    parameters: ClassVar = {"weight": WEIGHT, "normalize_weights": ON, "eps": ParameterSpec(1e-8, lowest=0.0)}
    needs_base = False

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        vectors = span.deltas if span.with_base else span.models
        if len(vectors) == 1:
            return span.models[0]
        eps = float(numbers.shared["eps"])
        weights = np.array(numbers.weights)
        if numbers.shared["normalize_weights"]:
            if abs(weights.sum()) < 1e-300:
                raise RecipeError("multislerp: the weights add up to 0 and cannot be normalized")
            weights = weights / weights.sum()
        found = self._barycentre(span, vectors, weights, eps)
        return found + span.base if span.with_base else found

    def _barycentre(self, span: Span, vectors: list[Vector], weights: Vector, eps: float) -> Vector:
        norms = np.array([span.norm(v) for v in vectors])
        units = [v / (norm + eps) for v, norm in zip(vectors, norms, strict=True)]
        mean = np.sum([w * u for w, u in zip(weights, units, strict=True)], axis=0)
        length = span.norm(mean)
        if length < eps:
            if len(vectors) == 2 or not norms.any():
                return np.asarray(weights @ np.array(vectors))
            raise RecipeError("multislerp: the weighted directions cancel each other: choose other weights")
        mean = mean / length
        tangent = np.sum([w * (u - span.dot(u, mean) * mean) for w, u in zip(weights, units, strict=True)], axis=0)
        angle = span.norm(tangent) + eps
        found = mean * np.cos(angle) + tangent * (np.sin(angle) / angle)
        return np.asarray(found * float(norms @ weights))


class Karcher(SpanMethod):
    """The Karcher mean of the models' directions, all alike, as long as the mean of their norms. A base that the recipe
    names is one of the models."""

    name = "karcher"
    parameters: ClassVar = {"max_iter": ParameterSpec(10.0, lowest=0.0, highest=1e6), "tol": ParameterSpec(1e-5)}
    needs_base = False

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        vectors = [span.base, *span.models] if span.with_base else span.models
        if len(vectors) == 1:
            return vectors[0]
        tolerance = float(numbers.shared["tol"])
        norms = [span.norm(v) for v in vectors]
        units = [v / norm for v, norm in zip(vectors, norms, strict=True) if norm > tolerance]
        if not units:
            return np.zeros_like(span.base)
        mean = np.mean(units, axis=0)
        length = span.norm(mean)
        mean = units[0] if length < tolerance else mean / length
        for _ in range(int(numbers.shared["max_iter"])):
            tangent = np.zeros_like(mean)
            for unit in units:
                cosine = float(np.clip(span.dot(mean, unit), -1.0, 1.0))
                angle = float(np.arccos(cosine))
                if angle >= tolerance:
                    tangent += angle / np.sin(angle) * (unit - cosine * mean) / len(units)
            step = span.norm(tangent)
            if step < tolerance:
                break
            mean = np.cos(step) * mean + np.sin(step) * (tangent / step)
            mean = mean / span.norm(mean)
        return np.asarray(float(np.mean(norms)) * mean)


class ModelStock(RowMethod):
    """The point between the base and the experts' average that the mean cosine of their deltas says (arXiv
    2403.19522): of whole tensors, or of each row where `filter_wise`."""

    name = "model_stock"
    parameters: ClassVar = {"filter_wise": OFF}
    fewest = 2

    def along(self, numbers: Numbers) -> Along:
        """See `RowMethod.along`."""
        return Along.ROWS if numbers.shared["filter_wise"] else Along.WHOLE

    def results(self, numbers: Numbers, products: NDArray[np.float64], *, with_base: bool) -> NDArray[np.float64]:
        """See `RowMethod.results`."""
        base, *deltas = np.eye(products.shape[1])
        count = len(deltas)
        pairs = [(a, b) for number, a in enumerate(deltas) for b in deltas[number + 1 :]]
        cosine = np.mean([_cosines(products, a, b, least=1e-6) for a, b in pairs], axis=0)
        divisor = 1.0 + (count - 1) * cosine
        singular = np.abs(divisor) < 1e-6
        t = np.where(singular, 0.0, count * cosine / np.where(singular, 1.0, divisor))
        return np.asarray(base + np.outer(t, np.mean(deltas, axis=0)))


def _cosines(products: NDArray[np.float64], a: Vector, b: Vector, least: float = 0.0) -> NDArray[np.float64]:
    """Return the cosines of the angle between two vectors in many spans, float64[m]; 0 where a vector is 0.

    Args:
        products: float64[m, 1 + K, 1 + K].
        a, b: their coordinates.
        least: the products of norms are taken to be at least this.
    """
    norms = np.sqrt(np.maximum(a @ products @ a, 0.0) * np.maximum(b @ products @ b, 0.0))
    norms = np.maximum(norms, least)
    return np.clip(a @ products @ b / np.where(norms > 0.0, norms, 1.0), -1.0, 1.0)
