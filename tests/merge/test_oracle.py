"""Merges against their definitions, computed in float64 from the files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builders import (
    EXPERTS,
    FLOATS,
    Array,
    Tensors,
    fine_tuned,
    load_model,
    random_model,
    recipe_text,
    tensors_of,
    write_model,
)
from numpy.typing import NDArray

from mergefs.merge import kernels
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from tools.synth import make

Float64s = NDArray[np.float64]

names = (f"merge-{number}" for number in count())


# ------------------------------------------------------------------------------------------------ definitions


@dataclass(frozen=True)
class Case:
    """A merge method with its numbers, one weight and one density for each expert."""

    method: str
    weights: Sequence[float]
    densities: Sequence[float] = ()
    normalize: bool = False
    scale: float = 1.0

    def recipe(self, base: str, experts: Sequence[str], dtype: str | None = None) -> Recipe:
        own = [
            {"weight": weight, **({"density": self.densities[i]} if self.densities else {})}
            for i, weight in enumerate(self.weights)
        ]
        shared: dict[str, Any] = {"normalize": self.normalize}
        if self.method != "linear":
            shared["scale"] = self.scale
        if dtype:
            shared["dtype"] = dtype
        return Recipe.parse(recipe_text(self.method, list(zip(experts, own, strict=True)), base, **shared))


def define(case: Case, base: Float64s, experts: Sequence[Float64s]) -> tuple[Float64s, NDArray[np.bool_]]:
    """Return the merge of one tensor, and where some expert's magnitude equals its trim threshold."""
    weights = np.array(case.weights)[:, None]
    values = np.stack(experts)
    deltas = values - base
    nowhere = np.zeros(base.shape, bool)
    if case.method == "linear":
        merged = (weights * values).sum(axis=0)
        return merged / (weights.sum() if case.normalize else 1.0), nowhere
    if case.method == "task_arithmetic":
        merged = (weights * deltas).sum(axis=0) / (weights.sum() if case.normalize else 1.0)
        return base + case.scale * merged, nowhere
    assert case.method == "ties"
    kept, equal = np.zeros_like(deltas), nowhere.copy()
    for row, density in enumerate(case.densities or [1.0] * len(experts)):
        if density == 0.0:
            continue
        magnitude = np.abs(deltas[row])
        k = max(1, int(density * magnitude.size))
        threshold = np.sort(magnitude)[::-1][k - 1] if density < 1 else 0.0
        kept[row] = np.where(magnitude >= threshold, deltas[row], 0.0)
        if density < 1 and threshold > 0:
            equal |= magnitude == threshold
    weighted = weights * kept
    elected = np.where(weighted.sum(axis=0) >= 0, 1.0, -1.0)
    agree = np.sign(weighted) == elected
    merged = np.where(agree, weighted, 0.0).sum(axis=0)
    if case.normalize:
        divisor = np.where(agree, weights, 0.0).sum(axis=0)
        merged = merged / np.where(np.abs(divisor) < 1e-8, 1.0, divisor)
    return base + case.scale * merged, equal


def shortened(values: Float64s, bits: int) -> Float64s:
    """Round to `bits` significant bits, to nearest, ties to even."""
    left = np.uint64(53 - bits)
    patterns = np.ascontiguousarray(values).view(np.uint64)
    odd = patterns >> left & np.uint64(1)
    half = np.uint64((1 << (int(left) - 1)) - 1)
    return ((patterns + half + odd) & ~np.uint64((1 << int(left)) - 1)).view(np.float64)


def rounded(values: Float64s, dtype: str) -> Array:
    """Round to nearest, ties to even.

    With weights such as 0.5, 0.3 and 0.2, several per cent of the merged bf16 elements lie exactly between two
    numbers, and the last bits of a float64 sum would toss a coin for each: those bits are rounded off first.
    """
    if dtype == "F64":
        return Array(dtype, values.shape, values.tobytes())
    values = shortened(values, 44)
    if dtype == "BF16":
        # A bf16 has 8 significant bits, so that what is left converts exactly.
        data = shortened(values, 8).astype(np.float32).astype(ml_dtypes.bfloat16)
    else:
        data = values.astype({"F16": np.float16, "F32": np.float32}[dtype])
    return Array(dtype, values.shape, data.tobytes())


