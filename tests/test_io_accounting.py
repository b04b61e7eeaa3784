"""What a merge reports as read is what the operating system read from the packs, and stays within the budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accounting import Prepared, measure, merge, packs_of, skip_unless_counted

from mergefs import Repository
from tools import synth

EXPERTS = 3

# 42 MB, most of it in matrices whose blocks are whole, as in real models.
SHAPE = {
    **synth.CONFIGS["tiny"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "max_window_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
}


def write_recipe(path: Path, density: float) -> Path:
    """Write a ties merge of all experts (JSON is YAML)."""
    models = [{"model": f"expert-{i}", "parameters": {"weight": 1.0, "density": density}} for i in range(EXPERTS)]
    path.write_text(json.dumps({"models": models, "merge_method": "ties", "base_model": "base"}))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A repository whose reads the operating system counts, with all programs in memory."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the kernel has no /proc/PID/io")
    folder = tmp_path_factory.mktemp("accounting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synth.CONFIGS, "accounting", SHAPE)
        base, *experts = synth.make("accounting", EXPERTS, folder / "models")
    with Repository.init(folder / "repository", block_size=1 << 20) as repo:
        repo.ingest(base, "base")
        for number, expert in enumerate(experts):
            repo.ingest(expert, f"expert-{number}", base="base")
        base_packs = packs_of(repo, "base")
        expert_packs = frozenset[Path]().union(*(packs_of(repo, f"expert-{i}") for i in range(EXPERTS))) - base_packs
    made = Prepared(folder / "repository", write_recipe(folder / "recipe.yaml", 0.5), base_packs, expert_packs)
    skip_unless_counted(made.expert_packs)
    # Reads every program, compiled loop and table of the catalog once; other blocks come out, so nothing is shared.
    merge(made, write_recipe(folder / "warm.yaml", 0.6), "warm", "10%")
    return made


def test_experts_and_base_lie_in_different_packs(prepared: Prepared) -> None:
    assert prepared.expert_packs
    assert prepared.base_packs
    assert not prepared.expert_packs & prepared.base_packs


def test_budget_caps_what_the_disk_gives_of_the_experts(prepared: Prepared) -> None:
    report = measure(prepared, prepared.expert_packs, "ten", "10%", ("expert",))
    assert report["budget_bytes"] <= report["expert_raw_bytes"] // 10
    assert report["read"]["expert"] <= report["budget_bytes"]
    assert report["read"]["expert"] > 0.9 * report["budget_bytes"], "the budget is hardly used: this test tests little"


def test_all_packs_cold(prepared: Prepared) -> None:
    packs = prepared.expert_packs | prepared.base_packs
    measure(prepared, packs, "cold", "10%", ("expert", "base", "metadata"))


def test_everything_read_without_a_binding_budget(prepared: Prepared) -> None:
    report = measure(prepared, prepared.expert_packs, "all", "100%", ("expert",))
    assert report["read"]["expert"] <= sum(path.stat().st_size for path in prepared.expert_packs)


def test_warm_packs_cost_the_disk_nothing(prepared: Prepared) -> None:
    """The control: what the other tests see comes from the packs that they evicted."""
    measure(prepared, frozenset(), "ten", "10%", ())
