"""The catalog's checks: a value, a page or a configuration that is not what was written is found, and mended."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest
from builders import merge_xy, merged_models, served

from mergefs.catalog.environment import CHECK_BYTES, Transaction
from mergefs.catalog.pages import FORMAT_TABLE, LAST_KEY, PagesError, check_pages
from mergefs.catalog.tables import TABLES
from mergefs.cli import cli
from mergefs.configuration import CONFIG, CONFIG_COPY, mend_configuration, read_config
from mergefs.errors import CatalogDamagedError, CorruptionError, MergefsError, NotARepositoryError
from mergefs.migration.run import migrate
from mergefs.rebuild import rebuild
from mergefs.repository import Repository
from mergefs.store import Store

META = 16 + 24 + 2 * 48
"""Where a meta page has the number of the last page, and behind it that of its transaction."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A repository that is closed."""
    merged_models(tmp_path).close()
    return tmp_path / "repository"


def _served(path: Path) -> dict[str, dict[str, str]]:
    with Repository.open(path, sync=False) as repository:
        return {name: served(repository, name) for name in sorted(repository.refs())}


def _raw(path: Path) -> Any:
    return lmdb.open(str(path / "catalog"), max_dbs=16, map_size=1 << 30)


def _flip_values(path: Path, table: str, most: int) -> int:
    """Flip a bit of some values of a table, and return of how many."""
    with _raw(path) as env, env.begin(write=True) as txn:
        db = env.open_db(table.encode(), txn=txn)
        values = list(txn.cursor(db=db))[:most]
        for key, value in values:
            txn.put(key, bytes([value[0] ^ 4]) + value[1:], db=db)
        # The transaction leaves its number, as all do.
        last = struct.pack("<Q", txn.id())
        from mergefs.catalog.environment import _check

        txn.put(b"last", last + _check(FORMAT_TABLE, b"last", last), db=env.open_db(FORMAT_TABLE.encode(), txn=txn))
    return len(values)


@pytest.mark.parametrize("table", ["blocks", "packs", "refs", "manifests", "statistics", "derivations"])
def test_a_flip_in_a_value_is_found_and_mended(path: Path, table: str) -> None:
    before = _served(path)
    assert _flip_values(path, table, 3)
    with Repository.open(path, sync=False) as repository:
        with repository.catalog.read() as txn, pytest.raises(CatalogDamagedError, match="--repair"):
            list(txn.items(table))
        assert not repository.fsck().ok
        repository.repair()
        for name in ("base", "x", "y"):
            repository.ingest(path.parent / name, name, base=None if name == "base" else "base")
        merge_xy(repository)
        assert repository.fsck(read_data=True).ok
    assert _served(path) == before


def _as_first_version(path: Path) -> None:
    """Make of a repository what one of the first version is: no checks, and no copy of its configuration."""
    with _raw(path) as env, env.begin(write=True) as txn:
        for table in TABLES:
            db = env.open_db(table.encode(), txn=txn)
            for key, value in list(txn.cursor(db=db)):
                txn.put(key, value[:-CHECK_BYTES], db=db)
        txn.drop(env.open_db(FORMAT_TABLE.encode(), txn=txn))
    config = {**read_config(path, oldest=1), "version": 1}
    config.pop("check", None)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (path / CONFIG_COPY).unlink(missing_ok=True)


def test_a_repository_of_the_first_version_gets_checks(path: Path) -> None:
    before = _served(path)
    _as_first_version(path)
    with Store(path, sync=False, oldest=1) as store:
        assert not store.catalog.has_checks
        store.catalog.add_checks()
        assert store.catalog.has_checks
        store.catalog.add_checks()
    _as_first_version(path)
    migrate(path, sync=False)
    with Repository.open(path, sync=False) as repository:
        assert repository.catalog.has_checks
        assert "check" in read_config(path)
        assert repository.fsck(read_data=True).ok
    assert _served(path) == before


def test_a_rebuilt_catalog_has_checks_whatever_the_version(path: Path) -> None:
    before = _served(path)
    _as_first_version(path)
    rebuild(path, sync=False)
    migrate(path, sync=False)
    with Repository.open(path, sync=False) as repository:
        assert repository.catalog.has_checks
        assert repository.fsck(read_data=True).ok
    assert _served(path) == before


def test_catalogs_are_kept_however_fast_they_are_rebuilt(path: Path) -> None:
    before = _served(path)
    kept = {rebuild(path, sync=False).kept for _ in range(4)}
    assert len(kept) == 4
    assert all((path / str(name) / "data.mdb").is_file() for name in kept)
    assert _served(path) == before


def _patch(file: Path, offset: int, data: bytes) -> bytes:
    with file.open("r+b") as opened:
        opened.seek(offset)
        old = opened.read(len(data))
        opened.seek(offset)
        opened.write(data)
    return old


def test_a_catalog_that_is_cut_short_is_refused(path: Path) -> None:
    file = path / "catalog" / "data.mdb"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(CatalogDamagedError, match=r"cut short; 'mergefs catalog rebuild'"):
        Repository.open(path)
    rebuild(path, sync=False)
    with Repository.open(path) as repository:
        assert repository.fsck(read_data=True).ok


