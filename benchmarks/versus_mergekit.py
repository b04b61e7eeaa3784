"""Merge by mergefs and by mergekit 0.1.5, alternately and cold, and compare time, memory, bytes and exactness.

    python -m benchmarks.versus_mergekit [--shape qwen3-0.6b] [-k 2,5,10,20]
        [--methods linear,slerp,task_arithmetic,ties,dare_ties] [--pairs "ties:2,10 dare_ties:5"] [--models DIR]
        [--exact fast|small|quick] [--work DIR] [--venv DIR] [--check] [--plot FILE] [--json]

mergefs merges from ingested experts (the ingest is measured once): exactly, again with one expert's weight changed,
again with that weight changed in one layer only, with a budget of 10 % of the experts' bytes, and lazily. mergekit
reads the checkpoints and writes one. Every measurement is a process of its own. With `--work DIR` each is kept in
DIR as soon as it is done, and not made again: an interrupted run goes on, and later runs add methods or K.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal
from benchmarks.measure import ROOT, Machine, StepFailedError, find_models, load, make_models
from benchmarks.mergefs_runs import Mergefs, commit, compile_loops, environment, ingest_all
from benchmarks.mergekit_runs import VERSIONS, Mergekit
from benchmarks.recipes import METHODS, Case, case
from benchmarks.versus_report import (
    BUDGET,
    FIXED_BUDGET,
    FIXED_METHOD,
    Session,
    checks,
    draw,
    tables,
    told_checks,
)
from mergefs.blocks.exact import CODINGS

VARIANTS = {
    "exact": (),
    "weight": (),
    "layer": (),
    "budget": ("--budget", BUDGET),
    "lazy": ("--lazy",),
}
CHANGED = ("weight", "layer")
GROUPS = (("exact", *CHANGED), ("budget",), ("lazy",))
"""Variants that find what is left of the ones before them; the others start with the base and experts alone."""
JUDGED = ("exact", "budget")
"""Variants whose distance from the definition is measured."""


class Comparison:
    """The measurements of one base and its experts.

    Args:
        mergefs: the repository.
        mergekit: or None, to measure mergefs alone.
        journal, mergekit_journal: where the measurements are kept.
        models: the folder that holds the base and the experts.
        work: a folder for temporary files.
    """

    def __init__(
        self,
        mergefs: Mergefs,
        mergekit: Mergekit | None,
        journal: Journal,
        mergekit_journal: Journal,
        models: Path,
        work: Path,
    ) -> None:
        self._mergefs = mergefs
        self._mergekit = mergekit
        self._journal = journal
        self._mergekit_journal = mergekit_journal
        self._models = models
        self._work = work

    def mergefs(self, asked: Case, number: int, variants: list[str]) -> None:
        """Measure the variants of a merge by mergefs; a group of them finds what the ones before it left, no more."""
        measured = False
        for group in GROUPS:
            keys = {v: f"mergefs {asked.name} {v} #{number}" for v in group if v in variants}
            distances = {v: f"mergefs {asked.name} distance {v}" for v in keys if v in JUDGED}
            if all(key in self._journal for key in (*keys.values(), *distances.values())):
                continue
            measured = True
            self._mergefs.discard(*VARIANTS)
            for variant, key in keys.items():
                self._journal.measure(key, lambda v=variant: self._mergefs.merge(asked.changed(v), v, *VARIANTS[v]))
            for variant, key in distances.items():
                if key not in self._journal:
                    where = {"repository": str(self._mergefs.repository.resolve()), "ref": variant}
                    self._journal.measure(key, lambda where=where: self._judge(asked, where))
        if measured:
            self._mergefs.discard(*VARIANTS)

    def mergekit(self, asked: Case, number: int) -> None:
        """Measure a merge by mergekit."""
        key, distance = f"mergekit {asked.name} #{number}", f"mergekit {asked.name} distance"
        if self._mergekit is None or (key in self._mergekit_journal and (number or distance in self._mergekit_journal)):
            return
        done = self._mergekit_journal.measure(key, lambda: self._mergekit.merge(asked) if self._mergekit else {})
        if distance not in self._mergekit_journal and "failed" not in done:
            where = {"folder": str(self._mergekit.output.resolve())}
            self._mergekit_journal.measure(distance, lambda: self._judge(asked, where))
        self._mergekit.discard()

    def fixed(self, counts: list[int]) -> None:
        """Measure merges of K experts under one budget in bytes."""
        for k in counts:
            key = f"fixed budget K={k}"
            if key not in self._journal:
                asked = case(FIXED_METHOD, k)
                self._journal.measure(
                    key, lambda asked=asked: self._mergefs.merge(asked, "fixed", "--budget", FIXED_BUDGET)
                )
                self._mergefs.discard("fixed")

    def _judge(self, asked: Case, where: dict[str, str]) -> dict[str, Any]:
        job = {"method": asked.method, "k": asked.k, "models": str(self._models), "result": where}
        file = self._work / "oracle.json"
        file.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.oracle", file],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise StepFailedError(f"the oracle ended with {done.returncode}: {done.stderr.strip()}")
        value: dict[str, Any] = json.loads(done.stdout)
        return value


# --- the command line --------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """Read `2,5,10`."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 2,5,10") from None
    if found[0] < 1:
        raise argparse.ArgumentTypeError("K is at least 1")
    return found


