"""Gradients and filters of a recipe's parameters: what mergekit's rules say, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

F32 = DTYPES["F32"]


def recipe(weights: str, extra: str = "", method: str = "task_arithmetic") -> Recipe:
    text = f"merge_method: {method}\nbase_model: base\n{extra}models:\n"
    return Recipe.parse(text + f"- {{model: x, parameters: {{weight: {weights}}}}}\n")


def weight(asked: Recipe, tensor: str, position: float) -> float:
    return asked.numbers(tensor, position).weights[0]


def test_a_gradient_is_interpolated_over_the_layers() -> None:
    asked = recipe("[0, 1, 0.5]")
    assert [weight(asked, "w", p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 0.75, 0.5]
    assert weight(recipe("[0.7]"), "w", 0.4) == 0.7


def test_the_first_filter_that_fits_counts() -> None:
    asked = recipe("[{filter: mlp, value: [0, 1]}, {filter: up, value: 3}, {filter: '*', value: 2}, {value: 9}]")
    assert weight(asked, "layers.1.mlp.up", 0.5) == 0.5
    assert weight(asked, "layers.1.up", 0.5) == 3
    assert weight(asked, "norm", 0.5) == 2
    assert weight(recipe("{filter: mlp, value: 1}", "parameters: {weight: 4}\n"), "norm", 0.0) == 4


def test_a_models_own_setting_goes_before_the_recipes() -> None:
    asked = recipe("[{filter: mlp, value: 1}]", "parameters: {weight: [{filter: attn, value: 5}, {value: 6}]}\n")
    assert [weight(asked, name, 0.0) for name in ("mlp.w", "attn.w", "norm")] == [1, 5, 6]


def test_a_tensor_that_all_filters_miss_is_named() -> None:
    with pytest.raises(RecipeError, match="model x has no weight for tensor 'norm'"):
        recipe("[{filter: mlp, value: 1}]").numbers("norm", 0.0)


def test_flags_are_not_interpolated() -> None:
    asked = recipe("1", "parameters: {normalize: [false, true]}\n", "ties")
    assert [asked.numbers("w", p).shared["normalize"] for p in (0.0, 0.9, 1.0)] == [False, False, True]


@pytest.mark.parametrize("lazy", [False, True])
def test_every_tensor_is_merged_with_its_own_weight(tmp_path: Path, lazy: bool) -> None:
    names = ["embed.w", *(f"model.layers.{n}.{part}.w" for n in range(3) for part in ("mlp", "attn")), "head.w"]
    random = np.random.default_rng(0)
    models = {m: {n: random.standard_normal((8, 16)).astype(np.float32) for n in names} for m in ("base", "x")}
    with Repository.init(tmp_path / "r") as repository:
        for model, tensors in models.items():
            header = build_header([(n, F32, tensors[n].shape) for n in names], None)
            path = tmp_path / f"{model}.safetensors"
            path.write_bytes(header + b"".join(tensors[n].tobytes() for n in names))
            repository.ingest(path, model, base="base" if model == "x" else None)
        asked = recipe("[{filter: mlp, value: [0, 0.5, 1]}, {filter: layers, value: [1, 0]}, {value: 0.25}]")
        repository.merge(asked, "m", lazy=lazy)
        expected = {"embed.w": 0.25, "head.w": 0.25}
        expected |= {f"model.layers.{n}.mlp.w": n / 2 for n in range(3)}
        expected |= {f"model.layers.{n}.attn.w": 1 - n / 2 for n in range(3)}
        with repository.view("m") as view:
            for name, factor in expected.items():
                base, x = (models[m][name].astype(np.float64) for m in ("base", "x"))
                exact = (base + factor * (models["x"][name] - models["base"][name])).astype(np.float32)
                assert np.allclose(view.tensor(name).numpy(), exact, rtol=1e-6, atol=1e-7), name
                assert (factor == 0) == np.array_equal(view.tensor(name).numpy(), models["base"][name])
                assert x.shape == base.shape
