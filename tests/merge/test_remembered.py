"""Derived blocks are taken again by merges that depend on the same things, and by no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import (
    EXPERTS,
    array,
    fine_tuned,
    forget,
    random_model,
    recipe_text,
    served,
    tensors_of,
    write_model,
)

from mergefs.merge import remembered
from mergefs.merge.engine import MergeReport
from mergefs.recipe import Recipe
from mergefs.repository import Repository

METHODS = ("linear", "task_arithmetic", "ties", "dare_ties", "breadcrumbs", "della_linear", "slerp", "multislerp")
OTHER = [("x", {"weight": [{"filter": "layers.0.", "value": 0.9}, {"value": 0.4}]}), "y"]
"""The models with another weight of x in one layer."""


def recipe(method: str, models: Any = ("x", "y"), **parameters: Any) -> Recipe:
    given: dict[str, Any] = {"slerp": {"t": 0.3}, "multislerp": {"weight": 0.5}}.get(method, {"weight": 0.4})
    if method in ("ties", "dare_ties", "breadcrumbs", "della_linear"):
        given = {**given, "density": 0.6}
    models = models[:1] if method == "slerp" else models
    return Recipe.parse(recipe_text(method, list(models), "base", **{**given, **parameters}))


def blocks(report: MergeReport) -> tuple[int, int]:
    """How many blocks were remembered, and how many derived."""
    return report.blocks.remembered, report.blocks.derived


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Repository:
    """A repository with a base and three experts, of which z changed one tensor only."""
    base = random_model(1)
    repository.ingest(write_model(tmp_path / "base", base), "base")
    for seed, name in ((2, "x"), (3, "y")):
        repository.ingest(write_model(tmp_path / name, fine_tuned(base, seed)), name, base="base")
    repository.ingest(write_model(tmp_path / "z", fine_tuned(base, 4, only="embed")), "z", base="base")
    return repository


@pytest.mark.parametrize("method", METHODS)
def test_the_same_merge_derives_nothing(models: Repository, method: str) -> None:
    expected = models.forecast(models.plan(recipe(method))).derived
    first = models.merge(recipe(method), "first")
    again = models.merge(recipe(method), "again")
    assert again.manifest == first.manifest
    assert blocks(again) == (expected, 0)
    assert (again.read.expert, again.read.base, again.written_bytes) == (0, 0, 0)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_ties", "della_linear"])
def test_only_what_depends_on_a_change_is_derived(models: Repository, method: str) -> None:
    total = models.forecast(models.plan(recipe(method))).derived
    first = models.merge(recipe(method), "first")
    second = models.merge(recipe(method, OTHER), "second")
    one, two = (models.manifest(report.manifest).tensor_by_name for report in (first, second))
    layer = {"layers.0.attn.weight", "layers.0.experts"}  # the norm's elements are too large for such deltas
    differ = {name for name, tensor in two.items() if tensor.blocks != one[name].blocks}
    assert differ
    assert differ <= layer
    again = sum(len(two[name].blocks) for name in layer)
    assert blocks(second) == (total - again, again)
    forget(models)
    assert models.merge(recipe(method, OTHER), "anew").manifest == second.manifest


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_an_expert_that_changed_nothing_in_a_block_does_not_count(models: Repository, method: str) -> None:
    """z changed the embedding alone: with other weights, or without it, all else is the same."""
    first = models.merge(recipe(method, ["x", "y", "z"]), "first")
    base = models.manifest(models.resolve("base"))
    embedding = sum(len(t.blocks) for t in base.tensors if "embed" in t.name)
    second = models.merge(recipe(method, ["x", "y"]), "second")
    assert blocks(second) == (first.blocks.derived - embedding, embedding)


def test_a_new_expert_of_which_one_tensor_differs(models: Repository, tmp_path: Path) -> None:
    first = models.merge(recipe("ties"), "first")
    other = dict(tensors_of(models, "y"))
    name = "layers.1.attn.weight"
    other[name] = array(other[name].values.reshape(64, 65) + 0.5, "BF16")
    models.ingest(write_model(tmp_path / "y2", other), "y2", base="base")
    second = models.merge(recipe("ties", ["x", "y2"]), "second")
    assert blocks(second)[1] == len(models.manifest(second.manifest).tensor_by_name[name].blocks)
    assert blocks(second)[0] == first.blocks.derived - blocks(second)[1]


def test_seeds_are_not_confused(models: Repository) -> None:
    first = models.merge(recipe("dare_ties"), "first", seed=1)
    second = models.merge(recipe("dare_ties"), "second", seed=2)
    assert second.blocks.remembered == 0
    assert second.manifest != first.manifest
    assert models.merge(recipe("dare_ties"), "third", seed=1).manifest == first.manifest
    # Other methods have no seed.
    models.merge(recipe("ties"), "first", seed=1)
    assert models.merge(recipe("ties"), "second", seed=2).blocks.derived == 0


def test_depths_are_not_confused(slice_repository: Repository) -> None:
    wanted, alone = recipe("ties", EXPERTS), {}
    for budget in ("4%", "9%", None):
        forget(slice_repository)
        alone[budget] = slice_repository.merge(wanted, f"alone-{budget and budget[0]}", budget=budget)
    forget(slice_repository)
    for budget, expected in alone.items():
        report = slice_repository.merge(wanted, "together", budget=budget)
        assert report.manifest == expected.manifest
        assert report.read.expert <= expected.read.expert


def test_what_gc_took_is_derived_again(models: Repository) -> None:
    first = models.merge(recipe("ties"), "first")
    content = served(models, "first")
    models.remove(["first"])
    models.gc()
    assert models.fsck().ok
    with models.catalog.read() as txn:
        assert not list(txn.items(remembered.TABLE))
    again = models.merge(recipe("ties"), "again")
    assert blocks(again) == (0, first.blocks.derived)
    assert served(models, "again") == content


def test_what_another_merge_needs_stays_remembered(models: Repository) -> None:
    first = models.merge(recipe("ties"), "first")
    models.merge(recipe("ties", OTHER), "second")
    models.remove(["first"])
    models.gc()
    again = models.merge(recipe("ties"), "again")
    assert again.manifest == first.manifest
    assert again.blocks.remembered > 0
    assert again.blocks.derived > 0
    assert models.fsck(read_data=True).ok


def test_a_remembered_block_that_is_gone_is_derived_again(models: Repository) -> None:
    """The catalog may say more than there is: entries whose block is not stored do not count."""
    first = models.merge(recipe("ties"), "first")
    with models.catalog.read() as txn:
        entries = list(txn.items(remembered.TABLE))
    models.remove(["first"])
    models.gc()
    models.catalog.write(lambda txn: [txn.put(remembered.TABLE, *entry) for entry in entries])
    (problem, *_) = models.fsck().errors
    assert (problem.kind, problem.affects) == ("derivation", ())
    again = models.merge(recipe("ties"), "again")
    assert blocks(again) == (0, first.blocks.derived)
    assert again.manifest == first.manifest
    assert models.fsck().ok


def test_a_plan_says_what_is_remembered(models: Repository) -> None:
    planned = models.plan(recipe("ties"))
    before = models.forecast(planned)
    assert before.remembered == 0
    report = models.merge(recipe("ties"), "first")
    assert before.derived == report.blocks.derived
    after = models.forecast(planned)
    assert (after.shared, after.remembered, after.derived) == (before.shared, before.derived, 0)


def test_materializing_and_refining_take_what_is_remembered(models: Repository) -> None:
    first = models.merge(recipe("ties"), "first")
    models.merge(recipe("ties"), "lazy", lazy=True)
    assert blocks(models.materialize("lazy")) == (first.blocks.derived, 0)


_MERGE = """
import itertools, pathlib, sys, time
from mergefs.cli import main
from mergefs.merge import run
derive, calls = run.derive, itertools.count()
def slow(*args):
    if next(calls) >= 6:
        pathlib.Path({begun!r}).touch()
        time.sleep(0.5)
    return derive(*args)
run.derive = slow
sys.argv[1:] = {arguments}
main()
"""


def test_an_interrupted_merge_goes_on_where_it_was(models: Repository, tmp_path: Path) -> None:
    """A real process, slowed down after its first blocks, gets SIGINT as from a terminal."""
    text = tmp_path / "recipe.yaml"
    text.write_text(recipe("ties").text)
    refs, total = models.refs(), models.forecast(models.plan(recipe("ties"))).derived
    arguments = ["-R", str(models.path), "merge", str(text), "--as", "m", "--threads", "1"]
    begun = tmp_path / "begun"
    script = _MERGE.format(arguments=arguments, begun=str(begun))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.decode().strip()) == (130, b"", "mergefs: interrupted")
    assert models.refs() == refs
    assert not any((models.path / "tmp").iterdir())
    assert models.fsck(read_data=True).ok
    report = models.merge(recipe("ties"), "m")
    assert report.blocks.remembered > 0
    assert report.blocks.derived > 0
    assert report.blocks.remembered + report.blocks.derived == total
    forget(models)
    assert models.merge(recipe("ties"), "anew").manifest == report.manifest
