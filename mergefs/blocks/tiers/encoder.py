"""From an expert's block and its base's to tiers. Nothing that is chosen here binds a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.exact import Exact
from mergefs.blocks.tiers import coarse, exact_fast, exact_quick, exact_small
from mergefs.blocks.tiers.kernels import quantise, rests, runs, wide
from mergefs.blocks.tiers.layout import ALL_CLASSES, COARSE_TIERS, RUN, Header, Kind, write_mask
from mergefs.blocks.tiers.scratch import room

THRESHOLDS = (0.34, 0.85, 1.42, 2.0, 2.45, 2.9, 3.5)
"""Of |delta|, in rms deltas s of the block. Tier 2 has all of them, tier 1 every second one, tier 0 the fourth."""

ACTIVE = (float("inf"), 1.8, 0.9)
"""A class takes part in a tier when its ulp is below so many s: what is left of a coarser one costs less exactly."""

ON_GRID = (0.6, 0.6, 0.4)
"""Classes whose ulp is at least so many s are predicted on the expert's bf16 grid."""

FINE = 0.9
"""Centroids are measured on classes whose ulp is below so many s."""

LARGEST_CENTROID = 6.0
"""The centroids' unit is the least power of two of which 255 reach so many s."""

FEWEST = 4096
"""Blocks with fewer changed elements have no coarse tiers."""

MOST_ACTIVE = 0.96
"""A tier that leaves fewer elements out than this leaves none out: it would save less than the context costs."""

SMALLEST_RMS = 2.0**-90
"""Far from where a processor that flushes subnormals to 0 would compute something else."""

LARGEST_BITS = 0x7F00
"""Magnitudes from here on are infinite, not a number, or so large that a prediction could overflow."""

_Bits = NDArray[np.uint16]
EXACT_WRITERS: Mapping[Exact, Callable[[_Bits, _Bits, _Bits, NDArray[np.int8]], bytes]] = {
    "fast": exact_fast.write,
    "small": exact_small.write,
    "quick": exact_quick.write,
}
"""What writes the exact tier of each coding, from the expert's bits, the zigzag rests, the base's bits and the
quantised magnitudes."""

NO_SAMPLE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Encoded:
    """The tiers of a block.

    Attributes:
        tiers: coarse ones (3, or none where the block has no use for them), and the exact one.
        errors: the squared error of the delta that remains after each.
        finite: whether all elements of both blocks are finite, and not almost infinite.
        sampled: float32[sample, coarse tiers]: the delta of the sampled elements after each coarse tier.
    """

    tiers: tuple[bytes, ...]
    errors: tuple[float, ...]
    finite: bool
    sampled: NDArray[np.float32]


