"""Models between repositories and archives: only what lacks travels, the ref comes last, and damage does not travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import merged_models, new_repository, served

from mergefs.blocks.pack import pack_name, read_records
from mergefs.errors import CorruptionError, NotARepositoryError, NotFoundError, RefMovedError, UserError
from mergefs.repository import Repository
from mergefs.transfer import archive


@pytest.fixture
def models(tmp_path: Path) -> Repository:
    """A base, two experts, a merge, and a lazy one."""
    return merged_models(tmp_path)


def test_models_go_and_come_back(models: Repository, remote: str, tmp_path: Path) -> None:
    before = {name: served(models, name) for name in models.refs()}
    for name in models.refs():
        report = models.push(name, remote)
        assert report.manifest == models.resolve(name)
        again = models.push(name, remote)
        assert (again.blocks_sent, again.bytes_sent, again.bytes_written) == (0, 0, 0)
    with new_repository(tmp_path / "elsewhere") as elsewhere:
        for name in before:
            elsewhere.pull(name, remote)
            assert served(elsewhere, name) == before[name]
        assert elsewhere.refs() == models.refs()
        assert elsewhere.fsck(read_data=True).ok
        elsewhere.gc()
        assert {name: served(elsewhere, name) for name in before} == before


def test_only_what_is_missing_travels(models: Repository, remote: str) -> None:
    first = models.push("base", remote)
    second = models.push("x", remote)
    assert first.bytes_sent > second.bytes_sent
    assert second.blocks_there > 0
    # A lazy merge brings what it is derived from.
    third = models.push("later", remote)
    assert third.blocks_sent <= len(set(models.manifest(models.resolve("y")).block_ids()))


def test_a_ref_that_names_another_model_stays(models: Repository, remote: str, tmp_path: Path) -> None:
    models.push("x", remote, as_="best")
    with pytest.raises(RefMovedError, match="--force"):
        models.push("y", remote, as_="best")
    with new_repository(tmp_path / "elsewhere") as elsewhere:
        assert elsewhere.pull("best", remote).manifest == models.resolve("x")
        models.push("y", remote, as_="best", force=True)
        with pytest.raises(RefMovedError, match="--as"):
            elsewhere.pull("best", remote)
        assert elsewhere.pull("best", remote, force=True).manifest == models.resolve("y")
        assert elsewhere.pull("best", remote, as_="other").ref == "other"


def test_damage_does_not_travel(models: Repository, remote: str, tmp_path: Path) -> None:
    location = next(models.catalog.locate(block) for block in models.manifest(models.resolve("x")).block_ids())
    assert location is not None
    path = models.path / pack_name(location.pack)
    with path.open("r+b") as file:
        file.seek(location.record.offset)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(CorruptionError, match=location.record.block.hex()):
        models.push("x", remote)
    with new_repository(tmp_path / "elsewhere") as elsewhere, pytest.raises(NotFoundError):
        elsewhere.pull("x", remote)


def test_places_that_cannot_be_used(models: Repository, tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError, match="init"):
        models.push("x", str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="push"):
        models.pull("x", f"file://{tmp_path}/nowhere")
    with pytest.raises(UserError, match="nothing-like-this"):
        models.push("x", "nothing-like-this://a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UserError, match="not empty"):
        models.push("x", f"file://{tmp_path}/full")
    (tmp_path / "full" / archive.CONFIG).write_text("[]")
    with pytest.raises(UserError, match="not an archive"):
        models.push("x", f"file://{tmp_path}/full")
    with Repository.init(tmp_path / "coarse", 1 << 20), pytest.raises(UserError, match="blocks"):
        models.push("x", str(tmp_path / "coarse"))
    with pytest.raises(NotFoundError):
        models.push("nothing", f"memory://{tmp_path.name}")


def test_an_archive_holds_ordinary_packs(models: Repository, tmp_path: Path) -> None:
    models.push("x", f"file://{tmp_path}/archive")
    packs = list((tmp_path / "archive").glob("packs/*/*.pack"))
    assert packs
    assert all(read_records(pack) for pack in packs)
