"""Export gives back exactly the files that went in, or nothing."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mergefs.serve.destination as module
from mergefs.errors import CorruptionError, DestinationError, MergefsError
from mergefs.manifest import FileRecipe, Manifest
from mergefs.repository import Repository
from mergefs.serve.export import export
from mergefs.serve.view import View

BLOCK = 4096


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of many dtypes; the larger ones have many blocks, some of them cut short."""
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.normal(size=(37, 301)).astype(np.float32))
    kinds = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
    found = {f"w.{kind}".replace("torch.", ""): values.to(kind) for kind in kinds}
    whole = torch.from_numpy(random.integers(0, 100, 5000))
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
        found[f"n.{kind}".replace("torch.", "")] = whole.to(kind)
    found["scalar"] = torch.tensor(1.5)
    found["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    return found


def checkpoint(folder: Path) -> Path:
    """Write a model directory with weights, an empty file, a file in a folder and a large blob."""
    (folder / "extra").mkdir(parents=True)
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "test"}')
    (folder / "tokenizer.model").write_bytes(np.random.default_rng(1).bytes(5 * BLOCK + 3))
    (folder / "extra" / "notes.txt").write_text("é")
    (folder / "empty.txt").touch()
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    Repository.init(tmp_path / "repo", BLOCK).close()
    with Repository.open(tmp_path / "repo", sync=False) as repository:
        repository.ingest(checkpoint(tmp_path / "model"), "model")
        yield repository


@pytest.fixture
def view(repository: Repository) -> Iterator[View]:
    with repository.view("model") as view:
        yield view


@pytest.mark.parametrize("threads", [None, 1, 5])
def test_the_directory_is_byte_identical(view: View, tmp_path: Path, threads: int | None) -> None:
    told: list[tuple[int, int]] = []
    report = export(view, tmp_path / "out", threads=threads, progress=lambda *bytes: told.append(bytes))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "model")
    total = sum(map(len, snapshot(tmp_path / "model").values()))
    assert (report.directory, report.files, report.bytes) == (tmp_path / "out", 5, total)
    assert told[-1] == (total, total)
    assert told == sorted(told)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.dtype for name, value in loaded.items()} == {
        name: value.dtype for name, value in tensors().items()
    }


def test_the_repository_exports_by_name_and_by_id(repository: Repository, tmp_path: Path) -> None:
    repository.export("model", tmp_path / "a")
    repository.export(repository.resolve("model")[:8], tmp_path / "b" / "c")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b" / "c") == snapshot(tmp_path / "model")


def test_an_empty_folder_is_filled_and_keeps_its_mode(view: View, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o750)
    export(view, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "model")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_files_have_the_modes_that_others_get(view: View, tmp_path: Path) -> None:
    export(view, tmp_path / "out")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert (tmp_path / "out" / "config.json").stat().st_mode == (tmp_path / "file").stat().st_mode


def test_a_link_to_an_empty_folder_is_followed(view: View, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    export(view, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert snapshot(tmp_path / "real") == snapshot(tmp_path / "model")


def test_what_is_there_is_never_touched(view: View, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    before = sorted(os.listdir(tmp_path))
    for name in ("out", "file", "file/below"):
        with pytest.raises(DestinationError):
            export(view, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(tmp_path / "out") == ["precious"]


def test_the_current_folder_is_refused(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(DestinationError, match="current folder"):
        export(view, Path("."))


def test_a_disk_that_is_too_small_is_refused_at_once(
    view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(DestinationError, match="free space"):
        export(view, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


def test_a_full_disk_leaves_nothing(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, buffer: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write", full)
    with pytest.raises(DestinationError, match="No space left"):
        export(view, tmp_path / "new" / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


def test_nothing_is_visible_before_the_end(view: View, tmp_path: Path) -> None:
    seen: list[bool] = []
    export(view, tmp_path / "out", progress=lambda *_: seen.append((tmp_path / "out").exists()))
    assert not any(seen)


def test_another_who_was_faster_wins(view: View, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(DestinationError):
        export(view, tmp_path / "out", progress=progress)
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "repo"]


def test_an_interrupted_export_leaves_nothing(view: View, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(view, tmp_path / "out", progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


def test_a_damaged_pack_leaves_nothing(repository: Repository, tmp_path: Path) -> None:
    for pack in (repository.path / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 4] ^= 1
        pack.write_bytes(data)
    with pytest.raises(CorruptionError):
        repository.export("model", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


def changed(view: View, **changes: object) -> None:
    """Change the description of the view's first file."""
    first, *others = view.manifest.files
    view.manifest = replace(view.manifest, files=(replace(first, **changes), *others))  # type: ignore[arg-type]


def test_a_file_with_another_sum_is_corruption(view: View, tmp_path: Path) -> None:
    changed(view, sha256="0" * 64)
    with pytest.raises(CorruptionError, match=r"config\.json"):
        export(view, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", ".", "a\\b"])
def test_no_file_is_written_outside(view: View, tmp_path: Path, path: str) -> None:
    changed(view, path=path)
    with pytest.raises(CorruptionError, match="unsafe"):
        export(view, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "repo"]


def derived(manifest: Manifest) -> Manifest:
    """Return the manifest as one whose files nobody has summed yet."""
    files = tuple(FileRecipe(file.path, file.size, None, file.segments) for file in manifest.files)
    return replace(manifest, files=files)


def test_sums_of_derived_files_are_remembered(repository: Repository, view: View, tmp_path: Path) -> None:
    view.manifest = derived(view.manifest)
    view.manifest_id = view.manifest.id
    export(view, tmp_path / "out")
    expected = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert repository.known_sha256(view.manifest.id, "model.safetensors") == expected


def test_a_read_only_catalog_is_no_hindrance(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise MergefsError("the catalog is read-only")

    view.manifest = derived(view.manifest)
    monkeypatch.setattr(Repository, "remember_sha256", refuse)
    export(view, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "model")


def test_a_model_without_files_is_an_empty_folder(view: View, tmp_path: Path) -> None:
    view.manifest = replace(view.manifest, files=(), tensors=())
    assert export(view, tmp_path / "out").bytes == 0
    assert os.listdir(tmp_path / "out") == []
