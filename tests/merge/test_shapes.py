"""Models whose tensors' names and shapes differ: other vocabularies, tied heads, tensors that only some have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Array, array, new_repository, recipe_text, sha256, tensors_of, write_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mergefs.errors import RecipeError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = {"base": 1000, "fewer": 940, "more": 1088}
"""Vocabularies; a block of the finest size holds 64 rows of 32 elements, so that all of them end within a block."""


def make(folder: Path, rows: int, *, tied: bool, seed: int, around: dict[str, Any] | None = None) -> Path:
    """Write a small Llama; `around` is the state of the model that it is a fine-tune of."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            max_position_embeddings=64,
        )
    )
    state = model.state_dict()
    for name, values in (around or {}).items():
        if name in state:
            common = min(len(values), len(state[name]))
            noise = 0.01 * torch.randn_like(values[:common])
            state[name][:common] = values[:common] + noise
    model.load_state_dict(state)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values.float() for name, values in LlamaForCausalLM.from_pretrained(folder).state_dict().items()}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repository") as made:
        yield made


def runs(repository: Repository, name: str, folder: Path) -> dict[str, Any]:
    """Export a model, load it and run it once; return what loading it said."""
    repository.export(name, folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        scores = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(scores).all()
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert scores.shape[-1] == model.config.vocab_size
    return dict(info)


def expected_rows(base: Array, expert: Array) -> np.ndarray[Any, Any]:
    """Half of the expert's delta on the rows that both have, the base's elsewhere, in float64."""
    result = base.values.reshape(base.shape).copy()
    common = min(len(result), expert.shape[0])
    theirs = expert.values.reshape(expert.shape)[:common]
    result[:common] += 0.5 * (theirs - result[:common])
    return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("other", ["fewer", "more"])
@pytest.mark.parametrize("lazy", [False, True])
def test_other_vocabularies(repository: Repository, tmp_path: Path, other: str, tied: bool, lazy: bool) -> None:
    base = make(tmp_path / "base", ROWS["base"], tied=tied, seed=1)
    expert = make(tmp_path / "expert", ROWS[other], tied=tied, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    repository.ingest(expert, "expert", base="base")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 0.5})], "base"))
    report = repository.merge(recipe, "merged", lazy=lazy)
    common = min(ROWS["base"], ROWS[other])
    assert any(EMBEDDING in note and f"the first {common:,} are merged" in note for note in report.notes)
    merged, one, two = (tensors_of(repository, name) for name in ("merged", "base", "expert"))
    assert merged.keys() == one.keys()
    for name, tensor in merged.items():
        assert tensor.shape == one[name].shape
        wanted = expected_rows(one[name], two[name])
        # One rounding to bfloat16, of a sum in float32 that may cancel.
        limit = 2**-8 * np.abs(wanted.ravel()) + 2**-22 * np.abs(one[name].values)
        assert (np.abs(tensor.values - wanted.ravel()) <= limit).all(), name
    # What the expert has nothing for is the base's, bit for bit.
    width = 32 * 2
    assert merged[EMBEDDING].data[common * width :] == one[EMBEDDING].data[common * width :]
    runs(repository, "merged", tmp_path / "out")


