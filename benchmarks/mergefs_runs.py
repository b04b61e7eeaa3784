"""Merges by mergefs in a repository of the base and its experts, each command in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, say
from benchmarks.measure import MERGEFS, ROOT, Machine, run
from benchmarks.recipes import Case, case
from mergefs.blocks.exact import CODINGS

LISTED = ("expert_raw_bytes", "budget_bytes", "predicted_error", "read", "written_bytes", "stored_bytes", "blocks")
"""What is kept of the reports of mergefs."""


class Mergefs:
    """A repository, and merges in it.

    Args:
        repository: its folder; made by `make`.
        models: the folder that holds the base and the experts.
        work: a folder for recipes.
        machine: prepared before every measured command.
        exact: the repository's coding.
    """

    def __init__(self, repository: Path, models: Path, work: Path, machine: Machine, exact: str = CODINGS[0]) -> None:
        self.repository = repository
        self._models = models
        self._work = work
        self._machine = machine
        self._exact = exact

    def make(self) -> None:
        """Make the repository."""
        self._quietly("init", self.repository, "--exact", self._exact)

    def ingest(self, name: str) -> dict[str, Any]:
        """Take in a model; return what it took."""
        against = () if name == "base" else ("--base", "base")
        return self._measured(f"ingest {name}", "ingest", self._models / name, "--as", name, *against)

    def merge(self, case: Case, name: str, *options: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Merge into the model `name`, with more environment variables if given; return what it took."""
        recipe = case.write(self._work / "mergefs.yaml")
        step = f"mergefs {case.name} {' '.join(options)}".strip()
        return self._measured(step, "merge", recipe, "--as", name, *options, variables=variables)

    def plan(self, case: Case, *options: str) -> dict[str, Any]:
        """Plan; return what it took, with the plan's id as `plan`."""
        recipe = case.write(self._work / "mergefs.yaml")
        return self._measured(f"plan {case.name}", "plan", recipe, *options)

    def merge_planned(self, plan: str, name: str) -> dict[str, Any]:
        """Run a stored plan; return what it took."""
        return self._measured(f"merge {plan[:12]}", "merge", "--plan", plan, "--as", name)

    def export(self, name: str, folder: Path) -> dict[str, Any]:
        """Write a model as an ordinary directory; return what it took."""
        return self._measured(f"export {name}", "export", name, folder)

    def discard(self, *names: str) -> None:
        """Remove models (those of the names that there are), what only they need, and what is remembered of merges."""
        present = {model["ref"] for model in self._quietly("ls")["models"]}
        if gone := present & set(names):
            self._quietly("rm", *sorted(gone))
        self._quietly("gc")

    def _measured(
        self, name: str, *arguments: str | Path, variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        self._machine.prepare()
        command = [*MERGEFS, "--repo", self.repository, *arguments, "--json"]
        measured = run(command, name, self._work, environment() | dict(variables or {}))
        value = asdict(measured)
        report = value.pop("report")
        value |= {key: report[key] for key in LISTED if key in report}
        return value | {"reused": reused(report), "plan": report.get("plan")}

    def _quietly(self, *arguments: str | Path) -> dict[str, Any]:
        where = () if arguments[0] == "init" else ("--repo", self.repository)
        command = [*MERGEFS, *where, *arguments, "--json"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"mergefs {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
        value: dict[str, Any] = json.loads(done.stdout)
        return value


def ingest_all(mergefs: Mergefs, journal: Journal, k: int) -> None:
    """Take in the base and k experts, those that are not there yet."""
    if "ingest base" not in journal:
        shutil.rmtree(mergefs.repository, ignore_errors=True)
        mergefs.make()
    for name in ("base", *(f"expert-{i}" for i in range(k))):
        if f"ingest {name}" not in journal:
            journal.measure(f"ingest {name}", lambda name=name: mergefs.ingest(name))


def compile_loops(methods: list[str], work: Path, journal: Journal | None = None) -> None:
    """Compile what these methods need, so that no measured merge does.

    With a journal, also measure the first `ties` merge after installation, when nothing is compiled yet.
    """
    say("Compiling what is not compiled yet ...")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        here = Path(folder)
        command = [sys.executable, "-m", "benchmarks.compile", folder, *methods]
        subprocess.run(command, check=True, cwd=ROOT, env=environment())
        if journal is None or "first use" in journal:
            return
        tiny = Mergefs(here / "repository", here / "models", here, Machine(work, cold=False))
        asked = case("ties", 2)
        tiny.merge(asked, "once")  # it is not compiled yet where only other methods are measured
        tiny.discard("once", "merged")
        warm = tiny.merge(asked, "warm")["seconds"]
        tiny.discard("warm")
        empty = {"NUMBA_CACHE_DIR": str(here / "compiled")}
        journal.measure("first use", lambda: tiny.merge(asked, "first", variables=empty) | {"warm_seconds": warm})


def reused(report: dict[str, Any]) -> int | None:
    """Return how many blocks a merge took from what is remembered; None where mergefs does not say."""
    blocks = report.get("blocks", {})
    return next((blocks[key] for key in ("remembered", "reused") if key in blocks), None)


def environment() -> dict[str, str]:
    """Return the environment of a process that finds mergefs here and may keep compiled Python."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(ROOT)}


def commit() -> str:
    """Return which mergefs is measured."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