@pytest.mark.parametrize(("newest", "change"), [(False, 2), (False, -2), (False, 1 << 20), (True, 2), (True, -4)])
def test_an_earlier_state_is_not_taken_for_the_latest(path: Path, newest: bool, change: int) -> None:
    file = path / "catalog" / "data.mdb"
    check_pages(file)
    data = file.read_bytes()
    numbers = [struct.unpack_from("<Q", data, page * 4096 + META + 8)[0] for page in range(2)]
    page = numbers.index(max(numbers) if newest else min(numbers))
    _patch(file, page * 4096 + META + 8, struct.pack("<Q", numbers[page] + change))
    with pytest.raises(PagesError):
        check_pages(file)


def test_a_snapshot_later_than_its_number_is_taken_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when others commit twice while LMDB takes one: simulated, as that is rare."""
    check, found = Transaction.check_last, []

    def first_wrong(txn: Transaction) -> None:
        found.append(txn)
        if len(found) == 1:
            raise CatalogDamagedError("later")
        check(txn)

    monkeypatch.setattr(Transaction, "check_last", first_wrong)
    with Repository.open(path) as repository:
        assert repository.fsck().ok
    assert len(found) > 1


def test_pages_are_checked_while_another_process_commits(path: Path) -> None:
    """The writer is LMDB alone and does not sync: it commits thousands of times a second, also between two reads."""
    program = (
        "import lmdb, os, sys\n"
        "with lmdb.open(sys.argv[1], map_size=1 << 30, max_dbs=16, sync=False) as env:\n"
        "    table = env.open_db(sys.argv[2].encode())\n"
        "    print(flush=True)\n"
        "    while True:\n"
        "        with env.begin(write=True, db=table) as txn:\n"
        "            txn.put(sys.argv[3].encode(), txn.id().to_bytes(8, 'little') + os.urandom(300))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path / "catalog"), FORMAT_TABLE, LAST_KEY.decode()], stdout=subprocess.PIPE
    ) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            end = time.monotonic() + 3
            checks = 0
            while time.monotonic() < end:
                check_pages(path / "catalog" / "data.mdb")
                checks += 1
            assert checks > 20
            assert writer.poll() is None
        finally:
            writer.kill()


def test_pages_are_in_use_or_free(path: Path) -> None:
    file = path / "catalog" / "data.mdb"
    used = check_pages(file)
    (last,) = struct.unpack("<Q", file.read_bytes()[META : META + 8])
    assert {0, 1} < used < set(range(last + 1))


# ------------------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize("how", ["lost", "damaged", "empty"])
@pytest.mark.parametrize("both", [False, True])
def test_the_configuration_is_made_again(path: Path, how: str, both: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before, config = _served(path), read_config(path)
    for name in (CONFIG, CONFIG_COPY) if both else (CONFIG,):
        match how:
            case "lost":
                (path / name).unlink()
            case "damaged":
                text = (path / name).read_text()
                (path / name).write_text(text.replace('"block_size": 4096', '"block_size": 4097'))
            case _:
                (path / name).write_text("")
    with pytest.raises(MergefsError, match=CONFIG):
        Repository.open(path)
    assert cli.main(["-R", str(path), "fsck", "--repair"], standalone_mode=False) in (None, 0)
    assert "made again from" in capsys.readouterr().err
    after = read_config(path)
    del config["check"], config["created"], after["check"], after["created"]
    assert after == config
    assert _served(path) == before


def test_the_copy_of_the_configuration_is_made_again(path: Path) -> None:
    (path / CONFIG_COPY).unlink()
    with Repository.open(path, sync=False) as repository:
        assert [problem.kind for problem in repository.fsck().errors] == ["configuration"]
        assert repository.repair().ok
    assert (path / CONFIG_COPY).read_bytes() == (path / CONFIG).read_bytes()


def test_nothing_is_made_of_a_folder_that_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError):
        mend_configuration(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("name", ["data", "journal", "session.json", "no session.json", "no data"])
def test_damage_to_a_session_is_found(path: Path, name: str) -> None:
    with Repository.open(path, sync=False) as repository:
        session = repository.edit("merged")
        session.filesystem().pipe_file("notes.txt", b"changed")
        session.close()
        assert repository.fsck(read_data=True).ok
        folder = path / "sessions" / session.id
        data = next(file for file in folder.rglob("data/*") if file.is_file())
        match name:
            case "data":
                _patch(data, 3, b"?")
            case "no data":
                shutil.rmtree(data.parent)
            case "journal":
                _patch(folder / "journal", 40, b"?")
            case "session.json":
                text = (folder / name).read_text()
                (folder / name).write_text(text.replace('"merged"', '"merger"'))
            case _:
                (folder / "session.json").unlink()
        assert [problem.kind for problem in repository.fsck(read_data=True).errors] == ["session"]
        with pytest.raises(CorruptionError, match=f"'mergefs discard {session.id}'"):
            repository.edit(resume=session.id)
        with pytest.raises(CorruptionError):
            repository.gc() if "session.json" in name else repository.edit(resume=session.id)
        from mergefs.edit.folders import discard

        discard(repository, session.id)
        assert repository.fsck(read_data=True).ok
