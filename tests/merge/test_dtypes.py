"""Base, experts and result in different dtypes: exact and under a budget, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import FLOATS, Array, array, fine_tuned, random_model, recipe_text, served, tensors_of, write_model
from numpy.typing import NDArray

from mergefs.recipe import Recipe
from mergefs.repository import Repository

Float64s = NDArray[np.float64]

MIXES = (("BF16", "F32"), ("F32", "BF16"), ("F16", "BF16"), ("F32", "F16"), ("BF16", "F16"))
"""Dtypes of the base and of its first expert; the second one has the base's."""

OUT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
EPSILON = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-23}


def models(kinds: tuple[str, str]) -> list[dict[str, Array]]:
    base = random_model(1, kinds[0])
    return [base, fine_tuned(base, 2, delta=2e-3, dtype=kinds[1]), fine_tuned(base, 3, delta=2e-3)]


def ingest(repository: Repository, folder: Path, made: list[dict[str, Array]]) -> None:
    for name, model in zip(("base", "x", "y"), made, strict=True):
        repository.ingest(write_model(folder / name, model), name, base=None if name == "base" else "base")


def recipe(method: str, dtype: str | None = None) -> Recipe:
    shared: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if method == "slerp":
        return Recipe.parse(recipe_text(method, ["x"], "base", t=0.3, **shared))
    each = {"weight": 0.6, **({"density": 0.5} if method == "ties" else {})}
    return Recipe.parse(recipe_text(method, [("x", each), ("y", each)], "base", **shared))


def define(method: str, base: Float64s, x: Float64s, y: Float64s) -> Float64s:
    if method == "slerp":
        if not base.any() or abs(cosine := base @ x / np.sqrt((base @ base) * (x @ x))) > 0.9995:
            return 0.7 * base + 0.3 * x
        angle = np.arccos(cosine)
        return (np.sin(0.7 * angle) * base + np.sin(0.3 * angle) * x) / np.sin(angle)
    if method == "task_arithmetic":
        return base + 0.6 * (x - base) + 0.6 * (y - base)
    kept = []
    for delta in (x - base, y - base):
        magnitude = np.abs(delta.astype(np.float32))
        least = np.sort(magnitude)[::-1][max(1, int(0.5 * delta.size)) - 1]
        kept.append(np.where(magnitude >= least, delta, 0.0))
    sign = np.where(kept[0] + kept[1] >= 0, 1.0, -1.0)
    agree = [(np.sign(part) == sign).astype(float) for part in kept]
    return base + (kept[0] * agree[0] + kept[1] * agree[1]) / np.maximum(agree[0] + agree[1], 1.0)


@pytest.mark.parametrize("kinds", MIXES)
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "slerp"])
@pytest.mark.parametrize("dtype", [None, *OUT])
def test_exact(repository: Repository, tmp_path: Path, kinds: tuple[str, str], method: str, dtype: str | None) -> None:
    made = models(kinds)
    ingest(repository, tmp_path, made)
    repository.merge(recipe(method, dtype), "merged")
    found = tensors_of(repository, "merged")
    for name, tensor in made[0].items():
        if tensor.dtype not in FLOATS:
            assert found[name] == tensor
            continue
        out = OUT[dtype] if dtype else kinds[0]
        assert found[name].dtype == out
        values = [model[name].values for model in made]
        want = define(method, *values)
        largest = np.abs([want, *values]).max(axis=0)
        off = np.abs(found[name].values - want)
        # Half a last place of the result; where models of few bits tie at a threshold, any rounding of it counts.
        assert (off <= 1.01 * EPSILON[out] * largest + 2.0**-24).mean() > 0.999, name
        right = array(want.reshape(tensor.shape), out)
        if out != "F32":
            # Of models of few bits, some merged elements lie between two numbers but for the last bits of a float64.
            assert np.count_nonzero(right.values != found[name].values) <= max(3, 3e-3 * off.size), name


@pytest.mark.parametrize("kinds", MIXES)
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_budgets(repository: Repository, tmp_path: Path, kinds: tuple[str, str], method: str) -> None:
    made = models(kinds)
    ingest(repository, tmp_path, made)
    whole = repository.plan(recipe(method))
    budget = whole.expert_bytes // 2
    report = repository.merge(recipe(method), "half", budget=str(budget))
    assert 0 < report.read.expert <= budget
    found = tensors_of(repository, "half")
    left = norm = 0.0
    for name, tensor in made[0].items():
        if tensor.dtype in FLOATS:
            values = [model[name].values for model in made]
            exact = define(method, *values)
            left += float(np.sum((found[name].values - exact) ** 2))
            norm += float(np.sum((exact - values[0]) ** 2))
    assert report.predicted_error is not None
    # The sample is small, and rounding to the output dtype is no error of the plan's.
    assert np.sqrt(left / norm) == pytest.approx(report.predicted_error, abs=0.25)
    assert np.sqrt(left / norm) < 1
    repository.merge(recipe(method), "lazy", budget=str(budget), lazy=True)
    assert served(repository, "lazy") == served(repository, "half")
    repository.merge(recipe(method), "exact")
    assert repository.refine("half", budget="100%").manifest == repository.resolve("exact")
