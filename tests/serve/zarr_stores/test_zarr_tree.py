"""The tree of groups, arrays and keys that a model is in Zarr."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr_tensors import FLOATS, PROTOTYPE, TENSORS, WHOLE, array, numpy_bytes

from mergefs.repository import Repository
from mergefs.serve.zarr_store import ModelStore, array_path


def test_groups_are_the_folders_of_names(group: zarr.Group, repository: Repository) -> None:
    assert group.attrs["manifest"] == repository.resolve("model")
    assert sorted(group) == ["..odd", "a", "a.b", "a.c", "all", "model", "slash%2Fname"]
    layer = group["model/layers/0/mlp"]
    assert isinstance(layer, zarr.Group)
    assert sorted(layer.array_keys()) == ["w"]
    assert sorted(layer.group_keys()) == ["c"]
    groups = {path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Group)}
    folders = {"a.c", "all", "model", "model/layers", "model/layers/0", "model/layers/0/mlp"}
    assert groups == folders | {"model/layers/0/mlp/c"} | {f"all/{name}" for name in FLOATS | WHOLE}


@pytest.mark.parametrize("consolidated", [True, False])
def test_the_tree_is_the_same_with_and_without_consolidated_metadata(store: ModelStore, consolidated: bool) -> None:
    group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
    arrays = {path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert arrays == set(store.arrays)
    for path in ("all/BF16/matrix", "all/F8_E4M3/scalar", "all/BOOL/empty", "a.c/d"):
        assert array(group, path).metadata == zarr.open_array(store, path=path, mode="r").metadata


PATHS = {
    "model.norm.weight": "model/norm/weight",
    "weight": "weight",
    "": "%",
    ".": "%2E",
    "..": "%2E%2E",
    ".a": ".a",
    "a.": "a.",
    "a..b": "a..b",
    "x/y\\z%": "x%2Fy%5Cz%25",
    "zarr.json": "zarr/json",
}


@pytest.mark.parametrize("name", PATHS)
def test_names_become_paths(name: str) -> None:
    assert array_path(name, {name}) == PATHS[name]


def test_a_tensor_beside_its_folder_keeps_the_dot() -> None:
    names = {"a", "a.b", "a.b.c", "a.c.d", "x.a.b", "zarr", "zarr.json"}
    found = {name: array_path(name, names) for name in sorted(names)}
    assert found == {
        "a": "a",
        "a.b": "a.b",
        "a.b.c": "a.b.c",
        "a.c.d": "a.c/d",
        "x.a.b": "x/a/b",
        "zarr": "zarr",
        "zarr.json": "zarr%2Ejson",
    }


def test_keys_are_listed_and_every_one_can_be_read(store: ModelStore) -> None:
    async def collect() -> dict[str, int]:
        keys = [key async for key in store.list()]
        assert len(set(keys)) == len(keys)
        sizes = {}
        for key in keys:
            value = await store.get(key, PROTOTYPE)
            assert value is not None, key
            assert await store.exists(key)
            sizes[key] = await store.getsize(key)
            assert sizes[key] == len(value)
        return sizes

    sizes = asyncio.run(collect())
    chunks = sum(len(tensor.blocks) for tensor in store.arrays.values())
    assert sum("/c" in key and not key.endswith("zarr.json") for key in sizes) == chunks
    assert {"zarr.json", "a.c/zarr.json", "all/F32/scalar/c", "all/F32/matrix/c/0/0"} <= sizes.keys()


def test_prefixes_and_folders_are_listed(store: ModelStore) -> None:
    async def collect(keys: AsyncIterator[str]) -> list[str]:
        return sorted([key async for key in keys])

    async def check() -> None:
        everything = await collect(store.list())
        prefixes = ("", "a", "a/", "all/F32/", "all/F32/matrix/c/1", "all/F32/mat", "zarr", "none", "a/c/1/")
        for prefix in prefixes:
            assert await collect(store.list_prefix(prefix)) == [k for k in everything if k.startswith(prefix)]
        for folder in ("", "all", "all/F32/", "all/F32/matrix", "all/F32/matrix/c", "all/F32/empty", "none"):
            below = f"{folder.strip('/')}/" if folder else ""
            expected = {k[len(below) :].split("/")[0] for k in everything if k.startswith(below)}
            assert await collect(store.list_dir(folder)) == sorted(expected)
        assert await store.is_empty("none")
        assert not await store.is_empty("all/F32")

    asyncio.run(check())


STRANGE = ["all/F32/matrix/c/99/0", "all/F32/matrix/c/0", "all/F32/matrix/c/0/0/0", "all/F32/matrix/c/00/0"]
STRANGE += ["all/F32/matrix/c/-1/0", "all/F32/matrix/c/x/0", "all/F32/matrix/c/", "all/F32/matrix", "all", ""]
STRANGE += ["none/zarr.json", "/zarr.json", "all/F32/empty/c/0", "c", "c/0", "zarr.json/c/0", "all/F32/matrix/c/²/0"]
STRANGE += ["all/F32/matrix/c/" + "9" * 5000 + "/0", "all/F32/scalar/c/0", "all/F32/hollow/c/0/0/0"]


@pytest.mark.parametrize("key", STRANGE)
def test_what_is_no_key_is_not_there(store: ModelStore, key: str) -> None:
    async def check() -> None:
        assert await store.get(key, PROTOTYPE) is None
        assert not await store.exists(key)
        with pytest.raises(FileNotFoundError):
            await store.getsize(key)

    asyncio.run(check())


def test_metadata_is_plain_zarr(store: ModelStore) -> None:
    text = asyncio.run(store.get("all/BF16/matrix/zarr.json", PROTOTYPE))
    assert text is not None
    assert json.loads(text.to_bytes()) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [37, 301],
        "data_type": "bfloat16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 301]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["all.BF16.matrix[0]", "all.BF16.matrix[1]"],
        "attributes": {"name": "all.BF16.matrix", "dtype": "BF16"},
    }


def test_a_copy_on_disk_is_the_same(store: ModelStore, tmp_path: Path) -> None:
    """What the store says is what a folder of files would: copied key by key, Zarr reads the same."""

    async def copy() -> None:
        async for key in store.list_prefix("all/"):
            value = await store.get(key, PROTOTYPE)
            assert value is not None
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(value.to_bytes())

    asyncio.run(copy())
    for path, tensor in store.arrays.items():
        if path.startswith("all/"):
            found = zarr.open_array(tmp_path / path, mode="r")
            assert np.asarray(found[...]).tobytes() == numpy_bytes(TENSORS[tensor.name])


def test_nothing_warns(store: ModelStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.asarray(array(zarr.open_group(store, mode="r"), "all/F8_E5M2/matrix")[:])


@pytest.mark.parametrize("mode", ["w", "a", "r+"])
def test_writing_is_refused(store: ModelStore, mode: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError)):
        zarr.open_group(store, mode=mode).create_array("new", shape=(1,), dtype="u1")
    with pytest.raises(ValueError, match="read-only"):
        array(zarr.open_group(store, mode="r"), "a")[0] = 0


def test_closing_ends_the_lease(repository: Repository) -> None:
    def leased() -> int:
        with repository.catalog.read() as txn:
            return txn.count("leases")

    before = leased()
    store = repository.zarr("model")
    assert leased() == before + 1
    store.close()
    assert leased() == before
