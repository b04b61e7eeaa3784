"""What a read budget costs in task accuracy, for the product's planner and for two that read whole blocks.

    python -m benchmarks.quality [--experts DIR] [--tasks FILE] [--seeds 3] [--plot FILE] [--json]

Merges experts of a sentence encoder by task_arithmetic and by ties, exactly and under budgets, and measures how many
held-out docstrings each merge finds by their names, the error of its delta, and the expert bytes it read. Without
DIR it trains a set of experts for every seed; see benchmarks/README.md for what the standard errors are of.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts import METHODS, expert_names, ingest, recipe, state, vector
from benchmarks.quality_report import (
    BUDGETS,
    PLANNERS,
    Key,
    Trial,
    Trials,
    as_json,
    draw,
    gains,
    notes,
    summarise,
    table,
)
from benchmarks.retrieval import HELD_OUT, Judge, Scores, Task, halves, read_tasks, versions
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from tools.encoder import LIBRARIES, fine_tune, make_base, say

RANDOM = "hash"
CODECS = ("fast", "small")
TRAINED = (*LIBRARIES, "torch")

# --- merging -----------------------------------------------------------------------------------------------


class Merger:
    """The merges of one set of experts, measured.

    Args:
        repository: holds the base and the experts.
        experts: their names.
        judge: measures the models.
        seeds: those that are measured with these experts.
    """

    def __init__(self, repository: Repository, experts: list[str], judge: Judge, seeds: Sequence[int]) -> None:
        self.repository = repository
        self.experts = experts
        self.judge = judge
        self.seeds = seeds
        self.base = vector(state(repository, "base"))

    def models(self) -> Trials:
        """Measure the base and the experts."""
        found = {Key("base"): self._spread(self._scores("base"), read=0.0, error=1.0)}
        return found | {Key(f"expert {name}"): self._spread(self._scores(name)) for name in self.experts}

    def method(self, method: str, planners: Sequence[str]) -> Trials:
        """Measure a method, exactly and under all budgets."""
        say(f"Merging by {method} ...")
        asked = recipe(method, self.experts)
        report = self.repository.merge(asked, "exact")
        exact = vector(state(self.repository, "exact")) - self.base
        share = report.read.expert / report.expert_raw_bytes
        found = {Key(method): self._spread(self._scores("exact", report.manifest), share, 0.0, 0.0)}
        for planner in planners:
            for budget in BUDGETS:
                key = Key(method, planner, budget)
                if planner == RANDOM:
                    found[key] = [self._budgeted(asked, key, seed, exact)[k] for k, seed in enumerate(self.seeds)]
                else:
                    found[key] = self._budgeted(asked, key, self.seeds[0], exact)
        self.repository.gc()
        return found

    def _budgeted(self, asked: Recipe, key: Key, seed: int, exact: NDArray[np.float64]) -> list[Trial]:
        """Merge under a budget; return the measurement for every seed's pool."""
        options: dict[str, Any] = {"budget": key.budget, "planner": key.planner, "seed": seed}
        planned = self.repository.plan(asked, save=False, **options)
        report = self.repository.merge(asked, "budgeted", **options)
        tensors = state(self.repository, "budgeted")
        error = float(np.linalg.norm(vector(tensors) - self.base - exact) / np.linalg.norm(exact))
        scores = self.judge.scores(report.manifest, tensors)
        share = report.read.expert / report.expert_raw_bytes
        return self._spread(scores, share, error, planned.predicted_error)

    def _scores(self, name: str, manifest: str | None = None) -> Scores:
        return self.judge.scores(manifest or self.repository.resolve(name), state(self.repository, name))

    @staticmethod
    def _spread(
        scores: Scores, read: float | None = None, error: float | None = None, predicted: float | None = None
    ) -> list[Trial]:
        """Return a measurement for every pool."""
        return [Trial(scores.right, pool, read, error, predicted) for pool in scores.pools]


def measure_set(
    folder: Path, experts: list[str], judge: Judge, seeds: Sequence[int], planners: Sequence[str]
) -> tuple[Trials, dict[str, float]]:
    """Measure all merges of a set of experts, and the share of their bytes that an exact merge reads by codec."""
    with tempfile.TemporaryDirectory() as work:
        with Repository.init(Path(work) / "repository") as repository:
            ingest(repository, folder, experts)
            merger = Merger(repository, experts, judge, seeds)
            trials = merger.models()
            for method in METHODS:
                trials |= merger.method(method, planners)
        shares = {codec: exact_share(Path(work) / codec, codec, folder, experts) for codec in CODECS}
    return trials, shares