def steps(a: Array, b: Array) -> NDArray[np.int64]:
    """Return by how many representable numbers the elements differ."""
    width = len(a.data) // max(1, a.values.size)
    unsigned, signed = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}[width]

    def ordered(array: Array) -> NDArray[np.int64]:
        bits = np.frombuffer(array.data, signed).astype(np.int64)
        magnitude = np.frombuffer(array.data, unsigned) & unsigned(np.iinfo(signed).max)
        return np.where(bits < 0, -magnitude.astype(np.int64), magnitude.astype(np.int64))

    return np.abs(ordered(a) - ordered(b))


def check(
    repository: Repository,
    case: Case,
    base: Tensors,
    experts: Sequence[Tensors],
    labels: Sequence[str],
    *,
    dtype: str | None = None,
    most_equal: float = 0.0,
) -> None:
    """Merge, and compare every float tensor with its definition.

    Elements at a trim threshold are left out of the comparison, and may be `most_equal` of all.
    """
    name = next(names)
    repository.merge(case.recipe(labels[0], labels[1:], dtype), name)
    found = tensors_of(repository, name)
    assert found.keys() == base.keys()
    elements = wrong = excluded = 0
    most_wrong = 1e-4
    for tensor, mine in base.items():
        if mine.dtype not in FLOATS:
            assert found[tensor] == mine
            continue
        expected, equal = define(case, mine.values, [expert[tensor].values for expert in experts])
        out = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", None: mine.dtype}[dtype]
        assert found[tensor].dtype == out
        assert found[tensor].shape == mine.shape
        off = steps(found[tensor], rounded(expected, out))
        # Where base and deltas cancel, the last bit of the operands counts instead of the result's.
        operands = np.abs([mine.values, *(expert[tensor].values for expert in experts)]).max(axis=0)
        close = (off <= 1) | (np.abs(found[tensor].values - expected) <= 2.0**-22 * operands)
        assert close[~equal].all(), tensor
        if "F64" not in (mine.dtype, *(expert[tensor].dtype for expert in experts)):
            # Those at a threshold are all kept, as documented: they have to be right as well.
            assert close[equal].all(), tensor
        elements += int(np.count_nonzero(~equal))
        if out in ("F32", "F64"):
            # Deltas are float32 (or float64 like the oracle's): their own rounding shows in some last bits.
            most_wrong = {"F32": 1e-2, "F64": 1.0}[out]
        wrong += int(np.count_nonzero((off > 0)[~equal] & (np.abs(expected) > 2.0**-44 * operands)[~equal]))
        excluded += int(np.count_nonzero(equal))
    assert wrong <= max(4, most_wrong * elements)
    assert excluded <= most_equal * (elements + excluded)


# -------------------------------------------------------------------------------------------------- real weights


@pytest.fixture(scope="module")
def real(slices: Path) -> list[dict[str, Array]]:
    return [load_model(slices / name) for name in ("base", *EXPERTS)]


WEIGHTED = (
    (1.0, 1.0, 1.0),
    (0.5, 0.3, 0.2),
    (0.7, -0.4, 1.3),
)


@pytest.mark.parametrize("weights", WEIGHTED)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
def test_averages_of_real_weights(
    slice_repository: Repository, real: list[dict[str, Array]], method: str, normalize: bool, weights: tuple[float, ...]
) -> None:
    scale = 1.0 if method == "linear" else 0.8
    check(slice_repository, Case(method, weights, (), normalize, scale), real[0], real[1:], ("base", *EXPERTS))


@pytest.mark.parametrize("weights", WEIGHTED)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "densities",
    [(1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), (0.333, 0.333, 0.333), (0.1, 0.777, 0.05), (0.0, 1.0, 0.45)],
    ids=str,
)
def test_ties_of_real_weights(
    slice_repository: Repository,
    real: list[dict[str, Array]],
    densities: tuple[float, ...],
    normalize: bool,
    weights: tuple[float, ...],
) -> None:
    # Deltas between bf16 numbers are few different numbers, so that many elements lie at a threshold.
    check(
        slice_repository,
        Case("ties", weights, densities, normalize, 1.1),
        real[0],
        real[1:],
        ("base", *EXPERTS),
        most_equal=0.33,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [Case("linear", (0.2, 0.3, 0.5), (), True), Case("ties", (1, 0.5, 0.25), (0.6, 0.333, 0.2), True, 0.9)],
    ids=lambda case: case.method,
)
def test_real_weights_in_another_dtype(
    slice_repository: Repository, real: list[dict[str, Array]], case: Case, dtype: str
) -> None:
    check(slice_repository, case, real[0], real[1:], ("base", *EXPERTS), dtype=dtype, most_equal=0.33)


