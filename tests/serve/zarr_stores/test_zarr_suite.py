"""What zarr's own tests ask of every store."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests
from zarr_tensors import PROTOTYPE

from mergefs.repository import Repository
from mergefs.serve.zarr_store import BlockStore, ModelStore

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
