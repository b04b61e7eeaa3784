"""Mending: what is damaged is known afterwards for lost, what is whole stays, and ingesting or merging again heals."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from builders import contents, merge_xy, merged_models, served, tree

from mergefs.blocks.pack import pack_name, read_records
from mergefs.blocks.writer import adopt
from mergefs.errors import CorruptionError, UserError
from mergefs.rebuild import rebuild
from mergefs.refs import REF_COPIES
from mergefs.repository import Repository
from mergefs.rewriting import Rewrite
from mergefs.store import manifest_name, plan_name


@pytest.fixture
def models(tmp_path: Path) -> Repository:
    """A base, two experts, a merge of them and a lazy one, each with its checkpoint's folder beside the repository."""
    return merged_models(tmp_path)


def _everything(repository: Repository) -> dict[str, dict[str, str]]:
    return {name: served(repository, name) for name in sorted(repository.refs())}


def _ingest_again(repository: Repository) -> None:
    """Take in all checkpoints and merge again, as somebody does who has lost something."""
    for name in ("base", "x", "y"):
        repository.ingest(repository.path.parent / name, name, base=None if name == "base" else "base")
    merge_xy(repository)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_sound_repository_stays_as_it_is(models: Repository) -> None:
    before = _everything(models)
    report = models.repair()
    assert report.ok
    assert (report.found, report.files) == ((), ())
    assert (report.blocks_found, report.blocks_dropped, report.blocks_moved) == (0, 0, 0)
    assert _everything(models) == before


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_mended_by_ingesting_again(models: Repository, seed: int) -> None:
    before = _everything(models)
    chance = random.Random(seed)
    files = [p for kind in ("packs", "manifests", "plans") for p in sorted((models.path / kind).glob("*/*"))]
    for path in chance.sample(files, 3):
        match chance.randrange(3):
            case 0:
                _flip(path, chance.randrange(path.stat().st_size))
            case 1:
                os.truncate(path, chance.randrange(path.stat().st_size))
            case _:
                path.unlink()
    assert not models.fsck(read_data=True).ok
    models.repair()
    models.close()
    with Repository.open(models.path, sync=False) as again:
        _ingest_again(again)
        assert again.fsck(read_data=True).ok
        assert _everything(again) == before


def test_what_is_sound_in_a_damaged_pack_is_kept(models: Repository) -> None:
    identity = bytes.fromhex(models.resolve("x"))
    assert identity
    packs = sorted(models.path.glob("packs/*/*.pack"), key=lambda p: len(read_records(p)))
    path, records = packs[-1], read_records(packs[-1])
    _flip(path, records[0].offset)
    report = models.repair()
    assert report.blocks_dropped == 1
    assert report.blocks_moved == len({r.block for r in records if r.tier == 0}) - 1
    assert report.files == (f"quarantine/{path.name}",)
    # What stands on the lost block waits for it.
    assert records[0].block.hex() in {problem.name for problem in report.left}
    with pytest.raises(CorruptionError):
        _everything(models)
    before = {name: tree(models.path.parent / name) for name in ("base", "x", "y")}
    models.ingest(models.path.parent / "base", "base")
    assert models.fsck(read_data=True).ok
    assert {name: served(models, name) for name in before} == before


def test_a_block_with_another_copy_is_found(models: Repository) -> None:
    before = _everything(models)
    path = max(models.path.glob("packs/*/*.pack"), key=lambda p: len(read_records(p)))
    records = read_records(path)
    # A pack that nobody knows, such as a crash leaves behind, with the same blocks in another order.
    with Rewrite(models, "test") as rewrite:
        for record in reversed(records):
            payload = models.backend.get(f"packs/{path.parent.name}/{path.name}", record.offset, record.length)
            rewrite.append(record, payload)
        rewrite.finish()
        for identity, pack in rewrite._finished:
            adopt(models.backend, identity, pack.path)
    path.unlink()
    report = models.repair()
    assert report.blocks_found == len({record.block for record in records})
    assert report.blocks_dropped == 0
    assert report.ok
    assert _everything(models) == before


def test_a_rebuilt_catalog_serves_the_same(models: Repository) -> None:
    before, refs = _everything(models), models.refs()
    logged = {name: models.manifest_entry(identity) for name, identity in refs.items()}
    models.close()
    shutil.rmtree(models.path / "catalog")
    report = rebuild(models.path, sync=False)
    assert (report.lost, report.recovered, report.kept) == ((), (), None)
    assert report.refs == len(refs)
    with Repository.open(models.path, sync=False) as again:
        assert again.refs() == refs
        assert again.fsck(read_data=True).ok
        assert _everything(again) == before
        assert {name: again.manifest_entry(identity) for name, identity in refs.items()} == logged
        again.gc()
        assert _everything(again) == before
        merge_xy(again)


