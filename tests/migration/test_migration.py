"""Repositories that earlier versions made: refused with a sentence, migrated whole, and read as they were."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from builders import recipe_text, served

from mergefs.blocks.codecs import Encoding
from mergefs.blocks.pack import pack_name
from mergefs.catalog.tables import Location, locations
from mergefs.configuration import VERSION
from mergefs.errors import FormatVersionError, NotARepositoryError, UserError
from mergefs.migration import from_1
from mergefs.migration.run import migrate
from mergefs.migration.trits import has_trits
from mergefs.rebuild import rebuild
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.store import Store
from mergefs.testing.crashes import can_record, crash_states, record

ARCHIVES = Path(__file__).parents[1] / "data" / "repositories"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


def version_of(name: str) -> int:
    """Return the version of the repository in an archive."""
    return int(name.split("-")[0])


OLD = [name for name in NAMES if version_of(name) < VERSION]
PRESENT = [name for name in NAMES if version_of(name) == VERSION]
Expected = dict[str, dict[str, str]]


def unpacked(name: str, folder: Path) -> tuple[Path, Expected]:
    """Return a repository as its version left it, and the SHA-256 of all files of all models that it gave out."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        # The archives are our own; Python 3.11 has the filter from 3.11.4 on, and Debian's does not.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    expected: Expected = json.loads((folder / "expected.json").read_text())
    return folder / "repository", expected


def check(path: Path, expected: Expected) -> None:
    """Check that a repository is whole and that its models read as they did."""
    with Repository.open(path, sync=False) as repository:
        report = repository.fsck(read_data=True)
        assert report.ok, report.errors
        assert set(repository.refs()) == set(expected)
        assert {name: served(repository, name) for name in expected} == expected


def tiered(store: Store) -> list[Location]:
    """Return the places of the payloads of tier 1."""
    with store.catalog.read() as txn:
        found = list(locations(txn))
    return [place for place in found if place.record.encoding == Encoding.TIERS and place.record.tier == 1]


def payload(store: Store, place: Location) -> bytes:
    """Return the bytes at a place."""
    return store.backend.get(pack_name(place.pack), place.record.offset, place.record.length)


def test_there_is_an_archive_of_every_version() -> None:
    assert {version_of(name) for name in NAMES} == set(range(1, VERSION + 1))
    assert len(OLD) >= 8


@pytest.mark.parametrize("name", PRESENT)
def test_repositories_of_this_version_are_read(name: str, tmp_path: Path) -> None:
    path, expected = unpacked(name, tmp_path)
    assert migrate(path).before == VERSION
    check(path, expected)


@pytest.mark.parametrize("name", OLD)
def test_repositories_of_earlier_versions_are_migrated(name: str, tmp_path: Path) -> None:
    path, expected = unpacked(name, tmp_path)
    before = version_of(name)
    for readonly in (True, False):
        with pytest.raises(FormatVersionError, match=rf"version {before}.*'mergefs -R .* migrate'"):
            Repository.open(path, readonly=readonly)
    with Store(path, oldest=before, sync=False) as store:
        named, manifests = store.refs(), store.manifest_ids()
    report = migrate(path, sync=False)
    assert (report.before, report.version, report.damaged) == (before, VERSION, ())
    check(path, expected)
    with Repository.open(path, sync=False) as repository:
        assert repository.refs() == named
        assert repository.manifest_ids() == manifests
        assert not any(has_trits(memoryview(payload(repository, place)), 1) for place in tiered(repository))
    again = migrate(path)
    assert (again.before, again.blocks_rewritten, again.refs_copied) == (VERSION, 0, 0)


@pytest.mark.parametrize("name", OLD)
def test_work_goes_on_after_a_migration(name: str, tmp_path: Path) -> None:
    path, expected = unpacked(name, tmp_path)
    migrate(path, sync=False)
    with Repository.open(path, sync=False) as repository:
        (tmp_path / "recipe.yml").write_text(
            recipe_text("ties", [(n, {"weight": w}) for n, w in (("x", 0.25), ("y", 0.75))], "base", density=0.5)
        )
        recipe = Recipe.load(tmp_path / "recipe.yml")
        repository.merge(recipe, "new")
        assert served(repository, "new") == expected["ties"]
        repository.merge(recipe, "cheap", budget="40%")
        repository.refine("budget", budget="100%", new_name="refined")
        assert served(repository, "refined") == expected["arithmetic"]
        repository.materialize("ties-lazy")
        repository.remove(["x", "y", "new", "cheap", "refined"])
        repository.gc(rewrite_above=0)
        assert repository.fsck(read_data=True).ok
        for model in set(expected) - {"x", "y"}:
            assert served(repository, model) == expected[model], model