def encode(
    expert: NDArray[np.uint16], base: NDArray[np.uint16], exact: Exact, sample: NDArray[np.int64] = NO_SAMPLE
) -> Encoded:
    """Encode any two blocks of bf16 bits, uint16[n]; all tiers together are exact for all of them.

    Args:
        expert, base: the blocks.
        exact: the coding of the exact tier.
        sample: places of elements whose coarse deltas are wanted.
    """
    if expert.size != base.size:
        raise ValueError("a block and its base differ in length")
    mask, before = _mask(expert, base)
    kept = slice(None)
    if before:
        kept = mask[sample // RUN] == 1
        sample = (np.cumsum(mask, dtype=np.int64)[sample // RUN] - 1) * RUN + sample % RUN
        expert, base = _take(expert, mask, "expert"), _take(base, mask, "base")
    page = np.empty(quantise.PAGE, np.float32)
    energy, largest = quantise.measure(expert, base, page)
    finite = int(largest) < LARGEST_BITS
    rms = float(np.sqrt(energy / max(base.size, 1))) if finite else 0.0
    tiers: list[bytes] = []
    errors: list[float] = []
    sampled = np.zeros((sample.size, COARSE_TIERS), np.float32)
    if base.size >= FEWEST and rms > SMALLEST_RMS:
        tiers, errors, sampled[kept], q, prediction = _coarse(expert, base, rms, page, sample[kept])
    else:
        q, prediction = room("q2", base.size, np.int8), coarse.NOTHING
        q[:] = 0
    predicted, rest = room("predicted", base.size, np.uint16), room("rests", base.size, np.uint16)
    wide.predict(base, q, prediction.codes, prediction.unit, predicted)
    rests.take(expert, predicted, q, rest)
    tiers.append(EXACT_WRITERS[exact](expert, rest, base, q))
    tiers[0] = before + tiers[0]
    if exact == "quick" and len(tiers) > 1:
        tiers[-1] = before + tiers[-1]  # it is read without the others
    return Encoded(tuple(tiers), (*errors, 0.0), finite, sampled)


def encode_quick(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> bytes:
    """Return the exact tier `quick` of any two blocks of bf16 bits, uint16[n], as it stands alone."""
    if expert.size != base.size:
        raise ValueError("a block and its base differ in length")
    mask, before = _mask(expert, base)
    if before:
        expert, base = _take(expert, mask, "expert"), _take(base, mask, "base")
    return before + exact_quick.payload(expert, base)


def _mask(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], bytes]:
    """Return the runs that changed, and their mask as it is written: nothing where all did."""
    mask = np.empty(-(-base.size // RUN), np.uint8)
    return mask, write_mask(mask) if runs.changed(expert, base, mask) < mask.size else b""


def _take(source: NDArray[np.uint16], mask: NDArray[np.uint8], name: str) -> NDArray[np.uint16]:
    out = room(name, source.size, np.uint16)
    return out[: runs.take(source, mask, out)]


def _coarse(
    expert: NDArray[np.uint16],
    base: NDArray[np.uint16],
    rms: float,
    page: NDArray[np.float32],
    sample: NDArray[np.int64],
) -> tuple[list[bytes], list[float], NDArray[np.float32], NDArray[np.int8], coarse.Prediction]:
    """Return the coarse payloads, the error and the sampled deltas after each, and the last one's q and prediction."""
    n = base.size
    thresholds = np.minimum(np.array(THRESHOLDS) * rms, float(np.finfo(np.float32).max)).astype(np.float32)
    active = [_first_class(share * rms) for share in ACTIVE]
    active = [
        a if a < ALL_CLASSES and quantise.count_active(base, a) <= MOST_ACTIVE * n else ALL_CLASSES for a in active
    ]
    q = [room(f"q{t}", n, np.int8) for t in range(COARSE_TIERS)]
    quantise.quantise(expert, base, thresholds, active[1], active[2], *q)
    counts, sums = np.zeros((2, 16), np.int64), np.zeros((2, 16))
    stride = max(n >> 16, 1)  # some 2^16 elements say enough
    quantise.sum_bins(expert, base, q[-1], _first_class(FINE * rms), stride, counts, sums)
    unit = np.float32(2.0 ** np.ceil(np.log2(LARGEST_CENTROID * rms / 255)))
    exponent = int(unit.view(np.uint32)) >> 23
    tiers, errors = [], []
    sampled = np.empty((COARSE_TIERS, sample.size), np.float32)
    for t in range(COARSE_TIERS):
        codes = _centroids(counts, sums, t, unit)
        header = Header(Kind.DENSE, active[t], _first_class(ON_GRID[t] * rms), exponent, 0, 0)
        prediction = coarse.Prediction.make(codes.tobytes(), exponent, header.g)
        sizes = wide.table(*prediction)
        errors.append(float(wide.remaining(expert, base, q[t], sizes, page)))
        wide.delta(base[sample], q[t][sample], sizes, sampled[t])
        if t == 0:
            tiers.append(coarse.write_sparse(q[t], codes, header))
        else:
            tiers.append(coarse.write_dense(q[t], q[t - 1], base, codes, header))
    return tiers, errors, sampled.T, q[-1], prediction


def _centroids(counts: NDArray[np.int64], sums: NDArray[np.float64], tier: int, unit: np.float32) -> NDArray[np.uint8]:
    """Return the codes of the magnitudes 1, 2, ... of a tier: the mean |delta| of each, in units.

    Args:
        counts, sums: [2, 16] of tier 2's magnitudes, in fine classes and in the others.
    """
    magnitudes = np.arange(16) >> (COARSE_TIERS - 1 - tier)
    n, total = (np.stack([np.bincount(magnitudes, row, 16) for row in rows]) for rows in (counts, sums))
    few = n[0] < 16
    means = np.where(few, total.sum(0), total[0]) / np.maximum(np.where(few, n.sum(0), n[0]), 1)
    codes: NDArray[np.uint8] = np.clip(np.rint(means / unit), 0, 255).astype(np.uint8)
    return codes[1 : 2 ** (tier + 1)]


def _first_class(ulp: float) -> int:
    """Return the least class whose ulp, 2^(class - 134), is at least `ulp`; 255 where there is none."""
    if ulp < 2.0**-134:
        return 0
    return int(np.clip(np.ceil(np.log2(ulp)) + 134, 0, ALL_CLASSES))
