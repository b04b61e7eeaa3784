"""Refining: deeper and deeper to the exact merge, reading what is needed, and a log that tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import array, fine_tuned, new_repository, recipe_text, served, tensors_of, write_model
from click.testing import CliRunner, Result

from mergefs.cli import cli
from mergefs.errors import BudgetError, NotFoundError, UserError
from mergefs.inspection import lineage
from mergefs.merge.engine import RefineReport
from mergefs.merge.lazy import load_plan
from mergefs.planner.plan import EXACT, Plan
from mergefs.recipe import Recipe
from mergefs.repository import Repository

EXPERTS = ("x", "y", "z")
METHODS = ("task_arithmetic", "ties", "dare_ties")
SHAPES = {"layers.0.w": (512, 384), "layers.1.w": (700, 256), "layers.2.w": (400, 400), "norm": (256,)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(21)
    base = {name: array(random.normal(0, 0.04, shape), "BF16") for name, shape in SHAPES.items()}
    write_model(folder / "base", base)
    for seed, name in enumerate(EXPERTS):
        write_model(folder / name, fine_tuned(base, seed + 30, delta=4e-4))
    return folder


@pytest.fixture
def repository(models: Path, tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repository", 1 << 17) as made:
        made.ingest(models / "base", "base")
        for name in EXPERTS:
            made.ingest(models / name, name, base="base")
        yield made


def text(method: str, **own: float) -> str:
    density = {} if method == "task_arithmetic" else {"density": 0.6}
    weights = dict(zip(EXPERTS, (0.5, 0.3, 0.4), strict=True))
    return recipe_text(method, [(name, {"weight": w, **density}) for name, w in weights.items()], "base", **own)


def recipe(method: str) -> Recipe:
    return Recipe.parse(text(method))


def plan_of(repository: Repository, name: str) -> Plan:
    identity = repository.manifest(repository.resolve(name)).lineage.plan
    assert identity is not None
    return load_plan(repository, identity)


def depths(repository: Repository, name: str) -> dict[tuple[str, int], str]:
    """Return the digits of a merge's plan, tensor by tensor and expert by expert."""
    plan = plan_of(repository, name)
    blocks = {tensor.name: len(tensor.blocks) for tensor in repository.manifest(plan.base).tensors}
    return {
        (name, expert): plan.tensor_by_name[name].depths[expert] if name in plan.tensor_by_name else "0" * count
        for name, count in blocks.items()
        for expert in range(len(EXPERTS))
    }


def cost_of(repository: Repository, name: str, only: Callable[[str, int], bool] = lambda tensor, block: True) -> int:
    """Return the bytes that a merge's plan reads of experts, as the catalog has them."""
    plan = plan_of(repository, name)
    total = 0
    for (tensor, expert), digits in depths(repository, name).items():
        blocks = repository.manifest(plan.experts[expert]).tensor_by_name[tensor].blocks
        for number, digit in enumerate(digits):
            tiers = repository.catalog.tiers(bytes.fromhex(blocks[number] or ""))
            depth = len(tiers) if int(digit) == EXACT else int(digit)
            total += sum(at.record.length for at in tiers[:depth]) if only(tensor, number) else 0
    return total


# ----------------------------------------------------------------------------------------------- the way to exact