def test_a_rebuilt_catalog_can_be_migrated(tmp_path: Path) -> None:
    path, expected = unpacked("1-sessions", tmp_path)
    shutil.rmtree(path / "catalog")
    assert not rebuild(path, sync=False).lost
    migrate(path, sync=False)
    check(path, expected)


def test_a_repository_in_use_is_not_migrated(tmp_path: Path) -> None:
    path, expected = unpacked("1-trits", tmp_path)
    with Store(path, oldest=1, sync=False) as store, store.lease("test"), pytest.raises(UserError, match="in use"):
        migrate(path)
    migrate(path, sync=False)
    check(path, expected)


@pytest.mark.parametrize("version", [VERSION + 1, 99, 0, -1, "1", 1.0, True, None])
def test_other_versions_are_refused(version: Any, tmp_path: Path) -> None:
    path, _ = unpacked("1-bits", tmp_path)
    config = json.loads((path / "mergefs.json").read_text())
    (path / "mergefs.json").write_text(json.dumps(config | {"version": version}))
    with pytest.raises(FormatVersionError, match=rf"version {version!r}.*upgrade"):
        Repository.open(path)
    with pytest.raises(FormatVersionError, match="upgrade"):
        migrate(path)
    with pytest.raises(NotARepositoryError):
        migrate(tmp_path)


def test_damage_is_named_and_left(tmp_path: Path) -> None:
    path, expected = unpacked("1-trits", tmp_path)
    with Store(path, oldest=1, sync=False) as store:
        place = tiered(store)[0]
    with (path / pack_name(place.pack)).open("r+b") as file:
        file.seek(place.record.offset + place.record.length - 2)
        file.write(b"\xff\xff")
    report = migrate(path, sync=False)
    assert report.damaged == (place.record.block.hex(),)
    with Repository.open(path, sync=False) as repository:
        names = {problem.name for problem in repository.fsck(read_data=True).errors}
        assert place.record.block.hex() in names
        whole = {name for name in expected if place.record.block.hex() not in needed(repository, name)}
        assert {"base", "linear"} <= whole
        for name in whole:
            assert served(repository, name) == expected[name]


def needed(repository: Repository, name: str) -> set[str]:
    """Return the blocks that a model needs, those included that a lazy one is derived from."""
    manifest = repository.manifest(repository.resolve(name))
    models = [manifest, *(map(repository.manifest, manifest.lineage.experts) if manifest.is_lazy else ())]
    return {block.hex() for model in models for block in model.block_ids()}


def test_a_migration_stopped_between_packs_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = unpacked("1-trits", tmp_path)
    monkeypatch.setattr("mergefs.rewriting.PACK_BYTES", 1)  # one block, one pack
    real, calls = from_1._switch, []

    def stopped(*arguments: Any) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(from_1, "_switch", stopped)
        with pytest.raises(KeyboardInterrupt):
            migrate(path, sync=False)
    with pytest.raises(FormatVersionError, match="migrate"):
        Repository.open(path)
    assert migrate(path, sync=False).blocks_rewritten == 1
    check(path, expected)


def _crashes(tmp_path: Path, name: str, most: int | None) -> int:
    """Have the power fail at moments of a migration, run it again, and check; return how many states were tried."""
    path, expected = unpacked(name, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    recording = record([sys.executable, "-m", "mergefs", "-R", str(path), "migrate"], path, environment=environment)
    assert recording.code == 0, recording.output
    states = list(crash_states(recording, ignore=["catalog/lock.mdb"]))
    if most is not None and len(states) > most:
        step = len(states) / most
        states = [*(states[int(i * step)] for i in range(most)), states[-1]]
    assert any(state.finished for state in states)
    for state in states:
        target = tmp_path / "crashed"
        state.write(target)
        report = migrate(target, sync=False)
        assert report.version == VERSION
        assert not report.damaged
        assert not state.finished or report.before == VERSION
        check(target, expected)
        shutil.rmtree(target)
    return len(states)


@pytest.mark.slow
@pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")
def test_a_crash_at_some_moments_of_a_migration(tmp_path: Path) -> None:
    assert _crashes(tmp_path, "1-trits", 30) > 20


@pytest.mark.exhaustive
@pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")
@pytest.mark.parametrize("name", ["1-trits", "1-whole-blocks", "1-sessions"])
def test_a_crash_at_any_moment_of_a_migration(name: str, tmp_path: Path) -> None:
    print(f"migrate {name}: {_crashes(tmp_path, name, None)} crash states, 0 losses")
