"""What the planner knows of an expert: statistics of its delta from a base, block by block.

One value in the catalog holds the statistics of one tensor (layout in spec/catalog.md). All figures are of the
exact delta in the value domain, the float32 difference of the two elements.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from mergefs.blocks.floats import to_float, unsigned
from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import name_key
from mergefs.dtypes import DType
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer, Hasher

BLOCK = np.dtype([("energy", "<f8"), ("inner", "<f8"), ("largest", "<f4"), ("unchanged", "<u4")])
"""Per block: squared norm of the delta, inner product of delta and base, largest |delta|, and the number of
elements whose bits are the base's."""

SKETCH_SIZE = 128
SKETCHED_FROM = 1 << 14
"""Tensors with fewer elements have no sketches: they are too small to matter to a budget."""

DENSITIES = tuple(i / 100 for i in range(1, 100))
"""The trim thresholds of these densities are stored exactly."""

_INEXACT_LIMIT = 1 << 25
_HEADER = struct.Struct("<4sIIIIQ")
_MAGIC = b"mst2"
_MAGIC_WITHOUT_ERRORS = b"mst1"


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor of one expert against a base.

    Attributes:
        elements: of the tensor.
        blocks: array of `BLOCK`, one for each block.
        errors: float32[blocks, 3], the squared error that remains of a block's delta after 1, 2 and 3 tiers; NaN where
            the block has no such coarse tier.
        sketches: float32[blocks, 128], a count sketch of each block's delta, or float32[0, 128]. The inner
            product of two blocks' sketches estimates the inner product of their deltas with a standard error
            of at most |a| |b| sqrt(2 / 128).
        bins, counts, inexact: the histogram of |delta|: the upper 16 bits of the float32 magnitude (uint16,
            ascending), elements in that bin, and how many of them are not equal to the bin's lowest value.
        ranks, thresholds: uint64 and float32; the exact magnitude of the k-th largest |delta| for some k.
    """

    elements: int
    blocks: NDArray[Any]
    errors: NDArray[np.float32]
    sketches: NDArray[np.float32]
    bins: NDArray[np.uint16]
    counts: NDArray[np.uint64]
    inexact: NDArray[np.uint64]
    ranks: NDArray[np.uint64]
    thresholds: NDArray[np.float32]

    def bin_of_rank(self, rank: int) -> tuple[int, int] | None:
        """Return the bin (its index) of the `rank`-th largest |delta| and its rank inside the bin, both from
        the largest; None when that element is an exact zero or there is none."""
        below = np.cumsum(self.counts[::-1])
        place = int(np.searchsorted(below, rank))
        if place >= len(below):
            return None
        index = len(self.bins) - 1 - place
        if self.bins[index] == 0 and self.inexact[index] == 0:
            return None
        return index, rank - (int(below[place - 1]) if place else 0)

    def threshold(self, rank: int) -> float | None:
        """Return the exact magnitude of the `rank`-th largest |delta|, or None where these statistics do not
        determine it."""
        where = self.bin_of_rank(rank)
        if where is None:
            return 0.0
        index, inside = where
        if inside > int(self.inexact[index]):
            return bin_value(int(self.bins[index]))
        known = np.flatnonzero(self.ranks == rank)
        return float(self.thresholds[known[0]]) if len(known) else None

    def encode(self) -> bytes:
        """Return the catalog's value."""
        head = _HEADER.pack(
            _MAGIC, len(self.blocks), len(self.sketches), len(self.bins), len(self.ranks), self.elements
        )
        arrays = (
            self.blocks,
            self.errors,
            self.sketches,
            self.bins,
            self.counts,
            self.inexact,
            self.ranks,
            self.thresholds,
        )
        return bytes(zstd.compress(head + b"".join(a.tobytes() for a in arrays), 1))

    @classmethod
    def decode(cls, value: Buffer) -> TensorStatistics:
        """Read the catalog's value.

        Raises:
            CorruptionError: when it is damaged.
        """
        try:
            data = bytes(zstd.decompress(value))
            magic, blocks, sketches, bins, ranks, elements = _HEADER.unpack_from(data)
            if magic not in (_MAGIC, _MAGIC_WITHOUT_ERRORS):
                raise ValueError("wrong magic")
            at = _HEADER.size

            def take(dtype: Any, count: int) -> NDArray[Any]:
                nonlocal at
                array = np.frombuffer(data, dtype, count, at)
                at += array.nbytes
                return array

            rows = take(BLOCK, blocks)
            if magic == _MAGIC:
                errors = take("<f4", blocks * COARSE_TIERS).reshape(blocks, COARSE_TIERS)
            else:
                errors = np.full((blocks, COARSE_TIERS), np.nan, "<f4")
            return cls(
                elements,
                rows,
                errors,
                take("<f4", sketches * SKETCH_SIZE).reshape(sketches, SKETCH_SIZE),
                take("<u2", bins),
                take("<u8", bins),
                take("<u8", bins),
                take("<u8", ranks),
                take("<f4", ranks),
            )
        except (ValueError, RuntimeError, struct.error) as error:
            raise CorruptionError(f"the catalog's statistics of a tensor are damaged: {error}") from error


@dataclass(frozen=True)
class BlockMeasure:
    """What `measure_block` found out about one block; see `BLOCK` and `TensorStatistics`."""

    energy: float
    inner: float
    largest: float
    unchanged: int
    elements: int
    histogram: NDArray[np.uint32] | None
    sketch: NDArray[np.float64] | None
    inexact: NDArray[np.uint32] | None


