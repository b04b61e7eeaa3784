"""The comparisons with mergekit and with a plain pipeline, mergefs's side of them, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builders import load_model

from benchmarks.journal import Journal
from benchmarks.measure import ROOT
from benchmarks.oracle import define, philox
from benchmarks.plain import merge as merge_plainly
from benchmarks.recipes import METHODS, Case, case
from benchmarks.versus_report import Session, checks, draw, told_checks
from mergefs.recipe import Recipe
from tools.synth import make


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in its own process."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base and three experts."""
    return make("tiny", 3, tmp_path_factory.mktemp("models"))[0].parent


# ------------------------------------------------------------------------------------------------- whole programs


@pytest.mark.slow
def test_versus_mergekit_without_mergekit(models: Path, tmp_path: Path) -> None:
    common = ("benchmarks.versus_mergekit", "--shape", "tiny", "--models", models, "--work", tmp_path, "--json")
    asked = ("-k", "2", "--methods", "ties,dare_ties", "--variants", "exact,budget")
    done = run(*common, *asked, "--without-mergekit", "--pairs-only", "--warm")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["page_cache_dropped"] is False
    assert sorted(found["ingest"]) == ["ingest base", "ingest expert-0", "ingest expert-1"]
    ties, dare = found["pairs"]
    assert (ties["method"], dare["method"]) == ("ties", "dare_ties")
    for pair in (ties, dare):
        exact, budget = pair["runs"]["exact"], pair["runs"]["budget"]
        assert pair["ingest_paid_after"] is None
        assert exact["seconds"] > 0
        assert 2**20 < exact["peak_bytes"] < 2**30
        assert budget["read"]["expert"] <= budget["budget_bytes"] < exact["read"]["expert"]
        assert exact["equal"] > 0.9999
        assert exact["delta_error"] == pytest.approx(exact["rounded_delta_error"], rel=1e-3)
        assert budget["delta_error"] > 1.5 * exact["delta_error"]
    assert abs(dare["runs"]["exact"]["slope"] - 1) < 0.1
    # All of it is kept: nothing is measured again, and nothing is lost.
    for more in ((*asked, "--without-mergekit", "--pairs-only", "--warm"), ("--report-only", "--check")):
        again = run(*common, *more)
        assert "#0 ..." not in again.stderr
        assert json.loads(again.stdout)["pairs"] == found["pairs"]
    assert again.returncode == 1, "limits that were not measured do not hold"


@pytest.mark.slow
def test_paper_in_small(tmp_path: Path) -> None:
    options = ("--quick", "--shapes", "tiny", "-k", "2,3", "--methods", "ties", "--iterations", "2", "--warm", "--json")
    done = run("benchmarks.paper", *options, "--work", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["k"], row["system"]) for row in found["rq1"]] == [
        (k, system) for k in (2, 3) for system in ("plain", "mergefs 100%", "mergefs 10%")
    ]
    assert found["rq2"] == found["rq1"][3:], "the same merges are not measured twice"
    for plain, exact, budget in (found["rq1"][:3], found["rq1"][3:]):
        assert plain["expert_bytes"] == exact["expert_raw_bytes"]
        assert budget["expert_bytes"] <= 0.1 * plain["expert_bytes"] < exact["expert_bytes"]
        assert exact["predicted_error"] == 0 < budget["predicted_error"]
    assert [(i["change"], i["k"]) for i in found["rq3"]] == [("first merge", 2), ("expert added", 3)]
    assert all(i["plan_seconds"] > 0 and i["merge_seconds"] > 0 and i["derived"] > 0 for i in found["rq3"])


# --------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["exact", "weight", "layer"])
def test_recipes_are_recipes(method: str, variant: str) -> None:
    asked = case(method, 3).changed(variant)
    recipe = Recipe.parse(json.dumps(asked.recipe()))
    assert recipe.method.name == method
    assert (asked == case(method, 3)) is (variant == "exact")
    assert asked.name == case(method, 3).name


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_plain_pipeline_merges_by_definition(models: Path, tmp_path: Path, method: str) -> None:
    read = merge_plainly(method, 2, models, tmp_path / "out")
    base, *experts = (load_model(models / name) for name in ("base", "expert-0", "expert-1"))
    assert read == sum(len(tensor.data) for expert in experts for tensor in expert.values())
    found = load_model(tmp_path / "out")
    assert found.keys() == base.keys()
    for name, tensor in found.items():
        values = define(method, base[name].values, [expert[name].values for expert in experts]).values
        near = np.isclose(tensor.values, values.astype(ml_dtypes.bfloat16).astype(np.float64), rtol=2**-7, atol=0)
        assert near.mean() > 0.999, name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {p.name for p in (models / "base").iterdir()}


def test_masks_are_drawn_from_philox() -> None:
    # From kat_vectors of Random123.
    words = philox(np.zeros(1, np.uint64), (0, 0))
    assert words.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


