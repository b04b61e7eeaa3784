"""The planner on the command line: keys of the JSON, what people read, and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from builders import EXPERTS, array, fine_tuned, new_repository, recipe_text, write_model
from click.testing import CliRunner, Result

from mergefs.cli import cli
from mergefs.errors import UserError
from mergefs.repository import Repository

Run = Callable[..., Result]

READ = {"expert", "base", "metadata"}
BLOCKS = {"shared", "remembered", "derived", "lazy"}
MERGE = {
    *("plan", "manifest", "ref", "previous", "budget_bytes", "expert_raw_bytes", "predicted_error", "read"),
    *("written_bytes", "blocks", "seconds", "notes"),
}
PLAN = {
    *("plan", "manifest", "ref", "method", "budget_bytes", "expert_raw_bytes", "read", "tier_bytes", "written_bytes"),
    *("everything", "predicted_error", "curve", "blocks", "seconds", "notes"),
}
ROW = {"name", "blocks", "blocks_read", "bytes", "bytes_read", "tier_bytes", "error", "cancelled"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two experts whose blocks have coarse tiers, and recipes."""
    made = tmp_path_factory.mktemp("planning")
    random = np.random.default_rng(3)
    shapes = {"layers.0.w": (256, 512), "layers.1.w": (256, 512), "embed": (200, 512), "norm": (512,)}
    base = {name: array(random.normal(0, 0.04, shape), "BF16") for name, shape in shapes.items()}
    with new_repository(made / "repo", 1 << 17) as repository:
        repository.ingest(write_model(made / "base", base), "base")
        for seed, name in enumerate("xy"):
            repository.ingest(write_model(made / name, fine_tuned(base, seed + 4, delta=4e-4)), name, base="base")
    (made / "sum.yml").write_text(recipe_text("task_arithmetic", ["x", "y"], "base", weight=0.5))
    (made / "ties.yml").write_text(recipe_text("ties", ["x", "y"], "base", weight=0.5, density=0.5))
    return made


@pytest.fixture
def run(folder: Path) -> Run:
    return lambda *arguments: CliRunner().invoke(cli, ["-R", str(folder / "repo"), *map(str, arguments)])


def value(done: Result) -> dict[str, Any]:
    """Return the one JSON object on stdout."""
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def check_plan(found: dict[str, Any]) -> None:
    assert found.keys() >= PLAN
    assert found["read"].keys() == READ
    assert found["blocks"].keys() == {*BLOCKS, "changed", "read"}
    assert len(found["tier_bytes"]) == 4
    assert sum(found["tier_bytes"]) == found["read"]["expert"]
    assert found["budget_bytes"] is None or found["read"]["expert"] <= found["budget_bytes"]
    points = [(point["bytes"], point["error"]) for point in found["curve"]]
    assert [bytes_ for bytes_, _ in points] == sorted(bytes_ for bytes_, _ in points)
    assert all(0 <= error <= 1 for _, error in points)
    assert not points or (points[0], points[-1][1]) == ((0, 1), 0)


@pytest.mark.parametrize("recipe", ["sum.yml", "ties.yml"])
@pytest.mark.parametrize(
    "aim", [(), ("--budget", "8%"), ("--max-error", "0.3"), ("--budget", "8%", "--planner", "blocks")], ids=" ".join
)
def test_plan_and_explain(run: Run, folder: Path, recipe: str, aim: tuple[str, ...]) -> None:
    planned = value(run("plan", folder / recipe, *aim, "--json"))
    check_plan(planned)
    assert (planned["manifest"], planned["ref"]) == (None, None)
    assert planned["everything"] is (not aim)
    assert (planned["predicted_error"] == 0) is (not aim)
    assert bool(planned["curve"]) is bool(aim)
    explained = value(run("explain", folder / recipe, *aim, "--json"))
    check_plan(explained)
    assert {k: v for k, v in explained.items() if k in PLAN - {"seconds", "written_bytes"}} == {
        k: v for k, v in planned.items() if k in PLAN - {"seconds", "written_bytes"}
    }
    assert planned["written_bytes"] > 0 == explained["written_bytes"]
    assert [row["name"].split()[0] for row in explained["experts"]] == ["1", "2"]
    assert [row["name"] for row in explained["layers"]] == ["-", "0", "1"]
    assert {row["name"] for row in explained["kinds"]} == {"layers.*.w", "embed", "norm"}
    for rows in (explained["experts"], explained["layers"], explained["kinds"]):
        assert all(row.keys() == ROW for row in rows)
        for key, total in (
            ("blocks", planned["blocks"]["changed"]),
            ("blocks_read", planned["blocks"]["read"]),
            ("bytes_read", planned["read"]["expert"]),
        ):
            assert sum(row[key] for row in rows) == total
        assert np.sum([row["tier_bytes"] for row in rows], axis=0).tolist() == planned["tier_bytes"]


