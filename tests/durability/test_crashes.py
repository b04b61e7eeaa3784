"""Every moment at which the power may fail: what a command had reported is there, and nothing is half made."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import fine_tuned, merged_models, new_repository, random_model, recipe_text, write_model

from mergefs.errors import CatalogMissingError, NotARepositoryError
from mergefs.rebuild import rebuild
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.testing.crashes import Recording, State, can_record, crash_states, record

pytestmark = pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")

LOCK = "catalog/lock.mdb"
"""LMDB makes it anew."""

QUICK = 40
"""States of each command that the fast tests try."""


EDIT = """
from mergefs.repository import Repository
with Repository.open(".") as repository, repository.edit("merged") as session:
    session.filesystem().pipe_file("notes.txt", b"changed")
    session.commit(as_="new")
"""


@dataclass(frozen=True)
class Case:
    """A command and what has to be there for it.

    Attributes:
        command: its arguments, without the repository; or a program, after -c.
        prepare: makes what it needs.
    """

    command: tuple[str, ...]
    prepare: Callable[[Repository], None] = lambda repository: None


def _forget(repository: Repository) -> None:
    repository.remove(["x", "merged"])


def _half_dead(repository: Repository) -> None:
    """Leave packs with more dead blocks than live ones."""
    repository.tag("kept", "x")
    repository.remove(["base", "x", "y", "merged", "later"])


CASES = {
    "ingest": Case(("ingest", "../new", "--as", "new")),
    "ingest an expert": Case(("ingest", "../new", "--as", "x", "--base", "base")),
    "merge": Case(("merge", "../other.yml", "--as", "merged")),
    "merge --lazy": Case(("merge", "../other.yml", "--as", "new", "--lazy")),
    "materialize": Case(("materialize", "later")),
    "refine": Case(("refine", "coarse", "--budget", "100%", "--as", "coarse"), lambda r: _merge(r, "coarse", "30%")),
    "tag": Case(("tag", "x", "new")),
    "tag over": Case(("tag", "x", "y")),
    "rm": Case(("rm", "x", "merged")),
    "gc": Case(("gc",), _forget),
    "gc that rewrites": Case(("gc", "--rewrite-above", "0"), _half_dead),
    "repack": Case(("repack", "--exact", "small")),
    "catalog rebuild": Case(("catalog", "rebuild")),
    "commit": Case(("-c", EDIT)),
    "pull": Case(("pull", "x", "../other", "--as", "new"), lambda repository: _twin(repository)),
}


def _twin(repository: Repository) -> None:
    """Make a repository that has something to be fetched."""
    with new_repository(repository.path.parent / "other") as other:
        other.ingest(repository.path.parent / "base", "base")
        other.ingest(repository.path.parent / "new", "x", base="base")


def _merge(repository: Repository, name: str, budget: str | None = None) -> None:
    recipe = Recipe.load(repository.path.parent / "recipe.yml")
    repository.merge(recipe, name, budget=budget)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a repository, checkpoints and recipes."""
    merged_models(tmp_path).close()
    write_model(tmp_path / "new", fine_tuned(random_model(1), 7), {"config.json": b"{}", "README.md": b"new"})
    models = [("x", {"weight": 0.25}), ("y", {"weight": 0.5})]
    (tmp_path / "other.yml").write_text(recipe_text("task_arithmetic", models, "base"))
    return tmp_path


def _record(command: Sequence[str], repository: Path) -> Recording:
    package = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    program = [sys.executable, *(command if command[0] == "-c" else ("-m", "mergefs", "-R", ".", *command))]
    # From inside the repository, so that paths in messages and commands are short.
    here = Path.cwd()
    os.chdir(repository)
    try:
        found = record(program, repository, environment=environment)
    finally:
        os.chdir(here)
    assert found.code == 0, found.output
    return found


def _refs(repository: Path) -> dict[str, str]:
    with Repository.open(repository, readonly=True) as opened:
        return opened.refs()


def _every(states: list[State], most: int | None) -> list[State]:
    """Return some of the states, the last ones of all with them: there the command had returned."""
    if most is None or len(states) <= most:
        return states
    step = len(states) / most
    return sorted({id(s): s for s in [states[int(i * step)] for i in range(most)] + states[-5:]}.values(), key=_moment)


def _moment(state: State) -> int:
    return state.moment


def _check(state: State, target: Path, before: dict[str, str], after: dict[str, str]) -> None:
    """Check a state: it opens, is whole, and has the refs from before or from after the command."""
    state.write(target)
    try:
        if not (target / "catalog").exists():
            with pytest.raises(CatalogMissingError):
                Repository.open(target)
            assert not state.finished
            assert not rebuild(target, sync=False).lost
        with Repository.open(target, sync=False) as repository:
            report = repository.fsck(read_data=True)
            assert report.ok, (state.moment, report.errors)
            found = repository.refs()
            assert found == after if state.finished else found in (before, after), (state.moment, found)
            repository.gc()
            assert repository.fsck().garbage_packs == 0
    finally:
        shutil.rmtree(target)


def _try_all(name: str, folder: Path, most: int | None) -> int:
    case = CASES[name]
    path = folder / "repository"
    with Repository.open(path, sync=False) as repository:
        case.prepare(repository)
    before = _refs(path)
    recording = _record(case.command, path)
    after = _refs(path)
    states = _every(list(crash_states(recording, ignore=[LOCK])), most)
    for state in states:
        _check(state, folder / "crashed", before, after)
    return len(states)


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_some_moments(name: str, folder: Path) -> None:
    assert _try_all(name, folder, QUICK) > 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_any_moment(name: str, folder: Path, record_property: Callable[[str, object], None]) -> None:
    tried = _try_all(name, folder, None)
    print(f"{name}: {tried} crash states, 0 losses")
    record_property("crash states", tried)


def test_a_crash_while_a_repository_is_made(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    recording = _record(("init", "repository"), tmp_path / "outside")
    opened = 0
    for state in crash_states(recording, ignore=[f"repository/{LOCK}"]):
        state.write(tmp_path / "crashed")
        try:
            Repository.open(tmp_path / "crashed" / "repository", sync=False).close()
            opened += 1
        except NotARepositoryError:
            assert not state.finished, state.moment
        shutil.rmtree(tmp_path / "crashed")
    assert opened > 0
