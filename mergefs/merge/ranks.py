"""Exact order statistics of a score that every element of a tensor has, whatever the tensor's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.merge.passes import Part, Passes

Score = Callable[[Part], NDArray[np.float32]]
"""Gives float32[n], not negative."""

_HALF = 1 << 16


class Ranks:
    """The score's histogram over the upper halves of its bits, found in a first pass; a second one finds any ranks.

    The order of float32 numbers that are not negative is that of their bits, so two histograms of 65,536 counts each
    find the exact value of a rank.

    Args:
        passes: over the tensor.
        score: of the elements of a block; the same each time.

    Attributes:
        nonzero: how many elements have a score that is not 0.
    """

    def __init__(self, passes: Passes, score: Score) -> None:
        self._passes = passes
        self._score = score
        self._counts = np.zeros(_HALF, np.int64)
        self.nonzero = 0
        for counts, nonzero in passes.each(self._count):
            self._counts += counts
            self.nonzero += nonzero

    def smallest(self, ranks: Sequence[int]) -> list[float]:
        """Return the score of the element that so many others lie below, for each of `ranks`."""
        ends = np.cumsum(self._counts)
        upper = ends.searchsorted(ranks, side="right")
        inside = {int(half): np.zeros(_HALF, np.int64) for half in upper}
        for found in self._passes.each(lambda part: self._count_inside(part, inside)):
            for half, counts in found.items():
                inside[half] += counts
        values = []
        for rank, half in zip(ranks, upper.tolist(), strict=True):
            below = int(ends[half] - self._counts[half])
            lower = int(np.cumsum(inside[half]).searchsorted(rank - below, side="right"))
            values.append(float(np.array([half << 16 | lower], np.uint32).view(np.float32)[0]))
        return values

    def _bits(self, part: Part) -> NDArray[np.uint32]:
        return self._score(part).view(np.uint32)

    def _count(self, part: Part) -> tuple[NDArray[Any], int]:
        bits = self._bits(part)
        return np.bincount(bits >> 16, minlength=_HALF), int(np.count_nonzero(bits))

    def _count_inside(self, part: Part, halves: dict[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        bits = self._bits(part)
        upper = bits >> 16
        return {half: np.bincount(bits[upper == half] & (_HALF - 1), minlength=_HALF) for half in halves}
