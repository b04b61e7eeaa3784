"""Many processes use one repository at once: no reader sees anything wrong, and nothing that was reported is lost.

    python -m tools.stress --processes 8 --seconds 600

Each process runs random commands on small models (ingest, merge eager and lazy, read through the library and a mount,
tag, rm, gc, repack, materialize, edit and commit, push to and pull from a second repository, fsck) and writes down what
it was told and what it saw. A violation is a wrong byte, a missing block, a ref that names what it cannot name by then,
and any error that what the others did does not account for.

When all have ended, both repositories are collected and every byte is read; every ref has to be what the last command
that set it reported. Then the repository is compared with a fresh one to which every ref was pushed: the bytes of
packs, manifests, plans and copies of refs, and what the catalog lists of blocks, manifests, refs, leases and claims.
The catalog's own file is not compared: LMDB uses its pages again and never gives them back, so that it is as large as
it had to be at some moment. How many bytes of it are in use is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from mergefs.catalog.tables import TABLES
from mergefs.errors import MergefsError, MountError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve.mount import umount
from tools.small_models import recipe_text, write_models
from tools.stress.history import ABSENT, Event, History, read_events
from tools.stress.worker import EXPERTS, HERE, MOUNT, THERE, checkpoint_files, digest_of, read_model

BLOCK_SIZE = 16 << 10
RECIPES = 24
GRACE_SECONDS = 120.0
"""What a process may take for its last command."""
OBJECTS = ("packs", "manifests", "plans", "refs")


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        processes, seconds, seed: of the run.
        commands: that were done, by kind.
        refused: those that ended with an error that the others account for.
        checks: things seen and read that were judged.
        refs: at the end, in both repositories.
        disk_bytes, fresh_bytes: of the objects of the repository, and of a fresh one with the same refs.
        catalog_bytes, fresh_catalog_bytes: in use in the catalogs.
        violations: what does not fit.
    """

    processes: int
    seconds: float
    seed: int
    commands: dict[str, int]
    refused: dict[str, int]
    checks: int
    refs: int
    disk_bytes: int
    fresh_bytes: int
    catalog_bytes: int
    fresh_catalog_bytes: int
    violations: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="tools.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mergefs-stress-") as scratch:
        folder = Path(scratch)
        result = stress(folder, options.processes, options.seconds, options.seed)
        if result.violations:
            kept = folder.with_name(f"{folder.name}-kept")
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns(MOUNT))
            print(f"everything is kept in {kept}", file=sys.stderr)
    print(json.dumps(asdict(result)) if options.json else describe(result))
    for violation in result.violations[:20]:
        print(violation, file=sys.stderr)
    return 1 if result.violations else 0


def stress(folder: Path, processes: int, seconds: float, seed: int) -> Result:
    """Prepare everything in an empty folder, run the processes, and judge.

    Args:
        folder: where to work.
        processes: how many run commands.
        seconds: for how long.
        seed: for the commands; what comes of them depends on the machine as well.
    """
    first = _prepare(folder, seed)
    with ExitStack() as stack:
        _mount(folder, stack)
        began = time.monotonic()
        late = _run(folder, processes, seconds, seed)
        took = time.monotonic() - began
    events = [event for path in sorted(folder.glob("history-*.jsonl")) for event in read_events(path)]
    history = History([*first, *events])
    violations = [*late, *history.violations()]
    with (
        Repository.open(folder / HERE) as here,
        Repository.open(folder / THERE) as there,
        Repository.init(folder / "fresh", BLOCK_SIZE) as fresh,
    ):
        for where, repository in ((HERE, here), (THERE, there)):
            violations += _settle(repository, where, history)
        if not violations:
            for name in here.refs():
                here.push(name, str(fresh.path))
            violations += _compare(here, fresh)
        return Result(
            processes,
            round(took, 1),
            seed,
            dict(history.counts("command").most_common()),
            dict(history.counts("refused").most_common()),
            history.checks,
            len(here.refs()) + len(there.refs()),
            _object_bytes(here),
            _object_bytes(fresh),
            _catalog_bytes(here),
            _catalog_bytes(fresh),
            violations,
        )


def describe(result: Result) -> str:
    """Return what a run found, for people."""
    lines = [
        f"{result.processes} processes, {result.seconds} s, seed {result.seed}:"
        f" {sum(result.commands.values())} commands, {result.checks} checks, {len(result.violations)} violations",
        "done: " + _counted(result.commands),
        f"refused, as others had changed something ({sum(result.refused.values())}): " + _counted(result.refused),
    ]
    if result.fresh_bytes:
        more = result.disk_bytes / result.fresh_bytes - 1
        lines.append(
            f"{result.refs} refs; disk use after the last gc {result.disk_bytes} bytes, of a fresh repository with the"
            f" same refs {result.fresh_bytes} ({more:+.3%}); catalog in use {result.catalog_bytes} and"
            f" {result.fresh_catalog_bytes} bytes"
        )
    return "\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {text}" for text, count in counts.items()) or "nothing"


# ------------------------------------------------------------------------------------------------- before and meanwhile


