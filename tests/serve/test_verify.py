"""verify-export: every byte of an export is compared, and what differs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import fsspec
import numpy as np
import pytest
from builders import Array, array
from click.testing import CliRunner

from mergefs.checkpoint.directory import INDEX
from mergefs.checkpoint.safetensors import read_header
from mergefs.cli import cli
from mergefs.errors import DestinationError, UserError
from mergefs.repository import Repository
from mergefs.serve.verify import Difference, VerifyReport

CONFIG = b'{"model_type": "test", "torch_dtype": "bfloat16"}'
LAYOUTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "shards": {"shard_size": 10_000},
    "one file": {"shard_size": 1 << 30},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "shards of float32": {"shard_size": 10_000, "dtype": "float32"},
}


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Repository:
    """`model`, an expert, and their merge, stored and lazy."""
    base = {
        **builders.random_model(1),
        "flags": array(np.arange(7) % 2, "BOOL"),
        "empty": array(np.zeros((0, 5)), "BF16"),
    }
    builders.write_model(tmp_path / "model", base, {"config.json": CONFIG, "extra/notes.txt": b"notes"})
    builders.write_model(tmp_path / "x", builders.fine_tuned(base, 2), {"config.json": CONFIG})
    repository.ingest(tmp_path / "model", "model")
    repository.ingest(tmp_path / "x", "x", base="model")
    (tmp_path / "recipe.yml").write_text(builders.recipe_text("task_arithmetic", [("x", {"weight": 0.5})], "model"))
    from mergefs.recipe import Recipe

    repository.merge(Recipe.load(tmp_path / "recipe.yml"), "lazy", lazy=True)
    return repository


def change(path: Path, tensor: str, at: int = 0) -> None:
    """Change a byte of a tensor in a file."""
    (entry,) = (entry for entry in read_header(path).tensors if entry.name == tensor)
    with path.open("r+b") as file:
        file.seek(entry.start + at)
        byte = file.read(1)
        file.seek(entry.start + at)
        file.write(bytes([byte[0] ^ 1]))


def home(folder: Path, tensor: str) -> Path:
    """Return the file that a tensor is in."""
    (path,) = (p for p in folder.glob("*.safetensors") if tensor in {e.name for e in read_header(p).tensors})
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["model", "lazy"])
def test_an_export_is_what_it_was_made_of(models: Repository, tmp_path: Path, name: str, layout: str) -> None:
    models.export(name, tmp_path / "out", **LAYOUTS[layout])
    strict = models.verify_export(name, tmp_path / "out", **LAYOUTS[layout])
    assert strict.ok
    assert strict.compared == "files"
    found = models.verify_export(name, tmp_path / "out")
    assert found.ok, found
    assert found.compared == ("files" if layout == "as it is" else "tensors")
    assert found.files == len(builders.tree(tmp_path / "out"))
    other = "x" if name == "model" else "model"
    assert not models.verify_export(other, tmp_path / "out").ok


@pytest.mark.parametrize("with_options", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_changed_byte_is_found_and_its_tensor_named(
    models: Repository, tmp_path: Path, layout: str, with_options: bool
) -> None:
    models.export("model", tmp_path / "out", **LAYOUTS[layout])
    options = LAYOUTS[layout] if with_options else {}
    for tensor in ("layers.0.experts", "positions", "scale"):
        path = home(tmp_path / "out", tensor)
        change(path, tensor, 1)
        report = models.verify_export("model", tmp_path / "out", **options)
        assert report.different == (Difference(path.name, (tensor,)),)
        assert not report.missing + report.extra + report.missing_tensors + report.extra_tensors
        change(path, tensor, 1)
    assert models.verify_export("model", tmp_path / "out", **options).ok


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a file is missing": (lambda out: (out / "extra" / "notes.txt").unlink(), "missing", "extra/notes.txt"),
    "weights are missing": (lambda out: (out / "model.safetensors").unlink(), "missing", "model.safetensors"),
    "a file too many": (lambda out: (out / "more.txt").write_text("more"), "extra", "more.txt"),
    "a hidden one": (lambda out: (out / ".mergefs-export.json").write_text("{}"), "extra", ".mergefs-export.json"),
    "another text": (lambda out: (out / "config.json").write_bytes(CONFIG.upper()), "different", "config.json"),
    "a longer text": (lambda out: (out / "config.json").write_bytes(CONFIG + b"\n"), "different", "config.json"),
    "cut weights": (lambda out: _truncate(out / "model.safetensors"), "different", "model.safetensors"),
    "no weights": (lambda out: (out / "model.safetensors").write_bytes(b"\xff" * 99), "different", "model.safetensors"),
    "empty weights": (lambda out: (out / "model.safetensors").write_bytes(b""), "different", "model.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_are_named(models: Repository, tmp_path: Path, damage: str) -> None:
    models.export("model", tmp_path / "out")
    act, field, path = DAMAGE[damage]
    act(tmp_path / "out")
    report = models.verify_export("model", tmp_path / "out")
    found = {name: getattr(report, name) for name in ("missing", "extra", "different")}
    wanted = (Difference(path),) if field == "different" else (path,)
    assert found == {"missing": (), "extra": (), "different": (), field: wanted}


def test_shards_without_a_tensor_or_with_one_too_many(models: Repository, tmp_path: Path) -> None:
    models.export("model", tmp_path / "out", shard_size=10_000)
    path = home(tmp_path / "out", "positions")
    tensors = builders.unpack(path.read_bytes())
    more: dict[str, Array] = {**tensors, "more": array([1.0], "F32")}
    del more["positions"]
    path.write_bytes(builders.pack(more, {"format": "pt"}))
    report = models.verify_export("model", tmp_path / "out")
    assert (report.missing_tensors, report.extra_tensors) == (("positions",), ("more",))
    assert report.different == (Difference(path.name), Difference(INDEX))
    report = models.verify_export("model", tmp_path / "out", shard_size=10_000)
    assert report.different == (Difference(path.name, ("more", "positions")),)
    path.write_bytes(builders.pack({**tensors, "positions": array(np.arange(40).reshape(4, 10), "I64")}))
    assert models.verify_export("model", tmp_path / "out").different == (Difference(path.name, ("positions",)),)


@pytest.mark.parametrize("layout", ["as it is", "shards"])
def test_a_header_that_says_the_same_otherwise(models: Repository, tmp_path: Path, layout: str) -> None:
    models.export("model", tmp_path / "out", **LAYOUTS[layout])
    path = home(tmp_path / "out", "positions")
    path.write_bytes(builders.pack(builders.unpack(path.read_bytes()), {"format": "np"}))
    assert models.verify_export("model", tmp_path / "out").different == (Difference(path.name),)


def test_an_index_that_leads_elsewhere(models: Repository, tmp_path: Path) -> None:
    models.export("model", tmp_path / "out", shard_size=10_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    index["weight_map"] = {n: second if f == first else f for n, f in index["weight_map"].items()}
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    assert models.verify_export("model", tmp_path / "out").different == (Difference(INDEX),)
    (tmp_path / "out" / INDEX).unlink()
    assert models.verify_export("model", tmp_path / "out").missing == (INDEX,)


def test_shards_that_have_the_models_names(models: Repository, tmp_path: Path) -> None:
    models.export("model", tmp_path / "shards", shard_size=20_000)
    models.ingest(tmp_path / "shards", "sharded")
    count = len(list((tmp_path / "shards").glob("*.safetensors")))
    sizes = [size for size in range(14_000, 20_000, 500) if _count(models, tmp_path, size) == count]
    differing = 0
    for size in sizes:
        report = models.verify_export("sharded", tmp_path / f"out-{size}")
        assert report.ok, report
        differing += report.compared == "tensors"
    assert differing


def _count(models: Repository, tmp_path: Path, size: int) -> int:
    models.export("sharded", tmp_path / f"out-{size}", shard_size=size)
    return len(list((tmp_path / f"out-{size}").glob("*.safetensors")))


def test_another_dtype_than_any_export_has(models: Repository, tmp_path: Path) -> None:
    models.export("model", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = builders.unpack(path.read_bytes())
    tensors["embed.weight"] = array(tensors["embed.weight"].values.reshape(70, 96), "F32")
    tensors["layers.0.norm"] = array(tensors["layers.0.norm"].values, "F16")
    path.write_bytes(builders.pack(tensors))
    names = ("embed.weight", "layers.0.norm")
    assert models.verify_export("model", tmp_path / "out").different == (Difference(path.name, names),)
    for number, (name, tensor) in enumerate(tensors.items()):
        builders_path = tmp_path / "out" / f"{number}.safetensors"
        builders_path.write_bytes(builders.pack({name: tensor}))
    path.unlink()
    with pytest.raises(UserError, match="F16, F32"):
        models.verify_export("model", tmp_path / "out")


def test_places_that_are_no_folders(models: Repository, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty", "recipe.yml"):
        with pytest.raises(DestinationError, match=place):
            models.verify_export("model", tmp_path / place)
    with pytest.raises(DestinationError, match="nothing-like"):
        models.verify_export("model", "nothing-like://this")


def test_urls(models: Repository, tmp_path: Path) -> None:
    url = f"memory://verify-{tmp_path.name}"
    models.export("lazy", url)
    try:
        assert models.verify_export("lazy", url).ok
        files, root = fsspec.url_to_fs(url)
        files.pipe_file(f"{root}/config.json", b"{}")
        assert models.verify_export("lazy", url).different == (Difference("config.json"),)
    finally:
        fsspec.filesystem("memory").rm(f"/verify-{tmp_path.name}", recursive=True)


def test_the_command(models: Repository, tmp_path: Path) -> None:
    models.export("model", tmp_path / "out")

    def run(*arguments: str) -> tuple[int, str]:
        command = ["-R", str(models.path), "verify-export", *arguments]
        result = CliRunner().invoke(cli, command)
        return result.exit_code, result.output

    code, text = run("model", str(tmp_path / "out"), "--json")
    assert code == 0
    assert json.loads(text)["ok"] is True
    assert set(json.loads(text)) == {"ok", *VerifyReport.__dataclass_fields__}
    change(tmp_path / "out" / "model.safetensors", "scale")
    shutil.copy(tmp_path / "out" / "config.json", tmp_path / "out" / "copy.json")
    code, text = run("model", str(tmp_path / "out"))
    assert code == 1
    assert "different: model.safetensors (tensors scale)" in text
    assert "not the model's: copy.json" in text
    assert run("model", str(tmp_path / "nowhere"))[0] != 0
