"""A session through Zarr: arrays of the model are changed, made and deleted; zarr's own tests run on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import hypothesis
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from mergefs.edit.session import Session
from mergefs.edit.zarr_session import SessionStore
from mergefs.errors import UserError
from mergefs.repository import Repository

WEIGHTS = "model.safetensors"
PROTOTYPE = default_buffer_prototype()


@pytest.fixture
def model(repository: Repository, tmp_path: Path) -> Repository:
    """A repository with a model `model`."""
    folder = builders.write_model(tmp_path / "model", builders.random_model(1), {"config.json": b"{}"})
    repository.ingest(folder, "model")
    return repository


@pytest.fixture
def session(model: Repository) -> Iterator[Session]:
    with model.edit("model") as opened:
        yield opened


def cleared(session: Session) -> SessionStore:
    """The session's store with everything deleted from it."""
    store = session.zarr()
    asyncio.run(store.clear())
    return store


# -- tensors -----------------------------------------------------------------------------------------------


def test_writing_to_an_array_changes_its_chunks(model: Repository, session: Session) -> None:
    group = zarr.open_group(session.zarr(), mode="r+")
    assert sorted(group.array_keys()) == ["positions", "scale"]
    array = group["layers/0/attn/weight"]
    assert isinstance(array, zarr.Array)
    array[:, 10] = 0.5
    array[3] = np.asarray(array[4])
    group["layers/0/experts"][1, 2:4] = 0  # zeros: Zarr deletes chunks that are nothing else
    group["positions"][5] = -7
    group["scale"][...] = 2
    report = session.commit("changed")
    tensors = builders.random_model(1)
    expected = {
        name: np.frombuffer(t.data, builders.NUMPY[t.dtype]).reshape(t.shape).copy() for name, t in tensors.items()
    }
    expected["layers.0.attn.weight"][:, 10] = 0.5
    expected["layers.0.attn.weight"][3] = expected["layers.0.attn.weight"][4]
    expected["layers.0.experts"][1, 2:4] = 0
    expected["positions"][5] = -7
    expected["scale"][...] = 2
    found = builders.tensors_of(model, "changed")
    assert {name: t.data for name, t in found.items()} == {name: a.tobytes() for name, a in expected.items()}
    parent = set(model.manifest(report.parent).block_ids())
    assert len(set(model.manifest(report.manifest).block_ids()) - parent) == report.blocks_new
    assert model.fsck(read_data=True).ok


def test_one_chunk_is_one_block(model: Repository, session: Session) -> None:
    array = zarr.open_array(session.zarr(), path="embed/weight")
    assert array.chunks == (21, 96)
    array[21:42] = 1
    report = session.commit("changed")
    assert report.blocks_new == 1


def test_a_deleted_chunk_is_zeros_and_stays_so(model: Repository, session: Session) -> None:
    array = zarr.open_array(session.zarr(), path="embed/weight")
    array[:21] = 0
    assert not asyncio.run(session.zarr().exists("embed/weight/c/0/0"))
    assert session.tree.file(WEIGHTS).local
    session.close()
    with model.edit(resume=session.id) as again:
        array = zarr.open_array(again.zarr(), path="embed/weight")
        assert not np.asarray(array[:21]).any()
        array[0] = 1
        again.commit("changed")
    found = builders.tensors_of(model, "changed")["embed.weight"].values.reshape(70, 96)
    assert (found[0] == 1).all()
    assert not found[1:21].any()
    assert (found[21:] == builders.random_model(1)["embed.weight"].values.reshape(70, 96)[21:]).all()


def test_tensors_of_files_that_were_changed_first(model: Repository, session: Session) -> None:
    tensors = {"other": builders.array(np.arange(6).reshape(2, 3), "F32")}
    session.tree.create(WEIGHTS).write(0, builders.pack(tensors))
    group = zarr.open_group(session.zarr(), mode="r+")
    assert list(group) == ["other"]
    group["other"][1] = 9
    session.commit("other")
    assert builders.tensors_of(model, "other")["other"].values.tolist() == [0, 1, 2, 9, 9, 9]


# -- arrays that are made and deleted ----------------------------------------------------------------------


def test_arrays_that_are_made_become_tensors(model: Repository, session: Session) -> None:
    group = zarr.open_group(session.zarr(), mode="r+")
    random = np.random.default_rng(1)
    values = random.normal(size=(70, 5)).astype("f4")
    group.create_array("new/weight", data=values, chunks=(30, 2))
    del group["layers/0"]
    group.create_array("embed/weight", shape=(4, 4), chunks=(2, 4), dtype="i2", overwrite=True)[2:] = 7
    group.create_array("one", shape=(), dtype="f8", attributes={"name": "a/b"})[...] = 0.5
    session.commit("changed")
    found = builders.tensors_of(model, "changed")
    assert list(found) == ["embed.weight", "layers.1.attn.weight", "scale", "positions", "new.weight", "a/b"]
    assert found["new.weight"] == builders.array(values, "F32")
    assert found["embed.weight"] == builders.array(np.repeat([[0], [0], [7], [7]], 4, 1), "I16")
    assert found["a/b"] == builders.array(np.float64(0.5), "F64")
    assert found["positions"] == builders.random_model(1)["positions"]
    assert model.fsck(read_data=True).ok


