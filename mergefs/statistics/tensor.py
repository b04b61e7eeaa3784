"""The statistics of one tensor, and their form in the catalog."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.blocks.zstd_frames import decompress
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import name_key
from mergefs.errors import CorruptionError

TIERS = COARSE_TIERS + 1

BLOCK = np.dtype(
    [
        ("energy", "<f8"),
        ("inner", "<f8"),
        ("largest", "<f4"),
        ("unchanged", "<u4"),
        ("errors", "<f4", COARSE_TIERS),
        ("bytes", "<u4", TIERS),
    ]
)
"""Per block: squared norm of the delta; inner product of delta and base; largest |delta|; the number of elements whose
bits are the base's; the squared error that remains of the delta after 1, 2 and 3 tiers (NaN where there is no such
coarse tier); the bytes that each tier takes to read (0 where there is none; all 0 for a block that is the base's)."""

SKETCH_SIZE = 128
SKETCHED_FROM = 1 << 14
"""Tensors with fewer elements have no sketches and no sample: they are too small to matter to a budget."""

_HEADER = struct.Struct("<4sIIIIIQ")
_MAGIC = b"mst3"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGEST = 1 << 24
"""Bytes of a distribution: some 100,000 numbers."""


@dataclass(frozen=True)
class Distribution:
    """How the elements of one tensor's delta are distributed.

    Attributes:
        sample: uint16[elements sampled, 4]: bfloat16 bits of the deltas that the sampled elements (see `sample.py`)
            have after 1, 2 and 3 tiers, and exactly.
        bins, counts, inexact: the histogram of |delta|: the upper 16 bits of the float32 magnitude (uint16,
            ascending), elements in that bin, and how many of them are not equal to the bin's lowest value.
        ranks, thresholds: the exact magnitude of the k-th largest |delta| for some k.
    """

    sample: NDArray[np.uint16]
    bins: NDArray[np.uint16]
    counts: NDArray[Any]
    inexact: NDArray[Any]
    ranks: NDArray[Any]
    thresholds: NDArray[np.float32]

    def bin_of_rank(self, rank: int) -> tuple[int, int] | None:
        """Return the bin (its index) of the `rank`-th largest |delta| and its rank inside the bin, both from
        the largest; None when that element is an exact zero or there is none."""
        below = self._from_largest
        place = int(below.searchsorted(rank))
        if place >= len(below):
            return None
        index = len(self.bins) - 1 - place
        if self.bins[index] == 0 and self.inexact[index] == 0:
            return None
        return index, rank - (int(below[place - 1]) if place else 0)

    @cached_property
    def _from_largest(self) -> NDArray[np.uint64]:
        return np.cumsum(self.counts[::-1], dtype=np.uint64)

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

    def _pack(self, elements: int) -> bytes:
        """Return the arrays as they are compressed: byte planes, of bins the differences."""
        gaps = np.diff(self.bins, prepend=np.uint16(0)).astype("<u2")
        numbers = np.concatenate([self.counts, self.inexact, self.ranks]).astype(_count_type(elements))
        planes = (array.view(np.uint8).reshape(len(array), array.itemsize).T.tobytes() for array in (gaps, numbers))
        return self.sample.astype("<u2").T.tobytes() + b"".join(planes) + self.thresholds.astype("<f4").tobytes()

    @staticmethod
    def _size(elements: int, sampled: int, bins: int, ranks: int) -> int:
        """Return how many bytes `_pack` makes."""
        return 2 * TIERS * sampled + 2 * bins + _count_type(elements).itemsize * (2 * bins + ranks) + 4 * ranks

    @classmethod
    def _unpack(cls, data: bytes, elements: int, sampled: int, bins: int, ranks: int) -> Self:
        dtype = _count_type(elements)
        count, width = 2 * bins + ranks, dtype.itemsize
        if len(data) != cls._size(elements, sampled, bins, ranks):
            raise ValueError("arrays of another size than the header says")
        at = 2 * TIERS * sampled
        sample = np.frombuffer(data, "<u2", TIERS * sampled).reshape(TIERS, sampled).T
        gaps = _from_planes(data, np.dtype("<u2"), bins, at)
        at += 2 * bins
        numbers = _from_planes(data, dtype, count, at)
        counts, inexact, known = numbers[:bins], numbers[bins : 2 * bins], numbers[2 * bins :]
        thresholds = np.frombuffer(data, "<f4", ranks, at + width * count)
        return cls(sample, np.cumsum(gaps, dtype="<u2"), counts, inexact, known, thresholds)


def _from_planes(data: bytes, dtype: np.dtype[Any], count: int, at: int) -> NDArray[Any]:
    """Return the numbers whose byte planes begin at `at`."""
    planes = np.frombuffer(data, np.uint8, dtype.itemsize * count, at).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _count_type(elements: int) -> np.dtype[Any]:
    """Return the type of numbers of elements of a tensor."""
    return np.dtype("<u4" if elements < 1 << 32 else "<u8")


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor of one expert against a base.

    Attributes:
        elements: of the tensor.
        blocks: array of `BLOCK`, one for each block.
        sketches: uint16[blocks, 128] or [0, 128]: bfloat16 bits of a count sketch of each block's delta. The inner
            product of two blocks' sketches estimates the inner product of their deltas with a standard error
            of at most |a| |b| sqrt(2 / 128).
        counts: how many elements are sampled, and how many bins and ranks the distribution has.
        packed: the distribution in a zstd frame; see `distribution`, which not every plan needs.
    """

    elements: int
    blocks: NDArray[Any]
    sketches: NDArray[np.uint16]
    counts: tuple[int, int, int]
    packed: bytes

    @classmethod
    def make(
        cls, elements: int, blocks: NDArray[Any], sketches: NDArray[np.uint16], distribution: Distribution
    ) -> Self:
        """Return the statistics with this distribution."""
        counts = len(distribution.sample), len(distribution.bins), len(distribution.ranks)
        # zstd cannot tell a frame of nothing from a damaged one.
        packed = bytes(zstd.compress(distribution._pack(elements), 1)) if any(counts) else b""
        return cls(elements, blocks, sketches, counts, packed)

    @cached_property
    def distribution(self) -> Distribution:
        """How the delta's elements are distributed.

        Raises:
            CorruptionError: when the value is damaged.
        """
        try:
            size = Distribution._size(self.elements, *self.counts)
            if size > _LARGEST:
                raise ValueError(f"a distribution of {size} bytes")
            data = decompress(self.packed, size).tobytes() if size else self.packed
            return Distribution._unpack(data, self.elements, *self.counts)
        except (ValueError, RuntimeError) as error:
            raise CorruptionError(f"the catalog's statistics of a tensor are damaged: {error}") from error

    def with_bytes(self, bytes_of: Mapping[int, tuple[int, ...]]) -> Self:
        """Return the same with other tiers' bytes of some blocks.

        Args:
            bytes_of: by the block's number, the bytes of each of its tiers.
        """
        blocks = self.blocks.copy()
        for number, sizes in bytes_of.items():
            blocks["bytes"][number] = (*sizes, *[0] * (TIERS - len(sizes)))
        return replace(self, blocks=blocks)

    def encode(self) -> bytes:
        """Return the catalog's value."""
        head = _HEADER.pack(_MAGIC, len(self.blocks), len(self.sketches), *self.counts, self.elements)
        return head + self.blocks.tobytes() + self.sketches.tobytes() + self.packed

    @classmethod
    def decode(cls, value: bytes) -> Self | None:
        """Read the catalog's value; None when an earlier mergefs wrote it, which counts as if there were none.

        Raises:
            CorruptionError: when it is damaged.
        """
        try:
            if value[:4] == _ZSTD_MAGIC:
                return None  # mst1 and mst2 were one frame
            magic, blocks, sketches, *counts, elements = _HEADER.unpack_from(value)
            if magic != _MAGIC:
                raise ValueError("wrong magic")
            at = _HEADER.size
            rows = np.frombuffer(value, BLOCK, blocks, at)
            at += rows.nbytes
            lanes = np.frombuffer(value, "<u2", sketches * SKETCH_SIZE, at).reshape(sketches, SKETCH_SIZE)
            return cls(elements, rows, lanes, tuple(counts), value[at + lanes.nbytes :])
        except (ValueError, struct.error) as error:
            raise CorruptionError(f"the catalog's statistics of a tensor are damaged: {error}") from error


def trim_rank(density: float, elements: int) -> int:
    """Return how many of the largest |delta| a density keeps: at least one of them."""
    return max(1, int(density * elements))


def bin_value(index: int) -> float:
    """Return the lowest magnitude of a histogram bin."""
    return float(np.array([index << 16], np.uint32).view(np.float32)[0])


def statistics_key(expert: str, base: str, tensor: str) -> bytes:
    """Return the catalog's key: expert and base manifest, and the tensor's name."""
    return statistics_prefix(expert, base) + name_key(tensor)


def statistics_prefix(expert: str, base: str) -> bytes:
    """Return what all keys of an expert's statistics against a base begin with."""
    return bytes.fromhex(expert) + bytes.fromhex(base)


def products_key(first: str, second: str, base: str, tensor: str) -> bytes:
    """Return the catalog's key of the inner product of two models' deltas from a base (the base's own id stands for its
    elements): both manifests in the order of their ids, the base, and the tensor's name."""
    return bytes.fromhex(first) + bytes.fromhex(second) + bytes.fromhex(base) + name_key(tensor)


def load(txn: Transaction, expert: str, base: str, tensors: Iterable[str]) -> dict[str, TensorStatistics]:
    """Return the statistics of those tensors of an expert that the catalog has."""
    found = {}
    for name in tensors:
        value = txn.get("statistics", statistics_key(expert, base, name))
        statistics = None if value is None else TensorStatistics.decode(value)
        if statistics is not None:
            found[name] = statistics
    return found