def test_rows_are_stored_as_deltas_of_the_bases(repository: Repository, tmp_path: Path) -> None:
    base = make(tmp_path / "base", ROWS["base"], tied=True, seed=1)
    same = make(tmp_path / "same", ROWS["base"], tied=True, seed=2, around=state_of(base))
    more = make(tmp_path / "more", ROWS["more"], tied=True, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    usual = repository.ingest(same, "same", base="base").stored_bytes
    padded = repository.ingest(more, "more", base="base").stored_bytes
    extra = (ROWS["more"] - ROWS["base"] + 64) * 32 * 2
    assert padded < usual + extra


def test_budgets_know_the_rows(repository: Repository, tmp_path: Path) -> None:
    """An expert of another vocabulary that was ingested with its base is planned for without reading it."""
    base = make(tmp_path / "base", ROWS["base"], tied=True, seed=1)
    expert = make(tmp_path / "expert", ROWS["fewer"], tied=True, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    repository.ingest(expert, "expert", base="base")
    for method in ("task_arithmetic", "ties"):
        own = {"weight": 1.0} if method == "task_arithmetic" else {"weight": 1.0, "density": 0.5}
        recipe = Recipe.parse(recipe_text(method, [("expert", own)], "base"))
        report = repository.merge(recipe, f"{method}-half", budget="30%")
        assert report.budget_bytes is not None
        assert 0 < report.read.expert <= report.budget_bytes
        exact = repository.merge(recipe, f"{method}-exact")
        assert exact.manifest == repository.merge(recipe, f"{method}-100", budget="100%").manifest


def test_fitted_models_are_collected_and_made_again(repository: Repository, tmp_path: Path) -> None:
    base = make(tmp_path / "base", ROWS["base"], tied=True, seed=1)
    expert = make(tmp_path / "expert", ROWS["fewer"], tied=True, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    repository.ingest(expert, "expert", base="base")
    recipe = Recipe.parse(recipe_text("linear", [("base", {"weight": 1}), ("expert", {"weight": 1})]))
    first = repository.merge(recipe, "merged", lazy=True)
    repository.gc()
    assert not repository.fsck(read_data=True).errors
    content = tensors_of(repository, "merged")
    again = repository.merge(recipe, "again", lazy=True)
    assert again.manifest == first.manifest
    stored = repository.materialize("merged")
    assert tensors_of(repository, "merged") == content
    assert stored.manifest != first.manifest
    repository.remove(["base", "expert", "again"])
    repository.gc()
    assert set(repository.manifest_ids()) == {stored.manifest}
    assert tensors_of(repository, "merged") == content


def test_an_expert_ties_its_head(repository: Repository, tmp_path: Path) -> None:
    """Its embedding is compared with the base's head as well."""
    base = make(tmp_path / "base", 320, tied=False, seed=1)
    expert = make(tmp_path / "expert", 320, tied=True, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    repository.ingest(expert, "expert", base="base")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 1})], "base"))
    report = repository.merge(recipe, "merged")
    assert f"'expert' ties its head to its embedding: '{EMBEDDING}' is merged as '{HEAD}'" in report.notes
    merged, theirs = tensors_of(repository, "merged"), tensors_of(repository, "expert")
    assert HEAD not in theirs
    difference = np.abs(merged[HEAD].values - theirs[EMBEDDING].values)
    assert difference.max() <= 2**-8 * np.abs(theirs[EMBEDDING].values).max()
    runs(repository, "merged", tmp_path / "out")


def test_the_base_ties_its_head(repository: Repository, tmp_path: Path) -> None:
    """The output ties as well, and carries no copy."""
    base = make(tmp_path / "base", 320, tied=True, seed=1)
    expert = make(tmp_path / "expert", 352, tied=False, seed=2, around=state_of(base))
    repository.ingest(base, "base")
    repository.ingest(expert, "expert", base="base")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 1})], "base"))
    report = repository.merge(recipe, "merged")
    assert any("is not the same as its embedding, and is left out" in note for note in report.notes)
    assert HEAD not in tensors_of(repository, "merged")
    runs(repository, "merged", tmp_path / "out")


def test_a_redundant_head_is_left_out(repository: Repository, tmp_path: Path) -> None:
    """Both files of weights have a copy of the embedding as the head, and the base's config says that it is tied."""
    folders = [make(tmp_path / "base", 320, tied=True, seed=1)]
    folders.append(make(tmp_path / "expert", 320, tied=True, seed=2, around=state_of(folders[0])))
    for folder in folders:
        repository.ingest(folder, f"{folder.name}-plain")
        tensors = tensors_of(repository, f"{folder.name}-plain")
        write_model(folder, {**tensors, HEAD: tensors[EMBEDDING]})
        repository.ingest(folder, folder.name)
    assert HEAD in tensors_of(repository, "expert")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 1})], "base"))
    report = repository.merge(recipe, "merged")
    assert any("its copy 'lm_head.weight' is left out" in note for note in report.notes)
    assert HEAD not in tensors_of(repository, "merged")
    runs(repository, "merged", tmp_path / "out")
    with pytest.raises(RecipeError, match="strict-shapes"):
        repository.merge(recipe, "strict", strict_shapes=True)