@pytest.mark.parametrize("method", METHODS)
def test_refining_to_everything_is_the_exact_merge(repository: Repository, method: str) -> None:
    exact = repository.merge(recipe(method), "exact", seed=5)
    repository.merge(recipe(method), "m", budget="5%", seed=5)
    reports = []
    for budget in ("10%", "20%", "100%"):
        before = depths(repository, "m")
        earlier = repository.resolve("m")
        report = repository.refine("m", budget=budget)
        assert report.refines == earlier == report.previous
        assert report.manifest == repository.resolve("m")
        after = depths(repository, "m")
        assert all(new >= old for key in after for new, old in zip(after[key], before[key], strict=True))
        reports.append(report)
    assert reports[-1].manifest == exact.manifest
    assert reports[-1].plan == exact.plan
    assert reports[-1].predicted_error == 0.0
    assert repository.fsck(read_data=True).ok
    errors = [report.predicted_error for report in reports]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_refinement_reads(repository: Repository, method: str) -> None:
    """Of blocks that change everything at its new depth, part of which had been read before; of the others nothing."""
    first = repository.merge(recipe(method), "first", budget="5%")
    report = repository.refine("first", budget="10%", new_name="second")
    assert report.expert_raw_bytes == first.expert_raw_bytes
    assert report.read.expert <= report.budget_bytes == report.expert_raw_bytes // 10
    old, new = depths(repository, "first"), depths(repository, "second")
    changed = {
        (tensor, number)
        for (tensor, expert), digits in new.items()
        for number, digit in enumerate(digits)
        if digit != old[tensor, expert][number]
    }
    assert changed
    total, before = cost_of(repository, "second"), cost_of(repository, "first")
    assert first.read.expert == before
    kept = cost_of(repository, "second", lambda tensor, number: (tensor, number) not in changed)
    assert report.read.expert == total - kept
    assert report.reread_bytes == before - kept
    assert report.read.expert - report.reread_bytes == total - before
    # It is what a merge by this plan makes.
    repository.refine("first", budget="10%", new_name="second")
    lazy = repository.merge(recipe(method), "lazy", budget="5%", lazy=True)
    assert repository.refine("lazy", budget="10%").plan == report.plan
    assert lazy.plan == first.plan
    assert repository.materialize("lazy").manifest == report.manifest


def test_blocks_that_do_not_change_are_taken_over(repository: Repository) -> None:
    repository.merge(recipe("task_arithmetic"), "first", budget="5%")
    repository.refine("first", budget="6%", new_name="second")
    one, two = (repository.manifest(repository.resolve(name)) for name in ("first", "second"))
    old, new = depths(repository, "first"), depths(repository, "second")
    same = 0
    for tensor in one.tensors:
        for number, block in enumerate(tensor.blocks):
            if all(new[tensor.name, e][number] == old[tensor.name, e][number] for e in range(len(EXPERTS))):
                assert two.tensor_by_name[tensor.name].blocks[number] == block
                same += 1
    assert same > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", ["3%", "5%", "10%", "25%", "100%"])
def test_the_same_budget_changes_nothing(repository: Repository, method: str, budget: str) -> None:
    first = repository.merge(recipe(method), "m", budget=budget)
    log = lineage(repository, "m")
    report = repository.refine("m", budget=budget)
    assert report.manifest == first.manifest
    assert report.previous is None
    assert report.blocks.derived == report.blocks.lazy == 0
    assert report.read.expert == report.reread_bytes == report.written_bytes == 0
    assert report.predicted_error == pytest.approx(first.predicted_error)
    assert lineage(repository, "m") == log
    assert (log["refines"], log["refined_as"]) == (None, [])


def test_an_error_as_the_aim(repository: Repository) -> None:
    first = repository.merge(recipe("task_arithmetic"), "m", budget="3%")
    report = repository.refine("m", max_error=0.2)
    assert report.predicted_error <= 0.2 < first.predicted_error
    assert report.read.expert <= report.budget_bytes
    again = repository.refine("m", max_error=0.5)
    assert (again.manifest, again.read.expert) == (report.manifest, 0)
    with pytest.raises(BudgetError, match="allows an error"):
        repository.refine("m", max_error=0.01, budget=str(report.budget_bytes + 1000))
    exact = repository.refine("m", max_error=0.0)
    assert exact.manifest == repository.merge(recipe("task_arithmetic"), "exact").manifest


@pytest.mark.parametrize("planner", ["tiers", "blocks", "hash"])
def test_every_planner_goes_on_from_any_other(repository: Repository, planner: str) -> None:
    repository.merge(recipe("ties"), "m", budget="5%", planner="hash")
    before = depths(repository, "m")
    report = repository.refine("m", budget="12%", planner=planner)
    after = depths(repository, "m")
    assert all(new >= old for key in after for new, old in zip(after[key], before[key], strict=True))
    assert report.read.expert <= report.budget_bytes
    assert repository.refine("m").manifest == repository.merge(recipe("ties"), "exact").manifest


