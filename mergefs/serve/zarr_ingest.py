"""Ingest from Zarr: a group's arrays become a model's tensors, so that who writes blocks need not write files first."""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from mergefs.blocks.geometry import Grid, grid
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.checkpoint.directory import INDEX, SINGLE, Checkpoint, CheckpointFile, companions
from mergefs.checkpoint.safetensors import Header, TensorEntry, build_header
from mergefs.checkpoint.strict import LARGEST, quote
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import CheckpointError, UserError
from mergefs.hashing import Buffer
from mergefs.ingest import IngestReport, Progress, take_in, window
from mergefs.manifest import Blob, TensorData
from mergefs.merge.output import is_carried
from mergefs.pipeline import available_cores
from mergefs.serve import zarr_dtypes
from mergefs.serve.cache import BlockCache
from mergefs.store import Store

SLAB_BYTES = 8 << 20
"""About so much of an array is read at once."""

MOST_SLAB_BYTES = 256 << 20
"""The most that is read at once so that a chunk need not be decoded again for the next part of it."""

MOST_CHUNK_BYTES = 1 << 30
"""Zarr decodes a chunk whole."""

_BY_NUMPY = {dtype.numpy_name: dtype for dtype in DTYPES.values()}

Files = str | os.PathLike[str] | Mapping[str, bytes]

zarr_dtypes.register()


def ingest_zarr(
    store: Store,
    group: Any,
    name: str,
    *,
    base: str | None = None,
    files: Files | None = None,
    kind: str = "model",
    threads: int | None = None,
    progress: Progress | None = None,
) -> IngestReport:
    """Take the arrays of a Zarr group, at whatever depth, into a repository as the tensors of a model.

    The model has one `model.safetensors`, in the order in which the safetensors library writes: wide elements first,
    then by name. A tensor is named by its array's attribute `name` where that and the attribute `dtype` are there, as
    in the groups that mergefs serves; otherwise by its path, with dots for slashes. Arrays are read block by block;
    what they hold must not change meanwhile.

    Args:
        store: the repository.
        group: a Zarr group, or what `zarr.open_group` opens: a store, a folder, a URL.
        name: the ref for it.
        base: the ref or id of the model that it was fine-tuned from; see `mergefs.ingest.ingest`.
        files: the model's other files (configuration, tokenizer): a folder, of which those at its top are taken that
            are no weights, or their contents by name. By default those at the top of the group's own folder, and
            where there are none those of the base.
        kind, threads, progress: see `mergefs.ingest.ingest`.

    Raises:
        CheckpointError: when there is no group or no array in it, an array has an element type that safetensors has
            not, two are of one name, or one cannot be read.
        NotFoundError, RefNameError, UserError, RecipeError: see `mergefs.ingest.ingest`.
    """
    opened = _open(group)
    where = str(opened.store_path)
    arrays = _arrays(opened, where)
    others: Mapping[str, bytes | Path] = _other_files(store, group, files, base)
    header = build_header([(a.name, a.dtype, a.shape) for a in arrays], {"format": "pt"})
    source = _Source(arrays, _header(arrays, header), where)
    checkpoint = _checkpoint(source, others, where)
    threads = threads or available_cores()
    under_way = window(threads) * store.block_elements * max(array.dtype.itemsize for array in arrays)
    report = take_in(
        store,
        checkpoint,
        lambda: _Contents(checkpoint, source, others, under_way),
        name,
        base=base,
        kind=kind,
        threads=threads,
        progress=progress,
    )
    return replace(report, format="zarr")