def _prepare(folder: Path, seed: int) -> list[Event]:
    """Make two repositories and the checkpoints, and learn in a quiet repository what the recipes' results are.

    Returns:
        What there is before any process begins.
    """
    models = folder / "models"
    write_models(models, EXPERTS)
    first = []
    for where in (HERE, THERE):
        with Repository.init(folder / where, BLOCK_SIZE) as repository:
            identity = repository.ingest(models / "base", "base").manifest
            first.append(Event("set", 0.0, 0.0, where, ("base",), identity))
    chance = random.Random(seed)
    recipes: list[dict[str, Any]] = []
    for names in combinations([f"expert-{k}" for k in range(EXPERTS)], 2):
        weights = {name: chance.choice([0.25, 0.5, 0.75]) for name in names}
        recipes.append({"names": names, "text": recipe_text("task_arithmetic", weights)})
        recipes.append({"names": names, "text": recipe_text("ties", weights, density=0.5)})
        recipes.append({"names": names, "text": recipe_text("dare_linear", weights, density=0.5)})
    recipes = chance.sample(recipes, RECIPES)
    truth: dict[str, Any] = {path.name: digest_of(checkpoint_files(path)) for path in models.iterdir()}
    with Repository.init(folder / "quiet", BLOCK_SIZE) as quiet:
        quiet.ingest(models / "base", "base")
        for k in range(EXPERTS):
            quiet.ingest(models / f"expert-{k}", f"expert-{k}", base="base")
        merged = []
        for recipe in recipes:
            quiet.merge(Recipe.parse(recipe["text"]), "merged")
            merged.append(read_model(quiet, "merged")[1])
    shutil.rmtree(folder / "quiet")
    (folder / "truth.json").write_text(json.dumps({**truth, "recipes": recipes, "merged": merged}))
    return first


def _mount(folder: Path, stack: ExitStack) -> None:
    """Mount the repository, where that can be done here."""
    with Repository.open(folder / HERE) as repository:
        try:
            repository.mount(folder / MOUNT)
        except MountError as error:
            print(f"without a mount: {error}", file=sys.stderr)
            return
    stack.callback(umount, folder / MOUNT)


def _run(folder: Path, processes: int, seconds: float, seed: int) -> list[str]:
    """Run the workers; return what was wrong with their ends."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    module = [sys.executable, "-m", "tools.stress.worker", str(folder)]
    running = [
        subprocess.Popen([*module, str(number), str(seconds), str(seed)], env=environment)
        for number in range(processes)
    ]
    found = []
    stop = time.monotonic() + seconds + GRACE_SECONDS
    for number, process in enumerate(running):
        try:
            code = process.wait(max(1.0, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found.append(f"process {number} did not end")
        else:
            if code:
                found.append(f"process {number} ended with {code}")
    return found


# --------------------------------------------------------------------------------------------------------------- after


def _settle(repository: Repository, where: str, history: History) -> list[str]:
    """Collect, and check that everything is there, and nothing else."""
    found: list[str] = []
    try:
        repository.gc(rewrite_above=0)
        report = repository.fsck(read_data=True)
        found += [f"{where}, at the end: {error}" for error in report.errors]
        if report.garbage_packs:
            found.append(f"{where}, at the end: {report.garbage_packs} packs that the catalog does not know")
        refs = repository.refs()
        contents = history.contents()
        for name in {*history.names(where), *refs}:
            if refs.get(name, ABSENT) not in history.possible(where, name):
                found.append(f"{where}, at the end: '{name}' names {refs.get(name)}: {history.possible(where, name)}")
        for name, identity in refs.items():
            content = read_model(repository, name)[1]
            if contents.get(identity, content) != content:
                found.append(f"{where}, at the end: '{name}' is not what was stored")
    except MergefsError as error:
        found.append(f"{where}, at the end: {type(error).__name__}: {error}")
    for folder in ("tmp", "sessions", "catalog/leases", "quarantine"):
        left = [path for path in (repository.path / folder).rglob("*") if path.is_file()]
        found += [f"{where}, at the end: {path} is left" for path in left]
    return found


def _compare(repository: Repository, fresh: Repository) -> list[str]:
    """Compare what a repository holds with one that was made for its refs alone."""
    found = []
    with repository.catalog.read() as mine, fresh.catalog.read() as other:
        for table in ("blocks", "manifests", "refs"):
            here, there = ({key for key, _ in txn.items(table)} for txn in (mine, other))
            if here != there:
                found.append(f"{len(here - there)} {table} too many and {len(there - here)} too few")
        for table in ("leases", "claims"):
            if mine.count(table):
                found.append(f"{mine.count(table)} {table} at the end")
        manifests = {key for key, _ in mine.items("manifests")}
        for key, _ in mine.items("statistics"):
            if not {key[:32], key[32:64]} <= manifests:
                found.append("statistics of a model that is gone")
    here, there = _object_bytes(repository), _object_bytes(fresh)
    if abs(here - there) > there / 100:
        found.append(f"the repository takes {here} bytes, and a fresh one with its refs {there}")
    return found


def _object_bytes(repository: Repository) -> int:
    return sum(size for kind in OBJECTS for _, size in repository.backend.list(kind))


def _catalog_bytes(repository: Repository) -> int:
    """Return the bytes of the catalog's pages that are in use."""
    with repository.catalog.read() as txn:
        return sum(txn.size(table) for table in TABLES)


if __name__ == "__main__":
    sys.exit(main())
