"""Derived blocks are kept: in a file, or in packs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import builders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergefs.errors import UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve.kept import ScratchFile
from mergefs.serve.served import Keeping, ServedModels

FILE = "model.safetensors"


@pytest.fixture
def lazy(repository: Repository, tmp_path: Path) -> Iterator[Repository]:
    """A repository with the lazy merge `merged` and its stored twin `twin`, of which nothing is remembered."""
    base = builders.random_model(1)
    repository.ingest(builders.write_model(tmp_path / "base", base), "base")
    for n in range(2):
        expert = builders.write_model(tmp_path / f"e{n}", builders.fine_tuned(base, n + 5))
        repository.ingest(expert, f"e{n}", base="base")
    recipe = Recipe.parse(builders.recipe_text("linear", ["e0", "e1"], weight=0.5))
    repository.merge(recipe, "twin")
    repository.merge(recipe, "merged", lazy=True)
    builders.forget(repository)
    return repository


def read_whole(served: ServedModels, name: str = "merged") -> bytes:
    with served.view(name) as view:
        return view.read(FILE)


def expected(repository: Repository) -> bytes:
    with repository.view("twin") as view:
        return view.read(FILE)


def test_bytes_of_derived_blocks_are_counted(lazy: Repository) -> None:
    served = ServedModels(lazy, Keeping(cache=0))
    assert served.read.expert == 0
    assert read_whole(served) == expected(lazy)
    once = served.read.expert
    assert once > 0
    assert read_whole(served) == expected(lazy)
    assert served.read.expert == 2 * once
    served.close()


@pytest.mark.parametrize("name", ["merged", "e0"])
def test_twenty_readers_take_no_more_bytes_than_one(lazy: Repository, name: str) -> None:
    """Of a lazy and of a stored model: each block is derived or decoded once."""
    totals = []
    for readers in (1, 20):
        served = ServedModels(lazy, Keeping(cache=16 << 20))
        together = threading.Barrier(readers)

        def read(_: int, served: ServedModels = served, together: threading.Barrier = together) -> bytes:
            with served.view(name) as view:
                together.wait()
                reader = view.reader(FILE)
                pieces = [b"".join(reader.pieces(at, 3000)) for at in range(0, view.files[FILE].size, 3000)]
                return b"".join(pieces)

        with ThreadPoolExecutor(readers) as threads:
            contents = set(threads.map(read, range(readers)))
        with lazy.view(name) as view:
            assert contents == {view.read(FILE)}
        totals.append((served.read.expert, served.read.base))
        served.close()
    assert totals[0] == totals[1]


def test_what_is_kept_in_a_file_is_not_derived_again(lazy: Repository) -> None:
    served = ServedModels(lazy, Keeping(cache=0, derived=1 << 20))
    assert read_whole(served) == expected(lazy)
    once = served.read
    assert read_whole(served) == expected(lazy)
    assert served.read.expert == once.expert
    served.close()
    assert list((lazy.path / "tmp").iterdir()) == []


def test_views_of_one_mount_share_their_blocks(lazy: Repository) -> None:
    served = ServedModels(lazy, Keeping(cache=1 << 20))
    read_whole(served, "e0")
    before = served.cache
    assert before.misses > 0
    lazy.tag("same", "e0")
    read_whole(served, "same")
    assert served.cache.misses == before.misses
    served.close()


def test_what_is_stored_outlives_the_mount_and_a_merge_takes_it_over(lazy: Repository) -> None:
    lazy.remove(["twin"])
    lazy.gc()
    content = None
    served = ServedModels(lazy, Keeping(cache=0, store=True))
    for _ in range(2):
        content = read_whole(served)
        once = served.read.expert
        served.tend()
    lazy.gc()  # leaves alone what the mount stored
    served.close()
    served = ServedModels(lazy, Keeping(cache=0))
    assert read_whole(served) == content
    assert served.read.expert == 0
    served.close()
    report = lazy.materialize("merged")
    assert (report.read.expert, report.blocks.derived) == (0, 0)
    assert report.blocks.remembered > 0
    assert once > 0
    lazy.gc()
    assert lazy.fsck(read_data=True).ok
    with lazy.view("merged") as view:
        assert not view.manifest.is_lazy
        assert view.read(FILE) == content


def test_what_was_stored_and_collected_is_derived_again(lazy: Repository) -> None:
    lazy.remove(["twin"])
    served = ServedModels(lazy, Keeping(cache=0, store=True))
    content = read_whole(served)
    served.close()
    lazy.gc()
    served = ServedModels(lazy, Keeping(cache=0))
    assert read_whole(served) == content
    assert served.read.expert > 0
    served.close()


def test_a_repository_for_reading_only_stores_nothing(lazy: Repository) -> None:
    with Repository.open(lazy.path, readonly=True) as readonly:
        with pytest.raises(UserError, match="open for reading only"):
            ServedModels(readonly, Keeping(cache=0, store=True))
        served = ServedModels(readonly, Keeping(cache=0, derived=1 << 20))
        assert read_whole(served) == expected(lazy)
        served.close()


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 12)), max_size=60),
)
def test_a_scratch_file_gives_back_what_was_put_or_nothing(limit: int, puts: list[tuple[int, int]]) -> None:
    scratch = ScratchFile(limit, Path("/tmp"))
    blocks: dict[int, bytes] = {}
    for key, size in puts:
        blocks.setdefault(key, bytes([key]) * size)
        scratch.put(key, blocks[key])
        found = {key: scratch.get(key) for key in blocks}
        assert all(found[key] in (None, blocks[key]) for key in blocks)
        assert sum(len(block) for block in found.values() if block is not None) <= limit
        if 0 < len(blocks[key]) <= limit:
            assert found[key] == blocks[key]
    scratch.close()