def exact_share(path: Path, codec: str, folder: Path, experts: list[str]) -> float:
    """Return the share of the experts' raw bytes that an exact merge reads in a repository of a codec."""
    with Repository.init(path, exact=codec) as repository:
        ingest(repository, folder, experts)
        report = repository.merge(recipe("task_arithmetic", experts), "merged")
        return report.read.expert / report.expert_raw_bytes


def measure_given(
    folder: Path, tasks: dict[str, Task], seeds: int, planners: Sequence[str]
) -> tuple[Trials, dict[str, float]]:
    """Measure a user's experts: the seeds vary the pool and the sampling."""
    judge = Judge(folder / "base", tasks, halves(seeds, len(tasks)))
    return measure_set(folder, list(tasks), judge, range(seeds), planners)


def measure_trained(tasks: dict[str, Task], seeds: int, planners: Sequence[str]) -> tuple[Trials, dict[str, float]]:
    """Measure a set of experts that is trained for every seed."""
    trials: Trials = defaultdict(list)
    shares = []
    with tempfile.TemporaryDirectory() as work:
        make_base(Path(work) / "base" / "base")
        judge = Judge(Path(work) / "base" / "base", tasks)
        for seed in range(seeds):
            folder = Path(work) / f"set-{seed}"
            shutil.copytree(Path(work) / "base", folder)
            for number, (library, task) in enumerate(tasks.items()):
                say(f"Seed {seed}: fine-tuning an expert for {library} ...")
                fine_tune(folder / "base", folder / library, task.training, seed * len(tasks) + number)
            found, share = measure_set(folder, list(tasks), judge, [seed], planners)
            for key, of_set in found.items():
                trials[key] += of_set
            shares.append(share)
            shutil.rmtree(folder)
    return trials, {codec: float(np.mean([share[codec] for share in shares])) for codec in CODECS}


# --- the command line --------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=Path, metavar="DIR", help="holds base/ and one folder a library, its expert")
    parser.add_argument("--tasks", type=Path, metavar="FILE", help="the tasks: by default pairs.py in DIR or beside it")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="at least 3 make a standard error")
    parser.add_argument("--planners", default=",".join(PLANNERS), metavar="A,B", help="by default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png or .svg (needs matplotlib)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.planners = options.planners.split(",")
    if unknown := set(options.planners) - set(PLANNERS):
        parser.error(f"no planner is called '{min(unknown)}'")
    if options.seeds < 1:
        parser.error("--seeds: at least 1")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'mergefs[plot]'")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        parser.error("--plot: name a .png or an .svg")
    if options.experts and not (options.experts / "base").is_dir():
        parser.error(f"{options.experts} holds no base")
    if options.experts and options.tasks is None:
        beside = [folder / "pairs.py" for folder in (options.experts.resolve(), options.experts.resolve().parent)]
        options.tasks = next((file for file in beside if file.is_file()), None)
        if options.tasks is None:
            parser.error(f"there is no pairs.py in {options.experts} or beside it: name the tasks' file with --tasks")
    return options


def main() -> None:
    """Train or ingest, merge, measure and print."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the repositories are removed then as well
    started = time.perf_counter()
    trained = options.experts is None
    say("Collecting names and docstrings ...")
    tasks = read_tasks(TRAINED if trained else expert_names(options.experts), options.tasks)
    if trained:
        trials, shares = measure_trained(tasks, options.seeds, options.planners)
    else:
        trials, shares = measure_given(options.experts, tasks, options.seeds, options.planners)
    rows = summarise(trials, list(tasks), trained)
    lines = gains(rows, trials, options.planners, trained)
    if options.plot:
        draw(rows, options.planners, options.plot)
    if options.json:
        told = {
            "experts": "trained" if trained else "given",
            "seeds": options.seeds,
            "held_out": HELD_OUT,
            "versions": versions(list(tasks)),
            "exact_share": shares,
            "rows": [as_json(row) for row in rows.values()],
            "gains": lines,
            "seconds": time.perf_counter() - started,
        }
        print(json.dumps(told))
        return
    print(table(rows.values()))
    print(f"\n{notes(trained, options.seeds, list(tasks))}\n")
    exact = ", ".join(f"{share:.2%} with the codec '{codec}'" for codec, share in shares.items())
    print(f"Exact merges read of the experts' raw bytes: {exact}.")
    print("\n".join(lines))
    say(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
