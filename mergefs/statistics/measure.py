"""Measuring blocks, and gathering what was measured into the statistics of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.floats import to_float, unsigned
from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.dtypes import DTYPES, DType
from mergefs.hashing import Buffer, Hasher
from mergefs.statistics.sample import from_bfloat16, to_bfloat16
from mergefs.statistics.tensor import (
    BLOCK,
    SKETCH_SIZE,
    SKETCHED_FROM,
    TIERS,
    Distribution,
    TensorStatistics,
    trim_rank,
)

DENSITIES = tuple(i / 100 for i in range(1, 100))
"""The trim thresholds of these densities are stored exactly."""

_INEXACT_LIMIT = 1 << 25


@dataclass(frozen=True)
class BlockMeasure:
    """What `measure_block` found out about one block; see `BLOCK` and `TensorStatistics`.

    `sample` is float32, the exact deltas of the sampled elements; `bins` are the occupied ones of the histogram.
    """

    energy: float
    inner: float
    largest: float
    unchanged: int
    elements: int
    sample: NDArray[np.float32]
    bins: NDArray[np.int64] | None = None
    counts: NDArray[np.uint32] | None = None
    sketch: NDArray[np.float64] | None = None
    inexact: NDArray[np.uint32] | None = None


def unchanged_block(elements: int, sample: NDArray[np.int64]) -> BlockMeasure:
    """Return the measure of a block that equals the base's."""
    return BlockMeasure(0.0, 0.0, 0.0, elements, elements, np.zeros(len(sample), np.float32))


def measure_block(
    raw: Buffer, dtype: DType, base: Buffer, base_dtype: DType, first: int, sample: NDArray[np.int64]
) -> BlockMeasure:
    """Measure the delta of one block.

    Args:
        raw, base: the bytes of the expert's block and of the base's, n elements each.
        dtype, base_dtype: their element types, both floats.
        first: the number of the block's first element in its tensor.
        sample: which elements are sampled, counted from there.
    """
    from mergefs.blocks import kernels

    unchanged = 0
    if dtype is base_dtype:
        unchanged = int(np.count_nonzero(unsigned(raw, dtype.itemsize) == unsigned(base, dtype.itemsize)))
    histogram = np.zeros(kernels.HISTOGRAM_BINS, np.uint32)
    sketch = np.zeros(SKETCH_SIZE, np.float64)
    count = len(raw) // dtype.itemsize
    inexact = np.empty(count + 1, np.uint32)
    if dtype.name == base_dtype.name == "BF16":
        x, b = unsigned(raw, 2), unsigned(base, 2)
        values, below = from_bfloat16(x[sample]), from_bfloat16(b[sample])
        found = kernels.measure_bf16(x, b, first, _signs(), histogram, sketch, inexact)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            x, b = (
                to_float(data, of).astype(np.float32, copy=False) for data, of in ((raw, dtype), (base, base_dtype))
            )
        values, below = x[sample], b[sample]
        found = kernels.measure(x, b, first, _signs(), histogram, sketch, inexact)
    energy, inner, largest, _, kept = found
    with np.errstate(over="ignore", invalid="ignore"):
        sampled = values - below
    sampled[~np.isfinite(sampled)] = 0.0
    bins = np.flatnonzero(histogram)
    return BlockMeasure(
        energy,
        inner,
        float(largest),
        unchanged,
        count,
        sampled,
        bins,
        histogram[bins],
        sketch,
        inexact[:kept].copy(),
    )


def measure_delta(delta: NDArray[Any], base: NDArray[Any], first: int, sample: NDArray[np.int64]) -> BlockMeasure:
    """Measure a block's delta that is not the difference of two stored blocks.

    Args:
        delta, base: float32[n] or float64[n]: the delta, and the base's elements.
        first, sample: see `measure_block`.
    """
    single = delta.astype(np.float32, copy=False)
    found = measure_block(single.tobytes(), DTYPES["F32"], bytes(4 * single.size), DTYPES["F32"], first, sample)
    with np.errstate(over="ignore", invalid="ignore"):
        inner = float(single.astype(np.float64) @ base.astype(np.float64))
    return replace(found, inner=inner if np.isfinite(inner) else 0.0, unchanged=0)


def coarse_sample(
    sampled: NDArray[np.float32] | None,
    root: Buffer,
    dtype: DType,
    base: Buffer,
    base_dtype: DType,
    sample: NDArray[np.int64],
) -> NDArray[np.float32] | None:
    """Return the sampled elements' coarse deltas from the base, given those from the block it is encoded against.

    Where a delta is not finite it counts as 0, as in the exact sample.

    Args:
        sampled: float32[sample, 3]: deltas from `root`, or None.
        root, dtype: the bytes of the block that it is encoded against, of the expert's dtype.
        base, base_dtype: the bytes of the base's block.
        sample: which elements are sampled.
    """
    if sampled is None or root is base:
        return sampled
    with np.errstate(over="ignore", invalid="ignore"):
        apart = to_float(root, dtype)[sample] - to_float(base, base_dtype)[sample]
        found = np.asarray(sampled + apart[:, None].astype(np.float32))
    found[~np.isfinite(found)] = 0.0
    return found


