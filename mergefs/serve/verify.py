"""Comparing an export with the model that it was made of: every file, or where it was written in other shards or
another dtype, every tensor."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergefs.checkpoint.directory import INDEX
from mergefs.checkpoint.safetensors import LENGTH_BYTES, Header, TensorEntry, parse_header
from mergefs.checkpoint.strict import LONGEST_JSON
from mergefs.dtypes import DType
from mergefs.errors import CheckpointError, DestinationError, MergefsError, UserError
from mergefs.json_input import load_json
from mergefs.manifest import Tensor, TensorData
from mergefs.pipeline import available_cores, ordered
from mergefs.serve.export import FILES_AT_ONCE, expected_sha256, remember
from mergefs.serve.layout import (
    OUTPUT_DTYPES,
    OutputFile,
    arranged,
    converted_dtype,
    file_metadata,
    lay_out,
    output_dtype,
    shards_metadata,
    tensor_part,
    weight_files,
)
from mergefs.serve.view import View

_READ_BYTES = 8 << 20
_WEIGHTS = ".safetensors"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """A file that is not what it should be.

    Attributes:
        path: of the file.
        tensors: which of its tensors differ, in a file of weights whose header can be read.
    """

    path: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifyReport:
    """What a comparison found.

    Attributes:
        directory: what was compared.
        manifest: the model's id.
        compared: `files`, or `tensors` where the weights lie in other files, or in another dtype, than in the model.
        files, bytes: how much was there.
        missing, extra: files that are not there, and that should not be.
        different: files with other bytes.
        missing_tensors, extra_tensors: likewise, where tensors were compared.
        seconds: wall time.
    """

    directory: str
    manifest: str
    compared: str
    files: int
    bytes: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    different: tuple[Difference, ...]
    missing_tensors: tuple[str, ...]
    extra_tensors: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.extra or self.different or self.missing_tensors or self.extra_tensors)


def verify_export(
    view: View,
    directory: str | Path,
    *,
    shard_size: int | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a folder with what an export of a model is.

    With `shard_size` or `dtype`, the folder has to be what an export with these is, byte for byte. Without them, it has
    to have the model's files; or, where its weights lie in other files or have another dtype, the model's tensors, with
    the values that an export to that dtype writes, an index that says where they are, and the model's other files.

    Args:
        view: the model.
        directory: a folder, or the URL of one.
        shard_size, dtype: those of the export; see `mergefs.serve.export.export`.
        threads: how many to work with; all cores by default.
        storage_options: for fsspec, with a URL.
        progress: told how far it is: bytes compared, and in all.

    Raises:
        DestinationError: when there is no such folder, or it cannot be read.
        CorruptionError: when the repository's own blocks are damaged.
    """
    began = time.monotonic()
    folder = _Folder(directory, storage_options)
    converted = output_dtype(dtype)
    files = lay_out(view, shard_size, converted)
    comparison = _Comparison(view, folder, threads or available_cores(), progress)
    asked = shard_size is not None or converted is not None
    if asked or comparison.has_layout(files):
        comparison.compare_files(files, converted)
        compared = "files"
        extra = set(folder.sizes) - {file.path for file in files}
    else:
        extra = comparison.compare_tensors()
        compared = "tensors"
    return VerifyReport(
        str(directory),
        view.manifest_id,
        compared,
        len(folder.sizes),
        sum(folder.sizes.values()),
        tuple(sorted(comparison.missing)),
        tuple(sorted(extra)),
        tuple(sorted(comparison.different, key=lambda found: found.path)),
        tuple(sorted(comparison.missing_tensors)),
        tuple(sorted(comparison.extra_tensors)),
        time.monotonic() - began,
    )