@dataclass(frozen=True)
class _Array:
    """An array that becomes a tensor."""

    name: str
    dtype: DType
    array: zarr.Array[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @cached_property
    def slabs(self) -> Grid:
        """How it is read: like a grid of blocks, in runs that end where chunks end as far as that is possible."""
        width, shape, chunks = self.dtype.itemsize, self.shape, self.array.chunks
        cut = grid(shape, max(1, SLAB_BYTES // width))
        if not len(cut) or not shape:
            return cut
        # Cut behind an axis along which chunks are longer than one, each of them would be decoded for every index.
        axis = next((axis for axis in range(cut.axis) if chunks[axis] > 1), cut.axis)
        if prod(shape[axis + 1 :]) * chunks[axis] * width > MOST_SLAB_BYTES:
            axis = cut.axis
        run = cut.block_shape[axis]
        if run >= chunks[axis]:
            run -= run % chunks[axis]
        elif prod(shape[axis + 1 :]) * chunks[axis] * width <= MOST_SLAB_BYTES:
            run = min(chunks[axis], shape[axis])
        return Grid(shape, (1,) * axis + (run,) + shape[axis + 1 :], axis)

    def read(self, number: int) -> Buffer:
        """Return the bytes of a slab.

        Raises:
            CheckpointError: when the array cannot be read there.
        """
        try:
            values = np.asarray(self.array[_selection(self.slabs, number)])
        except Exception as error:
            where = f"{self.array.store_path}: the array {quote(self.array.path)}"
            raise CheckpointError(f"{where} cannot be read: {error}; mend or write it again") from error
        values = np.ascontiguousarray(values.astype(self.dtype.numpy, copy=False))
        return values.reshape(-1).view(np.uint8).data


def _selection(slabs: Grid, number: int) -> tuple[int | slice, ...]:
    if not slabs.shape:
        return ()
    coordinates = np.unravel_index(number, slabs.counts)
    at = int(coordinates[slabs.axis]) * slabs.block_shape[slabs.axis]
    stop = min(at + slabs.block_shape[slabs.axis], slabs.shape[slabs.axis])
    rest = [slice(None)] * (len(slabs.shape) - slabs.axis - 1)
    return (*map(int, coordinates[: slabs.axis]), slice(at, stop), *rest)


@dataclass(frozen=True)
class _Source:
    """The arrays as one safetensors file."""

    arrays: list[_Array]
    header: Header
    where: str

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor begins in the file."""
        return [entry.start for entry in self.header.tensors]


class _Contents:
    """See `mergefs.ingest.Contents`.

    Args:
        under_way: how many bytes may lie between the first and the last that are read at the same time.
    """

    def __init__(
        self, checkpoint: Checkpoint, source: _Source, others: Mapping[str, bytes | Path], under_way: int
    ) -> None:
        self._files = checkpoint.files
        self._source = source
        self._others = others
        largest = max((prod(a.slabs.block_shape) * a.dtype.itemsize for a in source.arrays), default=0)
        # Slabs are kept until the last block that lies in them has been read.
        self._cache = BlockCache(under_way + 2 * largest)

    def read(self, file: int, start: int, size: int) -> bytes:
        """See `mergefs.ingest.Contents`."""
        if self._files[file].header is None:
            return self._other(self._files[file], start, size)
        raw = self._source.header.raw
        return raw[start : start + size] if start < len(raw) else self._data(start, size)

    def close(self) -> None:
        """See `mergefs.ingest.Contents`."""

    def _other(self, file: CheckpointFile, start: int, size: int) -> bytes:
        content = self._others[file.path]
        if isinstance(content, bytes):
            return content[start : start + size]
        try:
            with open(content, "rb") as opened:
                opened.seek(start)
                found = opened.read(size)
        except OSError as error:
            raise CheckpointError(f"{content} cannot be read: {error.strerror}") from error
        if len(found) < size:
            raise CheckpointError(f"{content} became shorter while it was read: let its writer finish")
        return found

    def _data(self, start: int, size: int) -> bytes:
        """Return bytes of one tensor."""
        index = bisect_right(self._source.starts, start) - 1
        array = self._source.arrays[index]
        width = array.dtype.itemsize
        first = (start - self._source.starts[index]) // width
        stop = first + size // width
        pieces = []
        for number in range(_slab_of(array.slabs, first), len(array.slabs)):
            begin, end = array.slabs.extent(number)
            if begin >= stop:
                break
            slab = memoryview(self._cache.get((index, number), partial(array.read, number)))
            pieces.append(slab[max(0, first - begin) * width : (min(stop, end) - begin) * width])
        return b"".join(pieces)


def _slab_of(slabs: Grid, element: int) -> int:
    return int(slabs.numbers(np.array([element]))[0])


def _open(group: Any) -> zarr.Group:
    if isinstance(group, zarr.Group):
        return group
    try:
        return zarr.open_group(os.fspath(group) if isinstance(group, os.PathLike) else group, mode="r")
    except Exception as error:
        raise CheckpointError(f"{group} is not a Zarr group that can be read: {error}; name a group") from error


def _arrays(group: zarr.Group, where: str) -> list[_Array]:
    found: dict[str, _Array] = {}
    with warnings.catch_warnings():
        # Configuration and tokenizer may lie beside the arrays.
        warnings.filterwarnings("ignore", message="Object at .* is not recognized")
        try:
            members = group.members(max_depth=None)
        except Exception as error:  # of whatever kind: the metadata is a stranger's, and Zarr does not check all of it
            raise CheckpointError(f"{where}: the Zarr group cannot be read: {error}; mend or write it again") from error
    for path, node in members:
        if not isinstance(node, zarr.Array):
            continue
        _check_sound(node, f"{where}: the array {quote(path)}")
        dtype = _BY_NUMPY.get(node.dtype.newbyteorder("=").name)
        if dtype is None:
            known = ", ".join(_BY_NUMPY)
            problem = f"{where}: the array {quote(path)} has the data type {node.dtype}, which safetensors has not"
            raise CheckpointError(f"{problem}; convert it to one of {known}")
        name = _tensor_name(path, node)
        if name in found:
            problem = f"{where}: the arrays {quote(found[name].array.path)} and {quote(node.path)} are both the tensor"
            raise CheckpointError(f"{problem} {quote(name)}; give one of them another name")
        found[name] = _Array(name, dtype, node)
    if not found:
        raise CheckpointError(f"{where}: the Zarr group has no array; name the group of a model")
    # As the safetensors library orders them.
    return sorted(found.values(), key=lambda array: (-array.dtype.itemsize, array.name))


def _check_sound(array: zarr.Array[Any], what: str) -> None:
    """Refuse what an array of a stranger may say that could run code, or take memory that nothing accounts for."""
    described = json.dumps(array.metadata.to_dict(), default=str)
    if "pickle" in described:
        raise CheckpointError(f"{what} is pickled, which mergefs does not read: write it with another codec")
    if not isinstance(array.metadata.attributes, Mapping):
        raise CheckpointError(f"{what} has attributes that are not an object; write it again")
    size = array.dtype.itemsize
    if prod(array.chunks) * size > MOST_CHUNK_BYTES or prod(array.shape) * size > LARGEST:
        raise CheckpointError(f"{what} has chunks of more than 1 GiB, or is larger than any file; write it again")


def _tensor_name(path: str, array: zarr.Array[Any]) -> str:
    name = array.attrs.get("name")
    if isinstance(name, str) and name and array.attrs.get("dtype") in DTYPES:
        return name
    return path.replace("/", ".")


def _header(arrays: Iterable[_Array], raw: bytes) -> Header:
    entries = []
    at = len(raw)
    for array in arrays:
        size = prod(array.shape) * array.dtype.itemsize
        entries.append(TensorEntry(array.name, array.dtype, array.shape, at, at + size))
        at += size
    return Header(raw, {"format": "pt"}, tuple(entries), at)


def _checkpoint(source: _Source, others: Mapping[str, bytes | Path], where: str) -> Checkpoint:
    root = Path(where)
    files = [CheckpointFile(SINGLE, root / SINGLE, source.header.file_size, source.header)]
    for path, content in others.items():
        if path == SINGLE:
            raise UserError(f"'{SINGLE}' is what the arrays become: leave it out of the other files")
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        files.append(CheckpointFile(path, root / path, size, None))
    return Checkpoint(root, tuple(sorted(files, key=lambda file: file.path)))


def _other_files(store: Store, group: Any, files: Files | None, base: str | None) -> Mapping[str, bytes | Path]:
    if isinstance(files, Mapping):
        return {path: bytes(content) for path, content in files.items()}
    if files is not None:
        return companions(Path(files))
    folder = Path(group) if isinstance(group, (str, os.PathLike)) else None
    beside = companions(folder) if folder is not None and folder.is_dir() else {}
    return beside or ({} if base is None else _files_of(store, store.resolve(base)))


def _files_of(store: Store, manifest: str) -> dict[str, bytes]:
    """Return the other files of a model that a merge would carry over."""
    reader = BlockReader(store.catalog, store.backend)
    found = {}
    with store.reading("ingest", [manifest]):
        for file in store.manifest(manifest).files:
            is_weights = any(isinstance(segment, TensorData) for segment in file.segments)
            if is_weights or file.path == INDEX or not is_carried(file):
                continue
            blobs = [bytes.fromhex(segment.block) for segment in file.segments if isinstance(segment, Blob)]
            found[file.path] = b"".join(bytes(reader.read(blob, Kind.METADATA)) for blob in blobs)
    return found
