"""Slices: layers of several models stacked into one, against what mergekit's rules say, in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Array, new_repository, tensors_of, tree, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import expected
from tiny import HIDDEN, VOCABULARY, llama, llama_config, near, write, written
from transformers import AutoModelForCausalLM

from mergefs.errors import RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.statistics.tensor import load

LAYERS = 5
World = tuple[Repository, dict[str, dict[str, Array]]]
names = (f"stack-{number}" for number in count())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A base and three fine-tunes of five layers, one of which was ingested alone."""
    folder = tmp_path_factory.mktemp("slices")
    state = llama(0, LAYERS)
    models = {}
    with new_repository(folder / "repository") as repository:
        for seed, name in enumerate(("base", "a", "b", "alone")):
            mine = state if name == "base" else near(state, seed)
            models[name] = write(folder / name, mine, llama_config(LAYERS), "F32")
            repository.ingest(folder / name, name, base="base" if name in "ab" else None)
        yield repository, models


def source(model: str, first: int, stop: int, **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, "layer_range": [first, stop]}
    return {**found, "parameters": parameters} if parameters else found


def stacked(method: str, *slices: Any, base: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a recipe of slices, each a list of sources or a map."""
    value: dict[str, Any] = {"merge_method": method, **more}
    if base is not None:
        value["base_model"] = base
    value["slices"] = [part if isinstance(part, dict) else {"sources": part} for part in slices]
    return value


def merged(world: World, recipe: dict[str, Any], **options: Any) -> str:
    name = next(names)
    world[0].merge(Recipe.parse(json.dumps(recipe)), name, **options)
    return name


def check(world: World, recipe: dict[str, Any], **options: Any) -> None:
    """Merge, and compare with the definition."""
    repository, models = world
    wanted = expected(recipe, {n: {t: a.values.reshape(a.shape) for t, a in m.items()} for n, m in models.items()})
    found = tensors_of(repository, merged(world, recipe, **options))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape
        limit = 2**-22 * (1.0 + np.abs(wanted[name].ravel()))
        wrong = np.abs(tensor.values - wanted[name].ravel()) > limit
        # Of a trim threshold or an election, one element may be on the other side.
        assert wrong.sum() <= (1 if recipe["merge_method"] == "ties" else 0), name


# ------------------------------------------------------------------------------------------- against definitions


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes of one to four slices: overlapping, repeated, of no layers, of unequal numbers of models."""
    method = draw(st.sampled_from(["linear", "task_arithmetic", "ties", "slerp", "passthrough"]))
    based = method not in ("linear", "passthrough")
    slices = []
    for _ in range(draw(st.integers(1, 4))):
        layers = draw(st.integers(0, 3))
        most = {"slerp": 1, "passthrough": 1}.get(method, 3)
        sources = []
        for _ in range(draw(st.integers(1, most))):
            first = draw(st.integers(0, LAYERS - layers))
            own = {"scale": draw(st.sampled_from([1.0, 0.5]))} if method == "passthrough" else {}
            if method not in ("slerp", "passthrough"):
                own["weight"] = draw(SETTINGS)
            sources.append(source(draw(st.sampled_from(["a", "b", "alone"])), first, first + layers, **own))
        if based:
            first = draw(st.integers(0, LAYERS - layers))
            sources.insert(draw(st.integers(0, len(sources))), source("base", first, first + layers))
        part: dict[str, Any] = {"sources": sources}
        if method == "slerp" and draw(st.booleans()):
            part["parameters"] = {"t": draw(SETTINGS)}
        if method == "ties" and draw(st.booleans()):
            part["parameters"] = {"density": draw(SETTINGS)}
        slices.append(part)
    shared: dict[str, Any] = {"t": draw(SETTINGS)} if method == "slerp" else {}
    if method in ("linear", "task_arithmetic"):
        shared["normalize"] = draw(st.booleans())
    found = stacked(method, *slices, base="base" if based else None)
    if shared:
        found["parameters"] = shared
    return found


SETTINGS = st.sampled_from(
    [
        0.5,
        [0.25, 1.0],
        [0.2, 0.9, 0.4],
        [{"filter": "self_attn", "value": [0.1, 0.8]}, {"filter": "layers.2.", "value": 0.9}, {"value": 0.3}],
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes(), st.booleans())
def test_slices_are_merged_as_defined(world: World, recipe: dict[str, Any], lazy: bool) -> None:
    check(world, recipe, lazy=lazy)


def test_the_nearest_parameter_counts(world: World) -> None:
    attn = [{"filter": "self_attn", "value": 0.3}]
    slices = [
        {
            "sources": [source("a", 0, 3, weight=attn), source("b", 1, 4, weight=[{"filter": "k_proj", "value": 2}])],
            "parameters": {"weight": [{"filter": "mlp", "value": [0.1, 0.9]}]},
        },
        {"sources": [source("b", 2, 5)]},
    ]
    module = {"slices": slices, "parameters": {"weight": [{"filter": "layernorm", "value": 0.7}]}}
    recipe = {
        "merge_method": "linear",
        "modules": {"default": module},
        "parameters": {"weight": 0.5, "normalize": False},
    }
    asked = Recipe.parse(json.dumps(recipe))
    numbers = {kind: asked.numbers_of(f"model.layers.0.{kind}.weight", 6).weights for kind in KINDS}
    assert numbers == {
        "self_attn.q_proj": (0.3, 0.5),
        "self_attn.k_proj": (0.3, 2.0),
        "mlp.up_proj": (0.1, 0.1),
        "input_layernorm": (0.7, 0.7),
    }
    assert asked.numbers_of("model.layers.2.mlp.up_proj.weight", 6).weights == (0.9, 0.9)
    # The second slice has one model: the other one weighs nothing there.
    assert asked.numbers_of("model.layers.3.mlp.up_proj.weight", 6).weights == (0.5, 0.0)
    check(world, recipe)


KINDS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "input_layernorm")


def test_a_slices_own_base(world: World) -> None:
    own = {"sources": [source("a", 3, 5), source("base", 0, 2, weight=0.5)], "base_model": "a"}
    check(world, stacked("task_arithmetic", [source("base", 0, 2), source("b", 0, 2, weight=1)], own, base="base"))


def test_a_base_that_is_not_among_the_sources_has_their_layers(world: World) -> None:
    named = stacked(
        "ties", [source("base", 1, 4), source("b", 1, 4, weight=1), source("a", 1, 4, weight=1)], base="base"
    )
    silent = stacked("ties", [source("b", 1, 4, weight=1), source("a", 1, 4, weight=1)], base="base")
    assert tensors_of(world[0], merged(world, named)) == tensors_of(world[0], merged(world, silent))


def test_one_slice_of_everything_is_the_models_themselves(world: World) -> None:
    repository, _ = world
    whole = stacked("ties", [source("base", 0, 5), source("a", 0, 5, weight=1)], base="base")
    models = {
        **{k: v for k, v in whole.items() if k != "slices"},
        "models": [{"model": "a", "parameters": {"weight": 1}}],
    }
    ids = [repository.manifest(repository.resolve(merged(world, recipe))).lineage.base for recipe in (whole, models)]
    assert ids[0] == ids[1] == repository.resolve("base")


# ------------------------------------------------------------------------------------------------- what is shared


def test_stacks_know_what_is_known_of_their_models(world: World) -> None:
    repository, _ = world
    recipe = stacked("ties", [source("base", 1, 4), source("a", 1, 4)], base="base", parameters={"weight": 1})
    planned = repository.plan(Recipe.parse(json.dumps(recipe)), budget="60%")
    assert not planned.everything
    with repository.catalog.read() as txn:
        found = load(txn, planned.plan.experts[0], planned.plan.base, planned.base.tensor_by_name)
        origin = load(txn, repository.resolve("a"), repository.resolve("base"), ["model.layers.1.mlp.up_proj.weight"])
    # Nothing had to be read: the statistics are those of the ingest, under the stacks' names.
    assert found.keys() == planned.base.tensor_by_name.keys()
    copied = found["model.layers.0.mlp.up_proj.weight"]
    assert copied.encode() == origin["model.layers.1.mlp.up_proj.weight"].encode()
    report = repository.merge(Recipe.parse(json.dumps(recipe)), next(names), budget="60%")
    assert report.read.expert <= 0.6 * report.expert_raw_bytes


def test_a_stack_is_refined_materialized_and_collected(world: World) -> None:
    repository, _ = world
    recipe = stacked(
        "task_arithmetic", [source("base", 0, 3), source("a", 0, 3)], base="base", parameters={"weight": 1}
    )
    exact = tensors_of(repository, merged(world, recipe))
    coarse = merged(world, recipe, budget="50%", lazy=True)
    repository.gc()
    assert tensors_of(repository, coarse).keys() == exact.keys()
    repository.refine(coarse, budget="100%")
    repository.materialize(coarse)
    assert tensors_of(repository, coarse) == exact
    lineage = repository.manifest(repository.resolve(coarse)).lineage
    assert lineage.models == (repository.resolve("base"), repository.resolve("a"))
    repository.gc()
    assert repository.fsck(read_data=True).ok
    assert tensors_of(repository, coarse) == exact


def test_a_stack_loads(world: World, tmp_path: Path) -> None:
    repository, _ = world
    name = merged(
        world,
        stacked("linear", [source("a", 0, 4)], [source("b", 1, 1)], [source("alone", 2, 5)], parameters={"weight": 1}),
    )
    repository.export(name, tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == ["config.json", "model.safetensors"]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert model.config.num_hidden_layers == 7
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


# --------------------------------------------------------------------------------------------- files, heads, shapes


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repository") as made:
        yield made


def config_of(repository: Repository, name: str) -> dict[str, Any]:
    with repository.view(name) as view:
        found = json.loads(bytes(view.read("config.json")))
    assert isinstance(found, dict)
    return found


def passthrough(*parts: tuple[str, int, int], base: str | None = None) -> Recipe:
    return Recipe.parse(json.dumps(stacked("passthrough", *[[source(*part)] for part in parts], base=base)))


def test_lists_of_layers_in_configurations_are_stacked_too(repository: Repository, tmp_path: Path) -> None:
    for seed, (name, kinds) in enumerate({"x": "fffs", "y": "ssff"}.items()):
        config = llama_config(
            4, layer_types=list(kinds), mlp_only_layers=[0, 3], max_window_layers=4, eos_token_id=[1, 2, 3, 4]
        )
        write(tmp_path / name, llama(seed, 4), config)
        repository.ingest(tmp_path / name, name)
    repository.merge(passthrough(("x", 1, 4), ("y", 0, 2)), "m")
    config = config_of(repository, "m")
    assert config["num_hidden_layers"] == 5
    assert config["layer_types"] == list("ffsss")
    assert config["mlp_only_layers"] == [2, 3]
    assert config["max_window_layers"] == 4
    assert config["eos_token_id"] == [1, 2, 3, 4]


def test_many_files_become_one(repository: Repository, tmp_path: Path) -> None:
    tensors = written(llama(1, 4), "F16")
    half = len(tensors) // 2
    folder = tmp_path / "sharded"
    files = {}
    for number, part in enumerate((list(tensors)[:half], list(tensors)[half:])):
        write_model(tmp_path / f"part-{number}", {name: tensors[name] for name in part})
        files[f"model-{number + 1:05}-of-00002.safetensors"] = (
            tmp_path / f"part-{number}/model.safetensors"
        ).read_bytes()
    weight_map = {name: f"model-{1 + (n >= half):05}-of-00002.safetensors" for n, name in enumerate(tensors)}
    index = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()
    folder.mkdir()
    for path, content in {**files, "config.json": llama_config(4), "model.safetensors.index.json": index}.items():
        (folder / path).write_bytes(content)
    repository.ingest(folder, "x")
    repository.merge(passthrough(("x", 0, 3), ("x", 2, 4)), "m")
    with repository.view("m") as view:
        assert sorted(view.files) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (True, True)])