def test_an_output_of_another_dtype(repository: Repository) -> None:
    wide = Recipe.parse(text("ties", dtype="float32"))  # type: ignore[arg-type]
    exact = repository.merge(wide, "exact")
    repository.merge(wide, "m", budget="5%")
    again = repository.refine("m", budget="5%")
    assert (again.read.expert, again.blocks.derived) == (0, 0)
    repository.refine("m", budget="15%")
    assert repository.refine("m", budget="100%").manifest == exact.manifest


# ------------------------------------------------------------------------------------------------ names and seeds


def test_another_name_leaves_the_earlier_one(repository: Repository) -> None:
    first = repository.merge(recipe("ties"), "first", budget="5%")
    files = served(repository, "first")
    report = repository.refine("first", budget="10%", new_name="second")
    assert report.ref == "second"
    assert report.previous is None
    assert repository.refs()["first"] == first.manifest == report.refines
    assert repository.refs()["second"] == report.manifest != first.manifest
    assert served(repository, "first") == files
    by_id = repository.refine(first.manifest, budget="10%", new_name="third")
    assert by_id.manifest == report.manifest


@pytest.mark.parametrize("seed", [0, 7])
def test_random_methods_keep_their_seed(repository: Repository, seed: int) -> None:
    repository.merge(recipe("dare_ties"), "m", budget="5%", seed=seed)
    repository.refine("m", budget="10%")
    assert plan_of(repository, "m").seed == seed
    exact = repository.merge(recipe("dare_ties"), "exact", seed=seed)
    other = repository.merge(recipe("dare_ties"), "other", seed=seed + 1)
    assert repository.refine("m").manifest == exact.manifest != other.manifest


def test_lazy_merges_stay_lazy_and_serve_the_same(repository: Repository) -> None:
    repository.merge(recipe("ties"), "eager", budget="5%")
    lazy = repository.merge(recipe("ties"), "lazy", budget="5%", lazy=True)
    report = repository.refine("lazy", budget="12%")
    eager = repository.refine("eager", budget="12%")
    assert isinstance(report, RefineReport)
    assert report.plan == eager.plan
    assert (report.refines, report.reread_bytes, report.read.expert) == (lazy.manifest, 0, 0)
    assert report.blocks.lazy > 0 == report.blocks.derived
    assert repository.manifest(report.manifest).is_lazy
    assert tensors_of(repository, "lazy") == tensors_of(repository, "eager")
    repository.refine("lazy", budget="100%")
    repository.merge(recipe("ties"), "exact")
    assert repository.manifest(repository.resolve("lazy")).is_lazy
    assert tensors_of(repository, "lazy") == tensors_of(repository, "exact")
    stored = repository.materialize("lazy")
    assert stored.manifest == repository.resolve("exact")


# -------------------------------------------------------------------------------------------------------- the log


def test_the_log_tells_what_refines_what(repository: Repository) -> None:
    first = repository.merge(recipe("ties"), "m", budget="5%")
    assert lineage(repository, "m")["refines"] is None
    assert lineage(repository, "m")["refined_as"] == []
    repository.tag("kept", "m")
    second = repository.refine("m", budget="10%")
    third = repository.refine("kept", budget="15%", new_name="third")
    fourth = repository.refine("m", budget="100%")
    assert lineage(repository, "kept")["refined_as"] == [
        {"manifest": second.manifest, "refs": []},
        {"manifest": third.manifest, "refs": ["third"]},
    ]
    assert lineage(repository, "third")["refines"] == {"manifest": first.manifest, "refs": ["kept"]}
    assert lineage(repository, second.manifest)["refines"]["manifest"] == first.manifest
    assert lineage(repository, second.manifest)["refined_as"] == [{"manifest": fourth.manifest, "refs": ["m"]}]
    assert lineage(repository, "m")["refines"] == {"manifest": second.manifest, "refs": []}
    # Asking for the same again is not a refinement of itself, and forgets nothing.
    assert repository.refine("m", budget="100%").manifest == fourth.manifest
    assert lineage(repository, "m")["refines"] == {"manifest": second.manifest, "refs": []}
    assert lineage(repository, "m")["refined_as"] == []
    assert "refines" not in lineage(repository, "x")
    # What is gone keeps its id.
    repository.gc()
    assert lineage(repository, "m")["refines"] == {"manifest": second.manifest, "refs": []}
    assert [later["refs"] for later in lineage(repository, "kept")["refined_as"]] == [["third"]]


