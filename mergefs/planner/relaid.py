"""The files of a fitted base: the base's, with some tensors left out and others added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mergefs.checkpoint.companions import rewritten
from mergefs.checkpoint.safetensors import build_header
from mergefs.errors import CorruptionError
from mergefs.json_input import load_json
from mergefs.manifest import Blob, FileRecipe, Manifest, Tensor, TensorData
from mergefs.planner.vocabulary import ReadBlob

WEIGHT_INDEX = "model.safetensors.index.json"

StoreBlob = Callable[[bytes], Blob]
"""Stores bytes and returns their segment."""


def relaid(
    base: Manifest, dropped: set[str], added: Sequence[Tensor], read: ReadBlob, store_blob: StoreBlob
) -> tuple[tuple[FileRecipe, ...], tuple[Tensor, ...]]:
    """Return the files, and the tensors in their order.

    Args:
        base: whose files they are.
        dropped: names of its tensors that are left out.
        added: tensors that it does not have; they come last in the last file of weights.
        read: for headers and the index, which are written anew where their tensors change.
        store_blob: called for those.
    """
    weights = [file for file in base.files if any(isinstance(s, TensorData) for s in file.segments)]
    tensors = {tensor.name: tensor for tensor in (*base.tensors, *added)}
    files: dict[str, FileRecipe] = {file.path: file for file in base.files}
    order: list[str] = []
    where: dict[str, str] = {}
    for file in weights:
        old = [s.tensor for s in file.segments if isinstance(s, TensorData)]
        new = [name for name in old if name not in dropped]
        if file is weights[-1]:
            new += [tensor.name for tensor in added]
        order += new
        where |= dict.fromkeys(new, file.path)
        if new != old:
            files[file.path] = _weights(file, [tensors[name] for name in new], read, store_blob)
    index = files.get(WEIGHT_INDEX)
    if index is not None:
        files[WEIGHT_INDEX] = _index(index, where, sum(tensors[n].nbytes for n in order), read, store_blob)
    return tuple(files[path] for path in sorted(files)), tuple(tensors[name] for name in order)


def _weights(file: FileRecipe, tensors: list[Tensor], read: ReadBlob, store_blob: StoreBlob) -> FileRecipe:
    try:
        metadata = load_json(_content(file, read)[8:]).get("__metadata__")
    except ValueError as error:
        raise CorruptionError(f"the header of '{file.path}' is damaged: {error}") from error
    header = store_blob(build_header([(t.name, t.dtype, t.shape) for t in tensors], metadata))
    size = header.size + sum(tensor.nbytes for tensor in tensors)
    return FileRecipe(file.path, size, None, (header, *(TensorData(t.name) for t in tensors)))


def _index(file: FileRecipe, where: dict[str, str], size: int, read: ReadBlob, store_blob: StoreBlob) -> FileRecipe:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"] = where
        index.setdefault("metadata", {})["total_size"] = size

    data = rewritten(_content(file, read), change)
    if data is None:
        raise CorruptionError(f"the index '{file.path}' is damaged: ingest the checkpoint again with a sound one")
    blob = store_blob(data)
    return replace(file, size=blob.size, sha256=None, segments=(blob,))


def _content(file: FileRecipe, read: ReadBlob) -> bytes:
    return b"".join(read(segment) for segment in file.segments if isinstance(segment, Blob))
