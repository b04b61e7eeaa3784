"""Breadcrumbs, DELLA, nearswap and passthrough against whole-tensor definitions in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

F32 = DTYPES["F32"]
SHAPES = {"w": (400, 96), "v": (700,)}
Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, Array]]:
    random = np.random.default_rng(11)
    base = {n: random.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    found = {"base": base}
    for model in ("x", "y"):
        found[model] = {n: (base[n] + 0.1 * random.standard_normal(s)).astype(np.float32) for n, s in SHAPES.items()}
    return {m: {n: v.astype(np.float64) for n, v in tensors.items()} for m, tensors in found.items()}


@pytest.fixture
def repository(models: dict[str, dict[str, Array]], tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repository", 1 << 14) as made:
        for model, tensors in models.items():
            header = build_header([(n, F32, SHAPES[n]) for n in SHAPES], None)
            path = tmp_path / f"{model}.safetensors"
            path.write_bytes(header + b"".join(tensors[n].astype(np.float32).tobytes() for n in SHAPES))
            made.ingest(path, model, base=None if model == "base" else "base")
        yield made


def merged(
    repository: Repository, method: str, own: str, shared: str = "", experts: str = "xy", **options: object
) -> dict[str, Array]:
    text = (
        f"merge_method: {method}\nbase_model: base\n" + (f"parameters: {{{shared}}}\n" if shared else "") + "models:\n"
    )
    asked = Recipe.parse(text + "".join(f"- {{model: {e}, parameters: {{{own}}}}}\n" for e in experts))
    repository.merge(asked, "m", **options)
    with repository.view("m") as view:
        return {n: view.tensor(n).double().numpy() for n in SHAPES}


def deltas(models: dict[str, dict[str, Array]], name: str) -> list[Array]:
    return [(models[m][name] - models["base"][name]).astype(np.float32).astype(np.float64) for m in "xy"]


def crumbs(delta: Array, density: float, gamma: float) -> Array:
    order = np.argsort(np.abs(delta), axis=None, kind="stable")
    count = int(density * delta.size)
    smallest = max(0, delta.size - count - int(gamma * delta.size))
    kept = np.zeros(delta.size)
    kept[order[smallest : smallest + count]] = delta.ravel()[order[smallest : smallest + count]]
    return kept.reshape(delta.shape)


def elected(parts: list[Array], weights: list[float]) -> Array:
    weighted = [w * p for w, p in zip(weights, parts, strict=True)]
    up = np.sum(weighted, axis=0) >= 0
    return np.sum([np.where(np.where(up, p > 0, p < 0), p, 0) for p in weighted], axis=0)


@pytest.mark.parametrize(("density", "gamma"), [(0.5, 0.01), (0.9, 0.05), (0.98, 0.1), (0.3, 0.0), (1.0, 0.2)])
@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
def test_breadcrumbs_lose_both_ends(
    repository: Repository, models: dict[str, dict[str, Array]], method: str, density: float, gamma: float
) -> None:
    found = merged(repository, method, f"weight: 0.7, density: {density}, gamma: {gamma}")
    for name in SHAPES:
        parts = deltas(models, name)
        if density < 1:
            parts = [crumbs(part, density, gamma) for part in parts]
        sums = 0.7 * np.sum(parts, axis=0) if method == "breadcrumbs" else elected(parts, [0.7, 0.7])
        assert np.allclose(found[name], models["base"][name] + sums, rtol=1e-6, atol=1e-6)


def chances(delta: Array, density: float, epsilon: float) -> Array:
    rows = np.atleast_2d(delta)
    ranks = np.argsort(np.argsort(np.abs(rows), axis=1, kind="stable"), axis=1)
    return (density - epsilon + 2 * epsilon * ranks / (rows.shape[1] - 1)).reshape(delta.shape)


def test_della_keeps_each_element_with_its_chance_and_the_expected_delta(
    repository: Repository, models: dict[str, dict[str, Array]]
) -> None:
    draws = 60
    delta: dict[str, Array] = {}
    chance: dict[str, Array] = {}
    for name in SHAPES:
        delta[name] = deltas(models, name)[0]
        chance[name] = chances(delta[name], 0.6, 0.2)
    kept = {n: np.zeros(s) for n, s in SHAPES.items()}
    for seed in range(draws):
        found = merged(repository, "della_linear", "weight: 1, density: 0.6, epsilon: 0.2", experts="x", seed=seed)
        for name in SHAPES:
            change = found[name] - models["base"][name]
            stays = np.abs(change) > np.abs(delta[name]) / 2
            assert np.allclose(change[stays], (delta[name] / chance[name])[stays], rtol=1e-4, atol=1e-6)
            assert np.allclose(change[~stays], 0, atol=1e-6)
            kept[name] += stays
    for name in SHAPES:
        wide = 5 * np.sqrt(chance[name] * (1 - chance[name]) / draws)
        assert (np.abs(kept[name] / draws - chance[name]) < wide).mean() > 0.999
        apart = (kept[name].sum() - draws * chance[name].sum()) / np.sqrt(
            draws * (chance[name] * (1 - chance[name])).sum()
        )
        assert abs(apart) < 4


def test_della_is_the_same_lazy_and_on_one_thread(repository: Repository) -> None:
    own = "weight: 0.5, density: 0.4, epsilon: 0.3"
    first = merged(repository, "della", own, seed=3)
    for options in ({"threads": 1}, {"lazy": True}):
        again = merged(repository, "della", own, seed=3, **options)
        assert all(np.array_equal(first[n], again[n]) for n in SHAPES)
    assert not np.array_equal(first["w"], merged(repository, "della", own, seed=4)["w"])


@pytest.mark.parametrize("epsilon", [0.4, 0.5])
def test_della_refuses_chances_beyond_0_and_1(repository: Repository, epsilon: float) -> None:
    with pytest.raises(RecipeError, match="lower epsilon"):
        merged(repository, "della", f"weight: 1, density: 0.6, epsilon: {epsilon}")


def test_nearswap_goes_as_far_as_t(repository: Repository, models: dict[str, dict[str, Array]]) -> None:
    found = merged(repository, "nearswap", "", shared="t: 0.05", experts="x")
    for name in SHAPES:
        delta = deltas(models, name)[0]
        expected = models["base"][name] + delta * np.minimum(1, 0.05 / np.maximum(np.abs(delta), 1e-6))
        assert np.allclose(found[name], expected, rtol=1e-6, atol=1e-6)


def test_passthrough_is_the_model_itself_or_scaled(repository: Repository, models: dict[str, dict[str, Array]]) -> None:
    for text, factor in (("", 1.0), ("scale: 0.5", 0.5)):
        found = merged(repository, "passthrough", text, experts="x")
        for name in SHAPES:
            assert np.allclose(found[name], factor * models["x"][name], rtol=1e-6, atol=1e-6)
            if factor == 1.0:
                assert np.array_equal(found[name], models["x"][name])
    report = repository.merge(Recipe.parse("merge_method: passthrough\nmodels:\n- model: x\n"), "same")
    assert (report.blocks.derived, report.read.expert) == (0, 0)


@pytest.mark.parametrize("method", ["breadcrumbs", "della", "nearswap"])
def test_they_can_be_merged_under_a_budget(repository: Repository, method: str) -> None:
    own = "" if method == "nearswap" else "weight: 0.5, density: 0.5"
    experts = "x" if method == "nearswap" else "xy"
    merged(repository, method, own, shared="t: 0.1" if method == "nearswap" else "", experts=experts, budget="60%")