def test_tensors_that_only_some_models_have(repository: Repository, tmp_path: Path) -> None:
    """A bias of the base stays, an expert's normalisation is taken over; the index of shards follows."""
    random = np.random.default_rng(5)
    shared = {f"layers.{i}.weight": array(random.normal(0, 0.1, (40, 50)), "BF16") for i in range(4)}
    base = {**shared, "layers.0.bias": array(random.normal(0, 0.1, 40), "BF16")}
    expert = {name: array(values.values.reshape(values.shape) + 0.01, "BF16") for name, values in shared.items()}
    expert["layers.0.q_norm"] = array(random.normal(0, 0.1, 50), "BF16")
    folder = tmp_path / "base"
    names = list(base)
    (folder).mkdir()
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for path, part in parts.items():
        write_model(tmp_path / "part", {name: base[name] for name in part})
        (tmp_path / "part" / "model.safetensors").rename(folder / path)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: path for path, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    repository.ingest(folder, "base")
    repository.ingest(write_model(tmp_path / "expert", expert), "expert", base="base")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 1})], "base"))
    report = repository.merge(recipe, "merged")
    assert "tensor 'layers.0.bias' is not in 'expert': kept as it is" in report.notes
    assert "tensor 'layers.0.q_norm' is in 'expert' and not in 'base': taken from 'expert'" in report.notes
    merged = tensors_of(repository, "merged")
    assert merged["layers.0.bias"] == base["layers.0.bias"]
    assert merged["layers.0.q_norm"] == expert["layers.0.q_norm"]
    repository.export("merged", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert found["weight_map"].keys() == merged.keys()
    assert found["metadata"]["total_size"] == sum(len(tensor.data) for tensor in merged.values())
    last = tmp_path / "out" / found["weight_map"]["layers.0.q_norm"]
    assert sha256(last.read_bytes()) != sha256((folder / last.name).read_bytes())


def test_other_differing_shapes_are_refused(repository: Repository, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    base = {"embed_tokens.weight": array(random.normal(0, 1, (30, 8)), "BF16"), "mlp": array(np.ones((4, 8)), "BF16")}
    repository.ingest(write_model(tmp_path / "base", base), "base")
    for name, shape in {"mlp": (5, 8), "embed_tokens.weight": (30, 9)}.items():
        other = {**base, name: array(np.ones(shape), "BF16")}
        repository.ingest(write_model(tmp_path / "other", other), "other")
        recipe = Recipe.parse(recipe_text("linear", [("base", {"weight": 1}), ("other", {"weight": 1})]))
        first, second = (list(tensors[name].shape) for tensors in (base, other))
        with pytest.raises(RecipeError) as caught:
            repository.merge(recipe, "merged")
        said = str(caught.value)
        assert f"tensor '{name}' has shape {first}" in said
        assert f"{second} in 'other'" in said
    assert "merged" not in repository.refs()


@pytest.mark.parametrize("dtypes", [("F32", "BF16"), ("BF16", "F32"), ("BF16", "F16")])
def test_other_vocabularies_in_other_dtypes(repository: Repository, tmp_path: Path, dtypes: tuple[str, str]) -> None:
    random = np.random.default_rng(6)
    base = {"wte.weight": array(random.normal(0, 1, (300, 24)), dtypes[0])}
    expert = {"wte.weight": array(random.normal(0, 1, (270, 24)), dtypes[1])}
    repository.ingest(write_model(tmp_path / "base", base), "base")
    repository.ingest(write_model(tmp_path / "expert", expert), "expert", base="base")
    recipe = Recipe.parse(recipe_text("task_arithmetic", [("expert", {"weight": 0.5})], "base"))
    repository.merge(recipe, "merged")
    wanted = expected_rows(base["wte.weight"], expert["wte.weight"])
    found = tensors_of(repository, "merged")["wte.weight"]
    assert (found.dtype, found.shape) == (dtypes[0], (300, 24))
    limit = {"F32": 2**-23, "BF16": 2**-8}[dtypes[0]] * np.abs(wanted) + 2**-21
    assert (np.abs(found.values.reshape(300, 24) - wanted) <= limit).all()
    kept = 270 * 24 * (len(found.data) // found.values.size)
    assert found.data[kept:] == base["wte.weight"].data[kept:]
