"""Methods on angles that can go by the rows or the columns of a tensor instead of the whole of it.

A row is what lies behind all but the last axis, a column all elements that agree in all but the first. Of a tensor with
fewer than two axes both are the whole. Rows lie in one block, which then holds all that they need. Columns go through
all blocks: their inner products are a measurement of the whole tensor, too large for a plan, and kept in the catalog.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum
from functools import partial
from math import nextafter, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.canonical import Json
from mergefs.errors import RecipeError
from mergefs.merge.method import BlockInputs, Method, Whole
from mergefs.merge.passes import Part, Passes
from mergefs.merge.span import Span, SpanMethod, Vector
from mergefs.planner.plan import Numbers, TensorPlan

_TILE = 1 << 15
"""Elements that are worked on in float64 at a time."""


class Along(Enum):
    """What has an angle of its own."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


class RowMethod(SpanMethod):
    """A method of this kind."""

    placed = True
    by_parts = False

    def depends_on(self, numbers: Numbers, tensor: TensorPlan, experts: tuple[int, ...]) -> Json:
        """See `Method.depends_on`: what has angles of its own is more than a sum with factors."""
        return Method.depends_on(self, numbers, tensor, experts)

    @abstractmethod
    def along(self, numbers: Numbers) -> Along:
        """Return what the parameters say."""

    @abstractmethod
    def results(self, numbers: Numbers, products: NDArray[np.float64], *, with_base: bool) -> NDArray[np.float64]:
        """Return the coordinates of many results, float64[m, 1 + K].

        Args:
            numbers: the parameters.
            products: float64[m, 1 + K, 1 + K]: the inner products of b, d_1, ..., d_K of each.
            with_base: whether the recipe names the base.
        """

    def result(self, numbers: Numbers, span: Span) -> Vector:
        """See `SpanMethod.result`."""
        return np.asarray(self.results(numbers, span.products[None], with_base=span.with_base)[0])

    def check(self, numbers: Numbers, shape: tuple[int, ...], block_elements: int) -> None:
        """See `Method.check`."""
        along = self._along(numbers, shape)
        length = {Along.WHOLE: 0, Along.ROWS: prod(shape[-1:]), Along.COLUMNS: prod(shape[1:])}[along]
        if length > block_elements:
            raise RecipeError(f"{self.name} cannot go by {along.value} here: {length} elements do not fit a block")

    def factors(self, numbers: Numbers, whole: Whole) -> tuple[float, ...]:
        """Return what `SpanMethod` does for whole tensors; else 1 where the recipe names the base and 0 where it does
        not, and for columns a number that stands for the content that their factors come from."""
        along = self._along(numbers, whole.shape)
        if along is Along.WHOLE:
            return super().factors(numbers, whole)
        if along is Along.ROWS or not whole.changed:
            return (float(whole.with_base),)
        whole.facts(_PRODUCTS, _measure)
        return float(whole.with_base), float(whole.content)

    def base_scale(self, numbers: Numbers, tensor: TensorPlan) -> float:
        """See `Method.base_scale`. Where no model differs along a row, that is its result; the models' columns may
        differ in other blocks."""
        match tensor.factors:
            case (_,) | (1.0, _):
                return 1.0
            case (_, _):
                return nextafter(1.0, 2.0)
        return super().base_scale(numbers, tensor)

    def coefficients(self, numbers: Numbers, tensor: TensorPlan) -> tuple[float, ...]:
        """See `Method.coefficients`: known for whole tensors, otherwise those of an average."""
        if len(tensor.factors) <= 2:
            total = sum(numbers.weights)
            return tuple(w / total if total else 1.0 / len(numbers.experts) for w in numbers.weights)
        return super().coefficients(numbers, tensor)

    def merge(self, inputs: BlockInputs) -> NDArray[Any]:
        """See `Method.merge`."""
        along = self._along(inputs.numbers, inputs.shape)
        if along is Along.WHOLE:
            return super().merge(inputs)
        out = np.empty_like(inputs.base)
        length = inputs.shape[-1] if along is Along.ROWS else prod(inputs.shape[1:])
        experts = [0, *(1 + e for e in inputs.experts)]
        size = 1 + len(inputs.numbers.experts)
        results = partial(self.results, inputs.numbers, with_base=inputs.tensor.factors[0] == 1.0)
        if along is Along.COLUMNS:
            assert inputs.facts is not None
            coordinates = results(_square(inputs.facts(_PRODUCTS, _measure), size)).T[experts]
        for start, stop in _tiles(inputs.base.size, length):
            vectors = _vectors(inputs.base, inputs.deltas, start, stop, length)
            if along is Along.ROWS:
                products = np.zeros((len(vectors), size, size))
                products[:, np.array(experts)[:, None], experts] = vectors @ vectors.swapaxes(1, 2)
                merged = results(products)[:, None, experts] @ vectors
            else:
                merged = np.einsum("ic,ric->rc", coordinates, vectors)
            out[start:stop] = merged.ravel()
        return out

    def _along(self, numbers: Numbers, shape: tuple[int, ...]) -> Along:
        return self.along(numbers) if len(shape) > 1 else Along.WHOLE


_PRODUCTS = "products by columns"


def _measure(passes: Passes) -> NDArray[np.float64]:
    """Return the products of b, d_1, ..., d_K of each column: those of i and j <= i, one after the other, flat."""
    length = prod(passes.shape[1:])
    size = 1 + passes.experts
    total = np.zeros((size * (size + 1) // 2, length))
    for part in passes.each(partial(_multiply, length=length, size=size)):
        total += part
    return total.ravel()


def _multiply(part: Part, length: int, size: int) -> NDArray[np.float64]:
    total = np.zeros((size * (size + 1) // 2, length))
    places = [0, *(1 + e for e in part.experts)]
    for start, stop in _tiles(part.base.size, length):
        vectors = _vectors(part.base, part.deltas, start, stop, length)
        for i, place in enumerate(places):
            for j in range(i + 1):
                total[place * (place + 1) // 2 + places[j]] += np.einsum("rc,rc->c", vectors[:, i], vectors[:, j])
    return total


def _square(products: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return products as `_measure` gives them as float64[columns, 1 + K, 1 + K]."""
    rows = products.reshape(size * (size + 1) // 2, -1)
    found = np.empty((rows.shape[1], size, size))
    for i in range(size):
        for j in range(i + 1):
            found[:, i, j] = found[:, j, i] = rows[i * (i + 1) // 2 + j]
    return found


def _tiles(elements: int, length: int) -> list[tuple[int, int]]:
    """Return where to cut a block into runs of whole rows."""
    step = max(1, _TILE // length) * length
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def _vectors(base: NDArray[Any], deltas: NDArray[Any], start: int, stop: int, length: int) -> NDArray[np.float64]:
    """Return the base's rows, and those of the deltas, float64[rows, 1 + k, length]."""
    found = np.empty(((stop - start) // length, 1 + len(deltas), length))
    found[:, 0] = base[start:stop].reshape(-1, length)
    found[:, 1:] = deltas[:, start:stop].reshape(len(deltas), -1, length).swapaxes(0, 1)
    return found
