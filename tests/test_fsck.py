"""fsck finds what is damaged and says whom it affects; damaged data is never served."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from builders import array, contents, fine_tuned, random_model, recipe_text, served, tree, write_model

from mergefs.blocks.pack import NO_BASE, pack_name, read_records
from mergefs.catalog.tables import locations, put_location
from mergefs.errors import CorruptionError, MergefsError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.store import manifest_name, plan_name


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Repository:
    """Two strangers, an expert of the first, a merge, and the same merge left lazy."""
    base = random_model(1)
    repository.ingest(write_model(tmp_path / "base", base), "base")
    repository.ingest(write_model(tmp_path / "x", fine_tuned(base, 2)), "x", base="base")
    repository.ingest(write_model(tmp_path / "stranger", random_model(9)), "stranger")
    text = recipe_text("task_arithmetic", ["x"], "base", weight=0.5)
    repository.merge(Recipe.parse(text), "eager")
    repository.merge(Recipe.parse(text.replace("0.5", "0.25")), "lazy", lazy=True)
    return repository


def pack_of(repository: Repository, name: str) -> Path:
    """Return the one pack that a model brought with it."""
    manifest = repository.manifest(repository.resolve(name))
    first = bytes.fromhex(str(manifest.tensors[0].blocks[0]))
    location = repository.catalog.locate(first)
    assert location is not None
    return repository.path / pack_name(location.pack)


def damage(path: Path, offset: int) -> None:
    """Flip one bit."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def affected(report: object) -> set[str]:
    return {ref for problem in report.errors for ref in problem.affects}  # type: ignore[attr-defined]


def test_a_sound_repository(models: Repository) -> None:
    before = contents(models.path)
    told: list[tuple[int, int]] = []
    report = models.fsck(read_data=True, progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert report.errors == ()
    stats = models.stats()
    assert (report.blocks, report.packs, report.manifests) == (stats.blocks, stats.packs, stats.manifests)
    assert report.garbage_packs == 0
    assert told[-1] == (stats.blocks, stats.blocks)
    assert contents(models.path) == before


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_in_a_payload(models: Repository, seed: int) -> None:
    path = pack_of(models, "x")
    record = random.Random(seed).choice(read_records(path))
    damage(path, record.offset + random.Random(seed).randrange(record.length))
    assert models.fsck().ok  # its bytes were not read
    report = models.fsck(read_data=True)
    assert not report.ok
    blocks = {problem.name for problem in report.errors if problem.kind == "block"}
    assert blocks == {record.block.hex()}
    assert any(problem.kind == "pack" and problem.name == path.stem for problem in report.errors)
    assert affected(report) >= {"x"}
    assert "stranger" not in affected(report)
    with pytest.raises(CorruptionError, match=record.block.hex()):
        served(models, "x")
    assert served(models, "stranger") == tree(models.path.parent / "stranger")


def test_a_damaged_base_is_named_by_all_that_need_it(models: Repository) -> None:
    path = pack_of(models, "base")
    roots = {record.base for record in read_records(pack_of(models, "x"))} - {NO_BASE}
    record = next(record for record in read_records(path) if record.block in roots)
    damage(path, record.offset)
    report = models.fsck(read_data=True)
    assert affected(report) >= {"base", "x"}
    for name in ("base", "x", "lazy"):
        with pytest.raises(CorruptionError):
            served(models, name)
    with pytest.raises(CorruptionError):
        models.export("x", models.path.parent / "out")
    assert not (models.path.parent / "out").exists()


@pytest.mark.parametrize("place", ["start", "table", "footer"])
def test_a_flipped_bit_outside_the_payloads(models: Repository, place: str) -> None:
    path = pack_of(models, "x")
    size = path.stat().st_size
    damage(path, {"start": 2, "table": size - 56 - 30, "footer": size - 3}[place])
    report = models.fsck()
    assert [(problem.kind, problem.name) for problem in report.errors] == [("pack", path.stem)]
    assert "x" in affected(report)
    assert "stranger" not in affected(report)


@pytest.mark.parametrize("size", [0, 7, 1000, -57, -1])
def test_a_truncated_pack(models: Repository, size: int) -> None:
    path = pack_of(models, "x")
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    for read_data in (False, True):
        report = models.fsck(read_data=read_data)
        assert ("pack", path.stem) in {(problem.kind, problem.name) for problem in report.errors}
        assert "x" in affected(report)
    if size >= 0:
        with pytest.raises(CorruptionError):
            served(models, "x")


def test_a_missing_pack(models: Repository) -> None:
    path = pack_of(models, "x")
    path.unlink()
    for read_data in (False, True):
        report = models.fsck(read_data=read_data)
        assert ("pack", path.stem) in {(problem.kind, problem.name) for problem in report.errors}
        assert "x" in affected(report)
    with pytest.raises(CorruptionError, match=path.stem):
        served(models, "x")
    assert served(models, "base") == tree(models.path.parent / "base")


@pytest.mark.parametrize("how", ["flipped", "truncated", "deleted", "replaced"])
def test_a_damaged_manifest(models: Repository, how: str) -> None:
    identity = models.resolve("x")
    path = models.path / manifest_name(identity)
    if how == "flipped":
        damage(path, 100)
    elif how == "truncated":
        os.truncate(path, 50)
    elif how == "deleted":
        path.unlink()
    else:
        path.write_bytes((models.path / manifest_name(models.resolve("base"))).read_bytes())
    report = models.fsck()
    problem = next(problem for problem in report.errors if problem.name == identity)
    assert problem.kind == "manifest"
    assert problem.affects == ("lazy", "x")
    models.close()
    with Repository.open(models.path) as opened:
        with pytest.raises(CorruptionError, match=identity):
            served(opened, "x")
        before = contents(opened.path)
        with pytest.raises(CorruptionError):
            opened.gc()
        # What cannot be read might need anything: nothing is freed.
        assert contents(opened.path) == before
        assert opened.fsck().errors == report.errors
    Repository.open(models.path)  # for the fixture to close


def test_a_damaged_plan_of_a_lazy_merge(models: Repository) -> None:
    manifest = models.manifest(models.resolve("lazy"))
    path = models.path / plan_name(str(manifest.lineage.plan))
    damage(path, 20)
    report = models.fsck()
    assert affected(report) == {"lazy"}
    with pytest.raises(CorruptionError, match="plan"):
        served(models, "lazy")


def test_a_ref_to_nowhere(models: Repository) -> None:
    models.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(models.resolve("stranger"))))
    report = models.fsck()
    assert ("ref", "stranger", ("stranger",)) in {(p.kind, p.name, p.affects) for p in report.errors}