def test_merge_and_refine(run: Run, folder: Path) -> None:
    planned = value(run("plan", folder / "ties.yml", "--budget", "8%", "--json"))
    merged = value(run("merge", folder / "ties.yml", "--as", "m", "--budget", "8%", "--report", "--json"))
    assert merged.keys() == {*MERGE, "report"}
    assert merged["report"].keys() == {"predicted_error", "actual_error", "read", "seconds"}
    assert merged["report"]["predicted_error"] == merged["predicted_error"] == planned["predicted_error"]
    assert merged["report"]["actual_error"] == pytest.approx(merged["predicted_error"], rel=0.3)
    assert merged["report"]["read"].keys() == READ
    # What finding out reads is not what the merge read.
    assert merged["read"]["expert"] == planned["read"]["expert"] < merged["report"]["read"]["expert"]
    refined = value(run("refine", "m", "--budget", "15%", "--as", "n", "--json"))
    assert refined.keys() == {*MERGE, "refines", "reread_bytes"}
    assert refined["refines"] == merged["manifest"]
    assert 0 < refined["reread_bytes"] < refined["read"]["expert"] <= refined["budget_bytes"]
    assert refined["predicted_error"] < merged["predicted_error"]
    exact = value(run("merge", folder / "ties.yml", "--as", "exact", "--report", "--json"))
    assert (exact["predicted_error"], exact["report"]["actual_error"]) == (0, 0)
    for lazy in (True, False):
        option = ("--lazy",) if lazy else ()
        found = value(run("merge", folder / "sum.yml", "--as", "l", "--budget", "8%", *option, "--report", "--json"))
        assert found["report"]["actual_error"] == pytest.approx(found["predicted_error"], rel=0.1)


def test_what_people_read(run: Run, folder: Path) -> None:
    shown = run("explain", folder / "ties.yml", "--budget", "8%").stdout
    for part in ("budget", "predicted error", "expert ", "layer ", "kind ", "reading", "layers.*.w", "exact"):
        assert part in shown
    assert "the result is exact" in run("explain", folder / "ties.yml").stdout
    shown = run("merge", folder / "ties.yml", "--as", "p", "--budget", "8%", "--report").stdout
    assert "predicted, 0." in shown
    assert "actual" in shown


@pytest.mark.parametrize("name", ["curve.png", "curve.svg", "CURVE.PNG"])
@pytest.mark.parametrize("aim", [("--budget", "8%"), ()], ids=["a budget", "everything"])
def test_plots_are_drawn(run: Run, folder: Path, tmp_path: Path, name: str, aim: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    found = value(run("explain", folder / "ties.yml", *aim, "--plot", path, "--json"))
    check_plan(found)
    if path.suffix.lower() == ".svg":
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg")
        # The axes, the grid, the curve and its points.
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10
        return
    from matplotlib import image

    assert path.read_bytes().startswith(PNG)
    pixels = image.imread(path, format="png")
    assert pixels.shape[:2] == (600, 960)
    orange = (np.abs(pixels[:, :, :3] - np.array([0xD5, 0x5E, 0x00]) / 255) < 0.02).all(axis=2)
    blue = (np.abs(pixels[:, :, :3] - np.array([0x00, 0x72, 0xB2]) / 255) < 0.02).all(axis=2)
    assert orange.sum() > 50
    assert not aim or blue.sum() > 200


def test_plots_that_cannot_be_drawn_are_refused_before_planning(run: Run, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "curve.pdf", "neither .png nor .svg"),
        (tmp_path / "curve", "neither .png nor .svg"),
        (tmp_path / "nowhere" / "curve.png", "is not a folder"),
        (tmp_path / "file" / "curve.svg", "is not a folder"),
    ):
        # The recipe does not exist: it is not even looked at.
        done = run("explain", tmp_path / "none.yml", "--budget", "8%", "--plot", path)
        assert isinstance(done.exception, UserError)
        assert done.exception.exit_code == 2
        assert message in str(done.exception)
    (tmp_path / "folder.png").mkdir()
    done = run("explain", folder / "ties.yml", "--budget", "8%", "--plot", tmp_path / "folder.png")
    assert isinstance(done.exception, UserError)
    assert "cannot be written" in str(done.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.png"}


def test_no_plan_loads_the_compiler(slice_repository: Repository, tmp_path: Path) -> None:
    """In a process of its own: plans of every kind of method, with and without a budget, and a lazy commit."""
    lines = ["import sys", "from mergefs.recipe import Recipe", "from mergefs.repository import Repository"]
    lines.append(f"with Repository.open({str(slice_repository.path)!r}) as repository:")
    for method in ("linear", "ties", "dare_ties", "della", "breadcrumbs"):
        text = recipe_text(method, EXPERTS, "base", weight=0.5)
        for budget in (None, "5%"):
            lines.append(f"    repository.plan(Recipe.parse({text!r}), budget={budget!r}, save=False)")
        lines.append(f"    repository.merge(Recipe.parse({text!r}), 'light', lazy=True, budget='5%')")
    lines.append("assert not {'numba', 'llvmlite', 'torch'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
