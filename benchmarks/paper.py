"""The three questions of the MergePipe paper (arXiv 2602.13273), answered by mergefs on this machine.

    python -m benchmarks.paper [--shapes qwen3-0.6b,llama-8b-slice] [-k 2,5,10] [--budgets 100%,10%,5%,2%]
        [--methods task_arithmetic,ties,dare_ties] [--questions 1,2,3] [--models SHAPE=DIR] [--work DIR] [--quick]
        [--json]

RQ1: expert bytes, total I/O and wall time against K at several budgets, beside a plain pipeline that reads every expert
whole (`benchmarks/plain.py`); by `ties`, of the first shape. RQ2: the same for every method and shape, at one K. RQ3:
times of planning and execution, and blocks reused, over ten merges of which each adds an expert or changes a weight.

Every step is a process of its own, cold. With `--work DIR` each is kept in DIR/SHAPE as soon as it is done, and not
made again. What `benchmarks.versus_mergekit --work DIR/SHAPE` measured before with the same mergefs and models is
taken over. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, say
from benchmarks.measure import Machine, StepFailedError, aligned, find_models, load, make_models, run, told
from benchmarks.mergefs_runs import Mergefs, commit, compile_loops, environment, ingest_all
from benchmarks.recipes import Case, case
from benchmarks.versus_mergekit import counts, one_of

SHAPES = ("qwen3-0.6b", "llama-8b-slice")
QUICK_SHAPES = ("tiny", "tiny-llama")
QUICK_BUDGETS = ("100%", "10%")
METHODS = ("task_arithmetic", "ties", "dare_ties")
METHOD = "ties"
"""Of the questions 1 and 3."""
OF_VERSUS = {"100%": "exact", "10%": "budget"}
"""What the comparison with mergekit calls merges under these budgets."""
ITERATIONS = 10
CHANGES = ("expert added", "weight changed", "weight changed in a layer")


@dataclass(frozen=True)
class Row:
    """One merge.

    Attributes:
        shape: of the models.
        method, k: of the merge.
        system: `plain`, or `mergefs` with its budget.
        seconds: wall time.
        peak_bytes: largest resident set.
        expert_bytes: read of experts.
        expert_raw_bytes: what all experts hold.
        disk_read_bytes, disk_written_bytes: at the operating system.
        predicted_error: of the merged delta, by mergefs.
    """

    shape: str
    method: str
    k: int
    system: str
    seconds: float
    peak_bytes: int
    expert_bytes: int
    expert_raw_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    predicted_error: float | None = None


@dataclass(frozen=True)
class Iteration:
    """One merge of a row of merges.

    Attributes:
        number: from 1 on.
        change: what differs from the merge before.
        k: number of experts.
        plan_seconds, merge_seconds: wall time of the two commands.
        expert_bytes: read of experts.
        disk_read_bytes, disk_written_bytes: of both, at the operating system.
        reused, derived: blocks of the result; `reused` is None where mergefs does not say.
        load: of the machine before.
    """

    number: int
    change: str
    k: int
    plan_seconds: float
    merge_seconds: float
    expert_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    reused: int | None
    derived: int
    load: float


class Models:
    """The merges of one shape's base and experts.

    Args:
        shape: of the models.
        models: their folder; made when absent.
        work: a folder that keeps the repository and the measurements.
        cold: whether to empty the page cache before every step.
    """

    def __init__(self, shape: str, models: Path, work: Path, cold: bool) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.shape = shape
        self._models = models
        self._work = work
        self.machine = Machine(work, cold)
        common = {"shape": shape, "models": str(models), "cold": self.machine.cold, "mergefs": commit()}
        self._journal = Journal(work / "mergefs.jsonl", common)
        self._mergefs = Mergefs(work / "repository", models, work, self.machine)

    def ingest(self, k: int) -> None:
        """Take in the base and k experts."""
        if not self._models.exists():
            make_models(self.shape, k, self._models)
        find_models(self._models, k)
        ingest_all(self._mergefs, self._journal, k)

    def rows(self, asked: Case, budgets: list[str]) -> Iterator[Row]:
        """Merge by the plain pipeline and by mergefs under every budget."""
        plain = self._kept(f"plain {asked.name} #0", lambda: self._plain(asked))
        raw = plain["expert_bytes"]
        yield self._row(asked, "plain", plain, raw, raw)
        for budget in budgets:
            options = () if budget == "100%" else ("--budget", budget)
            key = f"mergefs {asked.name} {OF_VERSUS.get(budget, budget)} #0"
            merged = self._kept(key, lambda options=options: self._merge(asked, *options))
            yield self._row(asked, f"mergefs {budget}", merged, merged["read"]["expert"], merged["expert_raw_bytes"])

    def iterations(self, most: int, count: int) -> list[Iteration]:
        """Merge again and again, each time with one thing changed; every merge stays until the end."""
        steps = list(changes(most, count))
        keys = [f"iteration {number} of {count}, {METHOD}" for number in range(1, count + 1)]
        if not all(key in self._journal for key in keys):  # a merge finds what those before it left
            names = [f"iteration-{number}" for number in range(1, count + 1)]
            self._mergefs.discard(*names)
            for key, name, (_, asked) in zip(keys, names, steps, strict=True):
                self._journal.measure(key, lambda name=name, asked=asked: self._planned(asked, name))
            self._mergefs.discard(*names)
        found = []
        for number, (key, (change, asked)) in enumerate(zip(keys, steps, strict=True), 1):
            value = self._journal.get(key) or {}
            found.append(Iteration(number, change, asked.k, **value["figures"], load=value["load"]))
        return found

    def _planned(self, asked: Case, name: str) -> dict[str, Any]:
        planned = self._mergefs.plan(asked)
        merged = self._mergefs.merge_planned(planned["plan"], name)
        return {
            "seconds": planned["seconds"] + merged["seconds"],
            "figures": {
                "plan_seconds": planned["seconds"],
                "merge_seconds": merged["seconds"],
                "expert_bytes": merged["read"]["expert"],
                "disk_read_bytes": planned["disk_read_bytes"] + merged["disk_read_bytes"],
                "disk_written_bytes": planned["disk_written_bytes"] + merged["disk_written_bytes"],
                "reused": merged["reused"],
                "derived": merged["blocks"]["derived"],
            },
        }

    def _kept(self, key: str, do: Any) -> dict[str, Any]:
        return self._journal.get(key) or self._journal.measure(key, do)

    def _merge(self, asked: Case, *options: str) -> dict[str, Any]:
        self._mergefs.discard("merged")
        value = self._mergefs.merge(asked, "merged", *options)
        self._mergefs.discard("merged")
        return value

    def _plain(self, asked: Case) -> dict[str, Any]:
        out = self._work / "plain"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.plain", asked.method, str(asked.k), self._models, out]
        self.machine.prepare([sys.executable, "-c", "import benchmarks.plain"])
        value = asdict(run(command, f"plain {asked.name}", self._work, environment()))
        shutil.rmtree(out)
        return value | value.pop("report")

    def _row(self, asked: Case, system: str, value: dict[str, Any], read: int, raw: int) -> Row:
        return Row(
            self.shape,
            asked.method,
            asked.k,
            system,
            value["seconds"],
            value["peak_bytes"],
            read,
            raw,
            value["disk_read_bytes"],
            value["disk_written_bytes"],
            value.get("predicted_error"),
        )


def changes(most: int, count: int) -> Iterator[tuple[str, Case]]:
    """Return merges, each with what it changes of the one before: an expert more (while there are), or a weight."""
    asked = case(METHOD, min(2, most))
    yield "first merge", asked
    for number in range(1, count):
        change = CHANGES[(0, 1, 0, 2)[(number - 1) % 4]]
        if change == CHANGES[0] and asked.k == most:
            change = CHANGES[1]
        if change == CHANGES[0]:
            asked = replace(asked, k=asked.k + 1)
        elif change == CHANGES[1]:
            asked = replace(asked, first=round(0.5 + 0.01 * number, 4))
        else:
            asked = replace(asked, layer=round(0.6 + 0.01 * number, 4))
        yield change, asked


# --- what is told ------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    """Lay merges out, each beside the plain one."""
    head = (
        "shape",
        "method",
        "system",
        "K",
        "s",
        "x",
        "expert MB",
        "of raw",
        "I/O MB",
        "of plain",
        "peak MiB",
        "error",
    )
    lines = [head]
    for row in rows:
        plain = next(
            r for r in rows if r.system == "plain" and (r.shape, r.method, r.k) == (row.shape, row.method, row.k)
        )
        total, of_plain = (r.disk_read_bytes + r.disk_written_bytes for r in (row, plain))
        lines.append(
            (
                row.shape,
                row.method,
                row.system,
                str(row.k),
                f"{row.seconds:.2f}",
                "" if row is plain else f"{plain.seconds / row.seconds:.1f}",
                f"{row.expert_bytes / 1e6:.1f}",
                f"{row.expert_bytes / row.expert_raw_bytes:.2%}",
                f"{total / 1e6:.0f}",
                "" if row is plain or not of_plain else f"{total / of_plain:.3f}",
                f"{row.peak_bytes / 2**20:.0f}",
                "" if row.predicted_error is None else f"{row.predicted_error:.3f}",
            )
        )
    return aligned(lines, left=3)


def iteration_table(iterations: list[Iteration]) -> list[str]:
    """Lay a row of merges out."""
    lines = [("", "change", "K", "plan s", "merge s", "reused", "derived", "expert MB", "read MB", "written MB")]
    for found in iterations:
        lines.append(
            (
                str(found.number),
                found.change,
                str(found.k),
                f"{found.plan_seconds:.2f}",
                f"{found.merge_seconds:.2f}",
                "not told" if found.reused is None else str(found.reused),
                str(found.derived),
                f"{found.expert_bytes / 1e6:.1f}",
                f"{found.disk_read_bytes / 1e6:.0f}",
                f"{found.disk_written_bytes / 1e6:.0f}",
            )
        )
    return aligned(lines, left=2)


def text(result: dict[str, Any]) -> str:
    """Lay everything out for people."""
    parts = [told(result["machine"])]
    if result["rq1"]:
        title = f"RQ1: expert bytes, I/O (read and written) and time against K, by {METHOD}; x: times as fast as plain"
        parts.append("\n".join([title, *table([Row(**row) for row in result["rq1"]])]))
    if result["rq2"]:
        title = "RQ2: the same across methods and shapes"
        parts.append("\n".join([title, *table([Row(**row) for row in result["rq2"]])]))
    if result["rq3"]:
        title = f"RQ3: {len(result['rq3'])} merges by {METHOD} one after the other, all exact"
        parts.append("\n".join([title, *iteration_table([Iteration(**found) for found in result["rq3"]])]))
    return "\n\n".join(parts)


# --- the command line --------------------------------------------------------------------------------------


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", metavar="SHAPE,...", help=f"the first for RQ1 and RQ3 ({','.join(SHAPES)})")
    parser.add_argument("-k", type=counts, metavar="K,...", help="for RQ1 (2,5,10); RQ2 takes the middle one")
    parser.add_argument("--budgets", metavar="B,...", help="for RQ1 (100%%,10%%,5%%,2%%); RQ2 takes the first two")
    parser.add_argument("--methods", type=one_of(METHODS), default=",".join(METHODS), help="for RQ2 (%(default)s)")
    parser.add_argument("--questions", type=counts, default="1,2,3", metavar="N,...", help="(%(default)s)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, metavar="N", help="of RQ3 (%(default)s)")
    parser.add_argument("--models", action="append", default=[], metavar="SHAPE=DIR", help="made when absent")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for everything else, kept; else temporary")
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--quick", action="store_true", help="tiny models: to see it run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(given)
    options.shapes = options.shapes.split(",") if options.shapes else list(QUICK_SHAPES if options.quick else SHAPES)
    options.k = options.k or ([2, 3] if options.quick else [2, 5, 10])
    default = QUICK_BUDGETS if options.quick else ("100%", "10%", "5%", "2%")
    options.budgets = options.budgets.split(",") if options.budgets else list(default)
    options.models = dict(given.split("=", 1) for given in options.models if "=" in given)
    if options.iterations < 1:
        parser.error("--iterations: at least 1")
    return options


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Answer the questions."""
    asked = set(options.questions)
    middle = options.k[len(options.k) // 2]
    result: dict[str, Any] = {"rq1": [], "rq2": [], "rq3": []}
    compile_loops(list(dict.fromkeys([METHOD, *options.methods])), work)
    for number, shape in enumerate(options.shapes):
        if number and 2 not in asked:
            break
        folder = Path(options.models.get(shape, work / shape / "models")).absolute()
        models = Models(shape, folder, work / shape, cold=not options.warm)
        if not number:
            result["machine"] = models.machine.describe()
        most = max(options.k) if not number and asked & {1, 3} else middle
        models.ingest(most)
        if not number and 1 in asked:
            say(f"RQ1, {shape} ...")
            for k in options.k:
                result["rq1"] += map(asdict, models.rows(case(METHOD, k), options.budgets))
        if 2 in asked:
            say(f"RQ2, {shape} ...")
            for method in options.methods:
                result["rq2"] += map(asdict, models.rows(case(method, middle), options.budgets[:2]))
        if not number and 3 in asked:
            say(f"RQ3, {shape} ...")
            result["rq3"] = [asdict(found) for found in models.iterations(most, options.iterations)]
        result["machine"] |= {"page_cache_dropped": models.machine.cold, "load_after": load()}
    return result


def main(given: list[str] | None = None) -> None:
    """The command line."""
    options = arguments(given)
    with ExitStack() as stack:
        if options.work:
            options.work.mkdir(parents=True, exist_ok=True)
            work = options.work.absolute()
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergefs-paper-")))
        try:
            result = measure(options, work)
        except StepFailedError as error:
            raise SystemExit(str(error)) from error
    print(json.dumps(result) if options.json else text(result))


if __name__ == "__main__":
    main()
