"""The statistics of one tensor, and their form in the catalog."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import name_key
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer

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
_OLDER = (b"mst1", b"mst2")


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor of one expert against a base.

    Attributes:
        elements: of the tensor.
        blocks: array of `BLOCK`, one for each block.
        sketches: uint16[blocks, 128] or [0, 128]: bfloat16 bits of a count sketch of each block's delta. The inner
            product of two blocks' sketches estimates the inner product of their deltas with a standard error
            of at most |a| |b| sqrt(2 / 128).
        sample: uint16[elements sampled, 4]: bfloat16 bits of the deltas that the sampled elements (see `sample.py`)
            have after 1, 2 and 3 tiers, and exactly.
        bins, counts, inexact: the histogram of |delta|: the upper 16 bits of the float32 magnitude (uint16,
            ascending), elements in that bin, and how many of them are not equal to the bin's lowest value.
        ranks, thresholds: uint64 and float32; the exact magnitude of the k-th largest |delta| for some k.
    """

    elements: int
    blocks: NDArray[Any]
    sketches: NDArray[np.uint16]
    sample: NDArray[np.uint16]
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
        counts = (len(array) for array in (self.blocks, self.sketches, self.sample, self.bins, self.ranks))
        head = _HEADER.pack(_MAGIC, *counts, self.elements)
        arrays = (
            self.blocks,
            self.sketches,
            self.sample,
            self.bins,
            self.counts,
            self.inexact,
            self.ranks,
            self.thresholds,
        )
        return bytes(zstd.compress(head + b"".join(a.tobytes() for a in arrays), 1))

    @classmethod
    def decode(cls, value: Buffer) -> Self | None:
        """Read the catalog's value; None when an earlier mergefs wrote it, which counts as if there were none.

        Raises:
            CorruptionError: when it is damaged.
        """
        try:
            data = bytes(zstd.decompress(value))
            if data[:4] in _OLDER:
                return None
            magic, blocks, sketches, sampled, bins, ranks, elements = _HEADER.unpack_from(data)
            if magic != _MAGIC:
                raise ValueError("wrong magic")
            at = _HEADER.size

            def take(dtype: Any, count: int) -> NDArray[Any]:
                nonlocal at
                array = np.frombuffer(data, dtype, count, at)
                at += array.nbytes
                return array

            return cls(
                elements,
                take(BLOCK, blocks),
                take("<u2", sketches * SKETCH_SIZE).reshape(sketches, SKETCH_SIZE),
                take("<u2", sampled * TIERS).reshape(sampled, TIERS),
                take("<u2", bins),
                take("<u8", bins),
                take("<u8", bins),
                take("<u8", ranks),
                take("<f4", ranks),
            )
        except (ValueError, RuntimeError, struct.error) as error:
            raise CorruptionError(f"the catalog's statistics of a tensor are damaged: {error}") from error


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
        statistics = None if value is None else TensorStatistics.decode(value)
        if statistics is not None:
            found[name] = statistics
    return found