def test_slerp_ends_at_its_ends() -> None:
    base, expert = np.array([3.0, 0.0]), np.array([0.0, 3.0])
    merged = define("slerp", base, [expert]).values
    assert np.linalg.norm(merged) == pytest.approx(3)
    assert np.arctan2(merged[1], merged[0]) == pytest.approx(0.4 * np.pi / 2)


def test_an_interrupted_journal_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    journal = Journal(file, {"shape": "tiny"})
    journal.measure("first", lambda: {"seconds": 1.0})
    with file.open("a") as opened:
        opened.write('{"key": "second", "seco')
    journal = Journal(file, {"shape": "tiny"})
    assert [key for key, _ in journal.items()] == ["first"]
    journal.measure("second", lambda: {"seconds": 2.0})
    again = Journal(file, {"shape": "tiny"})
    assert {key: value["seconds"] for key, value in again.items()} == {"first": 1.0, "second": 2.0}


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl", {"shape": "tiny"})
    with pytest.raises(SystemExit, match="something else"):
        Journal(tmp_path / "journal.jsonl", {"shape": "qwen3-0.6b"})
    assert Journal(tmp_path / "journal.jsonl", {}, check=False).common == {"shape": "tiny"}


def measured(seconds: float, read: int = 10**9, peak: int = 2**29) -> dict[str, Any]:
    """Return made-up figures of one run."""
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "anonymous_bytes": peak // 2,
        "disk_read_bytes": read,
        "disk_written_bytes": 10**8,
        "time": "2000-01-01T00:00:00",
    }


@pytest.fixture
def session() -> Session:
    """Made-up figures that are within all limits."""
    mergefs, mergekit = {}, {}
    cases = [case(method, k) for method in METHODS for k in (5, 10, 20)]
    for asked in cases:
        mergekit[f"mergekit {asked.name} #0"] = measured(300.0, read=40 * 10**9)
        for variant, seconds in (("exact", 9.0), ("weight", 4.0), ("layer", 1.0), ("budget", 3.0), ("lazy", 0.5)):
            mergefs[f"mergefs {asked.name} {variant} #0"] = measured(seconds)
    for k in (5, 10, 20):
        mergefs[f"fixed budget K={k}"] = measured(5.0) | {
            "read": {"expert": min(k * 2 * 10**8, 2**31 - 10**6)},
            "expert_raw_bytes": k * 10**9,
            "predicted_error": 0.0 if k < 11 else 0.1,
        }
    for name in ("base", *(f"expert-{i}" for i in range(20))):
        mergefs[f"ingest {name}"] = measured(7.0) | {"stored_bytes": 10**8}
    of_both = {"shape": "tiny", "models": "models", "cold": True}
    machine = {"cores": 2, "page_cache_dropped": True}
    versions = {"mergekit": "0.1.5", "torch": "2.13.0"}
    return Session(machine, of_both | {"mergefs": "0"}, of_both | versions, "", mergefs, mergekit)


def test_limits(session: Session) -> None:
    found = checks(session)
    assert all(check.holds for check in found), told_checks(found)
    session.mergefs["mergefs ties K=10 exact #0"] |= {"seconds": 13.0}
    session.mergefs["mergefs linear K=20 lazy #0"] |= {"seconds": 1.5, "peak_bytes": 2**31}
    session.mergefs["fixed budget K=20"] |= {"read": {"expert": 2**31 + 1}}
    failed = [check.name.split(":")[0] for check in checks(session) if not check.holds]
    assert failed == [
        "ties K=10, mergefs, everything",
        "lazy commit at K = 20",
        "peak memory of mergefs, the most",
        "expert bytes at --budget 2GiB, the most for any K",
    ]


def test_ingest_pays_after_some_merges(session: Session) -> None:
    told = {(pair["method"], pair["k"]): pair for pair in session.as_json([])["pairs"]}
    assert told["ties", 5]["ingest_seconds"] == 42.0
    assert told["ties", 5]["ingest_paid_after"] == 1
    session.mergekit["mergekit ties K=5 #0"] |= {"seconds": 30.0}
    told = {(pair["method"], pair["k"]): pair for pair in session.as_json([])["pairs"]}
    assert told["ties", 5]["ingest_paid_after"] == 3  # 42 + 2 * 9 = 60 = 2 * 30, 42 + 3 * 9 < 3 * 30


def test_medians_of_repetitions(session: Session) -> None:
    for number, seconds in ((1, 100.0), (2, 200.0)):
        session.mergekit[f"mergekit ties K=10 #{number}"] = measured(seconds)
    session.mergekit["mergekit ties K=10 #3"] = {"failed": "killed", "time": ""}
    found = session.runs()[Case("ties", 10)]["mergekit"]
    assert (found["seconds"], found["runs"]) == (200.0, 3)


def test_plot(session: Session, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(session, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "<svg" in text
    assert "slerp" not in text, "it has one K only"


def test_torch_is_not_loaded_by_the_programs_that_measure() -> None:
    code = "import sys, benchmarks.versus_mergekit, benchmarks.paper; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