def test_a_damaged_catalog_is_kept_beside_the_new_one(models: Repository) -> None:
    before = _everything(models)
    models.close()
    _flip(models.path / "catalog" / "data.mdb", 16)
    report = rebuild(models.path, sync=False)
    assert report.kept is not None
    assert (models.path / report.kept / "data.mdb").is_file()
    with Repository.open(models.path, sync=False) as again:
        assert _everything(again) == before


def test_a_catalog_in_use_is_not_rebuilt(models: Repository) -> None:
    with models.view("base"), pytest.raises(UserError, match="in use"):
        rebuild(models.path)
    assert models.fsck().ok


def test_models_without_copies_of_refs_get_names(models: Repository) -> None:
    before = _everything(models)
    models.close()
    shutil.rmtree(models.path / "catalog")
    shutil.rmtree(models.path / REF_COPIES)
    report = rebuild(models.path, sync=False)
    assert len(report.recovered) == len(before)
    with Repository.open(models.path, sync=False) as again:
        assert sorted(map(str, _everything(again).values())) == sorted(map(str, before.values()))
        assert (
            _everything(again)[f"recovered-{again.resolve('recovered-' + _id_of(again, before['x']))[:12]}"]
            == before["x"]
        )


def _id_of(repository: Repository, files: dict[str, str]) -> str:
    return next(name for name in repository.refs() if served(repository, name) == files).removeprefix("recovered-")


def test_what_a_rebuilt_catalog_cannot_have_is_said(models: Repository) -> None:
    identity = models.resolve("x")
    models.close()
    (models.path / manifest_name(identity)).unlink()
    (models.path / REF_COPIES / "y.json").write_text("{}\n")
    report = rebuild(models.path, sync=False)
    assert any(line.startswith("ref 'x'") for line in report.lost)
    assert any(line.startswith("ref 'y'") for line in report.lost)
    with Repository.open(models.path, sync=False) as again:
        assert sorted(again.refs()) == ["base", "later", "merged"]


def test_copies_of_refs_follow_the_refs(models: Repository) -> None:
    folder = models.path / REF_COPIES
    assert sorted(path.stem for path in folder.iterdir()) == sorted(models.refs())
    models.tag("other", "x")
    models.remove(["x", "merged"])
    assert sorted(path.stem for path in folder.iterdir()) == sorted(models.refs()) == ["base", "later", "other", "y"]


def test_copies_of_refs_that_are_all_gone_come_back(models: Repository) -> None:
    before = contents(models.path / REF_COPIES)
    names = set(models.refs())
    shutil.rmtree(models.path / REF_COPIES)
    assert {problem.name for problem in models.fsck().errors} == names
    assert models.repair().ok
    assert set(contents(models.path / REF_COPIES)) == set(before)
    assert models.fsck().ok


@pytest.mark.parametrize("damaged", ["copy", "no copy", "catalog", "manifest's entry"])
def test_a_damaged_ref_is_found_and_mended(models: Repository, damaged: str) -> None:
    before, identity = _everything(models), models.resolve("x")
    copy = models.path / REF_COPIES / "x.json"
    match damaged:
        case "copy":
            _flip(copy, 20)
        case "no copy":
            copy.unlink()
        case "catalog":
            entry = json.dumps({"manifest": "0" * 64, "time": 0, "previous": None}).encode()
            models.catalog.write(lambda txn: txn.put("refs", b"x", entry))
        case _:
            models.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(identity)))
    report = models.fsck()
    assert ("ref", "x") in {(problem.kind, problem.name) for problem in report.errors}
    assert all("x" in problem.affects for problem in report.errors if problem.name == "x")
    assert models.repair().ok
    assert models.resolve("x") == identity
    assert _everything(models) == before


def test_quarantined_files_are_out_of_the_way(models: Repository) -> None:
    identity = models.resolve("merged")
    plan = models.manifest(identity).lineage.plan
    assert plan is not None
    _flip(models.path / plan_name(plan), 5)
    assert not models.fsck().ok
    report = models.repair()
    assert report.files == (f"quarantine/{plan}.json",)
    assert not (models.path / plan_name(plan)).exists()
    merge_xy(models)
    assert models.fsck(read_data=True).ok
    assert contents(models.path / "quarantine")
    assert tree(models.path / "quarantine")
    assert all((models.path / pack_name(pack)).exists() for pack in _packs(models))


def _packs(repository: Repository) -> list[bytes]:
    with repository.catalog.read() as txn:
        return [key for key, _ in txn.items("packs")]
