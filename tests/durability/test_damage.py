"""Files that rot: what is damaged is found and named, and never served as if it were good.

*Found* is damage for which `fsck --read-data` reports an error, or for which the repository is refused with a sentence
that says so. What is not found has to be *harmless*: every value in the catalog, every file of every model and of the
session, and the configuration are what they were. Bytes of LMDB's file that lie between entries, in free pages or in
what is there twice are such.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import merged_models

from mergefs.catalog.pages import check_pages

LOOKER = Path(__file__).with_name("looker.py")
USED = "catalog, pages in use"
KINDS = ("packs", "manifests", "plans", "refs", "catalog", USED, "mergefs.json", "mergefs.copy.json", "sessions")
LOCKS = ("lock", "lock.mdb")
PAGE = 4096
DAMAGE = ("flip", "flip", "truncate", "delete")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that is closed, with a session."""
    folder = tmp_path_factory.mktemp("sound")
    with merged_models(folder) as repository:
        session = repository.edit("merged")
        files = session.filesystem()
        files.pipe_file("notes.txt", b"changed" * 100)
        with files.open("model.safetensors", "r+b") as file:
            file.seek(5000)
            file.write(b"\0" * 64)
        session.close()
    return folder / "repository"


@contextmanager
def _looker() -> Iterator[Any]:
    """Yield a function that looks at a repository in a process of its own, which damage may end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(LOOKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def look(path: Path) -> dict[str, Any]:
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            assert isinstance(found, dict)
            return found

        yield look
        process.stdin.close()


def _damage(path: Path, chance: random.Random, *, used: bool) -> str:
    """Damage a file and say how; with `used`, flips are in pages of LMDB's that hold something."""
    how = chance.choice(DAMAGE)
    match how:
        case "flip":
            place = chance.randrange(path.stat().st_size)
            if used:
                place = chance.choice(sorted(check_pages(path))) * PAGE + chance.randrange(PAGE)
            data = bytearray(path.read_bytes())
            data[place] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case "truncate":
            os.truncate(path, chance.randrange(path.stat().st_size))
        case _:
            path.unlink()
    return how


Outcomes = Counter[tuple[str, str, str]]


def _matrix(sound: Path, target: Path, seeds: Iterable[int], most: int) -> Outcomes:
    """Damage a copy for each seed, and count what came of it by the kind of file and of damage, until so much damage
    was found."""
    outcomes: Outcomes = Counter()
    with _looker() as look:
        good = look(sound)
        assert good["errors"] == []
        assert None not in good["served"].values()
        assert good["session"]
        for seed in seeds:
            chance = random.Random(seed)
            shutil.copytree(sound, target)
            kind = chance.choice(KINDS)
            where = target / kind.partition(",")[0]
            files = [path for path in sorted(where.rglob("*")) if path.is_file() and path.name not in LOCKS]
            files = [path for path in files if path.stat().st_size]
            path = chance.choice(files) if files else where
            how = _damage(path, chance, used=kind == USED)
            outcomes[kind, how, _outcome(look(target), good, (seed, path.name, how))] += 1
            shutil.rmtree(target)
            if sum(number for (_, _, outcome), number in outcomes.items() if outcome == "found") == most:
                break
    return outcomes


def _outcome(found: dict[str, Any], good: dict[str, Any], what: tuple[Any, ...]) -> str:
    """Return whether damage was `found` or is `harmless`; anything else is wrong."""
    assert "failed" not in found, (what, found)
    wrong = [name for name, files in found["served"].items() if files not in (None, good["served"][name])]
    assert not wrong, (what, wrong)
    assert found["session"] in (None, good["session"]), what
    if found["errors"] is None:
        assert found["refused"], (what, found)
        return "found"
    if not found["errors"]:
        for key in ("catalog", "configuration", "served", "session"):
            assert found[key] == good[key], (what, key, "changed, and not found")
        return "harmless"
    # Whatever is not served any more is named by the check.
    missing = {name for name in good["served"] if found["served"].get(name) is None}
    named = {name for _, affects in found["errors"] for name in affects}
    assert missing <= named, (what, missing, found["errors"])
    return "found"


def _table(outcomes: Outcomes) -> str:
    """Return the outcomes as a table: by kind of file and of damage, found and harmless."""
    rows = [f"{'file':22}" + "".join(f"{how:>20}" for how in dict.fromkeys(DAMAGE))]
    for kind in dict.fromkeys(KINDS):
        cells = [
            f"{outcomes[kind, how, 'found']:>4} found {outcomes[kind, how, 'harmless']:>3} h'less"
            for how in dict.fromkeys(DAMAGE)
        ]
        rows.append(f"{kind:22}" + "".join(f"{cell:>20}" for cell in cells))
    total = Counter(outcome for _, _, outcome in outcomes.elements())
    return "\n".join([*rows, f"found {total['found']}, proven harmless {total['harmless']}, served wrong 0"])


def _check(outcomes: Outcomes) -> None:
    harmless = {kind for kind, _, outcome in outcomes if outcome == "harmless"}
    # The catalog between its entries; the sums of a closed session; the line feed at the end of a file of JSON.
    assert harmless <= {"catalog", USED, "sessions", "mergefs.json", "mergefs.copy.json"}, harmless


def test_some_damage(sound: Path, tmp_path: Path) -> None:
    _check(_matrix(sound, tmp_path / "damaged", itertools.count(), 10))


@pytest.mark.exhaustive
def test_a_thousand_times_damage(sound: Path, tmp_path: Path) -> None:
    outcomes = _matrix(sound, tmp_path / "damaged", itertools.count(1000), 1000)
    print(_table(outcomes))
    _check(outcomes)
