"""Disks that fail: a command whose n-th write ends with an error says so, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import fine_tuned, merged_models, random_model, recipe_text, write_model

from mergefs.repository import Repository
from mergefs.testing.crashes import can_record
from mergefs.testing.faults import Place, places, run_failing

pytestmark = pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")

ERRORS = ("EIO", "ENOSPC")

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


def _nothing(repository: Repository) -> None:
    pass


def _forget(repository: Repository) -> None:
    repository.tag("kept", "x")
    repository.remove(["base", "x", "y", "merged", "later"])


def _edit(repository: Repository) -> None:
    """Leave a session with changes."""
    session = repository.edit("merged")
    session.filesystem().pipe_file("notes.txt", b"changed")
    session.close()


@dataclass(frozen=True)
class Case:
    """A command, and what has to be there for it.

    Attributes:
        command: its arguments; FOLDER is where the repository and the checkpoints lie, SESSION the only session.
        prepare: makes what it needs.
        repeatable: whether it can be run again when it has done its work; otherwise it then refuses.
    """

    command: tuple[str, ...]
    prepare: Callable[[Repository], None] = _nothing
    repeatable: bool = True


CASES = {
    "ingest": Case(("ingest", "FOLDER/new", "--as", "new")),
    "ingest an expert": Case(("ingest", "FOLDER/new", "--as", "x", "--base", "base")),
    "merge": Case(("merge", "FOLDER/other.yml", "--as", "merged")),
    "merge --lazy": Case(("merge", "FOLDER/other.yml", "--as", "new", "--lazy")),
    "materialize": Case(("materialize", "later")),
    "tag": Case(("tag", "x", "new")),
    "rm": Case(("rm", "x", "merged"), repeatable=False),
    "gc": Case(("gc", "--rewrite-above", "0"), _forget),
    "repack": Case(("repack", "--exact", "small")),
    "commit": Case(("commit", "SESSION", "--as", "new"), _edit, repeatable=False),
    "push": Case(("push", "x", "FOLDER/other")),
    "catalog rebuild": Case(("catalog", "rebuild")),
    "fsck --repair": Case(("fsck", "--repair")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository, checkpoints and recipes, which is copied for every run."""
    folder = tmp_path_factory.mktemp("sound")
    merged_models(folder).close()
    write_model(folder / "new", fine_tuned(random_model(1), 7), {"config.json": b"{}", "README.md": b"new"})
    models = [("x", {"weight": 0.25}), ("y", {"weight": 0.5})]
    (folder / "other.yml").write_text(recipe_text("task_arithmetic", models, "base"))
    Repository.init(folder / "other", 4096).close()
    return folder


class Runs:
    """Runs of one command on copies of a folder, each at the same path."""

    def __init__(self, case: Case, folder: Path, place: Path) -> None:
        self._case = case
        self._sound = place / "prepared"
        self._place = place / "run"
        self.repository = self._place / "repository"
        shutil.copytree(folder, self._sound)
        with Repository.open(self._sound / "repository", sync=False) as opened:
            case.prepare(opened)
            self.before = opened.refs()
            session = next((info.id for info in opened.sessions()), "")
        words = [word.replace("FOLDER", str(self._place)).replace("SESSION", session) for word in case.command]
        self.command = [sys.executable, "-m", "mergefs", "-R", str(self.repository), *words]
        # Another one is there to be sent to.
        self._stores = [self.repository, *([self._place / "other"] if case.command[0] == "push" else [])]
        self._fresh()
        # The calls are those of every later run.
        self.places = places(self.command, self._stores, environment=ENVIRONMENT)
        with Repository.open(self.repository) as opened:
            self.after = opened.refs()

    def fail(self, place: Place, error: str) -> int:
        """Run with a fault, check what is left, run again, and return the first run's exit code."""
        self._fresh()
        outcome = run_failing(self.command, self._stores, place, error, environment=ENVIRONMENT)
        where = f"{' '.join(self._case.command)}: {error} at {place.call} {place.number}: {outcome.errors}"
        # Where the interpreter cannot load itself, what it says is its own affair.
        if not outcome.elsewhere:
            assert outcome.code in (0, 1), where
            assert "Traceback" not in outcome.errors, where
        if outcome.code and not outcome.elsewhere:
            assert outcome.injected, where
            if self._case.command[0] != "fsck":  # which may also print what it found
                assert outcome.errors.startswith("mergefs: "), where
                assert outcome.errors.count("\n") == 1, where
        self._check(where, done=not outcome.code)
        again = subprocess.run(self.command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        where += f"; again: {again.stderr}"
        assert again.returncode == 0 or (again.returncode == 2 and not self._case.repeatable), where
        self._check(where, done=True)
        return outcome.code

    def _check(self, where: str, *, done: bool) -> None:
        for path in self._stores:
            with Repository.open(path) as opened:
                report = opened.fsck(read_data=True)
                assert report.ok, (where, report.errors)
                if path == self.repository:
                    refs = opened.refs()
                    assert refs == self.after if done else refs in (self.before, self.after), (where, refs)

    def _fresh(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._sound, self._place)


def _try(name: str, folder: Path, place: Path, most: int | None) -> Counter[tuple[str, int]]:
    """Fail calls of a command, all of them or so many, and count how it ended, by error and exit code."""
    runs = Runs(CASES[name], folder, place)
    faults = [(at, error) for at in runs.places for error in ERRORS]
    if most is not None:
        faults = random.Random(name).sample(faults, min(most, len(faults)))
    ended: Counter[tuple[str, int]] = Counter()
    for at, error in faults:
        ended[error, runs.fail(at, error)] += 1
    return ended


def test_a_failing_disk(folder: Path, tmp_path: Path) -> None:
    assert _try("rm", folder, tmp_path, 4).total() == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_some_faults(name: str, folder: Path, tmp_path: Path) -> None:
    assert _try(name, folder, tmp_path, 3).total() == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_fault(name: str, folder: Path, tmp_path: Path) -> None:
    ended = _try(name, folder, tmp_path, None)
    print(f"{name}: {ended.total()} faults, 0 losses: {dict(sorted(ended.items()))}")
