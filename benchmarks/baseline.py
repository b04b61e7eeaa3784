"""Measure the whole job on a base and K experts: ingest, merge, lazy merge and export, against `cp`.

    python -m benchmarks.baseline [--models DIR] [--shape qwen3-0.6b] [-k 5] [--work DIR] [--json]

Every step runs through the command line in a process of its own. Its seconds are wall time from start to end of
that process; peak memory is its largest resident set; `disk read` is what the operating system read from the
disk for it, which is to be compared with what mergefs reports (`expert + base`). `cp` of the same checkpoint
is followed by fsync, as ingest and export flush what they write. Copies and ingests alternate, and change
places from model to model, so that a slow minute of the machine hits both.

Before every step dirty pages are flushed and, when root, the page cache is dropped; then the programs (not
the data) are read back in, so that no step is charged for loading Python.

This process stays small on purpose: a child's peak memory is at least its parent's size when it was started.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    MERGEFS,
    Machine,
    Measured,
    StepFailedError,
    aligned,
    files,
    find_models,
    fsync,
    load,
    make_models,
    run,
    size,
    told,
)

DENSITY = 0.5


@dataclass
class Step:
    """What one step took.

    Attributes:
        name: of the step.
        seconds: wall time of its process (for `cp`, with fsync).
        peak_bytes: the largest resident set of the process.
        disk_read_bytes: what the operating system read from the disk for it.
        raw_bytes: bytes of the checkpoint that went in or came out.
        cp_seconds: the `cp` that it is compared with, or None.
        report: what mergefs itself reported.
    """

    name: str
    seconds: float
    peak_bytes: int
    disk_read_bytes: int
    raw_bytes: int
    cp_seconds: float | None = None
    report: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, name: str, raw_bytes: int, measured: Measured) -> Step:
        """Return the step that a process did."""
        return cls(
            name,
            measured.seconds,
            measured.peak_bytes,
            measured.disk_read_bytes,
            raw_bytes,
            report=measured.report,
        )


class Baseline:
    """One measurement in a work folder."""

    def __init__(self, models: list[Path], work: Path, machine: Machine, tell: bool) -> None:
        self.models = models
        self.work = work
        self.machine = machine
        self.tell = tell
        self.repository = work / "repository"
        self.steps: list[Step] = []

    def measure(self) -> None:
        """Run every step."""
        run([*MERGEFS, "init", "--json", self.repository], "init", self.work)
        for number, model in enumerate(self.models):
            self._take_in(number, model)
        raw = size(self.models[0])
        experts = [f"expert-{i}" for i in range(len(self.models) - 1)]
        for share in ("100%", "10%"):
            recipe = self._recipe(f"ties-{share}", experts)
            self._step(f"ties {share}", raw, "merge", recipe, "--as", f"merged-{share.rstrip('%')}", "--budget", share)
        for count in sorted({min(2, len(experts)), len(experts)}):
            # Another density, so that no block of this merge is stored already.
            recipe = self._recipe(f"lazy-{count}", experts[:count], density=0.6)
            self._step(f"lazy ties of {count}", raw, "merge", recipe, "--as", f"lazy-{count}", "--lazy")
        for ref in ("base", "expert-0", "merged-100"):
            copied = self._copy(f"cp for export {ref}", self.models[0])
            target = self.work / "exported"
            self._step(f"export {ref}", raw, "export", ref, target).cp_seconds = copied.seconds
            shutil.rmtree(target)

    def _take_in(self, number: int, model: Path) -> None:
        name = "base" if number == 0 else f"expert-{number - 1}"
        against = () if number == 0 else ("--base", "base")
        raw = size(model)

        def ingest() -> Step:
            return self._step(f"ingest {name}", raw, "ingest", model, "--as", name, *against)

        if number % 2:
            done = ingest()
            copied = self._copy(f"cp {name}", model)
        else:
            copied = self._copy(f"cp {name}", model)
            done = ingest()
        done.cp_seconds = copied.seconds

    def _copy(self, name: str, model: Path) -> Step:
        target = self.work / "copy"
        self.machine.prepare()
        began = time.perf_counter()
        step = Step.make(name, size(model), run(["cp", "-rL", model, target], name, self.work))
        for file in files(target):
            fsync(file)
        step.seconds = time.perf_counter() - began
        shutil.rmtree(target)
        return self._keep(step)

    def _step(self, name: str, raw_bytes: int, *arguments: str | os.PathLike[str]) -> Step:
        self.machine.prepare()
        command = [*MERGEFS, "--repo", self.repository, *arguments, "--json"]
        return self._keep(Step.make(name, raw_bytes, run(command, name, self.work)))

    def _keep(self, step: Step) -> Step:
        self.steps.append(step)
        if self.tell:
            print(f"{step.name}: {step.seconds:.2f} s", file=sys.stderr, flush=True)
        return step

    def _recipe(self, name: str, experts: list[str], density: float = DENSITY) -> Path:
        recipe = {
            "models": [{"model": expert, "parameters": {"weight": 1.0, "density": density}} for expert in experts],
            "merge_method": "ties",
            "base_model": "base",
            "parameters": {"normalize": True},
        }
        path = self.work / f"{name}.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        return path


def table(result: dict[str, Any]) -> str:
    """Lay a result out for people."""
    head = ("step", "s", "cp s", "x cp", "MB/s", "peak MiB", "disk read MB", "expert + base MB", "stored")
    rows = [head]
    for step in result["steps"]:
        report, cp = step["report"], step["cp_seconds"]
        read = report.get("read")
        stored = report.get("stored_bytes", report.get("written_bytes"))
        lazy = step["name"].startswith("lazy")
        rows.append(
            (
                step["name"],
                f"{step['seconds']:.2f}",
                "" if cp is None else f"{cp:.2f}",
                "" if cp is None else f"{step['seconds'] / cp:.1f}",
                "" if lazy else f"{step['raw_bytes'] / step['seconds'] / 1e6:.0f}",
                f"{step['peak_bytes'] / 2**20:.0f}",
                f"{step['disk_read_bytes'] / 1e6:.1f}",
                "" if read is None else f"{read['expert'] / 1e6:.1f} + {read['base'] / 1e6:.1f}",
                "" if stored is None or lazy else f"{stored / step['raw_bytes']:.4f}",
            )
        )
    machine, total = result["machine"], result["total"]
    head_lines = [
        told(machine),
        f"base and {result['k']} experts{' of ' + result['shape'] if result['shape'] else ''}",
        "",
    ]
    tail = [
        "",
        f"ingested {total['raw_bytes'] / 1e6:.1f} MB, stored {total['stored_bytes'] / 1e6:.1f} MB:"
        f" {total['stored_bytes'] / total['raw_bytes']:.3f} (experts alone {total['expert_share']:.3f})",
        f"ingest took {total['ingest_over_cp']:.2f} times as long as cp and fsync, in all",
        *(
            f"{name}: read {share['expert_share']:.2%} of the experts' raw bytes; the disk gave"
            f" {share['disk_over_reported']:.3f} of what was reported"
            for name, share in total["merges"].items()
        ),
        f"largest peak memory {total['peak_bytes'] / 2**30:.2f} GiB ({total['peak_step']})",
    ]
    return "\n".join([*head_lines, *aligned(rows), *tail])


def summarize(steps: list[Step]) -> dict[str, Any]:
    """Add up what the steps say."""
    ingests = [s for s in steps if s.name.startswith("ingest")]
    experts = ingests[1:]
    merges = [s for s in steps if s.name.startswith("ties")]
    largest = max((s for s in steps if s.report), key=lambda s: s.peak_bytes)

    def share(step: Step) -> dict[str, float]:
        read = step.report["read"]
        return {
            "expert_share": read["expert"] / step.report["expert_raw_bytes"],
            "disk_over_reported": step.disk_read_bytes / max(1, sum(read.values())),
        }

    return {
        "raw_bytes": sum(s.raw_bytes for s in ingests),
        "stored_bytes": sum(s.report["stored_bytes"] for s in ingests),
        "expert_share": sum(s.report["stored_bytes"] for s in experts) / sum(s.raw_bytes for s in experts),
        "ingest_over_cp": sum(s.seconds for s in ingests) / sum(s.cp_seconds or 0.0 for s in ingests),
        "merges": {s.name: share(s) for s in merges},
        "peak_bytes": largest.peak_bytes,
        "peak_step": largest.name,
    }


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baseline", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, metavar="DIR", help="reuse DIR/base and DIR/expert-0 ...")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of the models to make (default: %(default)s)")
    parser.add_argument("-k", type=int, default=5, metavar="K", help="number of experts (default: %(default)s)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the temporary folder is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.k < 1:
        parser.error("K is at least 1")
    with ExitStack() as stack:
        if options.work:
            options.work.mkdir(parents=True, exist_ok=True)
        work = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mergefs-baseline-", dir=options.work))
        ).resolve()
        folder = options.models.resolve() if options.models else work / "models"
        if not options.models:
            make_models(options.shape, options.k, folder)
        machine = Machine(work)
        baseline = Baseline(find_models(folder, options.k), work, machine, tell=not options.json)
        described = machine.describe()
        try:
            baseline.measure()
        except StepFailedError as error:
            raise SystemExit(str(error)) from error
        described |= {"page_cache_dropped": machine.cold, "load_after": load()}
    result = {
        "machine": described,
        "shape": None if options.models else options.shape,
        "k": options.k,
        "steps": [asdict(step) for step in baseline.steps],
        "total": summarize(baseline.steps),
    }
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