class _Folder:
    """A folder of any file system, for reading."""

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any] | None) -> None:
        import fsspec

        text = os.fspath(directory)
        self._name = text
        try:
            if "://" in text or "::" in text:
                self._fs, self._root = fsspec.url_to_fs(text, **(options or {}))
            else:
                self._fs, self._root = fsspec.filesystem("file"), os.path.abspath(text)
            self._root = self._root.rstrip("/")
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        except (OSError, ImportError, ValueError) as error:
            raise DestinationError(f"{text} cannot be read: {error}") from error
        self.sizes = {path[len(self._root) + 1 :]: int(info["size"]) for path, info in found.items()}
        """Of the files, by their paths."""
        if not self.sizes or "" in self.sizes:
            raise DestinationError(f"{text} is no folder with files in it: name one that a model was exported to")

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return some of a file's bytes; fewer where it ends before."""
        with self._reading(path):
            return bytes(self._fs.cat_file(f"{self._root}/{path}", start=start, end=stop))

    def sha256(self, path: str, tell: Callable[[int], None]) -> str:
        """Return a file's SHA-256."""
        sha256 = hashlib.sha256()
        with self._reading(path), self._fs.open(f"{self._root}/{path}", "rb") as file:
            while piece := file.read(_READ_BYTES):
                sha256.update(piece)
                tell(len(piece))
        return sha256.hexdigest()

    def header(self, path: str) -> Header | None:
        """Return the header of a file of weights, or None where it has none that can be read."""
        size = self.sizes[path]
        start = self.read(path, 0, LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > min(LONGEST_JSON, size):
            return None
        try:
            return parse_header(start + self.read(path, LENGTH_BYTES, LENGTH_BYTES + length), size, path)
        except CheckpointError:
            return None

    def _reading(self, path: str) -> _Reading:
        return _Reading(f"{self._name}/{path}")


class _Reading:
    """Turns what a file system raises into a DestinationError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, MergefsError):
            raise DestinationError(f"{self._name} cannot be read: {error}") from error


class _Comparison:
    def __init__(self, view: View, folder: _Folder, threads: int, progress: Progress | None) -> None:
        self._view = view
        self._folder = folder
        self._threads = threads
        self._progress = progress
        self._done = 0
        self._total = sum(folder.sizes.values())
        self.missing: list[str] = []
        self.different: list[Difference] = []
        self.missing_tensors: list[str] = []
        self.extra_tensors: list[str] = []

    def has_layout(self, files: list[OutputFile]) -> bool:
        """Tell whether the folder's weights are in the model's files, or could be: not in those of another export."""
        wanted = {file.path for file in files if file.path.endswith(_WEIGHTS)}
        there = {path for path in self._folder.sizes if path.endswith(_WEIGHTS)}
        if there - wanted and wanted - there:
            return False
        for path in wanted & there:
            header = self._folder.header(path)
            if header is not None and not self._is_models(path, header) and self._is_exported(path, header):
                return False
        return True

    def _is_models(self, path: str, header: Header) -> bool:
        """Tell whether a header is that of the model's file of this path."""
        return path in self._view.files and self._view.read(path, 0, len(header.raw)) == header.raw

    def _is_exported(self, path: str, header: Header) -> bool:
        """Tell whether a header is one that an export of this model writes, with whatever shards and dtype."""
        entries = {entry.name: entry for entry in header.tensors}
        tensors = [tensor for tensor in self._view.manifest.tensors if tensor.name in entries]
        if len(tensors) < len(entries):
            return False
        changed = {entries[t.name].dtype for t in tensors if entries[t.name].dtype is not t.dtype}
        if len(changed) > 1:
            return False
        dtype = changed.pop() if changed else None
        metadata = [shards_metadata(self._view)]
        metadata += [file_metadata(self._view, file) for file in weight_files(self._view) if file.path == path]
        return any(arranged(tensors, dtype, values)[1] == header.raw for values in metadata)

    def compare_files(self, files: Iterable[OutputFile], dtype: DType | None) -> None:
        """Compare files byte for byte."""
        expected = list(files)
        there = [file for file in expected if file.path in self._folder.sizes]
        self.missing += [file.path for file in expected if file.path not in self._folder.sizes]
        with ThreadPoolExecutor(min(FILES_AT_ONCE, self._threads), thread_name_prefix="mergefs-verify") as pool:
            right = list(pool.map(self._is_right, there))
        for file, is_right in zip(there, right, strict=True):
            if not is_right:
                self.different.append(Difference(file.path, self._tensors_in(file, dtype)))

    def _is_right(self, file: OutputFile) -> bool:
        if self._folder.sizes[file.path] != file.size:
            return False
        found = self._folder.sha256(file.path, self._tell)
        expected = expected_sha256(file, self._threads)
        if file.is_stored and file.sha256 is None:
            remember(self._view, file.path, expected)
        return found == expected

    def _tensors_in(self, file: OutputFile, dtype: DType | None) -> tuple[str, ...]:
        """Return the tensors of a file of weights that differ, or none where that cannot be said."""
        header = self._folder.header(file.path) if file.path.endswith(_WEIGHTS) else None
        if header is None:
            return ()
        entries = {entry.name: entry for entry in header.tensors}
        names = sorted(set(entries) | self._names_in(file))
        return tuple(name for name in names if not self._is_tensor(name, file.path, entries.get(name), dtype))

    def _names_in(self, file: OutputFile) -> set[str]:
        """Return the tensors that a file of weights should have."""
        if not file.is_stored:
            return {entry.name for entry in parse_header(bytes(file.parts[0]()), file.size, file.path).tensors}
        (recipe,) = (recipe for recipe in self._view.manifest.files if recipe.path == file.path)
        return {segment.tensor for segment in recipe.segments if isinstance(segment, TensorData)}

    def _is_tensor(self, name: str, path: str, entry: TensorEntry | None, dtype: DType | None) -> bool:
        tensor = self._view.tensors.get(name)
        if tensor is None or entry is None:
            return False
        return self._has_values(tensor, path, entry, converted_dtype(tensor, dtype))

    def _has_values(self, tensor: Tensor, path: str, entry: TensorEntry, dtype: DType) -> bool:
        """Compare a tensor with what the folder has of it, block by block."""
        if entry.dtype is not dtype or entry.shape != tensor.shape:
            return False
        at = entry.start
        numbers = range(len(tensor.blocks))
        parts = (tensor_part(self._view, tensor, number, dtype) for number in numbers)
        for data in ordered(lambda part: part(), parts, threads=self._threads, window=2 * self._threads + 2):
            if self._folder.read(path, at, at + len(data)) != bytes(data):
                return False
            at += len(data)
        return at == entry.stop

    def compare_tensors(self) -> set[str]:
        """Compare tensors, wherever they lie, and the files beside them; return the files that should not be there."""
        headers = {path: self._folder.header(path) for path in self._folder.sizes if path.endswith(_WEIGHTS)}
        places = dict(_places(headers))
        dtype = self._dtype(places)
        others = [f for f in lay_out(self._view, None, dtype) if not f.path.endswith(_WEIGHTS) and f.path != INDEX]
        self.compare_files(others, None)
        wrong: dict[str, list[str]] = {
            path: []
            for path, header in headers.items()
            if header is None or not (self._is_models(path, header) or self._is_exported(path, header))
        }
        for tensor in self._view.manifest.tensors:
            if tensor.name not in places:
                self.missing_tensors.append(tensor.name)
                continue
            path, entry = places[tensor.name]
            if not self._has_values(tensor, path, entry, converted_dtype(tensor, dtype)):
                wrong.setdefault(path, []).append(tensor.name)
            self._tell(entry.stop - entry.start)
        self.different += [Difference(path, tuple(sorted(names))) for path, names in wrong.items()]
        self.extra_tensors += sorted(set(places) - set(self._view.tensors))
        self._check_index(headers, {name: path for name, (path, _) in places.items()})
        return set(self._folder.sizes) - {file.path for file in others} - set(headers) - {INDEX}

    def _dtype(self, places: Mapping[str, tuple[str, TensorEntry]]) -> DType | None:
        """Return the dtype that the float tensors of the folder were converted to, or None where they were not."""
        found = set()
        for tensor in self._view.manifest.tensors:
            if tensor.dtype.is_float and tensor.name in places:
                entry = places[tensor.name][1]
                if entry.dtype is not tensor.dtype:
                    found.add(entry.dtype)
        if len(found) > 1 or not found <= set(OUTPUT_DTYPES.values()):
            names = ", ".join(sorted(dtype.name for dtype in found))
            raise UserError(
                f"tensors have dtypes ({names}) that the model's have not, and that no export gives them all: it was"
                " changed by something else"
            )
        return found.pop() if found else None

    def _check_index(self, headers: Mapping[str, Header | None], homes: Mapping[str, str]) -> None:
        if INDEX not in self._folder.sizes:
            if len(headers) > 1:
                self.missing.append(INDEX)
            return
        try:
            said = load_json(self._folder.read(INDEX, 0, self._folder.sizes[INDEX]))["weight_map"]
        except (ValueError, KeyError, TypeError):
            said = None
        if said != dict(homes):
            self.different.append(Difference(INDEX))

    def _tell(self, size: int) -> None:
        self._done += size
        if self._progress:
            self._progress(min(self._done, self._total), self._total)


def _places(headers: Mapping[str, Header | None]) -> Iterator[tuple[str, tuple[str, TensorEntry]]]:
    """Yield every tensor's name with the file and the place that it has."""
    for path, header in headers.items():
        for entry in header.tensors if header is not None else ():
            yield entry.name, (path, entry)
