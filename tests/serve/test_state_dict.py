"""`mergefs.open` and tensors for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import NUMPY, Array, array

import mergefs
from mergefs.catalog.leases import leases
from mergefs.errors import CorruptionError, NotARepositoryError, NotFoundError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve.view import View


def tensors() -> dict[str, Array]:
    found = builders.random_model(0)
    for name in NUMPY:
        found[f"kinds.{name}"] = array(np.arange(3000).reshape(30, 100) % 2, name)
        found[f"kinds.{name}.scalar"] = array(1, name)
    return found | {"empty": array(np.zeros((4, 0)), "BF16")}


@pytest.fixture
def model(tmp_path: Path, repository: Repository) -> Path:
    repository.ingest(builders.write_model(tmp_path / "model", tensors()), "model")
    return tmp_path / "model"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("threads", [1, 4])
def test_all_tensors_are_bit_for_bit_the_same(repository: Repository, model: Path, threads: int) -> None:
    with repository.view("model") as view:
        found = view.state_dict(threads=threads)
        assert list(found) == list(view.tensors)
        for name, expected in tensors().items():
            assert (tuple(found[name].shape), raw(found[name])) == (expected.shape, expected.data)
            assert found[name].dtype == view.tensors[name].dtype.torch
            assert raw(found[name]) == raw(view.tensor(name))


def test_patterns_and_names_choose(repository: Repository, model: Path) -> None:
    with repository.view("model") as view:
        assert set(view.state_dict("layers.0.*")) == {n for n in tensors() if n.startswith("layers.0.")}
        assert list(view.state_dict(tensors=["scale", "embed.weight", "scale"])) == ["scale", "embed.weight"]
        assert view.state_dict("none*") == view.state_dict([]) == {}
        with pytest.raises(NotFoundError, match="'none'"):
            view.state_dict(["scale", "none"])


@pytest.mark.parametrize("dtype", ["float32", torch.float16, torch.bfloat16, torch.float64])
def test_floats_are_converted_and_others_stay(repository: Repository, model: Path, dtype: Any) -> None:
    with repository.view("model") as view:
        plain = view.state_dict()
        found = view.state_dict(dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name, value in plain.items():
        expected = value.to(wanted) if value.dtype.is_floating_point else value
        assert found[name].dtype == expected.dtype
        assert raw(found[name]) == raw(expected)


@pytest.mark.parametrize("dtype", ["int8", "nothing", torch.int32, "Tensor"])
def test_other_dtypes_are_refused(repository: Repository, model: Path, dtype: Any) -> None:
    with repository.view("model") as view, pytest.raises(UserError, match="floating-point"):
        view.state_dict(dtype=dtype)


def test_tensors_are_put_on_a_device(repository: Repository, model: Path) -> None:
    with repository.view("model") as view:
        found = view.state_dict(device="meta")
    assert {value.device.type for value in found.values()} == {"meta"}


def test_tensors_are_the_callers_own(repository: Repository, model: Path) -> None:
    with repository.view("model") as view:
        first = view.state_dict("embed.weight")["embed.weight"]
        first.zero_()
        assert raw(view.state_dict("embed.weight")["embed.weight"]) == tensors()["embed.weight"].data


def test_a_lazy_merge_is_derived_into_them(repository: Repository, tmp_path: Path) -> None:
    base = builders.random_model(0)
    repository.ingest(builders.write_model(tmp_path / "base", base), "base")
    repository.ingest(builders.write_model(tmp_path / "e", builders.fine_tuned(base, 1)), "e", base="base")
    recipe = Recipe.parse(builders.recipe_text("ties", [("e", {"weight": 0.7, "density": 0.5})], "base"))
    repository.merge(recipe, "lazy", lazy=True)
    with repository.view("lazy") as view:
        found = {name: raw(value) for name, value in view.state_dict().items()}
    assert found == {name: tensor.data for name, tensor in builders.tensors_of(repository, "lazy").items()}


def test_damage_is_an_error(repository: Repository, model: Path) -> None:
    for pack in (repository.path / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 3] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
    with repository.view("model") as view, pytest.raises(CorruptionError):
        view.state_dict()


MEASURED = """
import resource, sys, torch, mergefs
with mergefs.open("big", repo=sys.argv[1]) as model:
    model.state_dict("small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = model.state_dict(threads=2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 - sum(value.nbytes for value in weights.values()))
"""


def test_there_is_no_second_copy(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    values = np.random.default_rng(0).integers(0, 1 << 15, (64 << 20,), np.uint16).tobytes()
    big = {"big": Array("BF16", (64 << 10, 1024), values), "small": array(np.ones((600, 1024)), "BF16")}
    folder = builders.write_model(tmp_path / "big", big)
    with Repository.open(tmp_path / "repo", sync=False) as repository:
        repository.ingest(folder, "big")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "repo")], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 64 << 20


# -- mergefs.open ------------------------------------------------------------------------------------------


def test_a_model_is_opened_by_itself(
    repository: Repository, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held() -> list[str]:
        with repository.catalog.read() as txn:
            return [lease.purpose for lease in leases(txn)]

    with mergefs.open("model", repo=repository.path) as found:
        assert isinstance(found, View)
        assert found.read("model.safetensors", 0, 8) == (model / "model.safetensors").read_bytes()[:8]
        assert held() == ["view"]
    assert held() == []
    found.close()
    monkeypatch.delenv("MERGEFS_REPO", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotARepositoryError):
        mergefs.open("model")
    monkeypatch.chdir(repository.path / "packs")
    mergefs.open(repository.resolve("model")[:10], cache_bytes=1 << 20).close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEFS_REPO", str(repository.path))
    mergefs.open("model").close()
    with pytest.raises(NotFoundError):
        mergefs.open("none")
    assert held() == []


def test_importing_mergefs_is_light() -> None:
    heavy = "torch", "zarr", "numba", "fsspec", "lmdb", "numpy", "transformers"
    text = f"import sys, mergefs; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", text], check=True, capture_output=True).stdout == b"[]\n"


def test_opening_and_reading_bytes_needs_no_torch(repository: Repository, model: Path) -> None:
    text = (
        "import sys, mergefs\n"
        "with mergefs.open('model', repo=sys.argv[1]) as model:\n"
        "    model.read('model.safetensors')\n"
        "print([name for name in ('torch', 'zarr') if name in sys.modules])"
    )
    command = [sys.executable, "-c", text, str(repository.path)]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"[]\n"