def one_of(choices: Iterable[str]) -> Any:
    """Return a reader of lists of some of these names."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in choices]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(choices)}")
        return [name for name in choices if name in found]

    return read


def pairs(text: str) -> list[Case]:
    """Read `ties:2,10 dare_ties:5 slerp`: for which merges mergekit runs."""
    found = []
    for part in text.split():
        method, _, of = part.partition(":")
        found += [case(name, k) for name in one_of(METHODS)(method) for k in counts(of or "1")]
    return found


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versus_mergekit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="qwen3-0.6b", help="of the models (%(default)s)")
    parser.add_argument(
        "-k", type=counts, default="2,5,10,20", metavar="K,...", help="numbers of experts (%(default)s)"
    )
    parser.add_argument("--methods", type=one_of(METHODS), default=",".join(METHODS), help="(%(default)s)")
    parser.add_argument(
        "--variants", type=one_of(VARIANTS), default=",".join(VARIANTS), help="of mergefs (%(default)s)"
    )
    parser.add_argument(
        "--exact",
        choices=CODINGS,
        default=CODINGS[0],
        help="coding of the repository; --work DIR is for one (%(default)s)",
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="DIR/base, DIR/expert-0 ...; made when absent")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for everything else, kept; else temporary")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="mergekit's environment; made when absent")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="of every pair; medians are shown")
    parser.add_argument("--pairs", type=pairs, metavar="METHOD:K,...", help="only these merges by mergekit too (all)")
    parser.add_argument("--mergekit-runs", type=int, metavar="N", help="of every pair, by mergekit (as --repeat)")
    parser.add_argument(
        "--mergekit-figures", type=Path, metavar="FILE", help="keep mergekit's figures in FILE, use its"
    )
    parser.add_argument("--without-mergekit", action="store_true", help="run mergefs only")
    parser.add_argument("--pairs-only", action="store_true", help=f"no K at {FIXED_BUDGET}, no compiling from nothing")
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--report-only", action="store_true", help="measure nothing: tell what --work DIR has")
    parser.add_argument("--check", action="store_true", help="exit 1 unless the limits hold")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png or .svg (the extra plot)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(given)
    if options.report_only and options.work is None:
        parser.error("--report-only needs --work")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        parser.error("--plot: name a .png or an .svg")
    if "exact" not in options.variants and set(CHANGED) & set(options.variants):
        parser.error("--variants: weight and layer change an exact merge, which is to be there")
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    return options


def measure(options: argparse.Namespace, work: Path) -> Session:
    """Measure everything that is asked for and not there yet; return all that is there."""
    cases = list(dict.fromkeys(case(method, k) for method in options.methods for k in options.k))
    most = max(options.k)
    models = (options.models or work / "models").absolute()
    machine = Machine(work, cold=not options.warm)
    described = machine.describe()
    of_both = {"shape": options.shape, "models": str(models), "cold": machine.cold}
    figures = options.mergekit_figures or work / "mergekit.jsonl"
    journal = Journal(
        work / "mergefs.jsonl", {**of_both, "mergefs": commit(), "exact": options.exact}, check=not options.report_only
    )
    mergekit_journal = Journal(figures, {**of_both, **VERSIONS}, check=not options.report_only)
    if not options.report_only:
        if not models.exists():
            make_models(options.shape, most, models)
        find_models(models, most)
        mergekit = None
        if not options.without_mergekit:
            mergekit = Mergekit(options.venv or work / "mergekit-environment", models, work, machine)
        mergefs = Mergefs(work / "repository", models, work, machine, options.exact)
        comparison = Comparison(mergefs, mergekit, journal, mergekit_journal, models, work)
        ingest_all(mergefs, journal, most)
        compile_loops([*options.methods, FIXED_METHOD], work, None if options.pairs_only else journal)
        runs = options.repeat if options.mergekit_runs is None else options.mergekit_runs
        for number in range(options.repeat):
            for asked in cases:
                both = [lambda a=asked, n=number: comparison.mergefs(a, n, options.variants)]
                if number < runs and (options.pairs is None or asked in options.pairs):
                    # They change places from one repetition to the next.
                    both.insert(number % 2, lambda a=asked, n=number: comparison.mergekit(a, n))
                for one in both:
                    one()
        if not options.pairs_only:
            comparison.fixed(options.k)
    return Session(
        described | {"page_cache_dropped": journal.common["cold"], "load_after": load()},
        journal.common,
        mergekit_journal.common,
        str(figures) if options.mergekit_figures else "",
        dict(journal.items()),
        dict(mergekit_journal.items()),
    )


def main(given: list[str] | None = None) -> None:
    """The command line."""
    options = arguments(given)
    with ExitStack() as stack:
        if options.work:
            options.work.mkdir(parents=True, exist_ok=True)
            work = options.work.absolute()
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergefs-versus-")))
        try:
            session = measure(options, work)
        except StepFailedError as error:
            raise SystemExit(str(error)) from error
    found = checks(session)
    print(json.dumps(session.as_json(found)) if options.json else "\n\n".join([*tables(session), told_checks(found)]))
    if options.plot:
        draw(session, options.plot)
    if options.check and not all(check.holds for check in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
