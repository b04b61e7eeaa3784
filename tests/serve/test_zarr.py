"""Blocks and models through Zarr."""

from __future__ import annotations

import asyncio
import json
import pickle
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save_file
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.store import StoreTests

from mergefs.blocks.pack import NO_BASE
from mergefs.blocks.reader import ReadTotals
from mergefs.hashing import hex_digest
from mergefs.repository import Repository
from mergefs.serve.view import View
from mergefs.serve.zarr_store import BlockStore, ModelStore, array_path

BLOCK = 4096
PROTOTYPE = default_buffer_prototype()

FLOATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
WHOLE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (5000,),
    "matrix": (37, 301),
    "wide": (3, 5000),
    "experts": (3, 7, 11, 60),
    "one": (1,),
    "scalar": (),
    "empty": (0,),
    "hollow": (4, 0, 3),
}


def random_bits(shape: tuple[int, ...], kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bit patterns, NaNs of all kinds among them."""
    size = torch.empty(0, dtype=kind).element_size()
    data = np.random.default_rng(seed).integers(0, 256, (*shape, size), np.uint8)
    if kind == torch.bool:
        data &= 1
    return torch.from_numpy(data.reshape(-1)).view(kind).reshape(shape).clone()


def tensors() -> dict[str, torch.Tensor]:
    found = {
        f"all.{name}.{shape}": random_bits(size, kind)
        for name, kind in (FLOATS | WHOLE).items()
        for shape, size in SHAPES.items()
    }
    names = ("a", "a.b", "a.c.d", "a.c.e", "slash/name", "..odd", "model.layers.0.mlp.w", "model.layers.0.mlp.c.0")
    return found | {name: random_bits((70, 60), torch.bfloat16, at) for at, name in enumerate(names)}


TENSORS = tensors()


def numpy_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("zarr")
    save_file(TENSORS, folder / "model.safetensors")
    changed = {name: value.clone() for name, value in TENSORS.items()}
    changed["a"].view(torch.int16)[3, 3] += 1
    (folder / "expert").mkdir()
    save_file(changed, folder / "expert" / "model.safetensors")
    Repository.init(folder / "repo", BLOCK).close()
    with Repository.open(folder / "repo", sync=False) as repository:
        repository.ingest(folder / "model.safetensors", "model")
        repository.ingest(folder / "expert", "expert", base="model")
        yield repository


@pytest.fixture
def store(repository: Repository) -> Iterator[ModelStore]:
    with repository.zarr("model") as store:
        yield store


@pytest.fixture(scope="module")
def group(repository: Repository) -> Iterator[zarr.Group]:
    with repository.zarr("model") as store:
        yield zarr.open_group(store, mode="r")


def array(group: zarr.Group, path: str) -> zarr.Array[Any]:
    found = group[path]
    assert isinstance(found, zarr.Array)
    return found


# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_the_same_array(group: zarr.Group, name: str) -> None:
    tensor = TENSORS[name]
    found = array(group, array_path(name, TENSORS))
    values = np.asarray(found[...])
    assert values.shape == found.shape == tuple(tensor.shape)
    assert values.tobytes() == numpy_bytes(tensor)
    assert found.attrs["name"] == name
    kinds = {kind: name for name, kind in (FLOATS | WHOLE).items()}
    assert found.attrs["dtype"] == kinds[tensor.dtype]


def test_values_compute_as_numbers(group: zarr.Group) -> None:
    found = np.asarray(array(group, "all/BF16/matrix")[:])
    assert found.dtype == ml_dtypes.bfloat16
    expected = TENSORS["all.BF16.matrix"].float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), expected)


SELECTIONS: list[Any] = [
    np.s_[5],
    np.s_[5, 7],
    np.s_[-1],
    np.s_[10:20, 100:200],
    np.s_[::7, 5::11],
    np.s_[36:],
    np.s_[..., 300],
    np.s_[3:3],
]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["F32", "BF16", "U8"])
def test_selections_are_those_of_numpy(group: zarr.Group, name: str, selection: Any) -> None:
    found = array(group, f"all/{name}/matrix")
    whole = np.asarray(found[:])
    chosen = np.asarray(found[selection])
    assert chosen.tobytes() == whole[selection].tobytes()
    assert chosen.shape == whole[selection].shape


def test_only_the_blocks_that_are_needed_are_read(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    block = View.block

    def counted(self: View, tensor: Any, number: int) -> Any:
        read.append((tensor.name, number))
        return block(self, tensor, number)

    monkeypatch.setattr(View, "block", counted)
    with repository.zarr("model") as store:
        group = zarr.open_group(store, mode="r")
        found = array(group, "all/F32/matrix")
        assert read == []
        assert found.chunks == (6, 301)
        found[6:8, 5]
        assert read == [("all.F32.matrix", 1)]
        found[5:7]
        assert sorted(read[1:]) == [("all.F32.matrix", 0), ("all.F32.matrix", 1)]


def test_only_the_bytes_that_are_needed_are_read(repository: Repository) -> None:
    view = repository.view("model")
    tensor = view.tensors["all.F32.matrix"]
    lengths = [
        repository.catalog.tiers(bytes.fromhex(block))[0].record.length for block in tensor.blocks if block is not None
    ]
    with ModelStore(view) as store:
        found = array(zarr.open_group(store, mode="r"), "all/F32/matrix")
        assert view.counter.totals == ReadTotals(0, 0, 0)
        found[6:8, 5]
        assert view.counter.totals == ReadTotals(0, lengths[1], 0)
        found[5:7]
        found[6:12]
        assert view.counter.totals == ReadTotals(0, lengths[0] + lengths[1], 0)
        found[:]
        assert view.counter.totals == ReadTotals(0, sum(lengths), 0)


def test_an_expert_is_served_as_its_own_values(repository: Repository) -> None:
    with repository.zarr("expert") as store:
        found = array(zarr.open_group(store, mode="r"), "a")[:]
    expected = TENSORS["a"].clone()
    expected.view(torch.int16)[3, 3] += 1
    assert np.asarray(found).tobytes() == numpy_bytes(expected)


# -- the tree ----------------------------------------------------------------------------------------------


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


# -- who reads it ------------------------------------------------------------------------------------------


def test_dask_computes_with_arrays(repository: Repository) -> None:
    import dask.array

    expected = TENSORS["all.BF16.matrix"].float().numpy()
    with repository.zarr("model") as store:
        for found in (
            dask.array.from_zarr(store, component="all/BF16/matrix"),
            dask.array.from_zarr(zarr.open_group(store, mode="r")["all/BF16/matrix"]),
        ):
            assert found.chunks == ((6,) * 6 + (1,), (301,))
            assert found.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(found.astype(np.float32).compute(), expected)
            again = pickle.loads(pickle.dumps(found[5:20:2]))
            np.testing.assert_array_equal(again.astype(np.float32).compute(), expected[5:20:2])


def test_xarray_opens_groups_and_trees(repository: Repository) -> None:
    xarray = pytest.importorskip("xarray")
    expected = TENSORS["all.F32.matrix"].numpy()
    with repository.zarr("model") as store:
        with xarray.open_zarr(store, group="all/F32") as dataset:
            assert set(dataset.data_vars) == set(SHAPES)
            assert dataset.matrix.dims == ("all.F32.matrix[0]", "all.F32.matrix[1]")
            np.testing.assert_array_equal(dataset.matrix[5:9].compute(), expected[5:9])
        with xarray.open_datatree(store, engine="zarr") as tree:
            found = tree["model/layers/0/mlp/w"][3].compute()
            assert found.dtype == ml_dtypes.bfloat16


# -- blocks by id ------------------------------------------------------------------------------------------


def block_ids(repository: Repository) -> set[str]:
    manifests = (repository.manifest(identity) for identity in repository.manifest_ids())
    return {block.hex() for manifest in manifests for block in manifest.block_ids()}


def test_blocks_are_found_by_their_hash(repository: Repository) -> None:
    store = repository.blocks()

    async def check() -> None:
        keys = [key async for key in store.list()]
        assert set(keys) == block_ids(repository)
        assert keys == sorted(keys)
        assert [key async for key in store.list_dir("")] == keys
        assert [key async for key in store.list_dir("x")] == []
        for key in keys:
            value = await store.get(key, PROTOTYPE)
            assert value is not None
            assert hex_digest(value.to_bytes()) == key
            assert await store.getsize(key) == len(value)
        for prefix in (keys[0][:1], keys[0][:2], keys[0][:3], keys[0], "g", keys[0] + "0", keys[0].upper() + "x"):
            assert [key async for key in store.list_prefix(prefix)] == [k for k in keys if k.startswith(prefix)]

    asyncio.run(check())


def test_some_block_is_encoded_against_another(repository: Repository) -> None:
    """Otherwise the test above shows less than it seems to."""
    located = repository.catalog.locate_all(map(bytes.fromhex, block_ids(repository)))
    assert any(location.record.base != NO_BASE for location in located.values())


@pytest.mark.parametrize("key", ["", "0" * 64, "zarr.json", "0" * 63, "F" * 64, "x" * 64])
def test_other_keys_are_no_blocks(repository: Repository, key: str) -> None:
    store = repository.blocks()
    assert asyncio.run(store.get(key, PROTOTYPE)) is None
    assert not asyncio.run(store.exists(key))


def test_a_model_is_also_readable_from_its_blocks(repository: Repository) -> None:
    tensor = repository.manifest(repository.resolve("model")).tensor_by_name["model.layers.0.mlp.w"]
    store = repository.blocks()
    keys = [block for block in tensor.blocks if block is not None]
    parts = asyncio.run(store.get_partial_values(PROTOTYPE, [(key, None) for key in keys]))
    assert b"".join(part.to_bytes() for part in parts if part) == numpy_bytes(TENSORS[tensor.name])


# -- what zarr asks of every store -------------------------------------------------------------------------

FIXED = "a model's keys are its tensors' and a block's key is its hash: there is no place for the key that this writes"
RANGES = [None, RangeByteRequest(1, 4), OffsetByteRequest(1), SuffixByteRequest(1), RangeByteRequest(2, 10**9)]
SKIPPED = """get_sync set_sync delete_sync serializable_store get_many getsize_prefix set set_not_open
set_many get_partial_values exists delete delete_dir delete_nonexistent_key_does_not_raise is_empty clear list
list_prefix list_empty_path list_dir set_if_not_exists get_bytes get_bytes_sync get_json get_json_sync get_not_open
"""


def skipped(self: object) -> None:
    pytest.skip(FIXED)


class ReadOnlyStoreTests(StoreTests[Any, cpu.Buffer]):
    """The part of zarr's own tests that does not write, and readings of what is there instead of the rest."""

    buffer_cls = cpu.Buffer

    @pytest.fixture
    def keys(self, store: Store) -> list[str]:
        async def first() -> list[str]:
            return [key async for key in store.list()][:40]

        return asyncio.run(first())

    async def set(self, store: Store, key: str, value: Buffer) -> None:
        raise AssertionError(FIXED)

    async def get(self, store: Store, key: str) -> Buffer:
        raise AssertionError(FIXED)

    def test_store_repr(self, store: Store) -> None:
        assert repr(store).startswith(self.store_cls.__name__ + "(")

    def test_store_supports_writes(self, store: Store) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: Store) -> None:
        assert store.supports_listing

    def test_store_read_only(self, store: Store) -> None:
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False  # type: ignore[misc]

    @pytest.mark.parametrize("read_only", [True, False])
    async def test_store_open_read_only(self, open_kwargs: dict[str, Any], read_only: bool) -> None:
        if read_only:
            await super().test_store_open_read_only(open_kwargs, read_only)
            return
        with pytest.raises(ValueError, match="read only"):
            await self.store_cls.open(**open_kwargs, read_only=False)

    def test_another_store_is_not_equal(self, store: Store) -> None:
        assert store != zarr.storage.MemoryStore()

    async def test_with_read_only_gives_an_equal_store(self, store: Store) -> None:
        again = store.with_read_only(True)
        assert again == store
        assert not again._is_open

    def test_a_pickle_opens_the_same(self, store: Store, keys: list[str]) -> None:
        again = pickle.loads(pickle.dumps(store))
        assert again == store
        mine, theirs = (asyncio.run(s.get(keys[0], PROTOTYPE)) for s in (store, again))
        assert mine is not None
        assert theirs is not None
        assert mine.to_bytes() == theirs.to_bytes()
        again.close()

    @pytest.mark.parametrize("byte_range", RANGES)
    async def test_get(self, store: Store, byte_range: Any) -> None:
        keys = [key async for key in store.list()][:20]
        for key in keys:
            whole, part = [await store.get(key, PROTOTYPE, wanted) for wanted in (None, byte_range)]
            assert whole is not None
            assert part is not None
            assert part.to_bytes() == expected(whole.to_bytes(), byte_range)
            same = store.get_sync(key, byte_range=byte_range)  # type: ignore[attr-defined]
            assert same.to_bytes() == part.to_bytes()
        pairs = [(key, byte_range) for key in (*keys, "none")]
        parts = await store.get_partial_values(PROTOTYPE, pairs)
        assert [part is None for part in parts] == [False] * len(keys) + [True]

    async def test_get_of_a_store_that_is_not_open(self, store_not_open: Store) -> None:
        assert not store_not_open._is_open
        assert await store_not_open.get("none", PROTOTYPE) is None
        assert store_not_open._is_open

    async def test_get_raises(self, store: Store) -> None:
        with pytest.raises((ValueError, TypeError), match=r"Unexpected byte_range, got.*"):
            await store.get("zarr.json", PROTOTYPE, byte_range=(0, 2))  # type: ignore[arg-type]

    async def test_get_at_once(self, store: Store) -> None:
        keys = [key async for key in store.list()][:40]
        values = await asyncio.gather(*(store.get(key, PROTOTYPE) for key in keys * 3))
        assert all(value is not None for value in values)

    async def test_getsize(self, store: Store) -> None:
        keys = [key async for key in store.list_prefix("a")]
        total = 0
        for key in keys:
            value = await store.get(key, PROTOTYPE)
            assert value is not None
            assert await store.getsize(key) == len(value)
            total += len(value)
        assert await store.getsize_prefix("a") == total

    @pytest.mark.skipif(not hasattr(Store, "_get_bytes"), reason="only in newer versions of zarr")
    async def test_get_helpers(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError):
            await store._get_bytes("none", prototype=PROTOTYPE)


for _name in SKIPPED.split():
    setattr(ReadOnlyStoreTests, f"test_{_name}", skipped)


def expected(data: bytes, byte_range: Any) -> bytes:
    if isinstance(byte_range, RangeByteRequest):
        return data[byte_range.start : byte_range.end]
    if isinstance(byte_range, OffsetByteRequest):
        return data[byte_range.offset :]
    if isinstance(byte_range, SuffixByteRequest):
        return data[-byte_range.suffix :]
    return data


class TestBlockStore(ReadOnlyStoreTests):
    store_cls = BlockStore

    @pytest.fixture
    def store_kwargs(self, repository: Repository) -> dict[str, Any]:
        return {"repository": repository}


class TestModelStore(ReadOnlyStoreTests):
    store_cls = ModelStore

    @pytest.fixture
    def store_kwargs(self, repository: Repository) -> Iterator[dict[str, Any]]:
        with repository.view("model") as view:
            yield {"view": view}
