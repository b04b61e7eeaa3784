"""Values read through Zarr are those of the checkpoint, and no more is read for them than is needed."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from zarr_tensors import FLOATS, SHAPES, TENSORS, WHOLE, array, numpy_bytes

from mergefs.blocks.reader import ReadTotals
from mergefs.repository import Repository
from mergefs.serve.view import View
from mergefs.serve.zarr_store import ModelStore, array_path


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
