"""All blocks of a repository as a Zarr store, by their ids."""

from __future__ import annotations

import asyncio

import pytest
from zarr_tensors import PROTOTYPE, TENSORS, numpy_bytes

from mergefs.blocks.pack import NO_BASE
from mergefs.hashing import hex_digest
from mergefs.repository import Repository


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
