"""Sessions of real repositories: what a commit stores and shares, and who keeps what meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import builders
import numpy as np
import pytest
from builders import Array

from mergefs import manifest as manifests
from mergefs.edit import folders
from mergefs.edit.session import Session
from mergefs.errors import CheckpointError, CorruptionError, NotFoundError, RefMovedError, UserError
from mergefs.manifest import Manifest
from mergefs.rebuild import rebuild
from mergefs.recipe import Recipe
from mergefs.repository import Repository

WEIGHTS = "model.safetensors"
FILES = {"config.json": b'{"a": 1}', "extra/vocab.txt": b"a\nb\n", "big.bin": bytes(range(256)) * 300}


@pytest.fixture
def model(repository: Repository, tmp_path: Path) -> Path:
    """A model, ingested as `model`."""
    folder = builders.write_model(tmp_path / "model", builders.random_model(1), FILES)
    repository.ingest(folder, "model")
    return folder


def place(repository: Repository, name: str, tensor: str) -> int:
    """Where a tensor begins in its file."""
    with repository.view(name) as view:
        data = view.read(WEIGHTS)
    length = int.from_bytes(data[:8], "little")
    return 8 + length + int(json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0])


def blocks(manifest: Manifest) -> set[bytes]:
    return set(manifest.block_ids())


def is_whole(repository: Repository) -> bool:
    return repository.fsck(read_data=True).ok


def test_a_patched_tensor_costs_its_blocks(repository: Repository, model: Path) -> None:
    at = place(repository, "model", "embed.weight")
    with repository.edit("model") as session:
        session.tree.file(WEIGHTS).write(at + 6001, b"\1\2\3")
        report = session.commit("patched")
        assert not session.is_open
    assert (report.parent, report.ref, report.previous) == (repository.resolve("model"), "patched", None)
    assert report.blocks_new == 1
    parent, child = (repository.manifest(repository.resolve(name)) for name in ("model", "patched"))
    assert len(blocks(child) - blocks(parent)) == 1
    assert child.lineage == manifests.Lineage("edit", parent=parent.id)
    assert child.file_by_path[WEIGHTS].sha256 is None
    assert child.file_by_path["big.bin"] == parent.file_by_path["big.bin"]
    expected = bytearray((model / WEIGHTS).read_bytes())
    expected[at + 6001 : at + 6004] = b"\1\2\3"
    assert builders.served(repository, "patched") == {**builders.tree(model), WEIGHTS: builders.sha256(expected)}
    (new,) = blocks(child) - blocks(parent)
    location = repository.catalog.locate(new)
    assert location is not None
    assert location.record.length < 200  # a difference from the block that it replaces
    assert is_whole(repository)
    assert repository.sessions() == []


def test_a_new_header_is_read_as_an_ingest_reads_it(repository: Repository, model: Path, tmp_path: Path) -> None:
    tensors = builders.random_model(1)
    del tensors["layers.0.norm"]
    tensors["added"] = builders.array(np.arange(5000).reshape(50, 100), "F32")
    content = builders.pack(tensors, {"format": "pt", "by": "hand"})
    with repository.edit("model") as session:
        file = session.tree.create(WEIGHTS)
        for start in range(0, len(content), 1000):
            file.append(content[start : start + 1000])
        session.commit()
    edited = repository.manifest(repository.resolve("model"))
    folder = builders.write_model(tmp_path / "again", tensors, FILES)
    (folder / WEIGHTS).write_bytes(content)
    repository.ingest(folder, "again")
    ingested = repository.manifest(repository.resolve("again"))
    assert (edited.files, edited.tensors) == (ingested.files, ingested.tensors)
    assert builders.tensors_of(repository, "model") == tensors
    assert is_whole(repository)


def test_files_are_renamed_removed_added_and_changed(repository: Repository, model: Path) -> None:
    with repository.edit("model") as session:
        tree = session.tree
        tree.rename("extra", "more")
        tree.remove("config.json")
        tree.make_folder("new/".rstrip("/"))
        tree.make_folder("empty")
        tree.create("new/README.md").write(0, b"hello")
        tree.file("big.bin").write(5000, b"xyz")
        tree.rename(WEIGHTS, "weights.safetensors")
        report = session.commit("changed")
    assert report.blocks_new == 2
    expected = builders.tree(model)
    big = bytearray(FILES["big.bin"])
    big[5000:5003] = b"xyz"
    del expected["config.json"]
    expected["more/vocab.txt"] = expected.pop("extra/vocab.txt")
    expected["weights.safetensors"] = expected.pop(WEIGHTS)
    expected |= {"new/README.md": builders.sha256(b"hello"), "big.bin": builders.sha256(big)}
    assert builders.served(repository, "changed") == expected
    found = repository.manifest(repository.resolve("changed"))
    assert {file.path: file.sha256 for file in found.files} == expected
    assert found.tensors == repository.manifest(repository.resolve("model")).tensors


def test_nothing_changed_is_the_same_model(repository: Repository, model: Path) -> None:
    with repository.edit("model") as session:
        file = session.tree.file(WEIGHTS)
        file.write(500, file.read(500, 10))
        report = session.commit("same")
    assert report.manifest == repository.resolve("model")
    assert report.stored_bytes == 0


def test_a_copy_of_the_weights_and_weights_that_are_none(repository: Repository, model: Path) -> None:
    with repository.edit("model") as session:
        session.tree.create("copy.safetensors").write(0, (model / WEIGHTS).read_bytes())
        session.commit("copied")
    expected = builders.tree(model)
    assert builders.served(repository, "copied") == {**expected, "copy.safetensors": expected[WEIGHTS]}
    assert repository.manifest(repository.resolve("copied")).tensors
    with repository.edit("copied") as session:
        session.tree.remove(WEIGHTS)
        session.commit("other")
    assert builders.tensors_of(repository, "other") == builders.random_model(1)
    with repository.edit("copied") as session:
        session.tree.rename("copy.safetensors", "first.safetensors")
        session.tree.rename(WEIGHTS, "copy.safetensors")
        session.tree.rename("first.safetensors", WEIGHTS)
        session.commit("swapped")
    assert builders.served(repository, "swapped") == builders.served(repository, "copied")
    assert is_whole(repository)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tree: tree.file(WEIGHTS).truncate(9000), "model.safetensors"),
        (lambda tree: tree.file(WEIGHTS).append(b"x"), "1 bytes behind its last tensor"),
        (lambda tree: tree.file(WEIGHTS).write(8, b"["), "model.safetensors"),
        (lambda tree: tree.remove(WEIGHTS), "its weights are pickled"),
        (lambda tree: (tree.rename(WEIGHTS, "a.safetensors"), tree.create("b.safetensors")), "several weight files"),
    ],
)
def test_what_an_ingest_refuses_is_refused(repository: Repository, model: Path, damage: object, words: str) -> None:
    session = repository.edit("model")
    damage(session.tree)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=words) as caught:
        session.commit("damaged")
    assert "headers-" not in str(caught.value)
    assert session.is_open
    assert not repository.has("damaged")
    session.discard()


def test_a_session_goes_on_after_its_process_was_killed(repository: Repository, model: Path) -> None:
    at = place(repository, "model", "embed.weight")
    code = f"""
        import os, signal
        from mergefs.repository import Repository
        session = Repository.open({str(repository.path)!r}).edit("model")
        session.tree.file("{WEIGHTS}").write({at}, b"abcd")
        session.tree.create("new").write(0, b"new")
        print(session.id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    identity = done.stdout.strip()
    assert done.returncode < 0, done.stderr
    repository.remove(["model"])
    assert repository.gc().sessions == 1  # it alone keeps its model
    (info,) = repository.sessions()
    assert (info.id, info.ref, info.in_use) == (identity, "model", False)
    with repository.edit(resume=identity[:6]) as session:
        session.commit("patched")
    expected = bytearray((model / WEIGHTS).read_bytes())
    expected[at : at + 4] = b"abcd"
    served = builders.served(repository, "patched")
    assert served == {**builders.tree(model), WEIGHTS: builders.sha256(expected), "new": builders.sha256(b"new")}
    assert is_whole(repository)


def test_gc_and_ingest_run_during_a_session(repository: Repository, model: Path, tmp_path: Path) -> None:
    session = repository.edit("model")
    session.tree.file("big.bin").write(0, b"changed")
    repository.remove(["model"])
    repository.gc(rewrite_above=0.0)
    other = builders.write_model(tmp_path / "other", builders.random_model(2))
    repository.ingest(other, "other")
    assert session.tree.file(WEIGHTS).read(0, 1 << 30) == (model / WEIGHTS).read_bytes()
    session.close()
    repository.gc(rewrite_above=0.0)
    with repository.edit(resume=session.id) as again:
        assert again.tree.file("big.bin").read(0, 7) == b"changed"
        again.commit("saved")
    repository.gc(rewrite_above=0.0)
    assert is_whole(repository)
    repository.remove(["saved", "other"])
    assert repository.gc().live_bytes == 0
    assert list((repository.path / "sessions").iterdir()) == []


def test_a_name_that_moved_meanwhile(repository: Repository, model: Path) -> None:
    first, second = repository.edit("model"), repository.edit("model")
    first.tree.create("first").write(0, b"1")
    second.tree.create("second").write(0, b"2")
    done = first.commit()
    assert done.previous == done.parent
    with pytest.raises(RefMovedError, match="under another name with --as"):
        second.commit()
    report = second.commit(force=True)
    assert report.previous == done.manifest
    removed = repository.edit("model")
    removed.tree.create("third")
    repository.remove(["model"])
    with pytest.raises(RefMovedError, match="was removed"):
        removed.commit("model")
    assert removed.commit("third").previous is None


def test_a_commit_that_was_published_and_not_ended_can_be_repeated(
    repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(hold: folders.Hold) -> None:
        raise KeyboardInterrupt

    session = repository.edit("model")
    session.tree.create("new").write(0, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(folders.Hold, "remove", crash)
        with pytest.raises(KeyboardInterrupt):
            session.commit()
    session.close()
    published = repository.resolve("model")
    assert published != session.manifest_id
    with repository.edit(resume=session.id) as again:
        assert again.commit().manifest == published


def test_one_process_at_a_time(repository: Repository, model: Path) -> None:
    with repository.edit("model") as session:
        with pytest.raises(UserError, match="open in another process"):
            Session.resume(repository, session.id)
        with pytest.raises(UserError, match="open in another process"):
            folders.discard(repository, session.id)
    assert repository.sessions() == []  # nothing was changed


def test_leaving_keeps_what_was_changed(repository: Repository, model: Path) -> None:
    with repository.edit("model") as session:
        session.tree.create("new")
    (info,) = repository.sessions()
    assert info.id == session.id
    with repository.edit(resume=session.id) as again:
        again.discard()
        with pytest.raises(UserError, match="is over"):
            again.commit("late")
    assert repository.sessions() == []
    with pytest.raises(NotFoundError, match="neither a session"):
        repository.edit(resume=session.id)


def test_a_damaged_session_holds_gc_up_until_it_is_discarded(repository: Repository, model: Path) -> None:
    session = repository.edit("model")
    session.tree.create("new")
    session.close()
    (repository.path / "sessions" / session.id / "session.json").write_text("{")
    with pytest.raises(CorruptionError, match=f"'mergefs discard {session.id}' removes"):
        repository.gc()
    (problem,) = repository.fsck().errors
    assert (problem.kind, problem.name) == ("session", session.id)
    folders.discard(repository, session.id)
    repository.gc()
    assert repository.fsck().ok


def test_an_edit_of_an_expert_is_one_too(repository: Repository, model: Path, tmp_path: Path) -> None:
    tuned = builders.fine_tuned(builders.random_model(1), 5)
    repository.ingest(builders.write_model(tmp_path / "tuned", tuned, FILES), "tuned", base="model")
    changed = {**tuned, "embed.weight": Array("BF16", (70, 96), b"\0" * (70 * 96 * 2))}
    for name, result in (("tuned", "edited"), ("model", "cleared")):
        at = place(repository, name, "embed.weight")
        with repository.edit(name) as session:
            session.tree.file(WEIGHTS).write(at, bytes(70 * 96 * 2))
            session.commit(result)
        assert repository.manifest_entry(repository.resolve(result))["base"] == repository.resolve("model")
    assert builders.tensors_of(repository, "edited") == changed
    repository.merge(
        Recipe.parse(builders.recipe_text("ties", ["edited", "tuned"], "model", weight=1, density=0.5)), "merged"
    )
    repository.merge(Recipe.parse(builders.recipe_text("linear", [("edited", {"weight": 1.0})])), "alone")
    assert builders.tensors_of(repository, "alone") == changed
    assert is_whole(repository)


def test_an_edit_of_a_lazy_merge_stays_lazy(repository: Repository, model: Path, tmp_path: Path) -> None:
    tuned = builders.fine_tuned(builders.random_model(1), 5)
    repository.ingest(builders.write_model(tmp_path / "tuned", tuned, FILES), "tuned", base="model")
    recipe = Recipe.parse(builders.recipe_text("task_arithmetic", [("tuned", {"weight": 0.5})], "model"))
    repository.merge(recipe, "lazy", lazy=True)
    repository.merge(recipe, "whole")
    at = place(repository, "lazy", "scale")
    with repository.edit("lazy") as session:
        session.tree.create("note.txt").write(0, b"note")
        session.commit("noted")
    noted = repository.manifest(repository.resolve("noted"))
    lazy = repository.manifest(repository.resolve("lazy"))
    assert noted.is_lazy
    assert noted.tensors == lazy.tensors
    assert noted.lineage.plan == lazy.lineage.plan
    assert manifests.decode(noted.encoded) == noted
    with repository.edit("noted") as session:
        session.tree.file(WEIGHTS).write(at, b"\1\2")
        session.commit("twice")
    repository.remove(["lazy", "tuned", "noted"])
    repository.gc()
    expected = {**builders.tensors_of(repository, "whole"), "scale": Array("BF16", (), b"\1\2")}
    assert builders.tensors_of(repository, "twice") == expected
    with pytest.raises(UserError, match="edited"):
        repository.materialize("twice")
    assert is_whole(repository)


def test_a_session_needs_a_name_to_commit_under(repository: Repository, model: Path) -> None:
    with repository.edit(repository.resolve("model")[:12]) as session:
        session.tree.create("new")
        with pytest.raises(UserError, match="--as"):
            session.commit()
        session.commit("new")
    with pytest.raises(NotFoundError):
        repository.edit("none")
    assert repository.sessions() == []


def test_what_is_left_of_a_folder_goes_in_time(repository: Repository, model: Path) -> None:
    half = repository.path / "sessions" / ("a" * 12)
    (half / "data").mkdir(parents=True)
    repository.gc()
    assert half.exists()
    os.utime(half, (0, 0))
    repository.gc()
    assert not half.exists()


def test_a_catalog_that_is_made_again_keeps_sessions(tmp_path: Path) -> None:
    folder = builders.write_model(tmp_path / "model", builders.random_model(1), FILES)
    with builders.new_repository(tmp_path / "own") as first:
        first.ingest(folder, "model")
        session = first.edit("model")
        session.tree.create("new").write(0, b"1")
        session.close()
    rebuild(tmp_path / "own", sync=False)
    with Repository.open(tmp_path / "own", sync=False) as again:
        with again.edit(resume=session.id) as resumed:
            resumed.commit("changed")
        assert "new" in builders.served(again, "changed")
        assert is_whole(again)
