"""Models that are born from Zarr."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import builders
import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from builders import NUMPY, Array, array
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mergefs.blocks.geometry import grid
from mergefs.cli import cli
from mergefs.errors import CheckpointError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve import zarr_dtypes, zarr_ingest

zarr_dtypes.register()


def write(group: zarr.Group, tensors: dict[str, Array], chunks: Any = None, **options: Any) -> zarr.Group:
    """Write tensors as arrays, at the paths that their names give."""
    for name, tensor in tensors.items():
        values = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)
        shape = tuple(max(1, n if chunks is None else min(n, chunks)) for n in tensor.shape)
        made = group.create_array(
            name.replace(".", "/"), shape=tensor.shape, chunks=shape, dtype=values.dtype, **options
        )
        if values.size:
            made[...] = values
    return group


def every_dtype() -> dict[str, Array]:
    """Return random bits in every dtype and several shapes."""
    random = np.random.default_rng(0)
    found = {}
    for name, kind in NUMPY.items():
        for shape in ((), (0, 3), (7,), (40, 33), (3, 5, 70), (2, 3000)):
            width = np.dtype(kind).itemsize
            data = random.integers(0, 2 if name == "BOOL" else 256, (int(np.prod(shape)), width), np.uint8)
            found[f"{name}.t{'x'.join(map(str, shape))}"] = Array(name, shape, data.tobytes())
    return found


@pytest.mark.parametrize("chunks", [None, 16])
def test_every_dtype_and_shape_arrives(repository: Repository, tmp_path: Path, chunks: int | None) -> None:
    tensors = every_dtype()
    group = write(zarr.open_group(tmp_path / "group", mode="w"), tensors, chunks)
    report = repository.ingest_zarr(group, as_="born")
    assert report.format == "zarr"
    assert builders.tensors_of(repository, "born") == tensors
    assert repository.fsck(read_data=True).ok


def test_it_is_the_model_that_its_export_is(repository: Repository, tmp_path: Path) -> None:
    group = write(zarr.open_group(zarr.storage.MemoryStore(), mode="w"), every_dtype())
    born = repository.ingest_zarr(group, as_="born", files={"config.json": b"{}", "extra/a.txt": b"x" * 10_000})
    repository.export("born", tmp_path / "out")
    again = repository.ingest(tmp_path / "out", "again")
    assert again.manifest == born.manifest
    assert again.blocks_new == 0
    assert (tmp_path / "out" / "extra" / "a.txt").read_bytes() == b"x" * 10_000
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert len(loaded) == len(every_dtype())


def test_the_order_is_that_of_the_safetensors_library(repository: Repository, tmp_path: Path) -> None:
    tensors = {
        "b.narrow": torch.zeros(3, dtype=torch.uint8),
        "a.wide": torch.zeros(3, dtype=torch.float64),
        "z": torch.zeros(5),
        "c": torch.zeros(5),
        "c.d": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    for name, tensor in tensors.items():
        made = group.create_array(f"x/{name}", data=tensor.numpy())
        made.attrs.update({"name": name, "dtype": {8: "F64", 4: "F32", 1: "U8"}[tensor.element_size()]})
    repository.ingest_zarr(group, as_="born")
    with repository.view("born") as view:
        assert view.read("model.safetensors") == (tmp_path / "theirs.safetensors").read_bytes()


def test_what_mergefs_serves_comes_back(repository: Repository, tmp_path: Path) -> None:
    tensors = every_dtype() | {"a": array([1.0], "F32"), "a.b": array([2.0], "F32"), "s/t": array([3.0], "F32")}
    folder = builders.write_model(tmp_path / "model", tensors, {"config.json": b"{}"})
    repository.ingest(folder, "model")
    with repository.zarr("model") as store:
        report = repository.ingest_zarr(store, as_="copy")
        assert builders.tensors_of(repository, "copy") == tensors
        assert report.blocks_new == 2  # both are of the header: every other block is there already
        layer = repository.ingest_zarr(zarr.open_group(store, path="F16", mode="r"), as_="layer")
    assert set(builders.tensors_of(repository, "layer")) == {name for name in tensors if name.startswith("F16.")}
    assert layer.raw_bytes < report.raw_bytes


def test_an_expert_is_stored_as_a_delta_of_its_base(repository: Repository, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    base = {"w.weight": array(random.normal(0, 0.02, (400, 300)), "BF16"), "norm": array(np.ones(64), "BF16")}
    expert = builders.fine_tuned(base, 1, only="w.")
    files = {"config.json": b'{"model_type": "test"}', "README.md": b"#", "tokenizer.json": b"{}"}
    repository.ingest(builders.write_model(tmp_path / "base", base, files), "base")
    group = write(zarr.open_group(tmp_path / "group", mode="w"), expert, 64)
    born = repository.ingest_zarr(group, as_="born", base="base")
    folder = builders.write_model(tmp_path / "expert", expert, {k: v for k, v in files.items() if k != "README.md"})
    header = repository.ingest(folder, "usual", base="base")
    assert builders.served(repository, "born").keys() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert builders.tensors_of(repository, "born") == expert
    assert born.stored_bytes < 0.6 * born.raw_bytes
    assert header.blocks_new <= 1
    merge = Recipe.parse(builders.recipe_text("ties", [("born", {"weight": 0.5, "density": 0.5})], "base"))
    same = Recipe.parse(builders.recipe_text("ties", [("usual", {"weight": 0.5, "density": 0.5})], "base"))
    repository.merge(merge, "a", budget="50%")
    repository.merge(same, "b", budget="50%")
    assert builders.tensors_of(repository, "a") == builders.tensors_of(repository, "b")


def test_a_delta_is_one(repository: Repository, tmp_path: Path) -> None:
    base = builders.random_model(0)
    repository.ingest(builders.write_model(tmp_path / "base", base), "base")
    delta = {"layers.0.norm": array(np.full(64, 0.5), "BF16")}
    group = write(zarr.open_group(tmp_path / "group", mode="w"), delta)
    assert repository.ingest_zarr(group, as_="delta", base="base", kind="delta").kind == "delta"
    with pytest.raises(UserError, match="--base"):
        repository.ingest_zarr(group, as_="delta", kind="delta")


def test_a_trained_model_is_written_as_zarr_and_loaded_by_transformers(repository: Repository, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    group = zarr.open_group(tmp_path / "run.zarr", mode="w")
    for name, value in model.state_dict().items():
        values = value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        group.create_array(name.replace(".", "/"), data=values, chunks=tuple(min(20, n) for n in values.shape))
    config.save_pretrained(tmp_path / "run.zarr")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mergefs",
            "-R",
            str(repository.path),
            "ingest",
            str(tmp_path / "run.zarr"),
            "--as",
            "a",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "from a Zarr group" in done.stdout
    repository.export("a", tmp_path / "out", shard_size=10_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


# -- how it is read ----------------------------------------------------------------------------------------


class Counting(zarr.storage.MemoryStore):
    """Counts how often each key is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[str, int] = {}

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.reads[key] = self.reads.get(key, 0) + 1
        return await super().get(key, *arguments, **options)