def test_a_block_that_the_catalog_lost(models: Repository) -> None:
    block = bytes.fromhex(str(models.manifest(models.resolve("stranger")).tensors[1].blocks[0]))
    models.catalog.write(lambda txn: txn.delete("blocks", block + b"\0"))
    report = models.fsck()
    assert [(p.kind, p.name, p.affects) for p in report.errors] == [("block", block.hex(), ("stranger",))]
    with pytest.raises(CorruptionError, match=block.hex()):
        served(models, "stranger")


def test_a_catalog_that_disagrees_with_a_pack(models: Repository) -> None:
    with models.catalog.read() as txn:
        location = next(loc for loc in locations(txn) if loc.record.base == NO_BASE and loc.record.length > 100)
    wrong = location.record._replace(offset=location.record.offset + 1)
    models.catalog.write(lambda txn: put_location(txn, location.pack, wrong))
    report = models.fsck()
    assert location.record.block.hex() in {problem.name for problem in report.errors}


def test_a_pack_that_nobody_knows_is_garbage_and_no_error(models: Repository) -> None:
    folder = models.path / "packs" / "00"
    folder.mkdir(exist_ok=True)
    (folder / ("00" * 32 + ".pack")).write_bytes(b"half-written")
    report = models.fsck(read_data=True)
    assert report.ok
    assert report.garbage_packs == 1
    models.gc()
    assert models.fsck().garbage_packs == 0


def test_no_damage_is_ever_served(repository: Repository, tmp_path: Path) -> None:
    """Every byte of a pack in turn: a read gives the right bytes, or fails."""
    base = {"w": array([[1.0, 2.0, 3.0], [0.5, 0.25, -1.0]], "BF16"), "v": array([0.0] * 300, "BF16")}
    repository.ingest(write_model(tmp_path / "base", base), "base")
    repository.ingest(write_model(tmp_path / "x", fine_tuned(base, 3)), "x", base="base")
    wanted = tree(tmp_path / "x")
    failed = 0
    for path in (repository.path / "packs").rglob("*.pack"):
        for offset in range(path.stat().st_size):
            damage(path, offset)
            try:
                assert served(repository, "x") == wanted
            except MergefsError:
                failed += 1
            damage(path, offset)
    assert failed > 300
    assert served(repository, "x") == wanted
    assert repository.fsck(read_data=True).ok