@functools.cache
def _signs() -> NDArray[np.float32]:
    """Return the sketch's signs: bit 0 of the bytes of BLAKE3 in extended-output mode over b"mergefs-signs"."""
    stream = Hasher(b"mergefs-signs").digest(length=1 << 16)
    return np.where(np.frombuffer(stream, np.uint8) & 1, np.float32(-1), np.float32(1)).astype(np.float32)


class Collector:
    """Gathers the measures of one tensor's blocks, in order, into its statistics."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._sketched = elements >= SKETCHED_FROM
        self._rows: list[tuple[object, ...]] = []
        self._sample: list[NDArray[np.float32]] = []
        self._sketches: list[NDArray[np.float64]] = []
        self._histogram = np.zeros(1 << 15, np.uint64)
        self._inexact: list[NDArray[np.uint32]] = []
        self._inexact_count = 0

    def add(
        self, measure: BlockMeasure, errors: Sequence[float] = (), coarse: NDArray[np.float32] | None = None
    ) -> None:
        """Add the next block.

        Args:
            measure: of the block.
            errors: what remains of its delta after each of its tiers, where it has several.
            coarse: float32[sample, 3]: the sampled elements' deltas after each coarse tier, where it has such.
        """
        remaining = (*errors[:-1], *[np.nan] * COARSE_TIERS)[:COARSE_TIERS]
        self._rows.append((measure.energy, measure.inner, measure.largest, measure.unchanged, remaining, (0,) * TIERS))
        if self._sketched:
            exact = measure.sample[:, None]
            self._sample.append(np.hstack((np.repeat(exact, COARSE_TIERS, 1) if coarse is None else coarse, exact)))
            self._sketches.append(np.zeros(SKETCH_SIZE) if measure.sketch is None else measure.sketch)
        if measure.bins is None or measure.counts is None:
            self._histogram[0] += np.uint64(measure.elements)
        else:
            self._histogram[measure.bins] += measure.counts
        if measure.inexact is not None:
            self._inexact_count += len(measure.inexact)
            self._inexact.append(measure.inexact)
            if self._inexact_count > _INEXACT_LIMIT:
                # Too many to keep: their bins are still counted, thresholds inside them stay unknown.
                self._inexact = [_bins_only(self._inexact)]

    def finish(self) -> TensorStatistics:
        """Return the tensor's statistics, without the bytes that its blocks take (see `with_bytes`)."""
        bins = np.flatnonzero(self._histogram).astype("<u2")
        counts = self._histogram[bins]
        magnitudes = np.concatenate([np.empty(0, np.uint32), *self._inexact])
        inexact = np.bincount(magnitudes >> 16, minlength=1 << 15)[bins].astype("<u8")
        if self._inexact_count > _INEXACT_LIMIT:
            inexact = np.where(inexact > 0, counts, 0).astype("<u8")
        found = Distribution(
            to_bfloat16(np.concatenate([np.empty((0, TIERS), np.float32), *self._sample])),
            bins,
            counts.astype("<u8"),
            inexact,
            np.empty(0, "<u8"),
            np.empty(0, "<f4"),
        )
        ranks, thresholds = [], []
        if self._inexact_count <= _INEXACT_LIMIT:
            wanted = sorted({trim_rank(density, self._elements) for density in DENSITIES})
            places = [where[0] for where in map(found.bin_of_rank, wanted) if where is not None]
            # Only the bins that a threshold lies in have to be sorted.
            sought = np.zeros(1 << 15, bool)
            sought[bins[places]] = True
            magnitudes = np.sort(magnitudes[sought[magnitudes >> 16]])
            for rank in wanted:
                where = found.bin_of_rank(rank)
                if where is not None and where[1] <= int(inexact[where[0]]):
                    end = int(np.searchsorted(magnitudes, (int(bins[where[0]]) + 1) << 16))
                    ranks.append(rank)
                    thresholds.append(magnitudes[end - where[1]])
        return TensorStatistics.make(
            self._elements,
            np.array(self._rows, BLOCK),
            to_bfloat16(np.array(self._sketches).reshape(len(self._sketches), SKETCH_SIZE)),
            replace(found, ranks=np.array(ranks, "<u8"), thresholds=np.array(thresholds, np.uint32).view("<f4")),
        )


def _bins_only(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Shrink what is kept to nothing but one magnitude in each occupied bin."""
    occupied = np.unique(np.concatenate([np.unique(part >> 16) for part in parts]))
    return (occupied << 16 | 1).astype(np.uint32)
