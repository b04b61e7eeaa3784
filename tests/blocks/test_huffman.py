"""Frames of Huffman codes: any zstd decoder reads them, and no code could be shorter."""

from __future__ import annotations

import heapq
from itertools import count

import numcodecs.zstd as zstd
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergefs.blocks import huffman
from mergefs.blocks.zstd_frames import compress_planes, decompress


def drawn(seed: int, n: int, kind: str) -> NDArray[np.uint8]:
    """Return uint8[n] of one of several distributions."""
    rng = np.random.default_rng(seed)
    match kind:
        case "skewed":
            found = np.minimum(rng.geometric(rng.uniform(0.02, 0.95), n), 255)
        case "half normal":
            found = np.minimum(np.abs(rng.standard_normal(n) * rng.uniform(0.3, 90)), 255)
        case "uniform":
            found = rng.integers(0, rng.integers(2, 257), n)
        case "long tail":
            found = rng.zipf(rng.uniform(1.1, 3), n) % 256
        case "few":
            found = rng.choice(rng.integers(0, 256, rng.integers(1, 40)), n)
        case "runs":
            found = np.repeat(rng.integers(0, 256, n // 16 + 1), 16)[:n]
        case "rare":
            found = np.where(rng.random(n) < 0.999, 7, rng.integers(0, 256, n))
        case _:  # the frequencies with the longest codes
            weights = 1.6 ** np.arange(40)
            found = rng.choice(40, n, p=weights / weights.sum())
    return found.astype(np.uint8)


KINDS = ("skewed", "half normal", "uniform", "long tail", "few", "runs", "rare", "steep")


@given(
    st.integers(0, 2**32),
    st.integers(1, 5000),
    st.integers(1, 4),
    st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
)
def test_planes_come_back(seed: int, n: int, width: int, kinds: list[str]) -> None:
    planes = np.stack([drawn(seed + plane, n, kinds[plane]) for plane in range(width)])
    frame = compress_planes(planes)
    assert decompress(frame, planes.size).tobytes() == planes.tobytes()
    assert bytes(zstd.decompress(frame)) == planes.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [(1 << 17) - 1, 1 << 17, (1 << 17) + 1, 3 << 17])
def test_long_planes_come_back(kind: str, n: int) -> None:
    planes = np.stack([drawn(n, n, kind), drawn(n, n, "rare")])
    assert decompress(compress_planes(planes), planes.size).tobytes() == planes.tobytes()


def test_noise_is_smaller_than_what_zstd_makes_of_it() -> None:
    planes = drawn(1, 1 << 19, "skewed").reshape(1, -1)
    assert len(compress_planes(planes)) < 0.97 * len(zstd.compress(planes, 1))


def test_what_repeats_is_left_to_zstd() -> None:
    rows = np.tile(drawn(1, 1 << 10, "half normal"), 64)
    rows[1 << 14 : 1 << 15] = 0
    assert len(compress_planes(rows.reshape(1, -1))) <= len(zstd.compress(rows, 1)) + 16


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=256).filter(lambda counts: np.count_nonzero(counts) >= 2))
def test_codes_are_whole_and_as_short_as_any(counts: list[int]) -> None:
    padded = np.array(counts + [0] * (256 - len(counts)), np.int64)
    lengths = huffman.code_lengths(padded)
    assert (lengths > 0).tolist() == (padded > 0).tolist()
    assert lengths.max() <= huffman.LONGEST
    assert sum(1 << (huffman.LONGEST - int(length)) for length in lengths if length) == 1 << huffman.LONGEST
    free = unlimited(padded)
    cost = sum(int(c) * int(length) for c, length in zip(padded, lengths, strict=True))
    if max(free) <= huffman.LONGEST:
        assert cost == sum(int(c) * length for c, length in zip(padded, free, strict=True))
    else:
        assert cost >= sum(int(c) * length for c, length in zip(padded, free, strict=True))


def unlimited(counts: NDArray[np.int64]) -> list[int]:
    """Return the lengths of Huffman's code, as it is taught."""
    order = count()
    heap = [(int(c), next(order), [byte]) for byte, c in enumerate(counts) if c]
    heapq.heapify(heap)
    lengths = [0] * 256
    while len(heap) > 1:
        one, two = heapq.heappop(heap), heapq.heappop(heap)
        for byte in one[2] + two[2]:
            lengths[byte] += 1
        heapq.heappush(heap, (one[0] + two[0], next(order), one[2] + two[2]))
    return lengths
