"""The files that an export has: those of the model, or its tensors in other shards or another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mergefs.blocks.floats import from_float, to_float
from mergefs.checkpoint import adapter
from mergefs.checkpoint.companions import rewritten, set_dtype, set_total_size, weight_index
from mergefs.checkpoint.directory import INDEX, SINGLE
from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import CorruptionError, UserError
from mergefs.hashing import Buffer
from mergefs.json_input import load_json
from mergefs.manifest import Blob, FileRecipe, Tensor, TensorData
from mergefs.serve.view import View

CONFIG = "config.json"
OUTPUT_DTYPES = {DTYPES[name].torch_name: DTYPES[name] for name in ("BF16", "F16", "F32")}

Part = Callable[[], Buffer]
"""Makes a run of a file's bytes, on any thread."""


@dataclass(frozen=True)
class OutputFile:
    """A file to be written.

    Attributes:
        path: relative, with `/` between folders.
        size: in bytes.
        sha256: of its bytes where it is known, or None.
        parts: its bytes, in order.
        is_stored: whether it is the model's file of this path.
    """

    path: str
    size: int
    sha256: str | None
    parts: Sequence[Part]
    is_stored: bool


def output_dtype(name: str | None) -> DType | None:
    """Return the dtype that a user names: `bfloat16`, `float16`, `float32`; None stays None.

    Raises:
        UserError: when it is another one.
    """
    if name is None:
        return None
    if name not in OUTPUT_DTYPES:
        raise UserError(f"'{name}' is not a dtype to export to: use {', '.join(OUTPUT_DTYPES)}")
    return OUTPUT_DTYPES[name]


def lay_out(view: View, shard_size: int | None = None, dtype: DType | None = None) -> list[OutputFile]:
    """Return the files of an export, those with weights first and the configuration last.

    Args:
        view: the model.
        shard_size: put the tensors into shards of at most so many bytes of tensors (a larger tensor has one of its
            own); None leaves them in the files that they are in.
        dtype: of all float tensors; None leaves them as they are.

    Raises:
        UserError: when the model is an adapter, which has no shards, or the size is not positive.
        CorruptionError: when the header of a file of weights is damaged.
    """
    manifest = view.manifest
    weights = weight_files(view)
    if shard_size is not None and shard_size < 1:
        raise UserError(f"a shard size of {shard_size} bytes: give at least one byte")
    if shard_size is not None and any(file.path == adapter.WEIGHTS for file in weights):
        raise UserError("an adapter's weights are one file: leave the shard size out")
    if dtype is not None and all(tensor.dtype in (dtype, *_fixed()) for tensor in manifest.tensors):
        dtype = None
    made: dict[str, OutputFile] = {}
    if shard_size is not None and weights:
        made = _shards(view, shard_size, dtype, shards_metadata(view))
        others = [f for f in manifest.files if f not in weights and f.path != INDEX]
    elif dtype is not None:
        made = {file.path: _retyped(view, file, dtype) for file in weights}
        others = [file for file in manifest.files if file not in weights]
    else:
        others = list(manifest.files)
    for file in others:
        made.setdefault(file.path, _companion(view, file, dtype))
    heavy = {path for path, file in made.items() if path.endswith(".safetensors")}
    return sorted(made.values(), key=lambda f: (f.path not in heavy, f.path == CONFIG, f.path))


def weight_files(view: View) -> list[FileRecipe]:
    """Return the model's files that have tensors in them."""
    return [file for file in view.manifest.files if any(isinstance(s, TensorData) for s in file.segments)]


def shards_metadata(view: View) -> dict[str, str] | None:
    """Return the `__metadata__` of every shard of an export, the first of the model's files before others."""
    metadata: dict[str, str] = {}
    for file in reversed(weight_files(view)):
        metadata |= file_metadata(view, file) or {}
    return metadata or None


def _fixed() -> list[DType]:
    """Return the dtypes that are never converted."""
    return [dtype for dtype in DTYPES.values() if not dtype.is_float]


def converted_dtype(tensor: Tensor, dtype: DType | None) -> DType:
    """Return the dtype that a tensor has in an export to `dtype`."""
    return dtype if dtype is not None and tensor.dtype.is_float else tensor.dtype


def _companion(view: View, file: FileRecipe, dtype: DType | None) -> OutputFile:
    """Return a file without tensors, with the dtype and size in it changed where they are."""
    if dtype is not None and file.path == CONFIG:
        return _rewritten(view, file, lambda config: set_dtype(config, dtype))
    if dtype is not None and file.path == INDEX:
        size = sum(tensor.elements * converted_dtype(tensor, dtype).itemsize for tensor in view.manifest.tensors)
        return _rewritten(view, file, lambda index: set_total_size(index, size))
    return _stored(view, file)


