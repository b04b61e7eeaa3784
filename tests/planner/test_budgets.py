"""Ten experts under a budget: what is read, what error is predicted, and what error there is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accounting import Prepared, measure, merge, packs_of, skip_unless_counted
from builders import array, load_model, new_repository, recipe_text, tensors_of, write_model
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from mergefs.cli import cli
from mergefs.errors import BudgetError
from mergefs.merge.accuracy import ErrorReport
from mergefs.merge.run import MergeReport
from mergefs.recipe import Recipe
from mergefs.repository import Repository

Floats = NDArray[np.float64]

EXPERTS = tuple(f"expert-{number}" for number in range(10))
WEIGHTS = (0.3, 0.1, 0.2, 0.15, 0.1, 0.25, 0.05, 0.1, 0.2, 0.15)
SHAPES = {f"layers.{layer}.w": (700, 900) for layer in range(7)} | {"embed": (300, 900), "norm": (900,), "none": (0, 4)}
DENSITY = 0.5
METHODS = ("task_arithmetic", "ties", "dare_ties", "dare_linear")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 4.7 million elements, and experts that share a quarter of their deltas' energy."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(11)

    def noise(shape: tuple[int, ...]) -> NDArray[np.float32]:
        return random.standard_normal(shape, np.float32)

    base = {name: array(np.float32(0.03) * noise(shape), "BF16") for name, shape in SHAPES.items()}
    values = {name: tensor.values.reshape(tensor.shape).astype(np.float32) for name, tensor in base.items()}
    common = {name: noise(shape) for name, shape in SHAPES.items()}
    write_model(folder / "base", base)
    for number, expert in enumerate(EXPERTS):
        # Layers are changed more and more, as far as 3 to 1.
        size = {name: 4e-4 * (1 + 2 * (index + number % 3) / 12) for index, name in enumerate(SHAPES)}
        tuned = {n: values[n] + np.float32(size[n]) * (0.5 * common[n] + 0.87 * noise(s)) for n, s in SHAPES.items()}
        write_model(folder / expert, {name: array(value, "BF16") for name, value in tuned.items()})
    return folder


@pytest.fixture(scope="module")
def repository(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """All of them. Tests may add merges of their own names."""
    with new_repository(tmp_path_factory.mktemp("ten") / "repository", 1 << 19) as made:
        made.ingest(models / "base", "base")
        for expert in EXPERTS:
            made.ingest(models / expert, expert, base="base")
        yield made


def text(method: str) -> str:
    own = [{"weight": w, **({} if method == "task_arithmetic" else {"density": DENSITY})} for w in WEIGHTS]
    return recipe_text(method, list(zip(EXPERTS, own, strict=True)), "base", dtype="float32")


def recipe(method: str) -> Recipe:
    return Recipe.parse(text(method))


@pytest.fixture(scope="module")
def tenth(repository: Repository) -> Callable[..., tuple[MergeReport, ErrorReport]]:
    """Merge with a budget of 10 %, once for each method and planner; return both reports."""

    @cache
    def run(method: str, planner: str = "tiers") -> tuple[MergeReport, ErrorReport]:
        report = repository.merge(recipe(method), f"tenth-{method}-{planner}", budget="10%", planner=planner)
        return report, repository.measure_error(report.manifest, report.predicted_error)

    return run


# ---------------------------------------------------------------------------------------------------- definitions


def defined(models: Path, method: str) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield each tensor's name, base and exact merge, computed in float64 from the files alone."""
    base = load_model(models / "base")
    loaded = [load_model(models / expert) for expert in EXPERTS]
    weights = np.array(WEIGHTS)[:, None]
    for name, tensor in base.items():
        below = tensor.values
        deltas = np.stack([expert[name].values - below for expert in loaded])
        if method == "task_arithmetic":
            yield name, below, below + (weights * deltas).sum(axis=0)
            continue
        assert method == "ties"
        keep = max(1, int(DENSITY * below.size))
        if below.size:
            thresholds = np.partition(np.abs(deltas), below.size - keep, axis=1)[:, below.size - keep]
            deltas = np.where(np.abs(deltas) >= thresholds[:, None], deltas, 0.0)
        weighted = weights * deltas
        elected = np.where(weighted.sum(axis=0) >= 0, 1.0, -1.0)
        agree = np.sign(weighted) == elected
        divisor = np.where(agree, weights, 0.0).sum(axis=0)
        merged = np.where(agree, weighted, 0.0).sum(axis=0) / np.where(divisor < 1e-8, 1.0, divisor)
        yield name, below, below + merged


