"""Interpolation on spheres: `slerp` (Shoemake 1985, doi 10.1145/325334.325242), `nuslerp`, `multislerp`
(goddard.blog/posts/multislerp-wow-what-a-cool-idea) and `karcher` (arXiv 2603.04972)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from mergefs.errors import RecipeError
from mergefs.merge.parameters import OFF, ON, WEIGHT, ParameterSpec
from mergefs.merge.span import Span, SpanMethod, Vector
from mergefs.planner.plan import Numbers

_NEARLY_PARALLEL = 0.9995
"""Of vectors whose cosine is beyond this, `slerp` takes the line between them."""


def _between(span: Span, t: float, a: Vector, b: Vector, *, parallel: bool) -> Vector:
    """Return the point between two vectors, each scaled by the sines of its part of the angle."""
    if parallel:
        return (1.0 - t) * a + t * b
    angle = float(np.arccos(span.cosine(a, b)))
    found: Vector = (np.sin((1.0 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)
    return found


class Slerp(SpanMethod):
    """From the base (t = 0) to the other model (t = 1) along the arc between them; along the line where they are
    nearly parallel or opposite."""

    name = "slerp"
    parameters: ClassVar = {"t": ParameterSpec(None)}
    fewest, most = 1, 1

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        (model,) = span.models
        parallel = abs(span.cosine(span.base, model)) > _NEARLY_PARALLEL
        return _between(span, float(numbers.shared["t"]), span.base, model, parallel=parallel)


class NuSlerp(SpanMethod):
    """`slerp` of two models, or of their deltas where the recipe names a base, at the second weight's share. Whole
    tensors only: not by rows or columns."""

    name = "nuslerp"
    parameters: ClassVar = {"weight": WEIGHT, "nuslerp_flatten": ON, "nuslerp_row_wise": OFF}
    needs_base = False
    fewest, most = 2, 2

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        if not numbers.shared["nuslerp_flatten"]:
            raise RecipeError("nuslerp_flatten: false is not supported yet, and would change the result: remove it")
        total = sum(numbers.weights)
        t = 0.5 if abs(total) < 1e-6 else numbers.weights[1] / total
        a, b = span.deltas if span.with_base else span.models
        found = _between(span, t, a, b, parallel=1.0 - span.cosine(a, b) ** 2 <= 1e-16)
        return found + span.base if span.with_base else found


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
            if len(vectors) == 2:
                return np.asarray(weights[0] * vectors[0] + weights[1] * vectors[1])
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


class ModelStock(SpanMethod):
    """The point between the base and the experts' average that the mean cosine of their deltas says (arXiv
    2403.19522). Whole tensors only: not by filters."""

    name = "model_stock"
    parameters: ClassVar = {"filter_wise": OFF}
    fewest = 2

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        if numbers.shared["filter_wise"]:
            raise RecipeError("filter_wise: true is not supported yet, and would change the result: remove it")
        deltas = span.deltas
        count = len(deltas)
        cosines = [
            np.clip(span.dot(a, b) / max(span.norm(a) * span.norm(b), 1e-6), -1.0, 1.0)
            for number, a in enumerate(deltas)
            for b in deltas[number + 1 :]
        ]
        cosine = float(np.mean(cosines))
        divisor = 1.0 + (count - 1) * cosine
        t = 0.0 if abs(divisor) < 1e-6 else count * cosine / divisor
        return np.asarray(span.base + t * np.mean(deltas, axis=0))