def test_a_stored_lazy_refinement_still_says_what_it_refines(repository: Repository) -> None:
    lazy = repository.merge(recipe("ties"), "m", budget="5%", lazy=True)
    repository.refine("m", budget="10%")
    repository.materialize("m")
    assert lineage(repository, "m")["refines"] == {"manifest": lazy.manifest, "refs": []}


# ---------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def run(repository: Repository, tmp_path: Path) -> Callable[..., Result]:
    (tmp_path / "recipe.yml").write_text(text("ties"))
    return lambda *arguments: CliRunner().invoke(cli, ["-R", str(repository.path), *map(str, arguments)])


def test_the_command_line(run: Callable[..., Result], tmp_path: Path, repository: Repository) -> None:
    run("merge", tmp_path / "recipe.yml", "--as", "m", "--budget", "5%")
    first = repository.resolve("m")
    done = run("refine", "m", "--budget", "10%", "--as", "n", "--threads", 1)
    assert done.exit_code == 0, done.output
    assert f"it refines {first[:12]}" in done.stdout
    assert "had been read for it before" in done.stdout
    shown = run("log", "n").stdout
    assert f"refines  {first[:12]} m" in shown
    shown = run("log", "m").stdout
    assert f"refined as {repository.resolve('n')[:12]} n" in shown
    assert "refines" not in shown
    value = json.loads(run("log", "m", "--json").stdout)
    assert value["refines"] is None
    assert value["refined_as"] == [{"manifest": repository.resolve("n"), "refs": ["n"]}]
    described = json.loads(run("show", "n", "--json").stdout)
    assert described["lineage"]["refines"] == {"manifest": first, "refs": ["m"]}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("x", "--budget", "10%"), UserError, "is a checkpoint, not a merge: there is nothing to refine"),
        (("nobody", "--budget", "10%"), NotFoundError, "'nobody' is neither a ref nor a manifest"),
        (("m", "--budget", "2%"), BudgetError, "bytes that the model was made from"),
        (("m", "--budget", "2%", "--max-error", "0.01"), BudgetError, "bytes that the model was made from"),
        (("m", "--budget", "nonsense"), BudgetError, "is not a budget"),
        (("m", "--max-error", "1"), BudgetError, "cannot be aimed at"),
        (("m", "--as", "a/b"), UserError, "cannot be a name"),
        (("m", "--importance", "nothing.json"), UserError, "cannot be read"),
        (("ID",), NotFoundError, "--as"),
    ],
    ids=str,
)
def test_what_cannot_be_refined(
    run: Callable[..., Result],
    repository: Repository,
    tmp_path: Path,
    arguments: tuple[str, ...],
    kind: type[UserError],
    message: str,
) -> None:
    run("merge", tmp_path / "recipe.yml", "--as", "m", "--budget", "5%")
    refs, stats = repository.refs(), repository.stats()
    done = run("refine", *(repository.resolve("m") if a == "ID" else a for a in arguments))
    assert isinstance(done.exception, kind)
    assert done.exception.exit_code == 2
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert (repository.refs(), repository.stats()) == (refs, stats)


def test_a_checkpoint_has_no_error_to_measure(repository: Repository) -> None:
    with pytest.raises(UserError, match="not a merge"):
        repository.measure_error("x")
