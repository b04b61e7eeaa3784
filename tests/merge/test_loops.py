"""The compiled loops, the vectors among them and the operations on whole arrays give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergefs.merge import arrays, kernels

quick = settings(max_examples=40, deadline=None)
sizes = st.tuples(st.integers(0, 11), st.sampled_from([0, 1, 7, 8, 9, 1023, 1024, 1025, 5000]))


def inputs(count: int, size: int, seed: int, dtype: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return a base, deltas with ties, zeros and numbers that are not finite, and weights."""
    random = np.random.default_rng(seed)
    deltas = random.integers(-3, 4, (count, size)) * 2.0**-9
    for odd in (np.nan, np.inf, -np.inf):
        deltas[random.random(deltas.shape) < 0.003] = odd
    return random.normal(size=size).astype(dtype), deltas.astype(dtype), random.choice([0.1, 0.3, -0.2, 1.0], count)


def same(one: NDArray[Any], other: NDArray[Any]) -> None:
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.signbit(one[one == 0]), np.signbit(other[other == 0]))


@quick
@given(sizes, st.integers(0, 99), st.sampled_from([np.float32, np.float64]), st.booleans())
def test_elections_are_the_same(shape: tuple[int, int], seed: int, dtype: Any, normalize: bool) -> None:
    base, deltas, weights = inputs(*shape, seed, dtype)
    thresholds = np.random.default_rng(seed).choice([0.0, 2.0**-9, 2.0**-8, np.inf], len(weights))
    loops = [kernels.elect, arrays.elect, *([kernels.elect_singles] if dtype is np.float32 else [])]
    found = [np.empty_like(base) for _ in loops]
    with np.errstate(invalid="ignore", over="ignore"):
        for loop, out in zip(loops, found, strict=True):
            loop(base, deltas, thresholds, weights, normalize, 0.7, out)
    for out in found[1:]:
        same(out, found[0])


@quick
@given(sizes, st.integers(0, 99), st.sampled_from([np.float32, np.float64]))
def test_sums_are_the_same(shape: tuple[int, int], seed: int, dtype: Any) -> None:
    base, deltas, weights = inputs(*shape, seed, dtype)
    found = [np.empty_like(base), np.empty_like(base)]
    with np.errstate(invalid="ignore", over="ignore"):
        for loop, out in zip((kernels.combine, arrays.combine), found, strict=True):
            loop(base, 0.9, deltas, weights, out)
    same(*found)


@quick
@given(st.integers(0, 2**40), st.integers(0, 2100), st.integers(0, 2**32 - 1), st.integers(0, 2**32))
def test_masks_are_the_same(first: int, count: int, key: int, limit: int) -> None:
    one, other = (np.ones(count, np.float32) for _ in range(2))
    kernels.drop(one, first, key, 77, limit)
    arrays.drop(other, first, key, 77, limit)
    same(one, other)
    lanes, expected = np.empty(4, np.uint64), []
    for element in range(first, first + min(count, 9)):
        kernels.draw(np.uint64(element // 4), key, 77, lanes)
        expected.append(float(int(lanes[element % 4]) < limit))
    assert one[:9].tolist() == expected


@quick
@given(st.integers(1, 5), st.integers(1, 90), st.integers(0, 2**40), st.booleans(), st.integers(0, 99))
def test_pruning_is_the_same(rows: int, length: int, first: int, rescale: bool, seed: int) -> None:
    delta = np.random.default_rng(seed).integers(-9, 10, rows * length).astype(np.float64)
    other = delta.copy()
    kernels.prune(delta, length, first, 3, 4, 0.6, 0.2, rescale)
    arrays.prune(other, length, first, 3, 4, 0.6, 0.2, rescale)
    same(delta, other)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cuts_are_the_same(dtype: Any) -> None:
    _, (delta, *_), _ = inputs(1, 5000, 1, dtype)
    other = delta.copy()
    kernels.cut(delta, 2.0**-9, 2.0**-8)
    with np.errstate(invalid="ignore"):
        arrays.cut(other, 2.0**-9, 2.0**-8)
    same(delta, other)
