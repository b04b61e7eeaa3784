"""Exports in other shards and dtypes, to other places, interrupted and verified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import builders
import fsspec
import numpy as np
import pytest
import torch
from builders import Array, array
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mergefs.serve.destination as destinations
from mergefs.cli import cli
from mergefs.errors import CorruptionError, DestinationError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve.destination import MARKER

INDEX = "model.safetensors.index.json"
COMPANIONS = {
    "config.json": b'{"model_type": "test", "torch_dtype": "bfloat16"}',
    "tokenizer.model": bytes(range(256)) * 40,
    "extra/notes.txt": b"notes",
    "empty.txt": b"",
}


def tensors() -> dict[str, Array]:
    """Return tensors of 2, 4, 8 and 1 bytes an element, of about 37 kB in all, two of them equal."""
    made = builders.random_model(0)
    made["head.weight"] = made["embed.weight"]
    made["double"] = array(np.linspace(0, 1, 300), "F64")
    made["single"] = array(np.linspace(0, 1, 301), "F32")
    made["flags"] = array(np.arange(7) % 2, "BOOL")
    made["empty"] = array(np.zeros((0, 5)), "BF16")
    return made


@pytest.fixture
def model(tmp_path: Path, repository: Repository) -> Path:
    folder = builders.write_model(tmp_path / "model", tensors(), COMPANIONS)
    repository.ingest(folder, "model")
    return folder


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


# -- shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5000, 20_000, 45_000])
def test_shards_hold_all_tensors_and_the_index_says_where(
    repository: Repository, model: Path, tmp_path: Path, size: int
) -> None:
    out = tmp_path / "out"
    report = repository.export("model", out, shard_size=size)
    shards = sorted(out.glob("*.safetensors"))
    assert builders.load_model(out) == tensors()
    assert (report.files, report.bytes) == (len(builders.tree(out)), sum(p.stat().st_size for p in out.rglob("*.*")))
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(len(tensor.data) for tensor in tensors().values())}
    assert list(index["weight_map"]) == sorted(tensors())
    for number, shard in enumerate(shards, 1):
        assert shard.name == f"model-{number:05}-of-{len(shards):05}.safetensors"
        held = builders.unpack(shard.read_bytes())
        assert {name for name, home in index["weight_map"].items() if home == shard.name} == set(held)
        assert len(held) == 1 or sum(len(tensor.data) for tensor in held.values()) <= size
        header = json.loads(shard.read_bytes()[8:].split(b"}}")[0] + b"}}")
        assert header["__metadata__"] == {"format": "pt"}
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % len(array(0, entry["dtype"]).data) == 0
    for path, content in COMPANIONS.items():
        assert (out / path).read_bytes() == content


def test_shards_are_put_into_one_file_and_ingested_as_the_same(
    repository: Repository, model: Path, tmp_path: Path
) -> None:
    repository.export("model", tmp_path / "many", shard_size=8000)
    again = repository.ingest(tmp_path / "many", "many")
    assert again.blocks_new <= len(list((tmp_path / "many").glob("*.safetensors"))) + 1  # headers and the index
    report = repository.export("many", tmp_path / "one", shard_size=1 << 30)
    assert sorted(path.name for path in (tmp_path / "one").glob("model*")) == ["model.safetensors"]
    assert builders.load_model(tmp_path / "one") == tensors()
    assert report.files == len(COMPANIONS) + 1


def test_the_same_shards_come_out_again(repository: Repository, model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        repository.export("model", tmp_path / name, shard_size=9000, threads=3)
    assert builders.tree(tmp_path / "a") == builders.tree(tmp_path / "b")


def test_a_model_with_a_tied_head_is_loaded_from_shards(repository: Repository, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    repository.ingest(tmp_path / "llama", "llama")
    repository.export("llama", tmp_path / "out", shard_size=20_000)
    repository.export("llama", tmp_path / "half", shard_size=20_000, dtype="bfloat16")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    tokens = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits for name in ("llama", "out")
        )
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert torch.equal(expected, found)
    assert half.dtype == torch.bfloat16
    assert half.lm_head.weight is half.model.embed_tokens.weight


def test_an_adapter_has_no_shards(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(builders.pack({"a": array(np.ones((2, 2)), "F32")}))
    (folder / "adapter_config.json").write_text("{}")
    repository.ingest(folder, "adapter")
    with pytest.raises(UserError, match="adapter"):
        repository.export("adapter", tmp_path / "out", shard_size=100)
    with pytest.raises(UserError, match="shard size"):
        repository.export("adapter", tmp_path / "out", shard_size=0)
    repository.export("adapter", tmp_path / "out", dtype="bfloat16")
    assert builders.load_model(tmp_path / "out")["a"].dtype == "BF16"


# -- dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize("size", [None, 9000])
def test_floats_are_rounded_once_and_others_stay(
    repository: Repository, model: Path, tmp_path: Path, name: str, kind: str, size: int | None
) -> None:
    repository.export("model", tmp_path / "out", dtype=name, shard_size=size)
    found = builders.load_model(tmp_path / "out")
    for tensor, old in tensors().items():
        expected = array(old.values.reshape(old.shape), kind) if old.dtype in builders.FLOATS else old
        assert found[tensor] == expected, tensor
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "test", "torch_dtype": name}
    if size:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in found.values())


def test_the_index_of_a_model_in_shards_follows_its_dtype(repository: Repository, model: Path, tmp_path: Path) -> None:
    repository.export("model", tmp_path / "shards", shard_size=9000)
    repository.ingest(tmp_path / "shards", "shards")
    repository.export("shards", tmp_path / "out", dtype="float32")
    found = builders.load_model(tmp_path / "out")
    old, new = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("shards", "out"))
    assert new["weight_map"] == old["weight_map"]
    assert new["metadata"]["total_size"] == sum(len(tensor.data) for tensor in found.values())


def test_a_dtype_that_is_there_already_changes_nothing(repository: Repository, tmp_path: Path) -> None:
    folder = builders.write_model(tmp_path / "model", builders.random_model(0), {"config.json": b"[1]"})
    repository.ingest(folder, "model")
    repository.export("model", tmp_path / "out", dtype="bfloat16")
    assert builders.tree(tmp_path / "out") == builders.tree(folder)
    repository.export("model", tmp_path / "wide", dtype="float32")
    assert (tmp_path / "wide" / "config.json").read_bytes() == b"[1]"
    with pytest.raises(UserError, match="float32"):
        repository.export("model", tmp_path / "no", dtype="int8")


def test_a_lazy_merge_is_exported_in_shards(repository: Repository, tmp_path: Path) -> None:
    base = builders.random_model(0)
    repository.ingest(builders.write_model(tmp_path / "base", base), "base")
    repository.ingest(builders.write_model(tmp_path / "e", builders.fine_tuned(base, 1)), "e", base="base")
    recipe = Recipe.parse(builders.recipe_text("linear", [("base", {"weight": 0.5}), ("e", {"weight": 0.5})]))
    repository.merge(recipe, "merged", lazy=True)
    repository.export("merged", tmp_path / "out", shard_size=9000, verify=True)
    assert builders.load_model(tmp_path / "out") == builders.tensors_of(repository, "merged")


# -- places ------------------------------------------------------------------------------------------------


def test_it_is_written_to_any_file_system(repository: Repository, model: Path, memory: MemoryFileSystem) -> None:
    report = repository.export("model", "memory://some/where", verify=True)
    assert report.directory == "memory://some/where"
    expected = {f"/some/where/{path}" for path in builders.tree(model)}
    assert set(memory.find("/some/where")) == expected
    for path in builders.tree(model):
        assert memory.cat_file(f"/some/where/{path}") == (model / path).read_bytes()
    for refused in ("memory://some/where", "memory://some"):
        with pytest.raises(DestinationError, match="empty"):
            repository.export("model", refused)
    assert set(memory.find("/")) == expected
    with pytest.raises(DestinationError, match="nosuch"):
        repository.export("model", "nosuch://some/where")
    with pytest.raises(DestinationError, match="cannot be written"):
        repository.export("model", f"mergefs://model/new::file://{repository.path}")


def test_a_url_of_a_folder_here_is_that_folder(repository: Repository, model: Path, tmp_path: Path) -> None:
    repository.export("model", f"file://{tmp_path}/out")
    assert builders.tree(tmp_path / "out") == builders.tree(model)


class StoppedError(Exception):
    """Ends an export in the middle."""


def stop_after(share: float) -> Any:
    def tell(done: int, total: int) -> None:
        if done > share * total:
            raise StoppedError

    return tell


@pytest.mark.parametrize("place", ["folder", "memory"])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_an_interrupted_export_goes_on(
    repository: Repository, model: Path, tmp_path: Path, memory: MemoryFileSystem, place: str, share: float
) -> None:
    target = "memory://out" if place == "memory" else str(tmp_path / "out")
    options: dict[str, Any] = {"shard_size": 5000, "threads": 2}
    repository.export("model", tmp_path / "expected", **options)
    sizes = {path.stat().st_size for path in (tmp_path / "expected").rglob("*.*")}
    with pytest.raises(StoppedError):
        repository.export("model", target, progress=stop_after(share), **options)
    if place == "memory":
        assert MARKER in {path.rpartition("/")[2] for path in memory.find("/out")}
        assert not memory.exists("/out/config.json")
        assert all(memory.size(path) in sizes for path in memory.find("/out") if MARKER not in path)
    else:
        assert not (tmp_path / "out").exists()
    with pytest.raises(DestinationError) if place == "memory" else nullcontext():  # another export has other files
        repository.export("model", target, shard_size=7000)
        (tmp_path / "out").rename(tmp_path / "other")
    told: list[int] = []
    report = repository.export("model", target, verify=True, progress=lambda done, _: told.append(done), **options)
    assert 0 < report.files_kept < report.files
    assert report.verified
    assert told[0] > 0
    expected = builders.tree(tmp_path / "expected")
    if place == "memory":
        for path in expected:
            assert memory.cat_file(f"/out/{path}") == (tmp_path / "expected" / path).read_bytes()
        assert len(memory.find("/out")) == len(expected)
    else:
        assert builders.tree(tmp_path / "out") == expected
        assert not list(tmp_path.glob(".*"))


def test_finished_files_are_not_written_anew(repository: Repository, model: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        repository.export("model", tmp_path / "out", shard_size=5000, threads=1, progress=stop_after(0.5))
    (part,) = tmp_path.glob(".out.part-*")
    kept = {path.name: path.stat().st_ino for path in part.glob("*.safetensors")}
    assert kept
    repository.export("model", tmp_path / "out", shard_size=5000)
    assert kept == {name: (tmp_path / "out" / name).stat().st_ino for name in kept}


KILLED = """
import os, signal, sys
from mergefs.repository import Repository
def tell(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
Repository.open(sys.argv[1]).export("model", sys.argv[2], shard_size=5000, threads=1, progress=tell)
"""


def test_a_killed_export_goes_on(repository: Repository, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(repository.path), str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    report = repository.export("model", tmp_path / "out", shard_size=5000, verify=True)
    assert 0 < report.files_kept < report.files
    assert builders.load_model(tmp_path / "out") == tensors()
    assert not list(tmp_path.glob(".*"))


def test_two_exports_of_the_same_do_not_mix(repository: Repository, model: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def again(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(DestinationError, match="another process") as raised:
                repository.export("model", tmp_path / "out")
            refused.append(str(raised.value))

    repository.export("model", tmp_path / "out", progress=again)
    assert refused
    assert builders.tree(tmp_path / "out") == builders.tree(model)


def test_a_full_disk_keeps_what_is_finished_and_says_so(
    repository: Repository, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = destinations.write
    left = [30_000]

    def filling(descriptor: int, buffer: Any) -> None:
        left[0] -= len(buffer)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(descriptor, buffer)

    monkeypatch.setattr(destinations, "write", filling)
    with pytest.raises(DestinationError, match=r"No space left on device; what is finished is kept in .*out\.part"):
        repository.export("model", tmp_path / "out", shard_size=9000, threads=1)
    left[0] = 1 << 30
    assert repository.export("model", tmp_path / "out", shard_size=9000, threads=1).files_kept
    assert builders.load_model(tmp_path / "out") == tensors()


def test_what_reads_back_otherwise_is_found(
    repository: Repository, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = destinations.write

    def careless(descriptor: int, buffer: Any) -> None:
        data = bytearray(buffer)
        data[-1] ^= len(data) > 3000
        write(descriptor, data)

    monkeypatch.setattr(destinations, "write", careless)
    with pytest.raises(DestinationError, match="other bytes"):
        repository.export("model", tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(destinations, "write", write)
    repository.export("model", tmp_path / "out", verify=True)
    assert builders.tree(tmp_path / "out") == builders.tree(model)


def test_files_kept_from_before_are_verified_too(repository: Repository, model: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        repository.export("model", tmp_path / "out", shard_size=5000, threads=1, progress=stop_after(0.5))
    (part,) = tmp_path.glob(".out.part-*")
    damaged = min(part.glob("*.safetensors"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DestinationError, match=damaged.name):
        repository.export("model", tmp_path / "out", shard_size=5000, verify=True)
    repository.export("model", tmp_path / "out", shard_size=5000, verify=True)
    assert builders.load_model(tmp_path / "out") == tensors()


def test_nothing_is_kept_of_a_damaged_model(repository: Repository, model: Path, tmp_path: Path) -> None:
    last = repository.manifest(repository.resolve("model")).tensors[-2].blocks[-1]
    assert last is not None
    location = repository.catalog.tiers(bytes.fromhex(last))[0]
    pack = repository.path / f"packs/{location.pack.hex()[:2]}/{location.pack.hex()}.pack"
    data = bytearray(pack.read_bytes())
    data[location.record.offset + 5] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(CorruptionError):
        repository.export("model", tmp_path / "out", shard_size=5000, threads=1)
    assert sorted(os.listdir(tmp_path)) == ["model", "repository"]


def test_the_command_does_all_of_it(repository: Repository, model: Path, tmp_path: Path) -> None:
    arguments = ["-R", str(repository.path), "export", "model", str(tmp_path / "out"), "--json", "--threads", "2"]
    result = CliRunner().invoke(cli, [*arguments, "--shard-size", "9kB", "--dtype", "float32", "--verify"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["verified"], report["files_kept"]) == (True, 0)
    assert report["directory"] == str(tmp_path / "out")
    assert all(tensor.dtype in ("F32", "I64", "BOOL") for tensor in builders.load_model(tmp_path / "out").values())
