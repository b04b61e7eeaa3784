"""Makes models for the tests, and reads them back, without the code under test."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mergefs.catalog.environment import Transaction
from mergefs.merge import remembered
from mergefs.recipe import Recipe
from mergefs.repository import Repository

NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
}
"""The numpy type of every safetensors dtype."""

FLOATS = ("F8_E5M2", "F8_E4M3", "F16", "BF16", "F32", "F64")
FINEST_BLOCK = 4096
"""The smallest block size of a repository: 2048 elements."""

EXPERTS = ("expert-lr1e-5", "expert-lr2e-5", "expert-lr1e-4")


@dataclass(frozen=True)
class Array:
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> NDArray[np.float64]:
        """The elements in float64, flat."""
        with np.errstate(invalid="ignore"):
            return np.frombuffer(self.data, NUMPY[self.dtype]).astype(np.float64)


Tensors = Mapping[str, Array]


def array(values: Any, dtype: str) -> Array:
    """Round values to a dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(values).astype(NUMPY[dtype])
    return Array(dtype, tuple(made.shape), made.tobytes())


def pack(tensors: Tensors, metadata: Mapping[str, str] | None = None, padding: int = 0) -> bytes:
    """Return a safetensors file with the tensors in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.data
    text = json.dumps(header, ensure_ascii=False).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + data


def unpack(content: bytes) -> dict[str, Array]:
    """Return the tensors of a safetensors file."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = Array(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
    return found


def write_model(folder: Path, tensors: Tensors, files: Mapping[str, bytes] | None = None) -> Path:
    """Write a model directory and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(pack(tensors, {"format": "pt"}))
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def load_model(folder: Path) -> dict[str, Array]:
    """Return all tensors of a model directory."""
    found: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= unpack(path.read_bytes())
    return found


def tree(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder by its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()) for path in paths}


def sha256(content: bytes) -> str:
    """Return a hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


def served(repository: Repository, name: str) -> dict[str, str]:
    """Return the SHA-256 of every file of a model by its path, read through a view."""
    with repository.view(name) as view:
        return {path: sha256(view.read(path)) for path in view.files}


def tensors_of(repository: Repository, name: str) -> dict[str, Array]:
    """Return the tensors of a model as its served safetensors files hold them."""
    found: dict[str, Array] = {}
    with repository.view(name) as view:
        for path in view.files:
            if path.endswith(".safetensors"):
                found |= unpack(view.read(path))
    return found


def new_repository(path: Path, block_size: int = FINEST_BLOCK) -> Repository:
    """Make a repository that does not wait for the disk."""
    Repository.init(path, block_size).close()
    return Repository.open(path, sync=False)


def contents(folder: Path) -> dict[str, str]:
    """Return everything that lasts in a repository, except for its catalog: SHA-256 by path."""
    return {path: digest for path, digest in tree(folder).items() if not path.startswith(("catalog/", "tmp/"))}


def random_model(seed: int, dtype: str = "BF16", scale: float = 0.02) -> dict[str, Array]:
    """Return a small model: matrices of several blocks, a fused stack, a vector, a scalar and an integer tensor."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": array(random.normal(0, scale, (70, 96)), dtype),
        "layers.0.attn.weight": array(random.normal(0, scale, (64, 64)), dtype),
        "layers.0.experts": array(random.normal(0, scale, (3, 20, 50)), dtype),
        "layers.0.norm": array(1 + random.normal(0, 0.1, 64), dtype),
        "layers.1.attn.weight": array(random.normal(0, scale, (64, 65)), dtype),
        "scale": array(random.normal(0, scale), dtype),
        "positions": array(np.arange(40), "I64"),
    }


def fine_tuned(
    base: Tensors, seed: int, *, delta: float = 3e-4, dtype: str | None = None, only: str = ""
) -> dict[str, Array]:
    """Return a model whose float tensors (those with `only` in their names) are the base's plus noise."""
    random = np.random.default_rng(seed)
    found = {}
    for name, tensor in base.items():
        kind = dtype or tensor.dtype
        if tensor.dtype not in FLOATS:
            found[name] = tensor
            continue
        values = tensor.values
        if only in name:
            values = values + random.normal(0, delta, values.shape)
        found[name] = array(values.reshape(tensor.shape), kind)
    return found


def recipe_text(method: str, models: Iterable[Any], base: str | None = None, **parameters: Any) -> str:
    """Return a recipe (JSON, which YAML reads).

    Args:
        method: the merge method.
        models: names, or pairs of a name and its own parameters.
        base: the base's name.
        parameters: of the whole recipe; `dtype` is put where it belongs, `scale` is lambda.
    """
    value: dict[str, Any] = {"merge_method": method, "models": []}
    for model in models:
        name, own = (model, None) if isinstance(model, str) else model
        value["models"].append({"model": name, **({"parameters": own} if own else {})})
    if base is not None:
        value["base_model"] = base
    if "dtype" in parameters:
        value["dtype"] = parameters.pop("dtype")
    if "scale" in parameters:
        parameters["lambda"] = parameters.pop("scale")
    if parameters:
        value["parameters"] = parameters
    return json.dumps(value)


def forget(repository: Repository) -> int:
    """Have a repository derive blocks again that it has derived before; return how many it remembered."""

    def delete(txn: Transaction) -> int:
        keys = [key for key, _ in txn.items(remembered.TABLE)]
        return sum(txn.delete(remembered.TABLE, key) for key in keys)

    return repository.catalog.write(delete)


def merged_models(folder: Path) -> Repository:
    """Return an open repository in `folder`: a base, experts x and y, their merge `merged`, and the same lazy, `later`.

    The checkpoints and the recipe lie beside it.
    """
    repository = new_repository(folder / "repository")
    base = random_model(1)
    write_model(folder / "base", base, {"config.json": b"{}"})
    repository.ingest(folder / "base", "base")
    for seed, name in enumerate(["x", "y"]):
        write_model(folder / name, fine_tuned(base, seed), {"config.json": b"{}"})
        repository.ingest(folder / name, name, base="base")
    merge_xy(repository)
    return repository


def merge_xy(repository: Repository) -> None:
    """Merge x and y of `merged_models`, once stored and once lazy."""
    path = repository.path.parent / "recipe.yml"
    path.write_text(recipe_text("task_arithmetic", [("x", {"weight": 0.5}), ("y", {"weight": 0.5})], "base"))
    repository.merge(Recipe.load(path), "merged")
    repository.merge(Recipe.load(path), "later", lazy=True)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for 20 seconds at most."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