@pytest.mark.parametrize("chunk", [(100, 64), (7, 300), (1500, 300), (2000, 20), (33, 33)])
@pytest.mark.parametrize("slab", [1, 4096, 1 << 20])
def test_every_chunk_is_decoded_once(
    repository: Repository, chunk: tuple[int, int], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_ingest, "SLAB_BYTES", slab)
    store = Counting()
    group = zarr.open_group(store, mode="w")
    values = np.random.default_rng(0).normal(size=(2000, 300)).astype(np.float32)
    group.create_array("w", data=values, chunks=chunk)
    store.reads.clear()
    repository.ingest_zarr(group, as_="born", threads=3)
    chunks = {key: count for key, count in store.reads.items() if "/c/" in key}
    assert len(chunks) == -(-2000 // chunk[0]) * -(-300 // chunk[1])
    assert set(chunks.values()) == {1}
    assert builders.tensors_of(repository, "born")["w"].data == values.tobytes()


def test_memory_does_not_grow_with_the_arrays(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo", 1 << 18).close()
    group = zarr.open_group(tmp_path / "group", mode="w")
    random = np.random.default_rng(0)
    for number in range(3):
        made = group.create_array(f"w{number}", shape=(16_384, 1024), chunks=(512, 1024), dtype="float32")
        for start in range(0, 16_384, 512):
            made[start : start + 512] = random.normal(size=(512, 1024)).astype(np.float32)
    with Repository.open(tmp_path / "repo", sync=False) as repository:
        tracemalloc.start()
        report = repository.ingest_zarr(tmp_path / "group", as_="born", threads=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert report.raw_bytes > 192 << 20
    assert peak < 96 << 20


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_slabs_tile_any_array(data: st.DataObject) -> None:
    """Whatever the chunks are, slabs are runs of bytes that tile the tensor, as the grid of blocks does."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    values = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    made = zarr.create_array(zarr.storage.MemoryStore(), data=values, chunks=chunks or "auto")
    tensor = zarr_ingest._Array("t", zarr_ingest.DTYPES["I16"], made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_ingest, "SLAB_BYTES", data.draw(st.integers(1, 200)))
        slabs = tensor.slabs
    found = b"".join(bytes(tensor.read(number)) for number in range(len(slabs)))
    assert found == values.tobytes()
    assert list(slabs.elements()) == [slabs.extent(number) for number in range(len(slabs))]
    assert grid(shape, 10).shape == slabs.shape


# -- other groups ------------------------------------------------------------------------------------------


def test_big_endian_v2_and_sharded_arrays_are_read(repository: Repository, tmp_path: Path) -> None:
    values = np.arange(3000, dtype=np.float32).reshape(60, 50)
    old = zarr.open_group(tmp_path / "old", mode="w", zarr_format=2)
    old.create_array("layer/big", data=values.astype(">f4"), chunks=(7, 50))
    repository.ingest(tmp_path / "old", "old")
    new = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    new.create_array("layer/big", data=values, chunks=(10, 10), shards=(20, 50))
    ends = new.create_array("half", shape=(30,), chunks=(4,), dtype=ml_dtypes.bfloat16, fill_value=1.5)
    ends[3:9] = np.arange(6).astype(ml_dtypes.bfloat16)
    repository.ingest_zarr(new, as_="new")
    assert builders.tensors_of(repository, "old")["layer.big"] == array(values, "F32")
    found = builders.tensors_of(repository, "new")
    assert found["layer.big"] == array(values, "F32")
    expected = np.full(30, 1.5)
    expected[3:9] = np.arange(6)
    assert found["half"] == array(expected, "BF16")


def test_a_group_is_named_by_url_store_or_folder(repository: Repository, tmp_path: Path) -> None:
    write(zarr.open_group(tmp_path / "group", mode="w"), {"a": array([1.0], "F32")})
    folder = tmp_path / "group"
    forms: list[Any] = [folder, str(folder), f"file://{folder}", zarr.storage.LocalStore(folder, read_only=True)]
    assert len({repository.ingest_zarr(form, as_=f"m{n}").manifest for n, form in enumerate(forms)}) == 1


def test_files_beside_the_group_go_along(repository: Repository, tmp_path: Path) -> None:
    group = write(zarr.open_group(tmp_path / "group", mode="w"), {"a.b": array([1.0], "F32")})
    (tmp_path / "group" / "config.json").write_text("{}")
    (tmp_path / "group" / ".hidden").touch()
    (tmp_path / "group" / "optimizer.pt").touch()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    (tmp_path / "files" / "model.safetensors").write_text("old")
    repository.ingest(tmp_path / "group", "beside")
    repository.ingest_zarr(group, as_="given", files=tmp_path / "files")
    repository.ingest_zarr(tmp_path / "group", as_="none", files={})
    found = {name: sorted(builders.served(repository, name)) for name in ("beside", "given", "none")}
    assert found == {
        "beside": ["config.json", "model.safetensors"],
        "given": ["model.safetensors", "tokenizer.json"],
        "none": ["model.safetensors"],
    }
    with pytest.raises(UserError, match=r"model\.safetensors"):
        repository.ingest_zarr(group, as_="x", files={"model.safetensors": b""})
    with pytest.raises(CheckpointError, match="name"):
        repository.ingest_zarr(group, as_="x", files={"../x": b""})


def test_what_cannot_be_a_model_is_refused(repository: Repository, tmp_path: Path) -> None:
    memory = zarr.storage.MemoryStore
    empty = zarr.open_group(memory(), mode="w")
    empty.create_group("a/b")
    complex_ = zarr.open_group(memory(), mode="w")
    complex_.create_array("a/z", shape=(2,), dtype="complex64")
    twice = zarr.open_group(memory(), mode="w")
    for path in ("a", "b"):
        twice.create_array(path, shape=(2,), dtype="float32").attrs.update({"name": "same", "dtype": "F32"})
    control = zarr.open_group(memory(), mode="w")
    control.create_array("a", shape=(2,), dtype="float32").attrs.update({"name": "a\n", "dtype": "F32"})
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="f4")
    before = builders.contents(repository.path)
    cases: list[tuple[Any, str]] = [
        (empty, "no array"),
        (complex_, "'a/z' has the data type complex64"),
        (twice, "both the tensor 'same'"),
        (control, "the tensor name"),
        (tmp_path / "array", "not a Zarr group"),
        (tmp_path / "nothing", "not a Zarr group"),
        (5, "not a Zarr group"),
    ]
    for group, message in cases:
        with pytest.raises(CheckpointError, match=message):
            repository.ingest_zarr(group, as_="x")
    assert builders.contents(repository.path) == before
    assert repository.refs() == {}


def test_a_chunk_that_is_damaged_is_named(repository: Repository, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32)
    group = zarr.open_group(tmp_path / "group", mode="w")
    group.create_array("layer/w", data=values, chunks=(10, 100))
    chunk = tmp_path / "group" / "layer" / "w" / "c" / "5" / "0"
    chunk.write_bytes(chunk.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="the array 'layer/w' cannot be read"):
        repository.ingest_zarr(group, as_="x")
    assert repository.refs() == {}


def test_a_directory_with_weights_is_none(repository: Repository, tmp_path: Path) -> None:
    folder = builders.write_model(tmp_path / "model", {"a": array([1.0], "F32")}, {"zarr.json": b"{}"})
    assert repository.ingest(folder, "model").format == "safetensors"
    assert set(builders.served(repository, "model")) == {"model.safetensors", "zarr.json"}


def test_the_command_takes_a_group(repository: Repository, tmp_path: Path) -> None:
    write(zarr.open_group(tmp_path / "group", mode="w"), {"a": array([1.0], "F32")})
    arguments = ["-R", str(repository.path), "ingest", str(tmp_path / "group"), "--as", "born", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "zarr"