def test_arrays_that_are_made_in_shards_are_in_the_index(model: Repository, tmp_path: Path) -> None:
    tensors = builders.random_model(3)
    folder = tmp_path / "shards"
    folder.mkdir()
    shards = {"a-1.safetensors": ["embed.weight", "scale"], "a-2.safetensors": ["positions", "layers.0.norm"]}
    for name, inside in shards.items():
        (folder / name).write_bytes(builders.pack({tensor: tensors[tensor] for tensor in inside}))
    weight_map = {tensor: name for name, inside in shards.items() for tensor in inside}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.ingest(folder, "shards")
    with model.edit("shards") as session:
        group = zarr.open_group(session.zarr(), mode="r+")
        del group["scale"]
        group.create_array("b", data=np.arange(3))
        session.commit("changed")
    found = builders.tensors_of(model, "changed")
    assert list(found) == ["embed.weight", "positions", "layers.0.norm", "b"]
    with model.view("changed") as view:
        written = json.loads(view.read("model.safetensors.index.json"))
    del weight_map["scale"]
    assert written["weight_map"] == {**weight_map, "b": "a-2.safetensors"}
    assert written["metadata"]["total_size"] == sum(len(tensor.data) for tensor in found.values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: g.create_array("x", shape=(3,), dtype="c8"), "'x' is of complex64"),
        (lambda g: g.create_array("x", shape=(3,), dtype="i4", attributes={"by": "me"}), "attribute 'by'"),
        (lambda g: g["positions"].attrs.update(unit="m"), "'positions' has the attribute 'unit'"),
        (lambda g: g.create_group("x", attributes={"by": "me"}), "attribute 'by'"),
        (lambda g: g.create_array("x", shape=(3,), dtype="i4", attributes={"name": "scale"}), "called 'scale'"),
    ],
)
def test_what_no_tensor_can_be_is_refused(model: Repository, session: Session, make: Any, words: str) -> None:
    make(zarr.open_group(session.zarr(), mode="r+"))
    with pytest.raises(UserError, match=words):
        session.commit("changed")
    assert session.is_open
    session.discard()


def test_keys_without_an_array_are_refused_and_may_be_deleted(model: Repository, session: Session) -> None:
    store = session.zarr()
    asyncio.run(store.set("note", cpu.Buffer.from_bytes(b"x")))
    with pytest.raises(UserError, match="the key 'note' belongs to no array"):
        session.commit("changed")
    asyncio.run(store.delete("note"))
    zarr.open_group(session.zarr(), mode="r+").create_group("empty")
    assert session.commit("changed").manifest == model.resolve("model")


def test_a_store_of_files_that_were_replaced_is_of_no_use(session: Session) -> None:
    array = zarr.open_array(session.zarr(), path="scale")
    session.tree.create(WEIGHTS).write(0, builders.pack(builders.random_model(2)))
    with pytest.raises(UserError, match="make another one"):
        array[...] = 1
    session.discard()


# -- what zarr asks of every store -------------------------------------------------------------------------


class TestSessionStore(StoreTests[SessionStore, cpu.Buffer]):
    """Zarr's tests, on a session from which every tensor was deleted: they expect an empty store."""

    store_cls = SessionStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, session: Session) -> dict[str, Any]:
        cleared(session)
        return {"session": session}

    async def set(self, store: SessionStore, key: str, value: Buffer) -> None:
        store._changed.put(key, value.to_bytes())

    async def get(self, store: SessionStore, key: str) -> Buffer:
        value = store._changed.get(key)
        assert value is not None
        return self.buffer_cls.from_bytes(value)

    def test_store_repr(self, store: SessionStore) -> None:
        assert repr(store) == f"SessionStore({store._session.id!r})"

    def test_store_supports_writes(self, store: SessionStore) -> None:
        assert store.supports_writes
        assert store.supports_deletes

    def test_store_supports_listing(self, store: SessionStore) -> None:
        assert store.supports_listing


@pytest.mark.parametrize("machine", [ZarrHierarchyStateMachine, ZarrStoreStateMachine])
def test_state_machines(model: Repository, machine: Any) -> None:
    opened: list[Session] = []

    def make() -> Any:
        for session in opened:
            session.discard()
        opened[:] = [model.edit("model")]
        return machine(opened[0].zarr())

    quick = hypothesis.settings(
        max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(make, settings=quick)
    opened[0].discard()