def test_heads_that_one_of_the_models_ties(repository: Repository, tmp_path: Path, first: bool, last: bool) -> None:
    for seed, (name, tied) in enumerate({"x": first, "y": last}.items()):
        write(tmp_path / name, llama(seed, 3, tied=tied), llama_config(3, tied=tied))
        repository.ingest(tmp_path / name, name)
    repository.merge(passthrough(("x", 0, 2), ("y", 1, 3)), "m")
    found, y = tensors_of(repository, "m"), tensors_of(repository, "y")
    assert ("lm_head.weight" in found) is not first
    if not first:
        assert found["lm_head.weight"] == y["model.embed_tokens.weight"]
    repository.export("m", tmp_path / "out")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]


def test_what_does_not_go_together_is_refused(repository: Repository, tmp_path: Path) -> None:
    write(tmp_path / "x", llama(0, 3), llama_config(3))
    write(tmp_path / "rows", llama(1, 3, rows=VOCABULARY + 2), llama_config(3, rows=VOCABULARY + 2))
    narrow = {n: v[..., : HIDDEN // 2] if "q_proj" in n else v for n, v in llama(2, 3).items()}
    write(tmp_path / "narrow", narrow, llama_config(3))
    renamed = {name.replace("model.layers", "decoder.block"): values for name, values in llama(3, 3).items()}
    write(tmp_path / "renamed", renamed, llama_config(3))
    two = {name.replace("model", "vision"): values for name, values in llama(4, 3).items()}
    write(tmp_path / "two", {**llama(4, 3), **two}, llama_config(3))
    for name in ("x", "rows", "narrow", "renamed", "two"):
        repository.ingest(tmp_path / name, name)
    for other, message in {
        "rows": "'model.embed_tokens.weight' of the stack has 48 rows and 'lm_head.weight' 50",
        "narrow": r"'model.layers.1.self_attn.q_proj.weight' has shape \[16, 8\] in 'narrow'",
        "renamed": r"'renamed' names its layers 'decoder.block.\*' and 'x' 'model.layers.\*'",
        "two": "'two' has 2 stacks of layers",
    }.items():
        with pytest.raises(RecipeError, match=message):
            repository.merge(passthrough(("x", 0, 2), (other, 1, 3)), "m")
    with pytest.raises(RecipeError, match="slice 2 takes layers 1 to 3 of 'x', which has 3 layers"):
        repository.merge(passthrough(("x", 0, 2), ("x", 1, 4)), "m")
    apart = stacked("slerp", [source("x", 0, 1), source("narrow", 1, 2)], base="rows", parameters={"t": 0.5})
    with pytest.raises(RecipeError, match="merges 1 model"):
        Recipe.parse(json.dumps(apart))
    apart = stacked("ties", [source("x", 0, 1), source("x", 1, 2)], base="rows", parameters={"weight": 1})
    with pytest.raises(RecipeError, match="slice 1 does not say which layers of its base 'rows'"):
        repository.merge(Recipe.parse(json.dumps(apart)), "m")
    assert "m" not in repository.refs()
