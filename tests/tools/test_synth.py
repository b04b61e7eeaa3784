"""The synthetic checkpoints: deterministic, loadable, and with deltas like a real fine-tune's."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tools.synth import CONFIGS, coded_size, make, tensor_shapes

EMBEDDING = "model.embed_tokens.weight"


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny base and three experts."""
    return make("tiny", 3, tmp_path_factory.mktemp("synth"))


def test_same_seed_gives_same_bytes(models: list[Path], tmp_path: Path) -> None:
    make("tiny", 3, tmp_path, threads=1)
    assert digests(tmp_path) == digests(models[0].parent)


def test_expert_does_not_depend_on_their_number(models: list[Path], tmp_path: Path) -> None:
    folders = make("tiny", 1, tmp_path)
    assert [digests(f) for f in folders] == [digests(f) for f in models[:2]]


def test_other_seed_gives_other_weights(models: list[Path], tmp_path: Path) -> None:
    for ours, theirs in zip(make("tiny", 1, tmp_path, seed=1), models, strict=False):
        assert digests(ours)["model.safetensors"] != digests(theirs)["model.safetensors"]
        assert digests(ours)["config.json"] == digests(theirs)["config.json"]


def test_folders_and_tensors(models: list[Path]) -> None:
    assert [folder.name for folder in models] == ["base", "expert-0", "expert-1", "expert-2"]
    for folder in models:
        assert 500_000 < (folder / "model.safetensors").stat().st_size < 1_000_000
        with safe_open(folder / "model.safetensors", "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}
        assert shapes == tensor_shapes(CONFIGS["tiny"])
        assert "lm_head.weight" not in shapes


def test_loads_in_transformers(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    for folder in models[:2]:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("Straße & café", return_tensors="pt")
        assert tokenizer.decode(inputs["input_ids"][0]) == "Straße & café"
        answer = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert answer.shape[1] > inputs["input_ids"].shape[1]


def test_shards_hold_the_same_tensors(models: list[Path], tmp_path: Path) -> None:
    base = make("tiny", 0, tmp_path, shard_size=200_000)[0]
    index = json.loads((base / "model.safetensors.index.json").read_text())
    whole = load_file(models[0] / "model.safetensors")
    shards = sorted(path.name for path in base.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for name, file in index["weight_map"].items():
        assert load_file(base / file)[name].equal(whole[name])


@pytest.fixture(scope="module")
def deltas(models: list[Path]) -> dict[str, np.ndarray]:
    """Experts minus base by tensor, stacked."""
    base, *experts = (load_file(folder / "model.safetensors") for folder in models)
    return {n: np.stack([(expert[n].float() - base[n].float()).numpy() for expert in experts]) for n in base}


def test_matrices_change_like_a_fine_tune(models: list[Path], deltas: dict[str, np.ndarray]) -> None:
    base, expert = (load_file(folder / "model.safetensors") for folder in models[:2])
    for name, delta in deltas.items():
        if delta.ndim < 3 or name == EMBEDDING:
            continue
        assert 0.55 < np.mean(delta != 0) < 0.9
        assert 0.8e-4 < delta.std() < 2e-4
        kurtosis = np.mean(delta**4) / np.mean(delta**2) ** 2
        assert 2.7 < kurtosis < 4.5
        words = (model[name].flatten().view(torch.uint16).numpy() for model in (base, expert))
        assert 0.22 < coded_size(*words) / base[name].nbytes < 0.32


def test_experts_agree_a_little(deltas: dict[str, np.ndarray]) -> None:
    matrices = [delta.reshape(3, -1) for n, delta in deltas.items() if delta.ndim == 3 and n != EMBEDDING]
    correlations = np.corrcoef(np.concatenate(matrices, axis=1))[np.triu_indices(3, 1)]
    assert np.all((correlations > 0.12) & (correlations < 0.3))


def test_most_embedding_rows_are_untouched(deltas: dict[str, np.ndarray]) -> None:
    touched = (deltas[EMBEDDING] != 0).any(axis=2)
    assert np.all((touched.mean(axis=1) > 0.03) & (touched.mean(axis=1) < 0.4))
    common, rare = np.array_split(touched, [128], axis=1)
    assert common.mean() > 2 * rare.mean()
    assert not np.array_equal(touched[0], touched[1])


def test_norms_hardly_change(deltas: dict[str, np.ndarray]) -> None:
    norms = np.concatenate([delta.ravel() for delta in deltas.values() if delta.ndim == 2])
    assert 0 < np.mean(norms != 0) < 0.2
    assert np.abs(norms).max() < 0.02


def test_command_line(tmp_path: Path) -> None:
    launcher = Path(__file__).parents[2] / "tools" / "synth"
    for arguments in (["tiny", "2", str(tmp_path), "--seed", "3"], ["--measure", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, launcher, *arguments], capture_output=True, text=True, check=True, cwd="/"
        )
    assert [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [
        ["expert-0", "matrices:"],
        ["expert-0", "embeddings:"],
        ["expert-0", "vectors:"],
    ]