def _stored(view: View, file: FileRecipe) -> OutputFile:
    parts = [_file_part(view, file.path, number) for number in range(view.file_parts(file.path))]
    return OutputFile(file.path, file.size, view.files[file.path].sha256, parts, True)


def _rewritten(view: View, file: FileRecipe, change: Callable[[dict[str, Any]], None]) -> OutputFile:
    data = rewritten(view.read(file.path), change)
    return _stored(view, file) if data is None else _literal(file.path, data)


def _literal(path: str, data: bytes) -> OutputFile:
    return OutputFile(path, len(data), None, [lambda: data], False)


def _retyped(view: View, file: FileRecipe, dtype: DType) -> OutputFile:
    tensors = [view.tensors[s.tensor] for s in file.segments if isinstance(s, TensorData)]
    return _weights(view, file.path, tensors, dtype, file_metadata(view, file))


def _shards(view: View, shard_size: int, dtype: DType | None, metadata: dict[str, str] | None) -> dict[str, OutputFile]:
    groups = list(_grouped(view.manifest.tensors, shard_size, dtype))
    if len(groups) == 1:
        return {SINGLE: _weights(view, SINGLE, groups[0], dtype, metadata)}
    count = f"{len(groups):05}"
    paths = [f"model-{number:05}-of-{count}.safetensors" for number in range(1, len(groups) + 1)]
    files = {path: _weights(view, path, group, dtype, metadata) for path, group in zip(paths, groups, strict=True)}
    home = {tensor.name: path for path, group in zip(paths, groups, strict=True) for tensor in group}
    size = sum(tensor.elements * converted_dtype(tensor, dtype).itemsize for tensor in view.manifest.tensors)
    return {**files, INDEX: _literal(INDEX, weight_index(home, size))}


def _grouped(tensors: Iterable[Tensor], shard_size: int, dtype: DType | None) -> Iterator[list[Tensor]]:
    """Yield the tensors of each shard: in their order, as many as fit."""
    group: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.elements * converted_dtype(tensor, dtype).itemsize
        if group and filled + size > shard_size:
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += size
    yield group


def _weights(
    view: View, path: str, tensors: list[Tensor], dtype: DType | None, metadata: dict[str, str] | None
) -> OutputFile:
    ordered, header = arranged(tensors, dtype, metadata)
    parts: list[Part] = [lambda: header]
    for tensor in ordered:
        parts += [
            tensor_part(view, tensor, number, converted_dtype(tensor, dtype)) for number in range(len(tensor.blocks))
        ]
    size = len(header) + sum(t.elements * converted_dtype(t, dtype).itemsize for t in ordered)
    return OutputFile(path, size, None, parts, False)


def arranged(tensors: list[Tensor], dtype: DType | None, metadata: dict[str, str] | None) -> tuple[list[Tensor], bytes]:
    """Return the tensors of a file of weights in the order in which an export writes them, and the file's header.

    Args:
        tensors: in the order of the model.
        dtype: of the float ones; None for their own.
        metadata: of the file.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element size, as loaders like it.
    ordered = sorted(tensors, key=lambda tensor: -converted_dtype(tensor, dtype).itemsize)
    return ordered, build_header([(t.name, converted_dtype(t, dtype), t.shape) for t in ordered], metadata)


def _file_part(view: View, path: str, number: int) -> Part:
    return lambda: view.part(path, number)


def tensor_part(view: View, tensor: Tensor, number: int, dtype: DType) -> Part:
    """Return what makes the bytes of a tensor's block in a dtype."""

    def make() -> Buffer:
        raw = view.fresh_block(tensor, number)
        return raw if dtype is tensor.dtype else from_float(to_float(raw, tensor.dtype), dtype)

    return make


def file_metadata(view: View, file: FileRecipe) -> dict[str, str] | None:
    """Return the `__metadata__` of a file of weights."""
    size = 0
    for segment in file.segments:
        if not isinstance(segment, Blob):
            break
        size += segment.size
    try:
        found = load_json(view.read(file.path, 8, size - 8)).get("__metadata__")
    except (ValueError, AttributeError) as error:
        raise CorruptionError(f"the header of '{file.path}' is damaged: {error}") from error
    return None if found is None else dict(found)
