"""A repository with tensors of every dtype, and its stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import zarr
from safetensors.torch import save_file
from zarr_tensors import BLOCK, TENSORS

from mergefs.repository import Repository
from mergefs.serve.zarr_store import ModelStore


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