def test_one_expert_alone(slice_repository: Repository, real: list[dict[str, Array]]) -> None:
    labels = ("base", EXPERTS[2])
    check(slice_repository, Case("ties", (1.0,), (0.3,), True), real[0], real[3:], labels, most_equal=0.33)
    check(slice_repository, Case("linear", (3.0,), (), True), real[0], real[3:], labels)


def test_weights_that_cancel_are_not_divided_by(slice_repository: Repository, real: list[dict[str, Array]]) -> None:
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floating point, and means zero.
    case = Case("ties", (0.1, 0.2, -0.3), (1.0, 1.0, 1.0), True)
    check(slice_repository, case, real[0], real[1:], ("base", *EXPERTS))


# -------------------------------------------------------------------------------------------- synthetic models


def ingested(repository: Repository, folder: Path, base: Tensors, experts: Sequence[Tensors]) -> list[str]:
    """Ingest models and return their names, the base's first."""
    labels = ["base", *(f"expert-{i}" for i in range(len(experts)))]
    for label, model in zip(labels, (base, *experts), strict=True):
        repository.ingest(write_model(folder / label, model), label, base=None if label == "base" else "base")
    return labels


CASES = [
    Case("linear", (0.6, 0.9), (), True),
    Case("linear", (0.6, -0.1), (), False),
    Case("task_arithmetic", (0.6, -0.3), (), False, 0.7),
    Case("ties", (1.0, 0.4), (0.5, 0.333), True),
    Case("ties", (1.0, -0.4), (0.8, 0.1234), False, 1.5),
]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_synthetic_models_of_one_dtype(repository: Repository, tmp_path: Path, dtype: str) -> None:
    base = random_model(1, dtype)
    experts = [fine_tuned(base, seed) for seed in (2, 3)]
    labels = ingested(repository, tmp_path, base, experts)
    for case in CASES:
        # The fewer bits, the more elements lie at a threshold.
        check(repository, case, base, experts, labels, most_equal=0.33 if dtype in ("BF16", "F16") else 0.001)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kinds", [("BF16", "F32", "F16"), ("F32", "BF16", "F32"), ("F16", "BF16", "F64")], ids=str)
def test_mixed_dtypes_in_one_merge(
    repository: Repository, tmp_path: Path, kinds: tuple[str, str, str], dtype: str | None
) -> None:
    base = random_model(1, kinds[0])
    experts = [fine_tuned(base, seed, dtype=kind) for seed, kind in zip((2, 3), kinds[1:], strict=True)]
    labels = ingested(repository, tmp_path, base, experts)
    for case in CASES:
        check(repository, case, base, experts, labels, dtype=dtype, most_equal=0.33)


def test_models_that_are_far_apart(repository: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    experts = [random_model(2), random_model(3)]
    labels = ingested(repository, tmp_path, base, experts)
    for case in CASES:
        check(repository, case, base, experts, labels, most_equal=0.05)


def test_a_tiny_language_model(repository: Repository, tmp_path: Path) -> None:
    folders = make("tiny", 2, tmp_path)
    for folder in folders:
        repository.ingest(folder, folder.name, base=None if folder.name == "base" else "base")
    base, *experts = map(load_model, folders)
    for case in CASES:
        check(repository, case, base, experts, [folder.name for folder in folders], most_equal=0.33)


# ------------------------------------------------------------------------------------------------ random methods


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al., SC 2011), in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


FULL = 0xFFFFFFFF