def error_by_definition(repository: Repository, models: Path, name: str, method: str) -> float:
    """Return the relative error of a merge's delta, from its served float32 files."""
    served = tensors_of(repository, name)
    error = norm = 0.0
    for tensor, below, exact in defined(models, method):
        error += float(np.sum((served[tensor].values - exact) ** 2))
        norm += float(np.sum((exact - below) ** 2))
    return float(np.sqrt(error / norm))


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("method", "tolerance"), [(m, 0.1 if m == "task_arithmetic" else 0.2) for m in METHODS])
def test_the_predicted_error_is_the_actual_one(
    tenth: Callable[..., tuple[MergeReport, ErrorReport]], method: str, tolerance: float
) -> None:
    report, error = tenth(method)
    assert report.budget_bytes == report.expert_raw_bytes // 10
    assert 0.95 * report.budget_bytes < report.read.expert <= report.budget_bytes
    assert error.predicted_error == report.predicted_error
    assert 0.05 < error.actual_error < 0.95
    assert error.predicted_error == pytest.approx(error.actual_error, rel=tolerance)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_measured_error_is_that_of_the_definition(
    repository: Repository, models: Path, tenth: Callable[..., tuple[MergeReport, ErrorReport]], method: str
) -> None:
    report, error = tenth(method)
    assert error_by_definition(repository, models, report.manifest, method) == pytest.approx(
        error.actual_error, rel=0.001
    )


@pytest.mark.parametrize(("method", "share"), [("task_arithmetic", 0.5), ("dare_ties", 0.6), ("ties", 0.8)])
def test_tiers_are_better_than_whole_blocks(
    tenth: Callable[..., tuple[MergeReport, ErrorReport]], method: str, share: float
) -> None:
    """Where signs are elected the gain is less: rough deltas elect others."""
    planners = ("tiers", "blocks", "hash") if method == "task_arithmetic" else ("tiers", "blocks")
    found = {planner: tenth(method, planner) for planner in planners}
    for report, _ in found.values():
        assert report.read.expert <= report.expert_raw_bytes // 10
    errors = {planner: error.actual_error for planner, (_, error) in found.items()}
    assert errors["tiers"] < errors.get("hash", 1.0)
    assert errors["tiers"] <= share * errors["blocks"], errors


@pytest.mark.parametrize("planner", ["tiers", "blocks", "hash"])
def test_whole_blocks_are_predicted_as_well(
    tenth: Callable[..., tuple[MergeReport, ErrorReport]], planner: str
) -> None:
    """What is left of experts that have something in common adds up: it is not noise of each."""
    _, error = tenth("task_arithmetic", planner)
    assert error.predicted_error == pytest.approx(error.actual_error, rel=0.05)


def test_more_bytes_leave_less_error(
    repository: Repository, tenth: Callable[..., tuple[MergeReport, ErrorReport]]
) -> None:
    points = [(report.read.expert, error.actual_error) for report, error in (tenth("ties"),)]
    for share in ("3%", "24%"):
        report = repository.merge(recipe("ties"), "more", budget=share)
        points.append((report.read.expert, repository.measure_error(report.manifest).actual_error))
    points.sort()
    assert [error for _, error in points] == sorted((error for _, error in points), reverse=True)


# ---------------------------------------------------------------------------------------------- errors as the aim


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_fewest_bytes_for_an_error(repository: Repository, method: str) -> None:
    reports = {}
    for aim in (0.3, 0.15):
        reports[aim] = repository.merge(recipe(method), f"within-{aim}", max_error=aim)
        report = reports[aim]
        assert 0.9 * aim < report.predicted_error <= aim
        assert report.read.expert <= report.budget_bytes
        # A little less does not suffice.
        fewer = repository.plan(recipe(method), budget=str(int(0.9 * report.read.expert)), save=False)
        assert fewer.predicted_error > aim
    assert reports[0.3].read.expert < reports[0.15].read.expert
    # For the smaller one the 570 sampled elements are too few to say as much.
    assert repository.measure_error(reports[0.3].manifest).actual_error <= 1.2 * 0.3


