"""Repack: another coding for what is stored."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders import load_model, tree, write_model
from click.testing import CliRunner
from looking import (
    EXPERTS,
    check_whole,
    checks,
    coarse,
    codings,
    in_tiny_packs,
    kinds,
    pack_bytes,
    tiered,
)

import mergefs.cli
import mergefs.repack
import mergefs.rewriting
from mergefs.blocks import tiers
from mergefs.blocks.encoding import Encoding
from mergefs.blocks.pack import Record, pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.tables import Location
from mergefs.cli import cli
from mergefs.errors import CorruptionError, UserError
from mergefs.repository import Repository


def test_there_and_back(repository: Repository, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiny_packs(monkeypatch)
    before, deltas, places = pack_bytes(repository), coarse(repository), tiered(repository)
    original = checks(repository)
    report = repository.repack("small")
    assert (report.exact, report.blocks_repacked) == ("small", len(places))
    assert (report.stored_bytes_before, report.stored_bytes_after) == (before, pack_bytes(repository))
    assert report.stored_bytes_after < before
    assert codings(repository) == {"small": len(places)}
    assert repository.exact == "small"
    assert coarse(repository) == deltas
    for block, at in tiered(repository).items():
        assert at[:-1] == places[block][:-1]
        assert at[-1].pack != places[block][-1].pack
    check_whole(repository, models)
    for name in EXPERTS:
        repository.export(name, tmp_path / name)
        assert tree(tmp_path / name) == tree(models / name)
    # What was replaced lay in a pack with blocks of other encodings: gc's to rewrite, when it is worth it.
    assert repository.gc(rewrite_above=0).waste_bytes == 0
    check_whole(repository, models)
    back = repository.repack("fast")
    assert back.blocks_repacked == len(places)
    assert codings(repository) == {"fast": len(places)}
    repository.gc(rewrite_above=0)
    check_whole(repository, models)
    assert checks(repository) == original


def test_quick_and_back(repository: Repository, models: Path, both: dict[str, Path]) -> None:
    """Blocks of all kinds are encoded anew, and an exact tier is read without the coarse ones."""
    tiered_ones, deltas = tiered(repository), coarse(repository)
    packs = pack_bytes(repository)
    encodings = kinds(repository)
    report = repository.repack("quick")
    assert report.blocks_repacked > len(tiered_ones)
    assert report.stored_bytes_after > packs
    assert Encoding.SHUFFLE_ZSTD not in kinds(repository)
    with Repository.open(both["quick"]) as ingested:
        assert kinds(repository) == kinds(ingested)
    assert deltas.items() <= coarse(repository).items()
    check_whole(repository, models)
    four = next(at for at in tiered(repository).values() if len(at) == 4)
    reader = BlockReader(repository.catalog, repository.backend)
    base = reader.read(four[0].record.base, Kind.BASE)
    reader.read(four[0].record.block, Kind.EXPERT, {four[0].record.base: base})
    assert reader.counter.totals.expert == four[-1].record.length
    repository.repack("fast")
    assert Encoding.QUICK not in kinds(repository)
    assert kinds(repository)[Encoding.SHUFFLE_ZSTD] == encodings[Encoding.SHUFFLE_ZSTD]
    check_whole(repository, models)


def test_damage_in_a_coarse_tier_of_a_block_that_is_read_without_it_is_found(repository: Repository) -> None:
    repository.repack("quick")
    at = next(at for at in tiered(repository).values() if len(at) == 4)[1]
    path = repository.path / pack_name(at.pack)
    data = bytearray(path.read_bytes())
    data[at.record.offset + at.record.length // 2] ^= 1
    path.write_bytes(data)
    assert any(problem.name == at.record.block.hex() for problem in repository.fsck(read_data=True).errors)


def test_repacking_equals_ingesting_with_the_coding(repository: Repository, both: dict[str, Path]) -> None:
    repository.repack("small")
    with Repository.open(both["small"]) as small:
        assert checks(repository) == checks(small)


def test_a_second_run_finds_nothing_to_do(repository: Repository) -> None:
    repository.repack("small")
    packs = tree(repository.path / "packs")
    for exact in ("small", None):
        report = repository.repack(exact)
        assert (report.exact, report.blocks_repacked) == ("small", 0)
        assert report.stored_bytes_before == report.stored_bytes_after
    assert tree(repository.path / "packs") == packs


def test_exact_tiers_lie_in_the_order_of_the_manifests(repository: Repository, models: Path, tmp_path: Path) -> None:
    """Whatever order they lay in: these were brought by a model with its tensors the other way round."""
    repository.remove(["x"])
    repository.gc()
    tensors = load_model(models / "x")
    write_model(tmp_path / "turned", dict(reversed(tensors.items())))
    repository.ingest(tmp_path / "turned", "turned", base="base")
    repository.ingest(models / "x", "x", base="base")
    repository.remove(["turned"])
    repository.gc()

    def places(name: str) -> list[Location]:
        ids = repository.manifest(repository.resolve(name)).block_ids()
        return [at[-1] for at in map(repository.catalog.tiers, ids) if len(at) == 4]

    before = [at.record.offset for at in places("x")]
    assert before != sorted(before)
    repository.repack("small")
    for name in ("x", "y"):
        found = places(name)
        assert len(found) >= 3
        assert len({at.pack for at in found}) == 1
        for one, two in pairwise(found):
            assert two.record.offset == one.record.offset + one.record.length


def test_a_damaged_block_is_left_as_it_is(repository: Repository) -> None:
    at = next(at for at in tiered(repository).values() if len(at) == 4)[-1]
    path = repository.path / pack_name(at.pack)
    data = bytearray(path.read_bytes())
    data[at.record.offset + at.record.length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=at.record.block.hex()):
        repository.repack("small")
    assert repository.catalog.tiers(at.record.block)[-1] == at
    assert not list((repository.path / "tmp").iterdir())


def test_what_does_not_decode_to_its_id_is_not_switched_to(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, places = tiers.recode, tiered(repository)

    def wrong(payloads: Sequence[bytes], base: bytes, exact: tiers.Exact) -> bytes:
        if len(payloads) > 1:
            return original(payloads, base, exact)
        changed = np.frombuffer(tiers.decode(payloads, base), np.uint16).copy()
        changed[0] ^= 1
        (payload,) = tiers.encode_always(changed.tobytes(), base, exact).tiers
        return payload

    monkeypatch.setattr(tiers, "recode", wrong)
    with pytest.raises(CorruptionError, match="another hash"):
        repository.repack("small")
    assert tiered(repository) == places


def test_a_repository_that_is_only_read(both: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(both["fast"], tmp_path / "copy")
    with Repository.open(tmp_path / "copy", readonly=True) as repository:
        for exact in ("small", None):
            with pytest.raises(UserError, match="reading only"):
                repository.repack(exact)
        assert repository.exact == "fast"


def test_the_command_line_refuses_what_it_may_not_write_to(
    both: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(both["fast"], tmp_path / "copy")
    before = tree(tmp_path / "copy" / "packs")
    monkeypatch.setattr("mergefs.cli.common.os.access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    monkeypatch.setattr(sys, "argv", ["mergefs", "-R", str(tmp_path / "copy"), "repack", "--exact", "small"])
    with pytest.raises(SystemExit) as caught:
        mergefs.cli.main()
    assert caught.value.code == 2
    assert "reading only" in capfd.readouterr().err
    assert tree(tmp_path / "copy" / "packs") == before


def test_the_command_line(repository: Repository) -> None:
    run = ["-R", str(repository.path), "repack"]
    done = CliRunner().invoke(cli, [*run, "--exact", "small", "--threads", "1", "--json"])
    assert done.exit_code == 0
    value = json.loads(done.output)
    assert value.keys() == {"exact", "blocks_repacked", "stored_bytes_before", "stored_bytes_after", "seconds"}
    assert value["exact"] == "small"
    assert value["stored_bytes_after"] < value["stored_bytes_before"]
    assert CliRunner().invoke(cli, run).output == "every block is 'small' already\n"
    assert f"{value['blocks_repacked']} blocks" in CliRunner().invoke(cli, [*run, "--exact", "fast"]).output


def test_a_record_keeps_all_but_its_place(repository: Repository) -> None:
    before = tiered(repository)
    repository.repack("small")
    for block, at in tiered(repository).items():
        one, two = before[block][-1].record, at[-1].record
        assert Record(block, two.base, one.check, one.offset, one.length, *_shape(two)) == one


def _shape(record: Record) -> tuple[int, int, int, int, int]:
    return record.raw_length, record.encoding, record.dtype, record.tier, record.tiers
