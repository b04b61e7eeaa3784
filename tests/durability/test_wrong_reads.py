"""Disks that return other bytes than were written: what is given out is right, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import EXPERTS, forget, merged_models, recipe_text, served

from mergefs.blocks.checking import EVERY, Sampler
from mergefs.blocks.exact import CODINGS, Exact
from mergefs.blocks.pack import pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.tables import get_tiers, put_location
from mergefs.errors import CorruptionError, MergefsError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.testing.faults import WrongReads


@pytest.mark.parametrize("name", ["x", "merged", "later"])
def test_a_wrong_bit_in_any_read_is_not_served(name: str, tmp_path: Path) -> None:
    with merged_models(tmp_path) as repository:
        right = served(repository, name)
        number = refused = 0
        while True:
            repository.backend = WrongReads(repository.path, number, number)
            repository._load_manifest.cache_clear()
            try:
                assert served(repository, name) == right, number
            except CorruptionError:
                refused += 1
            if repository.backend.reads <= number:
                break
            number += 1
    assert refused == number > 20


def test_a_wrong_bit_in_any_read_does_not_come_into_a_merge(tmp_path: Path) -> None:
    with merged_models(tmp_path) as repository:
        right = repository.resolve("merged")
        recipe = Recipe.load(tmp_path / "recipe.yml")
        number = refused = 0
        while True:
            forget(repository)
            repository.backend = WrongReads(repository.path, number, number)
            repository._load_manifest.cache_clear()
            try:
                assert repository.merge(recipe, "again").manifest == right, number
            except MergefsError:
                refused += 1
            if repository.backend.reads <= number:
                break
            number += 5
        repository.backend = WrongReads(repository.path, -1)
        assert repository.fsck(read_data=True).ok
    assert refused > 3


@pytest.mark.parametrize("exact", CODINGS)
def test_a_base_that_is_damaged_is_named_by_what_is_decoded_from_it(slices: Path, tmp_path: Path, exact: Exact) -> None:
    """Its own check is left out where that of the expert's block says all, and made up for when that fails."""
    with Repository.init(tmp_path / "repository", 1 << 18, exact=exact) as repository:
        repository.ingest(slices / "base", "base")
        repository.ingest(slices / EXPERTS[0], "x", base="base")
        tensor = max(repository.manifest(repository.resolve("x")).tensors, key=lambda tensor: tensor.nbytes)
        block = bytes.fromhex(tensor.blocks[0] or "")
        reader = BlockReader(repository.catalog, repository.backend)
        right = bytes(reader.read(block, Kind.EXPERT))
        with repository.catalog.read() as txn:
            base = get_tiers(txn, get_tiers(txn, block)[0].record.base)[0]
        pack = repository.path / pack_name(base.pack)
        whole = pack.read_bytes()
        for place in (0, base.record.length // 2, base.record.length - 1):
            damaged = bytearray(whole)
            damaged[base.record.offset + place] ^= 4
            pack.chmod(0o600)
            pack.write_bytes(damaged)
            with pytest.raises(CorruptionError, match=f"block {base.record.block.hex()} is damaged"):
                reader.read(block, Kind.EXPERT)
        pack.write_bytes(whole)
        assert bytes(reader.read(block, Kind.EXPERT)) == right


@pytest.mark.parametrize("setting", EVERY)
def test_blocks_of_a_merge_are_compared_with_their_ids(
    setting: str, slices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the payloads' checks cannot see: tiers of another block that are entered as this one's.
    monkeypatch.setenv("MERGEFS_CHECK_BLOCKS", setting)
    Repository.init(tmp_path / "repository", 1 << 18).close()
    with Repository.open(tmp_path / "repository", sync=False) as repository:
        repository.ingest(slices / "base", "base")
        for name in EXPERTS[:2]:
            repository.ingest(slices / name, name, base="base")
        one, other = (repository.manifest(repository.resolve(name)) for name in EXPERTS[:2])
        exchanged = 0
        with repository.catalog.read() as txn:
            pairs = [
                (get_tiers(txn, bytes.fromhex(a)), get_tiers(txn, bytes.fromhex(b)))
                for mine, its in zip(one.tensors, other.tensors, strict=True)
                for a, b in zip(mine.blocks, its.blocks, strict=True)
                if a is not None and b is not None and a != b
            ]
        for mine, its in pairs:
            if len(mine) != len(its) or len(mine) < 2 or mine[0].record.base != its[0].record.base:
                continue
            for here, there in zip(mine, its, strict=True):
                record = there.record._replace(block=here.record.block)
                repository.catalog.write(lambda txn, pack=there.pack, record=record: put_location(txn, pack, record))
            exchanged += 1
        assert exchanged
        with pytest.raises(CorruptionError, match="another hash"):
            BlockReader(repository.catalog, repository.backend).read(mine[0].record.block, Kind.EXPERT)
        text = recipe_text("task_arithmetic", [(name, {"weight": 0.5}) for name in EXPERTS[:2]], "base")
        (tmp_path / "recipe.yml").write_text(text)
        merge = repository.merge
        if setting == "always":
            with pytest.raises(CorruptionError, match="another hash"):
                merge(Recipe.load(tmp_path / "recipe.yml"), "merged")
        elif setting == "never":
            merge(Recipe.load(tmp_path / "recipe.yml"), "merged")


def test_one_of_so_many_blocks_is_compared() -> None:
    for name, every in EVERY.items():
        sampler = Sampler(every)
        due = sum(sampler.is_due() for _ in range(640))
        assert due == {"always": 640, "sampled": 10, "never": 0}[name]


def test_there_is_no_other_way_to_check(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repository").close()
    with pytest.raises(UserError, match="'seldom' is no way to check blocks: it is always, sampled, never"):
        Repository.open(tmp_path / "repository", check_blocks="seldom")
