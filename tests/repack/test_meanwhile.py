"""Repack while others read, ingest and collect, and when it is interrupted."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import served, tree
from looking import (
    EXPERTS,
    TINY_PACK,
    check_whole,
    codings,
    in_tiny_packs,
    tiered,
)

import mergefs.cli
import mergefs.repack
import mergefs.rewriting
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.repository import Repository


class StopError(Exception):
    """What a progress callback raises."""


def interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise StopError


# ------------------------------------------------------------------------------------------------ the configuration


def test_an_interrupted_repack_is_continued(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tiny_packs(monkeypatch)
    total = len(tiered(repository))
    with pytest.raises(StopError):
        repository.repack("small", progress=interrupt)
    done = codings(repository)
    assert done["fast"] + done["small"] == total
    assert done["small"] > 0
    assert repository.exact == "small"
    check_whole(repository, models)
    assert repository.repack().blocks_repacked == done["fast"]
    assert codings(repository) == {"small": total}
    check_whole(repository, models)


def test_a_killed_repack_is_continued(repository: Repository, models: Path) -> None:
    """Killed inside the transaction that switches a batch, after its packs have their names."""
    code = (
        "import os, sys, mergefs.repack as r, mergefs.rewriting as w\n"
        "from mergefs.repository import Repository\n"
        f"w.PACK_BYTES = {TINY_PACK}\n"
        "turns = []\n"
        "old = r.is_spent\n"
        "def spent(*args):\n"
        "    turns.append(1)\n"
        "    return os._exit(9) if len(turns) == int(sys.argv[2]) else old(*args)\n"
        "r.is_spent = spent\n"
        "Repository.open(sys.argv[1]).repack('small', threads=1)\n"
    )
    total = len(tiered(repository))
    for turn in (1, 3):
        ran = subprocess.run([sys.executable, "-c", code, str(repository.path), str(turn)], check=False)
        assert ran.returncode == 9
        repository.gc()
        assert 0 < codings(repository)["fast"] <= total
        for name in EXPERTS:
            assert served(repository, name) == tree(models / name)
    assert codings(repository)["small"] > 0
    repository.repack()
    repository.gc(rewrite_above=0)
    assert codings(repository) == {"small": total}
    # The temporary files of the killed are swept when the repository is opened.
    with Repository.open(repository.path, sync=False):
        check_whole(repository, models)


# ---------------------------------------------------------------------------------------------------- others meanwhile


def test_a_view_kept_open_over_a_repack(repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiny_packs(monkeypatch)
    content = (models / "x" / "model.safetensors").read_bytes()
    with repository.view("x", cache_bytes=0) as view:
        first = view.read("model.safetensors", 0, 5000)
        for exact in ("small", "fast"):
            repository.repack(exact)
            assert view.read("model.safetensors", 0, 5000) == first
            assert view.read("model.safetensors") == content


def test_readers_that_looked_a_block_up_before(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packs that a reader was told of are gone when it reads."""
    reader = BlockReader(repository.catalog, repository.backend)
    places = tiered(repository)
    expected = {block: bytes(reader.read(block, Kind.EXPERT)) for block in places}
    repository.repack("small")
    repository.gc(rewrite_above=0)
    fresh = repository.catalog.tiers
    stale = dict(places)
    monkeypatch.setattr(repository.catalog, "tiers", lambda block: stale.pop(block, None) or fresh(block))
    for block in places:
        assert bytes(reader.read(block, Kind.EXPERT)) == expected[block]
    assert not stale


def test_readers_ingests_and_collections_at_the_same_time(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tiny_packs(monkeypatch)
    code = (
        "import sys; from mergefs.repository import Repository; repository = Repository.open(sys.argv[1], sync=False)\n"
        "print('ready', flush=True)\n"
        "while True: repository.gc(rewrite_above=0)"
    )
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert served(repository, "y") == tree(models / "y")
        except BaseException as error:
            failures.append(error)

    collector = subprocess.Popen([sys.executable, "-c", code, str(repository.path)], stdout=subprocess.PIPE)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert collector.stdout is not None
        assert collector.stdout.readline() == b"ready\n"
        for turn in range(4):
            repository.remove(["x", "few"])
            repository.ingest(models / "x", "x", base="base")
            repository.repack(("small", "fast")[turn % 2])
            repository.ingest(models / "few", "few", base="base")
            assert served(repository, "x") == tree(models / "x")
        assert collector.poll() is None
    finally:
        stop.set()
        thread.join()
        collector.kill()
        collector.communicate()
    assert not failures
    repository.repack("small")
    repository.gc(rewrite_above=0)
    assert set(codings(repository)) == {"small"}
    check_whole(repository, models)


def test_an_ingest_that_began_before_makes_a_mixed_repository(repository: Repository, models: Path) -> None:
    repository.remove(["x"])
    repository.gc()
    repository.repack("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "exact", "fast")
        repository.ingest(models / "x", "x", base="base")
    mixed = codings(repository)
    assert set(mixed) == {"fast", "small"}
    check_whole(repository, models)
    assert repository.repack().blocks_repacked == mixed["fast"]
    assert set(codings(repository)) == {"small"}


def _meanwhile(monkeypatch: pytest.MonkeyPatch, where: str, action: Callable[[], object]) -> None:
    """Have something happen once, just before a function begins or a method returns that repack uses."""
    owner, name = {
        "before reading": (mergefs.repack, "ordered"),
        "before switching": (mergefs.rewriting.Rewrite, "finish"),
    }[where]
    original, turns = getattr(owner, name), []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not turns:
            turns.append(1)
            action()
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("where", ["before reading", "before switching"])
def test_blocks_that_gc_takes_in_between(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A model that is not in the catalog any more when repack begins: nothing protects its blocks."""
    gone = set(repository.manifest(repository.resolve("x")).block_ids())
    kept = set(repository.manifest(repository.resolve("y")).block_ids())
    identity = repository.remove(["x"])["x"]
    repository.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(identity)))
    places = tiered(repository)
    _meanwhile(monkeypatch, where, lambda: repository.gc(rewrite_above=0))
    report = repository.repack("small")
    assert places.keys() & (gone - kept)
    assert report.blocks_repacked == len(places) - len(places.keys() & (gone - kept))
    repository.ingest(models / "x", "x", base="base")
    repository.gc(rewrite_above=0)
    check_whole(repository, models)


def test_packs_that_were_not_entered_are_removed(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        assert list((repository.path / "tmp").iterdir())
        raise StopError

    places = tiered(repository)
    _meanwhile(monkeypatch, "before switching", stop)
    with pytest.raises(StopError):
        repository.repack("small")
    assert not list((repository.path / "tmp").iterdir())
    assert tiered(repository) == places


def test_tiers_that_gc_moves_in_between(repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.repack("small")  # which puts the exact tiers of all experts in one pack
    identity = repository.remove(["x"])["x"]
    repository.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(identity)))
    places = tiered(repository)

    def collect() -> None:
        assert repository.gc(rewrite_above=0).packs_rewritten
        assert any(at[-1].pack != places[block][-1].pack for block, at in tiered(repository).items())

    _meanwhile(monkeypatch, "before switching", collect)
    repository.repack("fast")
    assert set(codings(repository)) == {"fast"}
    repository.ingest(models / "x", "x", base="base")
    repository.gc(rewrite_above=0)
    check_whole(repository, models)


# ------------------------------------------------------------------------------------------------------------- refusals
