"""Public example recipes of mergekit's `examples/` folder, with the names of tiny local models in place of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from builders import Array, new_repository, tensors_of
from oracle import expected
from tiny import gpt2, gpt2_config, llama, llama_config, near, write
from transformers import AutoModelForCausalLM

from mergefs.cli import cli
from mergefs.errors import RecipeError
from mergefs.merge import registry
from mergefs.recipe import Recipe
from mergefs.repository import Repository

EXAMPLES = Path(__file__).parent / "examples"
FAMILIES = {
    "llama-2": ("orca-mini", "platypus", "wizard-lm", "wizard-math"),
    "mistral": ("mistral-instruct", "biomistral"),
    "florence-2-base": ("florence-2-screen-qa",),
    "qwen2-vl": ("qwen2-vl-instruct", "qwen2-vl-captioner"),
    "model_a": ("model_b",),
}
"""Models by the name of what they are fine-tunes of."""
LAYERS = {"llama-2": 40, "mistral": 32, "florence-2-base": 6, "qwen2-vl": 28, "model_a": 4}

World = tuple[Repository, dict[str, dict[str, Array]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A repository of all models that the examples name, and their tensors."""
    folder = tmp_path_factory.mktemp("examples")
    models = {}
    with new_repository(folder / "repository") as repository:
        for seed, (base, tunes) in enumerate(FAMILIES.items()):
            state, config = llama(seed, LAYERS[base]), llama_config(LAYERS[base])
            for number, name in enumerate((base, *tunes)):
                mine = state if name == base else near(state, 100 * seed + number)
                models[name] = write(folder / name, mine, config)
                repository.ingest(folder / name, name, base=None if name == base else base)
        models["gpt2"] = write(folder / "gpt2", gpt2(7), gpt2_config())
        repository.ingest(folder / "gpt2", "gpt2")
        yield repository, models


def check(merged: dict[str, Array], recipe: dict[str, Any], models: dict[str, dict[str, Array]]) -> None:
    """Check merged tensors against the definition."""
    exact = expected(recipe, {n: {t: a.values.reshape(a.shape) for t, a in m.items()} for n, m in models.items()})
    assert merged.keys() == exact.keys()
    dtype = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[recipe["dtype"]]
    step = {"F16": 2**-11, "BF16": 2**-8, "F32": 2**-23}[dtype]
    away = total = 0
    for name, tensor in merged.items():
        assert tensor.dtype == dtype
        assert tensor.shape == exact[name].shape
        wrong = np.abs(tensor.values - exact[name].ravel()) > 1.01 * step * np.abs(exact[name].ravel()) + 1e-7
        away, total = away + int(wrong.sum()), total + wrong.size
    # Float16 deltas are equal often, also at a threshold; a sign of a sum near 0 may be elected either way.
    assert away <= 1e-4 * total


def runs(repository: Repository, name: str, folder: Path, layers: int) -> None:
    """Check that transformers loads a model whole, and that it computes something."""
    repository.export(name, folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_hidden_layers == layers
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize(
    "name",
    ["bio-merge", "gradient-slerp", "linear", "ties", "vlm-linear", "vlm-ties", "gpt2-small", "orcamini-platy-44layer"],
)
def test_an_example_is_what_its_definition_says(world: World, tmp_path: Path, name: str) -> None:
    repository, models = world
    path = EXAMPLES / f"{name}.yml"
    repository.merge(Recipe.load(path), name)
    check(tensors_of(repository, name), yaml.safe_load(path.read_text()), models)
    layers = {"bio-merge": 32, "vlm-ties": 6, "vlm-linear": 28, "gpt2-small": 8, "orcamini-platy-44layer": 44}
    runs(repository, name, tmp_path / "out", layers.get(name, 40))


@pytest.mark.parametrize("name", ["gpt2-small", "orcamini-platy-44layer"])
@pytest.mark.parametrize("lazy", [False, True])
def test_stacked_layers_share_every_block(world: World, name: str, lazy: bool) -> None:
    repository, _ = world
    recipe = Recipe.load(EXAMPLES / f"{name}.yml")
    planned = repository.plan(recipe, budget="1%")
    assert planned.everything
    assert planned.expert_bytes == 0
    report = repository.merge(recipe, f"shared-{name}", lazy=lazy, budget="1%")
    assert report.read.expert == report.read.base == 0
    assert report.blocks.derived == report.blocks.lazy == 0
    manifest = repository.manifest(report.manifest)
    assert not manifest.is_lazy
    weights = sum(tensor.nbytes for tensor in manifest.tensors)
    # A header, a configuration and manifests.
    assert report.written_bytes < 1000 * len(manifest.tensors)
    assert repository.stats().raw_bytes > weights


def test_a_method_of_the_examples(world: World) -> None:
    if "arcee_fusion" not in registry.names():
        pytest.skip("there is no arcee_fusion yet")
    repository, models = world
    report = repository.merge(Recipe.load(EXAMPLES / "arcee_fusion.yml"), "fused")
    merged = tensors_of(repository, report.ref)
    assert merged.keys() == models["model_a"].keys()
    for name, tensor in merged.items():
        a, b = (models[model][name].values for model in ("model_a", "model_b"))
        near_one = np.minimum(np.abs(tensor.values - a), np.abs(tensor.values - b))
        assert (near_one <= 2**-8 * np.maximum(np.abs(a), np.abs(b))).all()


def test_a_file_of_several_recipes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    repository, models = world
    command = ["-R", str(repository.path), "merge", str(EXAMPLES / "mega.yml"), "--as", "mega", "--json"]
    cli.main(command, standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert [part["ref"] for part in report["earlier"]] == ["mega.gradient-slerp"]
    first, second = yaml.safe_load_all((EXAMPLES / "mega.yml").read_text())
    slerped = tensors_of(repository, "mega.gradient-slerp")
    check(slerped, first, models)
    check(tensors_of(repository, "mega"), second, models | {"gradient-slerp": slerped})
    with pytest.raises(RecipeError, match=r"mega.yml, line 19: another recipe begins"):
        Recipe.load(EXAMPLES / "mega.yml")
