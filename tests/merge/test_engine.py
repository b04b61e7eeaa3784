"""The merge engine: the same bytes on every path, and never a byte more of the experts than the budget."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from builders import (
    EXPERTS,
    FINEST_BLOCK,
    array,
    fine_tuned,
    forget,
    load_model,
    new_repository,
    random_model,
    recipe_text,
    served,
    tensors_of,
    tree,
    write_model,
)

from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.errors import BudgetError, BudgetExceededError, NotFoundError, RecipeError, UserError
from mergefs.merge.derive import derive
from mergefs.merge.sources import DeltaIterator, Sources
from mergefs.planner.plan import EXACT
from mergefs.recipe import Recipe
from mergefs.repository import Repository

METHODS = {
    "linear": {},
    "task_arithmetic": {"scale": 0.6},
    "ties": {"density": 0.333, "scale": 0.9},
    "dare_linear": {"density": 0.4},
    "dare_ties": {"density": 0.7, "normalize": True},
}


def recipe(method: str, models: Any = EXPERTS, base: str | None = "base", **parameters: Any) -> Recipe:
    weight = parameters.pop("weight", 0.5)
    weighted = [(model, {"weight": weight}) for model in models]
    return Recipe.parse(recipe_text(method, weighted, base, **{**METHODS[method], **parameters}))


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Repository:
    """A repository with a random base, two experts of it in all tensors, and one that changed one tensor."""
    base = random_model(1)
    config = {"config.json": json.dumps({"model_type": "test", "torch_dtype": "bfloat16"}).encode()}
    repository.ingest(write_model(tmp_path / "base", base, config), "base")
    for name, model in {
        "x": fine_tuned(base, 2),
        "y": fine_tuned(base, 3),
        "z": fine_tuned(base, 4, only="embed"),
    }.items():
        repository.ingest(write_model(tmp_path / name, model, config), name, base="base")
    return repository


# --------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [None, "12%"])
def test_every_path_gives_the_same_bytes(slice_repository: Repository, method: str, budget: str | None) -> None:
    repository = slice_repository
    chosen: dict[str, Any] = {"budget": budget, "seed": 3}
    prefix = f"{method}-{budget and budget[:-1]}"
    forget(repository)  # what tests of other modules have merged
    one = repository.merge(recipe(method), f"{prefix}-1", threads=1, **chosen)
    forget(repository)
    two = repository.merge(recipe(method), f"{prefix}-2", threads=2, **chosen)
    assert (one.manifest, one.plan) == (two.manifest, two.plan)
    assert one.read == two.read
    assert two.blocks.derived == 0
    assert one.read.expert > 0
    lazy = repository.merge(recipe(method), f"{prefix}-lazy", lazy=True, **chosen)
    assert lazy.plan == one.plan
    assert lazy.blocks.derived == 0
    assert lazy.blocks.lazy > 0
    assert repository.manifest(lazy.manifest).is_lazy
    assert served(repository, f"{prefix}-lazy") == served(repository, f"{prefix}-1")
    forget(repository)
    stored = repository.materialize(f"{prefix}-lazy")
    assert stored.manifest == one.manifest
    assert repository.resolve(f"{prefix}-lazy") == one.manifest
    again = repository.materialize(f"{prefix}-lazy")
    assert (again.manifest, again.plan, again.ref, again.previous) == (one.manifest, one.plan, f"{prefix}-lazy", None)
    assert (again.read.expert, again.written_bytes, again.blocks.derived) == (0, 0, 0)


def test_a_lazy_view_reads_any_part(models: Repository) -> None:
    models.merge(recipe("ties", ["x", "y"]), "eager")
    models.merge(recipe("ties", ["x", "y"]), "lazy", lazy=True)
    random = np.random.default_rng(0)
    with models.view("eager") as eager, models.view("lazy", cache_bytes=0) as lazy:
        whole = eager.read("model.safetensors")
        for start in random.integers(0, len(whole), 40).tolist():
            size = int(random.integers(0, 3 * FINEST_BLOCK))
            assert lazy.read("model.safetensors", start, size) == whole[start : start + size]


def test_derive_does_not_depend_on_the_order(models: Repository) -> None:
    planned = models.plan(recipe("dare_ties", ["x", "y"]), seed=9)
    sources = _sources(models, planned, ReadCounter())
    jobs = [(tensor, number) for tensor in planned.base.tensors for number in range(len(tensor.blocks))]
    forward = [bytes(derive(sources, *job)) for job in jobs]
    backward = [bytes(derive(sources, *job)) for job in reversed(jobs)]
    assert forward == backward[::-1]


def test_the_same_merge_again_writes_nothing(models: Repository) -> None:
    first = models.merge(recipe("ties", ["x", "y"]), "one")
    second = models.merge(recipe("ties", ["x", "y"]), "two")
    assert first.manifest == second.manifest
    assert second.written_bytes == 0
    assert second.blocks.derived == 0
    assert second.blocks.shared + second.blocks.remembered == first.blocks.shared + first.blocks.derived


def test_block_sizes_do_not_change_values(tmp_path: Path, slices: Path) -> None:
    found = []
    for size in (4096, 12288, 1 << 20):
        with new_repository(tmp_path / str(size), size) as repository:
            repository.ingest(slices / "base", "base")
            for name in EXPERTS:
                repository.ingest(slices / name, name, base="base")
            repository.merge(recipe("task_arithmetic"), "m")
            repository.merge(recipe("ties"), "t")
            found.append((served(repository, "m"), served(repository, "t")))
    assert found[0] == found[1] == found[2]


# -------------------------------------------------------------------------------------------------- the budget


@pytest.mark.parametrize("budget", ["1%", "5%", "10%", "20%", "20000", "1000", "1"])
@pytest.mark.parametrize("method", ["ties", "linear"])
def test_a_budget_is_a_hard_cap(slice_repository: Repository, method: str, budget: str) -> None:
    name = f"cap-{method}-{budget.strip('%')}"
    forget(slice_repository)
    report = slice_repository.merge(recipe(method), name, budget=budget)
    raw = sum(slice_repository.manifest(slice_repository.resolve(expert)).tensor_bytes for expert in EXPERTS)
    assert report.expert_raw_bytes == raw
    allowed = raw * int(budget[:-1]) // 100 if budget.endswith("%") else int(budget)
    assert report.budget_bytes == allowed
    assert report.read.expert <= allowed
    if budget in ("5%", "10%", "20000"):
        assert report.read.expert > 0.9 * allowed
    with slice_repository.view(name) as view:
        planned = slice_repository.plan(recipe(method), budget=budget)
        assert planned.expert_bytes == report.read.expert
        assert view.manifest.lineage.plan == planned.plan.id


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_budget_of_everything_is_none(slice_repository: Repository, method: str, lazy: bool) -> None:
    free = slice_repository.merge(recipe(method), f"free-{method}-{lazy}", lazy=lazy)
    full = slice_repository.merge(recipe(method), f"full-{method}-{lazy}", lazy=lazy, budget="100%")
    assert free.manifest == full.manifest


def test_a_budget_that_just_fits_is_kept(repository: Repository, tmp_path: Path) -> None:
    """Looking for a threshold that no statistics hold may not read beyond the budget either."""
    base = random_model(1, "F32")
    repository.ingest(write_model(tmp_path / "base", base), "base")
    for seed, name in ((2, "x"), (3, "y")):
        repository.ingest(write_model(tmp_path / name, fine_tuned(base, seed)), name, base="base")
    everything = repository.plan(recipe("task_arithmetic", ["x", "y"])).expert_bytes
    for spare in (0, 1, everything // 2, everything):
        density = 0.123 + 0.1 * spare / everything
        report = repository.merge(recipe("ties", ["x", "y"], density=density), "m", budget=str(everything + spare))
        assert report.read.expert <= everything + spare
    # The threshold is remembered, so that looking for it costs nothing the next time.
    free = []
    for _ in range(2):
        free.append(repository.merge(recipe("ties", ["x", "y"], density=0.777), "m").read.expert)
        forget(repository)
    assert free[0] > free[1] == everything


def test_a_budget_without_a_common_base(repository: Repository, tmp_path: Path) -> None:
    repository.ingest(write_model(tmp_path / "a", random_model(1)), "a")
    repository.ingest(write_model(tmp_path / "b", random_model(2)), "b")
    free = repository.merge(recipe("linear", ["a", "b"], None), "free")
    everything = repository.merge(recipe("linear", ["a", "b"], None), "everything", budget="100%")
    assert everything.manifest == free.manifest
    assert everything.read.expert <= everything.expert_raw_bytes
    with pytest.raises(BudgetError, match="common base"):
        repository.merge(recipe("linear", ["a", "b"], None), "m", budget="10%")
    # Enough for the second model alone, but the first is an expert as well.
    with pytest.raises(BudgetError, match="common base"):
        repository.merge(recipe("linear", ["a", "b"], None), "m", budget="60%")


def test_the_counter_refuses_what_passes_the_limit() -> None:
    counter = ReadCounter(100)
    counter.add(Kind.EXPERT, 60)
    counter.add(Kind.BASE, 1000)
    with pytest.raises(BudgetExceededError):
        counter.add(Kind.EXPERT, 41)
    counter.add(Kind.EXPERT, 40)
    with pytest.raises(BudgetExceededError):
        counter.add(Kind.EXPERT, 1)
    assert (counter.totals.expert, counter.totals.base) == (100, 1000)


def test_a_reader_stops_at_the_limit(models: Repository) -> None:
    planned = models.plan(recipe("linear", ["x", "y"]))
    limit = planned.expert_bytes // 2
    sources = _sources(models, planned, counter := ReadCounter(limit))
    jobs = ((tensor, number) for tensor in planned.base.tensors for number in range(len(tensor.blocks)))
    with pytest.raises(BudgetExceededError):
        deque((derive(sources, *job) for job in jobs), maxlen=0)
    assert 0 < counter.totals.expert <= limit


def test_what_no_expert_changed_is_not_read(models: Repository) -> None:
    report = models.merge(recipe("task_arithmetic", ["z"]), "m")
    manifest, base = (models.manifest(models.resolve(name)) for name in ("m", "base"))
    for tensor, twin in zip(manifest.tensors, base.tensors, strict=True):
        changed = [mine != other for mine, other in zip(tensor.blocks, twin.blocks, strict=True)]
        assert any(changed) == ("embed" in tensor.name)
    planned = models.plan(recipe("task_arithmetic", ["z"]))
    assert {t.name for t in planned.plan.tensors} == {"embed.weight"}
    assert report.read.expert == planned.expert_bytes < 0.2 * report.expert_raw_bytes


def test_an_expert_that_equals_the_base_is_not_read(models: Repository, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "again", tensors_of(models, "base"), {"note.txt": b"only this file differs"})
    models.ingest(folder, "again", base="base")
    report = models.merge(recipe("task_arithmetic", ["again"]), "m")
    assert (report.read.expert, report.blocks.derived) == (0, 0)
    assert served(models, "m") == served(models, "base")


def test_a_delta_iterator_yields_only_what_is_planned(models: Repository) -> None:
    planned = models.plan(recipe("task_arithmetic", ["x", "y", "z"]), budget="8%")
    assert not planned.everything
    sources = _sources(models, planned, ReadCounter())
    values = {name: tensors_of(models, name) for name in ("base", "x", "y", "z")}
    seen = {0: 0, 1: 0, 2: 0, 3: 0}
    for tensor in planned.plan.tensors:
        mine = planned.base.tensor_by_name[tensor.name]
        for number, (first, stop) in enumerate(mine.grid(models.block_elements).elements()):
            base = sources.base_block(mine, number)
            floats = values["base"][tensor.name].values[first:stop].astype(np.float32)
            deltas = DeltaIterator(sources, tensor, number, base, floats)
            expected = tuple(i for i, depths in enumerate(tensor.depths) if depths[number] != "0")
            assert deltas.experts == expected
            yielded = list(deltas)
            assert len(yielded) == len(deltas) == len(expected)
            seen[len(yielded)] += 1
            for expert, delta in zip(expected, yielded, strict=True):
                theirs = values["xyz"[expert]][tensor.name].values[first:stop]
                exact = (theirs - floats).astype(np.float32)
                if tensor.depth(expert, number) == EXACT:
                    assert np.array_equal(delta, exact)
                else:
                    assert 0 < np.linalg.norm(delta - exact) < np.linalg.norm(exact)
    # All of nothing, some and several were there.
    assert seen[0] > 0
    assert seen[1] > 0


# ------------------------------------------------------------------------------------------- files and dtypes


def test_another_dtype_is_written_into_files_and_config(models: Repository, tmp_path: Path) -> None:
    models.merge(recipe("linear", ["x", "y"], dtype="float32"), "m")
    models.merge(recipe("linear", ["x", "y"], dtype="float32"), "lazy", lazy=True)
    models.export("m", tmp_path / "out")
    models.export("lazy", tmp_path / "lazy")
    assert tree(tmp_path / "out") == tree(tmp_path / "lazy")
    loaded = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    x, y = (tensors_of(models, name) for name in "xy")
    assert loaded.keys() == x.keys()
    for name, found in loaded.items():
        if name == "positions":
            assert found.dtype == np.int64
            assert found.tobytes() == x[name].data
            continue
        assert found.dtype == np.float32
        expected = ((x[name].values + y[name].values) / 2).reshape(x[name].shape)
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-9)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "test",
        "torch_dtype": "float32",
    }


def test_a_sharded_base_gives_a_sharded_merge(repository: Repository, tmp_path: Path) -> None:
    from tools.synth import make

    folders = make("tiny", 2, tmp_path, shard_size=300_000)
    for folder in folders:
        repository.ingest(folder, folder.name, base=None if folder.name == "base" else "base")
    repository.merge(recipe("ties", ["expert-0", "expert-1"], dtype="float32"), "m")
    repository.export("m", tmp_path / "out")
    base = {path for path in tree(folders[0]) if path != "README.md"}
    assert set(tree(tmp_path / "out")) == base
    assert sum(path.endswith(".safetensors") for path in base) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = load_model(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())


def test_model_cards_and_other_weights_stay_behind(repository: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    files = dict.fromkeys(("README.md", "pytorch_model.bin", "onnx/model.onnx", "tokenizer.json", "LICENSE"), b"{}")
    repository.ingest(write_model(tmp_path / "base", base, files), "base")
    repository.ingest(write_model(tmp_path / "x", fine_tuned(base, 2)), "x", base="base")
    repository.merge(recipe("linear", ["x"]), "m")
    assert set(served(repository, "m")) == {"model.safetensors", "tokenizer.json", "LICENSE"}


# ----------------------------------------------------------------------------------------------- without a base


def test_linear_finds_the_common_base(models: Repository) -> None:
    report = models.merge(recipe("linear", ["x", "y"], None), "m")
    lineage = models.manifest(report.manifest).lineage
    assert lineage.base == models.resolve("base")
    named = models.merge(recipe("linear", ["x", "y"], "base"), "n")
    assert {t: a.data for t, a in tensors_of(models, "m").items()} == {
        t: a.data for t, a in tensors_of(models, "n").items()
    }
    assert named.blocks.derived == 0


def test_a_base_that_is_named_is_averaged_where_a_weight_is_given_for_all(models: Repository) -> None:
    own = {"weight": 3.0}
    models.merge(Recipe.parse(recipe_text("linear", ["x", ("y", own)], "base", weight=1, dtype="float32")), "m")
    base, x, y, found = (tensors_of(models, name)["embed.weight"].values for name in ("base", "x", "y", "m"))
    assert np.allclose(found, (base + x + 3 * y) / 5, rtol=1e-5, atol=1e-9)
    budgeted = Recipe.parse(recipe_text("linear", ["x", "y"], "base", weight=1))
    assert models.merge(budgeted, "n", budget="10%").read.expert > 0


@pytest.mark.parametrize("method", ["karcher", "multislerp", "nuslerp"])
def test_a_base_among_the_models_is_not_merged_twice(models: Repository, method: str) -> None:
    given = {} if method == "karcher" else {"weight": 0.5}
    for name, among in (("m", ["base", "x", "y"]), ("n", ["x", "y"])):
        models.merge(Recipe.parse(recipe_text(method, among, "base", **given)), name)
    assert tensors_of(models, "m") == tensors_of(models, "n")


def test_linear_of_strangers(repository: Repository, tmp_path: Path) -> None:
    a, b = random_model(1), random_model(2)
    repository.ingest(write_model(tmp_path / "a", a), "a")
    repository.ingest(write_model(tmp_path / "b", b), "b")
    report = repository.merge(recipe("linear", ["a", "b"], None, weight=0.5), "m")
    found = tensors_of(repository, "m")
    expected = array((a["embed.weight"].values + b["embed.weight"].values) / 2, "BF16")
    assert found["embed.weight"].data == expected.data
    # Both models are experts here, and all of both is read once.
    assert 0.5 * report.expert_raw_bytes < report.read.expert <= report.expert_raw_bytes
    assert report.read.base == 0


# --------------------------------------------------------------------------------------------- what is refused


def test_models_that_do_not_fit(models: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    models.ingest(write_model(tmp_path / "few", {"scale": base["scale"]}), "few")
    base["scale"] = array(np.ones(2), "BF16")
    models.ingest(write_model(tmp_path / "other", base), "other")
    base["scale"] = array(1, "I64")
    models.ingest(write_model(tmp_path / "integer", base), "integer")
    models.merge(recipe("linear", ["x", "y"]), "lazy", lazy=True)
    before = models.refs()
    for name, part in {
        "few": "'few' has 1 of the 7 tensors of 'base'",
        "other": "'scale' has shape",
        "integer": "'scale' is BF16 in 'base' and I64",
        "lazy": "is a lazy merge",
    }.items():
        with pytest.raises(RecipeError, match=part):
            models.merge(recipe("ties", ["x", name]), "m")
    with pytest.raises(UserError, match="max-memory"):
        models.merge(recipe("ties", ["x", "y"]), "m", max_memory=1000)
    with pytest.raises(UserError, match="nothing to materialize"):
        models.materialize("x")
    with pytest.raises(NotFoundError, match="name a ref"):
        models.materialize(models.resolve("lazy")[:10])
    assert models.refs() == before


def test_memory_limits_threads_and_not_the_result(models: Repository) -> None:
    one = models.merge(recipe("ties", ["x", "y"]), "one", threads=2, max_memory=100_000)
    assert models.merge(recipe("ties", ["x", "y"]), "two", threads=2).manifest == one.manifest


def _sources(repository: Repository, planned: Any, counter: ReadCounter) -> Sources:
    reader = BlockReader(repository.catalog, repository.backend, counter)
    return Sources(planned.plan, planned.base, planned.experts, reader)


def test_a_stored_merge_needs_no_experts_to_be_materialized(models: Repository) -> None:
    report = models.merge(recipe("task_arithmetic", ["x", "y"]), "stored")
    models.remove(["x", "y"])
    models.gc()
    again = models.materialize("stored")
    assert again.manifest == report.manifest
    assert again.blocks.shared == report.blocks.shared + report.blocks.derived