def test_philox_gives_the_published_answers() -> None:
    # From kat_vectors of Random123.
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((FULL,) * 4, (FULL,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def drawn(element: int, key: Sequence[int]) -> int:
    """Find an element's random number by which limits keep it."""
    low, high = 0, 1 << 32
    while low < high:
        middle = (low + high) // 2
        delta = np.ones(1, np.float32)
        kernels.drop(delta, element, key[0], key[1], middle)
        low, high = (low, middle) if delta[0] else (middle + 1, high)
    return low - 1


@pytest.mark.parametrize("element", [0, 1, 2, 3, 4, 4097, 2**34 + 6, 2**63 - 1])
@pytest.mark.parametrize("key", [(0, 0), (FULL, FULL), (0xA4093822, 0x299F31D0)])
def test_a_mask_draws_from_philox(element: int, key: tuple[int, int]) -> None:
    counter = element // 4
    assert drawn(element, key) == philox((counter & FULL, counter >> 32, 0, 0), key)[element % 4]


def test_any_part_of_a_mask_can_be_drawn_alone() -> None:
    whole = np.ones(1000, np.float32)
    kernels.drop(whole, 0, 7, 9, 1 << 31)
    for first, size in [(0, 1), (1, 7), (3, 2), (250, 750), (999, 1)]:
        part = np.ones(size, np.float32)
        kernels.drop(part, first, 7, 9, 1 << 31)
        assert np.array_equal(part, whole[first : first + size])


@pytest.fixture(scope="module")
def dare_models() -> list[dict[str, Array]]:
    base = {"w": Array("F32", (400, 300), np.zeros(120_000, np.float32).tobytes())}
    values = np.full(120_000, 1.0, np.float32)
    return [base, {"w": Array("F32", (400, 300), values.tobytes())}]


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_dare_keeps_its_share_and_the_mean(
    repository: Repository, tmp_path: Path, dare_models: list[dict[str, Array]], method: str, density: float
) -> None:
    labels = ingested(repository, tmp_path, dare_models[0], dare_models[1:])
    case = Case(method, (1.0,), (density,))
    seeds = []
    for seed in (1, 1, 2):
        repository.merge(case.recipe(*labels[:1], labels[1:]), f"seed-{len(seeds)}", seed=seed)
        seeds.append(tensors_of(repository, f"seed-{len(seeds)}")["w"])
    assert seeds[0] == seeds[1]
    assert seeds[0] != seeds[2]
    for found in (seeds[0], seeds[2]):
        values = found.values
        kept = values != 0
        # Six standard deviations of a binomial share.
        bound = 6 * (density * (1 - density) / values.size) ** 0.5
        assert abs(kept.mean() - density) < bound
        assert np.allclose(values[kept], 1 / density, rtol=1e-6)
        assert abs(values.mean() - 1) < bound / density
        # Neighbours are independent.
        assert abs((kept[1:] & kept[:-1]).mean() - density**2) < 2 * bound
    both = ((seeds[0].values != 0) & (seeds[2].values != 0)).mean()
    assert abs(both - density**2) < 2 * (density * (1 - density) / 120_000) ** 0.5 * 6


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_with_density_one_is_the_method_without(
    slice_repository: Repository, real: list[dict[str, Array]], method: str
) -> None:
    case = Case(method, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0))
    slice_repository.merge(case.recipe("base", EXPERTS), f"{method}-whole", seed=5)
    plain = Case("task_arithmetic" if method == "dare_linear" else "ties", case.weights)
    slice_repository.merge(plain.recipe("base", EXPERTS), f"{method}-plain")
    found, expected = (tensors_of(slice_repository, f"{method}-{kind}") for kind in ("whole", "plain"))
    assert found == expected


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_against_its_definition(slice_repository: Repository, real: list[dict[str, Array]], method: str) -> None:
    """The masks are found by merging each expert alone; together they have to give the defined sum."""
    base, *experts = real
    weights, densities = (0.5, 0.4, 0.3), (0.5, 0.7, 0.2)
    masks = []
    for i, label in enumerate(EXPERTS):
        # Only changed elements show whether they were kept; the others do not matter.
        alone = Case("dare_linear", (1.0,), (densities[i],))
        slice_repository.merge(alone.recipe("base", [label], "float32"), f"{method}-alone-{i}", seed=11)
        found = tensors_of(slice_repository, f"{method}-alone-{i}")
        masks.append({name: found[name].values != base[name].values for name in base})
    case = Case(method, weights, densities)
    slice_repository.merge(case.recipe("base", EXPERTS, "float32"), f"{method}-all", seed=11)
    found = tensors_of(slice_repository, f"{method}-all")
    for name, mine in base.items():
        deltas = np.stack(
            [
                w / d * np.where(mask[name], expert[name].values - mine.values, 0.0)
                for w, d, mask, expert in zip(weights, densities, masks, experts, strict=True)
            ]
        )
        total = deltas.sum(axis=0)
        if method == "dare_ties":
            elected = np.where(deltas.sum(axis=0) >= 0, 1.0, -1.0)
            deltas = np.where(np.sign(deltas) == elected, deltas, 0.0)
        expected = mine.values + deltas.sum(axis=0)
        # Where scaled deltas cancel exactly, which sign is elected hangs on the last bit.
        decided = np.abs(total) >= 1e-6 * np.abs(deltas).max(axis=0)
        assert np.allclose(found[name].values[decided], expected[decided], rtol=1e-6, atol=1e-9)
        assert decided.mean() > 0.99
