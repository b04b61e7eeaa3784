"""Files that rot: what is damaged is found and named, and never served as if it were good."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from builders import merged_models, served

LOOK = """
import json, sys
sys.path.insert(0, sys.argv[2])
from builders import served
from mergefs.errors import MergefsError
from mergefs.repository import Repository

found = {"errors": None, "served": {}}
try:
    with Repository.open(sys.argv[1], readonly=True) as repository:
        report = repository.fsck(read_data=True)
        found["errors"] = [[problem.kind, list(problem.affects)] for problem in report.errors]
        for name in json.loads(sys.argv[3]):
            try:
                found["served"][name] = served(repository, name)
            except MergefsError as error:
                found["served"][name] = None
except MergefsError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """A repository that is closed, and the files of its models by their hashes."""
    folder = tmp_path_factory.mktemp("sound")
    with merged_models(folder) as repository:
        files = {name: served(repository, name) for name in repository.refs()}
    return folder / "repository", files


def _damage(path: Path, chance: random.Random) -> str:
    """Damage a file and say how."""
    match chance.choice(["flip", "flip", "truncate", "delete"]):
        case "flip":
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            return "flip"
        case "truncate":
            os.truncate(path, chance.randrange(path.stat().st_size))
            return "truncate"
        case _:
            path.unlink()
            return "delete"


def _matrix(sound: tuple[Path, dict[str, dict[str, str]]], target: Path, seeds: range) -> Counter[tuple[str, str]]:
    """Damage a copy for each seed, and count what came of it by the kind of file.

    `found`: the check found it, or the repository was refused; `harmless`: it did not, and everything is served as it
    was. Anything else is wrong.
    """
    repository, files = sound
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        shutil.copytree(repository, target)
        kind = chance.choice(["packs", "packs", "manifests", "plans", "refs", "catalog", "mergefs.json"])
        files_of_kind = [p for p in sorted((target / kind).rglob("*.*")) if p.name != "lock.mdb"]
        path = chance.choice(files_of_kind) if files_of_kind else target / kind
        how = _damage(path, chance)
        program = [sys.executable, "-c", LOOK, str(target), str(Path(__file__).parents[1]), json.dumps(sorted(files))]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode:  # LMDB ends the process where its file is cut short under it
            assert kind == "catalog", (seed, done.stderr)
            found = {"errors": None, "served": {}}
        else:
            found = json.loads(done.stdout)
        wrong = [name for name, content in found["served"].items() if content not in (None, files[name])]
        assert not wrong, (seed, kind, how, wrong)
        # Whatever is not served any more is named by the check.
        missing = {name for name, content in found["served"].items() if content is None}
        named = {name for _, affects in found["errors"] or () for name in affects}
        assert missing <= named or kind == "catalog", (seed, kind, how, missing, found["errors"])
        outcomes[kind, "harmless" if found["errors"] == [] else "found"] += 1
        shutil.rmtree(target)
    return outcomes


def _check(outcomes: Counter[tuple[str, str]]) -> None:
    # A flip in a page of the catalog that is not used, or in a date, changes nothing; all else is found.
    assert {kind for kind, outcome in outcomes if outcome == "harmless"} <= {"catalog", "mergefs.json"}


def test_some_damage(sound: tuple[Path, dict[str, dict[str, str]]], tmp_path: Path) -> None:
    _check(_matrix(sound, tmp_path / "damaged", range(20)))


@pytest.mark.exhaustive
def test_a_thousand_times_damage(sound: tuple[Path, dict[str, dict[str, str]]], tmp_path: Path) -> None:
    outcomes = _matrix(sound, tmp_path / "damaged", range(1000, 2000))
    print(f"damage, served wrong 0: {dict(sorted(outcomes.items()))}")
    _check(outcomes)