def unchanged_block(elements: int) -> BlockMeasure:
    """Return the measure of a block that equals the base's."""
    return BlockMeasure(0.0, 0.0, 0.0, elements, elements, None, None, None)


def measure_block(raw: Buffer, dtype: DType, base: Buffer, base_dtype: DType, first: int) -> BlockMeasure:
    """Measure the delta of one block.

    Args:
        raw, base: the bytes of the expert's block and of the base's, n elements each.
        dtype, base_dtype: their element types, both floats.
        first: the number of the block's first element in its tensor.
    """
    from mergefs.blocks import kernels

    unchanged = 0
    if dtype is base_dtype:
        unchanged = int(np.count_nonzero(unsigned(raw, dtype.itemsize) == unsigned(base, dtype.itemsize)))
    histogram = np.zeros(kernels.HISTOGRAM_BINS, np.uint32)
    sketch = np.zeros(SKETCH_SIZE, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        values, below = (
            to_float(data, of).astype(np.float32, copy=False) for data, of in ((raw, dtype), (base, base_dtype))
        )
    inexact = np.empty(values.size + 1, np.uint32)
    energy, inner, largest, _, count = kernels.measure(
        values,
        below,
        first,
        _signs(),
        histogram,
        sketch,
        inexact,
    )
    return BlockMeasure(
        energy, inner, float(largest), unchanged, values.size, histogram, sketch, inexact[:count].copy()
    )


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
        self._rows: list[tuple[float, float, float, int]] = []
        self._errors: list[tuple[float, ...]] = []
        self._sketches: list[NDArray[np.float64]] = []
        self._histogram = np.zeros(1 << 15, np.uint64)
        self._inexact: list[NDArray[np.uint32]] = []
        self._inexact_count = 0

    def add(self, measure: BlockMeasure, errors: Sequence[float] = ()) -> None:
        """Add the next block's measure, and what remains of its delta after each of its tiers."""
        coarse = tuple(errors[:-1])
        self._errors.append((*coarse, *[np.nan] * (COARSE_TIERS - len(coarse))))
        self._rows.append((measure.energy, measure.inner, measure.largest, measure.unchanged))
        if self._sketched:
            self._sketches.append(np.zeros(SKETCH_SIZE) if measure.sketch is None else measure.sketch)
        if measure.histogram is None:
            self._histogram[0] += np.uint64(measure.elements)
        else:
            self._histogram += measure.histogram
        if measure.inexact is not None:
            self._inexact_count += len(measure.inexact)
            self._inexact.append(measure.inexact)
            if self._inexact_count > _INEXACT_LIMIT:
                # Too many to keep: their bins are still counted, thresholds inside them stay unknown.
                self._inexact = [_bins_only(self._inexact)]

    def finish(self) -> TensorStatistics:
        """Return the tensor's statistics."""
        bins = np.flatnonzero(self._histogram).astype("<u2")
        counts = self._histogram[bins]
        magnitudes = np.sort(np.concatenate(self._inexact)) if self._inexact else np.empty(0, np.uint32)
        inexact = np.bincount(magnitudes >> 16, minlength=1 << 15)[bins].astype("<u8")
        if self._inexact_count > _INEXACT_LIMIT:
            inexact = np.where(inexact > 0, counts, 0).astype("<u8")
        found = TensorStatistics(
            self._elements,
            np.array(self._rows, BLOCK),
            np.array(self._errors, "<f4").reshape(len(self._errors), COARSE_TIERS),
            np.array(self._sketches, "<f4").reshape(len(self._sketches), SKETCH_SIZE),
            bins,
            counts.astype("<u8"),
            inexact,
            np.empty(0, "<u8"),
            np.empty(0, "<f4"),
        )
        if self._inexact_count > _INEXACT_LIMIT:
            return found
        ranks, thresholds = [], []
        for rank in sorted({trim_rank(density, self._elements) for density in DENSITIES}):
            where = found.bin_of_rank(rank)
            if where is not None and where[1] <= int(inexact[where[0]]):
                end = int(np.searchsorted(magnitudes, (int(bins[where[0]]) + 1) << 16))
                ranks.append(rank)
                thresholds.append(magnitudes[end - where[1]])
        return TensorStatistics(
            found.elements,
            found.blocks,
            found.errors,
            found.sketches,
            found.bins,
            found.counts,
            found.inexact,
            np.array(ranks, "<u8"),
            np.array(thresholds, np.uint32).view("<f4"),
        )


def trim_rank(density: float, elements: int) -> int:
    """Return how many of the largest |delta| a density keeps: at least one of them."""
    return max(1, int(density * elements))


def bin_value(index: int) -> float:
    """Return the lowest magnitude of a histogram bin."""
    return float(np.array([index << 16], np.uint32).view(np.float32)[0])


def statistics_key(expert: str, base: str, tensor: str) -> bytes:
    """Return the catalog's key: expert and base manifest, and the tensor's name."""
    return bytes.fromhex(expert) + bytes.fromhex(base) + name_key(tensor)


def load(txn: Transaction, expert: str, base: str, tensors: Iterable[str]) -> dict[str, TensorStatistics]:
    """Return the statistics of those tensors of an expert that the catalog has."""
    found = {}
    for name in tensors:
        value = txn.get("statistics", statistics_key(expert, base, name))
        if value is not None:
            found[name] = TensorStatistics.decode(value)
    return found


def _bins_only(parts: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Shrink what is kept to nothing but one magnitude in each occupied bin."""
    occupied = np.unique(np.concatenate([np.unique(part >> 16) for part in parts]))
    return (occupied << 16 | 1).astype(np.uint32)