@pytest.mark.parametrize("aim", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_a_budget_that_is_too_small_for_an_error_says_what_it_allows(
    repository: Repository, method: str, aim: float
) -> None:
    with pytest.raises(BudgetError) as caught:
        repository.merge(recipe(method), "refused", max_error=aim, budget="5%")
    assert "refused" not in repository.refs()
    message = str(caught.value)
    allowed = re.search(r"allows an error of (\d\.\d+)", message)
    needed = re.search(r"\((\d+) bytes\)", message)
    assert allowed
    assert needed
    planned = repository.plan(recipe(method), budget="5%", save=False)
    assert float(allowed[1]) == pytest.approx(planned.predicted_error, abs=6e-4)
    # What it says that is needed suffices, and much less does not.
    enough = repository.plan(recipe(method), max_error=aim, budget=needed[1], save=False)
    assert enough.predicted_error <= aim
    with pytest.raises(BudgetError, match="allows an error"):
        repository.plan(recipe(method), max_error=aim, budget=str(int(0.9 * int(needed[1]))), save=False)


@pytest.mark.parametrize("method", METHODS)
def test_no_error_and_all_bytes_are_no_budget(repository: Repository, method: str) -> None:
    exact = repository.merge(recipe(method), "exact", lazy=True)
    assert exact.predicted_error == 0.0
    aims: list[dict[str, Any]] = [{"max_error": 0.0}, {"max_error": 0.0, "budget": "100%"}, {"budget": "99%"}]
    aims += [{"budget": "100%", "planner": planner} for planner in ("tiers", "blocks", "hash")]
    for aim in aims:
        report = repository.merge(recipe(method), "all", lazy=True, **aim)
        assert report.manifest == exact.manifest
        assert report.plan == exact.plan
        assert report.predicted_error == 0.0


def test_the_exact_merge_has_no_error(repository: Repository, models: Path) -> None:
    report = repository.merge(recipe("task_arithmetic"), "exact-now", budget="100%")
    assert repository.measure_error(report.manifest).actual_error == 0.0
    assert error_by_definition(repository, models, report.manifest, "task_arithmetic") < 1e-4


# --------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def run(repository: Repository, tmp_path: Path) -> Callable[..., Result]:
    (tmp_path / "recipe.yml").write_text(text("ties"))

    def invoke(command: str, *arguments: object) -> Result:
        at = ["-R", str(repository.path), command, str(tmp_path / "recipe.yml"), *map(str, arguments)]
        return CliRunner().invoke(cli, at)

    return invoke


@pytest.mark.parametrize("error", ["1.0", "-0.1", "nan", "inf", "-inf"])
def test_errors_that_cannot_be_aimed_at(run: Callable[..., Result], error: str) -> None:
    for command in (("plan",), ("explain",), ("merge", "--as", "never"), ("merge", "--as", "never", "--lazy")):
        done = run(*command, f"--max-error={error}")
        assert isinstance(done.exception, BudgetError)
        assert done.exception.exit_code == 2
        assert "cannot be aimed at" in str(done.exception)


def test_a_budget_too_small_for_anything_gives_the_base(run: Callable[..., Result], repository: Repository) -> None:
    done = run("plan", "--budget", "100")
    assert done.exit_code == 0
    assert "0 of" in done.stdout
    assert "the result is the base" in done.stdout
    smallest = re.search(r"first tier takes ([\d.]+ \w+) at least", done.stdout)
    assert smallest
    done = run("merge", "--as", "nothing", "--budget", "100", "--json")
    value = json.loads(done.stdout)
    assert value["read"]["expert"] == 0
    assert value["predicted_error"] == 1.0
    made, base = tensors_of(repository, "nothing"), tensors_of(repository, "base")
    for name, tensor in base.items():
        assert np.array_equal(made[name].values, tensor.values)


# ------------------------------------------------------------------------------------------- the operating system


def test_a_tenth_is_what_the_disk_gives(repository: Repository, tmp_path: Path) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("the kernel has no /proc/PID/io")
    (tmp_path / "recipe.yml").write_text(text("ties"))
    base_packs = packs_of(repository, "base")
    expert_packs = frozenset[Path]().union(*(packs_of(repository, expert) for expert in EXPERTS)) - base_packs
    prepared = Prepared(repository.path, tmp_path / "recipe.yml", base_packs, expert_packs)
    skip_unless_counted(expert_packs)
    (tmp_path / "warm.yml").write_text(text("task_arithmetic"))
    merge(prepared, tmp_path / "warm.yml", "warm", "10%")
    report = measure(prepared, expert_packs, "cold", "10%", ("expert",))
    assert report["read"]["expert"] <= report["budget_bytes"] == report["expert_raw_bytes"] // 10
    assert report["read"]["expert"] > 0.95 * report["budget_bytes"]
