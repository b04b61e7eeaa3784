"""Blocks that are merged part by part: the same bytes as at once, whatever the parts and however experts are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import array, fine_tuned, forget, recipe_text, write_model

from mergefs.merge import derive, registry
from mergefs.recipe import Recipe
from mergefs.repository import Repository

PARTS: dict[str, dict[str, float]] = {
    "linear": {},
    "task_arithmetic": {"scale": 0.6},
    "slerp": {"t": 0.3},
    "ties": {"density": 0.333, "scale": 0.9},
    "dare_linear": {"density": 0.4},
    "dare_ties": {"density": 0.7, "normalize": True},
    "breadcrumbs": {"density": 0.6, "gamma": 0.05},
    "breadcrumbs_ties": {"density": 0.6, "gamma": 0.05},
}
BLOCK = 1 << 17


@pytest.fixture(scope="module", params=["quick", "fast"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with a base and three experts: one changed everywhere, one in a few rows, one unrelated in part."""
    folder = tmp_path_factory.mktemp("parts")
    random = np.random.default_rng(5)
    values = 0.02 * random.standard_normal((520, 300))
    base = {"layer.weight": array(values, "BF16")}
    everywhere, other = fine_tuned(base, 2), fine_tuned(base, 3)["layer.weight"].values.reshape(520, 300)
    few = np.where(np.arange(520)[:, None] % 128 < 6, other, base["layer.weight"].values.reshape(520, 300))
    half = np.where(np.arange(520)[:, None] < 200, -7 * values, other)
    rows, unrelated = ({"layer.weight": array(found, "BF16")} for found in (few, half))
    with Repository.init(folder / "repository", block_size=BLOCK, exact=request.param) as repository:
        repository.ingest(write_model(folder / "base", base), "base")
        for name, model in {"x": everywhere, "y": rows, "z": unrelated}.items():
            repository.ingest(write_model(folder / name, model), name, base="base")
        yield repository


@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize("budget", [None, "30%"])
def test_parts_give_the_bytes_of_the_whole(
    models: Repository, monkeypatch: pytest.MonkeyPatch, method: str, budget: str | None
) -> None:
    experts = ["z"] if method == "slerp" else ["x", "y", "z"]
    own: dict[str, float] = {} if method == "slerp" else {"weight": 0.5}
    recipe = Recipe.parse(recipe_text(method, [(model, own) for model in experts], "base", **PARTS[method]))
    models.merge(recipe, method, budget=budget, seed=3)  # which measures what a plan needs
    found = []
    for part in (1 << 30, 960, 64, 1 << 14):
        monkeypatch.setattr(derive, "PART", part)
        forget(models)
        report = models.merge(recipe, method, budget=budget, seed=3)
        assert report.read.expert > 0
        found.append((report.manifest, report.read))
    assert found == found[:1] * 4
    assert registry.method(method).by_parts


LOOPS: dict[str, dict[str, object]] = {
    "linear": {},
    "task_arithmetic": {"scale": 0.6, "normalize": True},
    "slerp": {"t": 0.3},
    "ties": {"density": 0.333, "scale": 0.9},
    "dare_linear": {"density": 0.4},
    "dare_ties": {"density": 0.7, "normalize": True, "rescale": True},
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with a base and three experts, changed everywhere, in part, and so much that it takes bytes."""
    folder = tmp_path_factory.mktemp("loops")
    values = 0.02 * np.random.default_rng(8).standard_normal((331, 301))
    base = {"layer.weight": array(values, "BF16")}
    with Repository.init(folder / "repository", block_size=BLOCK, exact="quick") as repository:
        repository.ingest(write_model(folder / "base", base), "base")
        for name, (seed, scale) in {"x": (2, 1e-4), "y": (3, 3e-4), "z": (4, 3e-3)}.items():
            delta = scale * np.random.default_rng(seed).standard_normal(values.shape)
            if name == "y":
                delta[np.arange(331) % 7 > 2] = 0  # so that whole runs of elements are left out
            model = {"layer.weight": array(values + delta, "BF16")}
            repository.ingest(write_model(folder / name, model), name, base="base")
        yield repository


@pytest.mark.parametrize("method", LOOPS)
def test_loops_over_tiers_give_the_same_bytes(
    changed: Repository, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    experts = ["y"] if method == "slerp" else ["x", "y", "z"]
    own: dict[str, float] = {} if method == "slerp" else {"weight": 0.5}
    recipe = Recipe.parse(recipe_text(method, [(model, own) for model in experts], "base", **LOOPS[method]))
    changed.merge(recipe, method, seed=3)  # which measures what a plan needs
    kind = type(registry.method(method))
    loop, used = kind.loop, []

    def spied(*arguments: Any) -> Any:
        used.append(arguments)
        return loop(*arguments)

    monkeypatch.setattr(kind, "loop", spied)
    forget(changed)
    looped = changed.merge(recipe, method, seed=3)
    assert len(used) == 2  # blocks
    monkeypatch.setattr(kind, "loop", lambda *arguments: None)
    forget(changed)
    assert changed.merge(recipe, method, seed=3).manifest == looped.manifest
