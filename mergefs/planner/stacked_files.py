"""The files of a stack of layers: those of one model, with one file of weights and a configuration that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mergefs.checkpoint.companions import rewritten
from mergefs.checkpoint.safetensors import build_header
from mergefs.json_input import load_json
from mergefs.manifest import Blob, FileRecipe, Manifest, Tensor, TensorData
from mergefs.planner.relaid import WEIGHT_INDEX, StoreBlob
from mergefs.planner.vocabulary import ReadBlob

WEIGHTS = "model.safetensors"
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""What configurations call the number of layers."""
_NUMBERED = ("mlp_only_layers",)
"""What they call lists of layers' numbers."""


@dataclass(frozen=True)
class Origin:
    """Where a layer of a stack comes from: which layer of which model."""

    model: Manifest
    layer: int


def stacked_files(
    model: Manifest, tensors: Sequence[Tensor], origins: Sequence[Origin], read: ReadBlob, store_blob: StoreBlob
) -> tuple[tuple[FileRecipe, ...], tuple[Tensor, ...]]:
    """Return the files of a stack, and its tensors in their order.

    Args:
        model: whose files are followed.
        tensors: of the stack.
        origins: of its layers.
        read: for configurations.
        store_blob: called for what is written anew.
    """
    files = {
        file.path: file
        for file in model.files
        if not any(isinstance(segment, TensorData) for segment in file.segments)
        and file.path != WEIGHT_INDEX
        and not ("/" not in file.path and file.path.endswith(".safetensors"))
    }
    header = store_blob(build_header([(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}))
    size = header.size + sum(tensor.nbytes for tensor in tensors)
    files[WEIGHTS] = FileRecipe(WEIGHTS, size, None, (header, *(TensorData(t.name) for t in tensors)))
    theirs = [_config(origin.model, read) or {} for origin in origins]
    content = None if _config(model, read) is None else _content(model, read)
    data = None if content is None else rewritten(content, lambda config: _fit(config, origins, theirs))
    if data is not None:
        files["config.json"] = FileRecipe("config.json", len(data), None, (store_blob(data),))
    return tuple(files[path] for path in sorted(files)), tuple(tensors)


def _config(model: Manifest, read: ReadBlob) -> dict[str, Any] | None:
    data = _content(model, read)
    try:
        value = None if data is None else load_json(data)
    except ValueError:
        return None  # not what transformers would write: left alone
    return value if isinstance(value, dict) else None


def _content(model: Manifest, read: ReadBlob) -> bytes | None:
    file = model.file_by_path.get("config.json")
    if file is None:
        return None
    return b"".join(read(segment) for segment in file.segments if isinstance(segment, Blob))


def _fit(config: dict[str, Any], origins: Sequence[Origin], theirs: Sequence[dict[str, Any]]) -> None:
    """Make a configuration one of a stack.

    Args:
        config: is changed.
        origins: of the stack's layers.
        theirs: of each layer, the configuration of the model that it comes from.
    """
    for key, part in config.items():
        if isinstance(part, dict):
            _fit(part, origins, [t[key] if isinstance(t.get(key), dict) else {} for t in theirs])
    counts = [key for key in _COUNTS if type(config.get(key)) is int]
    if not counts:
        return
    layers = config[counts[0]]
    for key, value in config.items():
        if not isinstance(value, list) or not ("layer" in key or "block" in key):
            continue
        lists = [t[key] if isinstance(t.get(key), list) else value for t in theirs]
        if key in _NUMBERED:
            config[key] = [
                n for n, (origin, mine) in enumerate(zip(origins, lists, strict=True)) if origin.layer in mine
            ]
        elif len(value) == layers and all(
            origin.layer < len(mine) for origin, mine in zip(origins, lists, strict=True)
        ):
            config[key] = [mine[origin.layer] for origin, mine in zip(origins, lists, strict=True)]
    for key in counts:
        config[key] = len(origins)
