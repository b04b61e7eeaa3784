"""Methods on spheres against whole-vector definitions in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import array, forget, new_repository, recipe_text, tensors_of, write_model
from numpy.typing import NDArray

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import BudgetError, RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

BF16 = DTYPES["BF16"]
SHAPES = {"wide.w": (300, 200), "parallel.w": (64, 64), "norm": (40,), "still.w": (30, 30)}
MODELS = ("base", "x", "y", "z")
Vector = NDArray[np.float64]


def unit(v: Vector) -> Vector:
    return v / np.linalg.norm(v)


def arc(t: float, a: Vector, b: Vector) -> Vector:
    angle = np.arccos(np.clip(unit(a) @ unit(b), -1, 1))
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def slerp(base: Vector, x: Vector) -> Vector:
    cosine = unit(base) @ unit(x)
    return 0.7 * base + 0.3 * x if abs(cosine) > 0.9995 else arc(0.3, base, x)


def nuslerp(x: Vector, y: Vector) -> Vector:
    return arc(0.75, x, y)


def nuslerp_of_deltas(base: Vector, x: Vector, y: Vector) -> Vector:
    if not (x - base).any():
        return base
    return base + arc(0.75, x - base, y - base)


def multislerp(vectors: list[Vector], weights: list[float]) -> Vector:
    w = np.array(weights) / sum(weights)
    lengths = np.array([np.linalg.norm(v) for v in vectors])
    units = np.stack(vectors) / (lengths + 1e-8)[:, None]
    mean = unit(w @ units)
    tangent = w @ (units - np.outer(units @ mean, mean))
    angle = np.linalg.norm(tangent) + 1e-8
    return (mean * np.cos(angle) + tangent * np.sin(angle) / angle) * (w @ lengths)


def karcher(vectors: list[Vector]) -> Vector:
    """The mean on the sphere, found by many small steps; what ten large ones come near."""
    units = np.stack([unit(v) for v in vectors])
    mean = unit(units.mean(axis=0))
    for _ in range(200):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        scale = np.where(angles < 1e-12, 1.0, angles / np.maximum(np.sin(angles), 1e-300))
        step = (scale[:, None] * (units - np.outer(cosines, mean))).mean(axis=0)
        length = np.linalg.norm(step)
        if length < 1e-14:
            break
        mean = unit(np.cos(length) * mean + np.sin(length) * step / length)
    return mean * np.mean([np.linalg.norm(v) for v in vectors])


def model_stock(base: Vector, *experts: Vector) -> Vector:
    deltas = [x - base for x in experts]
    cosines = []
    for i, a in enumerate(deltas):
        for b in deltas[i + 1 :]:
            cosines.append(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-6))
    cosine = np.mean(cosines)
    t = len(deltas) * cosine / (1 + (len(deltas) - 1) * cosine)
    return t * np.mean(experts, axis=0) + (1 - t) * base


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, Vector]]:
    random = np.random.default_rng(3)

    def rounded(values: Vector) -> Vector:
        return values.astype(BF16.numpy).astype(np.float64)

    base = {name: rounded(random.standard_normal(shape) * 0.1) for name, shape in SHAPES.items()}
    spread = {"wide.w": 0.08, "parallel.w": 1e-3, "norm": 0.05, "still.w": 0.0}
    common = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    found = {"base": base}
    for model in MODELS[1:]:
        found[model] = {
            n: rounded(base[n] + spread[n] * (0.5 * common[n] + random.standard_normal(s))) for n, s in SHAPES.items()
        }
    return found


@pytest.fixture
def repository(models: dict[str, dict[str, Vector]], tmp_path: Path) -> Iterator[Repository]:
    folder = tmp_path
    with Repository.init(folder / "repository", 1 << 14) as made:
        for model, tensors in models.items():
            header = build_header([(n, BF16, SHAPES[n]) for n in SHAPES], None)
            path = folder / f"{model}.safetensors"
            path.write_bytes(header + b"".join(tensors[n].astype(BF16.numpy).tobytes() for n in SHAPES))
            made.ingest(path, model, base=None if model == "base" else "base")
        yield made


def recipe(method: str, models: dict[str, str], *, base: bool = True, extra: str = "") -> Recipe:
    text = f"merge_method: {method}\n{extra}" + ("base_model: base\n" if base else "") + "models:\n"
    return Recipe.parse(text + "".join(f"- {{model: {m}, parameters: {{{p}}}}}\n" for m, p in models.items()))


CASES: dict[str, tuple[Recipe, Callable[..., Vector], tuple[str, ...]]] = {
    "slerp": (recipe("slerp", {"x": ""}, extra="parameters: {t: 0.3}\n"), slerp, ("base", "x")),
    "nuslerp": (recipe("nuslerp", {"x": "weight: 1", "y": "weight: 3"}, base=False), nuslerp, ("x", "y")),
    "nuslerp of deltas": (
        recipe("nuslerp", {"x": "weight: 1", "y": "weight: 3"}),
        nuslerp_of_deltas,
        ("base", "x", "y"),
    ),
    "multislerp": (
        recipe("multislerp", {"x": "weight: 1", "y": "weight: 2", "z": "weight: 0.5"}, base=False),
        lambda *v: multislerp(list(v), [1, 2, 0.5]),
        ("x", "y", "z"),
    ),
    "karcher": (
        recipe("karcher", {"x": "", "y": "", "z": ""}, base=False, extra="parameters: {max_iter: 100, tol: 1.0e-10}\n"),
        lambda *v: karcher(list(v)),
        ("x", "y", "z"),
    ),
    "model_stock": (recipe("model_stock", {"x": "", "y": "", "z": ""}), model_stock, MODELS),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lazy", [False, True])
def test_it_is_what_the_definition_says(
    repository: Repository, models: dict[str, dict[str, Vector]], case: str, lazy: bool
) -> None:
    asked, oracle, names = CASES[case]
    repository.merge(asked, "m", lazy=lazy)
    with repository.view("m") as view:
        for name in SHAPES:
            if name == "still.w" and case == "model_stock":
                expected = models["base"][name]  # no delta has a direction there
            else:
                with np.errstate(invalid="ignore"):
                    expected = oracle(*(models[m][name].ravel() for m in names))
                if name == "still.w":
                    expected = models["base"][name]
            rounded = expected.astype(np.float32).astype(BF16.numpy).view(np.uint16).ravel().astype(np.int32)
            found = view.tensor(name).view(torch.uint16).numpy().ravel().astype(np.int32)
            apart = np.abs(found - rounded)
            assert apart.max() <= 1, name
            assert (apart == 0).mean() >= 0.999, name


def test_products_are_measured_once_and_kept(repository: Repository) -> None:
    asked = recipe("model_stock", {"x": "", "z": ""}, extra="dtype: float32\n")
    first, second = (repository.merge(asked, "m") for _ in range(2))
    assert first.manifest == second.manifest
    assert second.read.expert < first.read.expert
    planned = repository.plan(asked, budget="10%")
    assert planned.expert_bytes <= planned.budget_bytes


def test_a_budget_before_the_products_are_known_is_refused(repository: Repository) -> None:
    with pytest.raises(BudgetError, match="merge once without a budget"):
        repository.plan(recipe("model_stock", {"y": "", "x": "", "z": ""}, extra=""), budget="1%")


@pytest.mark.parametrize(
    ("method", "count", "message"),
    [("slerp", 2, "merges 1 model"), ("nuslerp", 1, "merges 2 model"), ("model_stock", 1, "at least 2 model")],
)
def test_the_number_of_models_is_checked(method: str, count: int, message: str) -> None:
    parameters = "weight: 1" if method == "nuslerp" else ""
    extra = "parameters: {t: 0.5}\n" if method == "slerp" else ""
    with pytest.raises(RecipeError, match=message):
        recipe(method, {f"m{n}": parameters for n in range(count)}, extra=extra)


def test_products_that_are_kept_are_those_of_the_models(tmp_path: Path) -> None:
    """Without a base the first model stands for it, and with another base the same models have other products."""
    random = np.random.default_rng(8)
    with new_repository(tmp_path / "repository") as repository:
        tensors = {name: array(random.normal(0, 1, (40, 50)), "BF16") for name in MODELS}
        for name, tensor in tensors.items():
            repository.ingest(write_model(tmp_path / name, {"w": tensor}), name)
        text = recipe_text("multislerp", [("x", {"weight": 1}), ("y", {"weight": 1})], dtype="float32")
        wanted = multislerp([tensors["x"].values, tensors["y"].values], [1, 1])
        others = recipe_text("slerp", ["y"], "x", t=0.3)
        for number in range(3):
            forget(repository)
            repository.merge(Recipe.parse(text), "merged")
            assert np.allclose(tensors_of(repository, "merged")["w"].values, wanted, atol=1e-6), number
            repository.merge(Recipe.parse(others), "other")
