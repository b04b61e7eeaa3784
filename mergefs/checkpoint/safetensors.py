"""Reading and building the headers of safetensors files.

A file is eight bytes (the header's length, little-endian), the header (JSON) and the data section, which the
tensors tile without gaps or overlaps. The reader accepts nothing that the safetensors library refuses, and
refuses some of what that lets pass: unknown keys, repeated keys, names that cannot be printed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergefs.checkpoint.strict import (
    LARGEST,
    LONGEST_JSON,
    Repeated,
    flaw,
    is_unicode,
    parse_object,
    quote,
    reason,
    shown,
)
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import CheckpointError

LENGTH_BYTES = 8
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_AGAIN = "download or save the file again"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file.

    Attributes:
        name: its name; never empty, without control characters.
        dtype: its element type.
        shape: its shape; empty for a scalar.
        start: where its bytes begin in the file.
        stop: where they end.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The checked header of a safetensors file.

    Attributes:
        raw: the file's first bytes as they are, the length and the JSON: everything before the data section.
        metadata: the `__metadata__` map, or None when there is none.
        tensors: in the order of their bytes, which they tile from `len(raw)` to `file_size`.
        file_size: bytes of the whole file.
    """

    raw: bytes
    metadata: dict[str, str] | None
    tensors: tuple[TensorEntry, ...]
    file_size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file; the data section is not read.

    Raises:
        CheckpointError: when the file cannot be read, is truncated, or breaks the format in any way. The
            message names the file and, where it is one tensor's fault, the tensor.
    """
    where = shown(path)
    raw, file_size = _read_raw(path, where)
    return parse_header(raw, file_size, where)


def parse_header(raw: bytes, file_size: int, where: str) -> Header:
    """Check a header that has been read.

    Args:
        raw: the length and the JSON.
        file_size: bytes of the whole file.
        where: how messages call the file.

    Raises:
        CheckpointError: when it breaks the format, or does not fit the file.
    """
    what = f"the header of {where}"
    text = raw[LENGTH_BYTES:]
    if not text.startswith(b"{"):
        raise CheckpointError(f"{what} does not start with '{{'; {_AGAIN}")
    fields, _ = parse_object(text, what, _AGAIN)
    metadata = _metadata(fields.pop(_METADATA), where) if _METADATA in fields else None
    entries = [_entry(name, value, len(raw), where) for name, value in fields.items()]
    # Sorting is stable, and an empty tensor goes before the tensor that starts where it lies.
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_tiling(entries, len(raw), file_size, where)
    return Header(raw, metadata, tuple(entries), file_size)


def build_header(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the first bytes of a safetensors file (length and JSON) whose tensors lie in the given order.

    The same arguments always give the same bytes: keys of `metadata` are sorted, and the JSON is padded with
    spaces so that the data section begins at a multiple of 8.

    Raises:
        CheckpointError: when a name is malformed, reserved or given twice, a shape is not one, or the header
            would be longer than readers accept.
    """
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[_METADATA] = _metadata(dict(sorted(metadata.items())), "the new file")
    offset = 0
    for name, dtype, shape in tensors:
        where = _tensor(name, "the new file")
        if name in fields or name == _METADATA:
            raise CheckpointError(f"{where} has a name that is taken; give it another name")
        begin, offset = offset, offset + _length(dtype, _shape(list(shape), where), where)
        if offset > LARGEST:
            raise CheckpointError(f"{where} ends beyond {LARGEST} bytes; split the tensors among files")
        fields[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [begin, offset]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_JSON:
        problem = f"the header of the new file would take {len(text)} bytes of at most {LONGEST_JSON}"
        raise CheckpointError(f"{problem}; split the tensors among files")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _read_raw(path: str | os.PathLike[str], where: str) -> tuple[bytes, int]:
    """Return the length bytes and the JSON as they are in the file, and the file's size."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise CheckpointError(f"{where} is not a regular file; name a safetensors file")
            start = file.read(LENGTH_BYTES)
            if len(start) < LENGTH_BYTES:
                problem = f"{where} has {len(start)} bytes, too few for a safetensors file"
                raise CheckpointError(f"{problem}; {_AGAIN}")
            length = int.from_bytes(start, "little")
            if length > LONGEST_JSON:
                raise _too_long(where, length, start + file.read(len(_LFS_POINTER)))
            text = file.read(min(length, state.st_size))  # what it claims is set aside beforehand
    except (OSError, ValueError) as error:
        problem = f"{where} cannot be read: {reason(error)}"
        raise CheckpointError(f"{problem}; name a safetensors file that you may read") from None
    if len(text) < length:
        problem = f"{where} is truncated: its header takes {length} bytes and {len(text)} are there"
        raise CheckpointError(f"{problem}; {_AGAIN}")
    return start + text, state.st_size


def _open_without_waiting(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO would wait for its writer, perhaps for ever.
    return os.open(path, flags | os.O_NONBLOCK)


def _too_long(where: str, length: int, start: bytes) -> CheckpointError:
    if start.startswith(_LFS_POINTER):
        return CheckpointError(f"{where} is a Git LFS pointer, not the weights; run `git lfs pull` there")
    problem = f"{where} claims a header of {length} bytes, where {LONGEST_JSON} are the most"
    return CheckpointError(f"{problem}, so it is damaged or not a safetensors file; {_AGAIN}")


def _tensor(name: str, where: str) -> str:
    """Return how messages call a tensor, once its name is found to be sound."""
    problem = flaw(name)
    if problem:
        raise CheckpointError(f"{where}: the tensor name {quote(name)} {problem}; rename the tensor")
    return f"{where}: tensor {quote(name)}"


def _metadata(value: Any, where: str) -> dict[str, str]:
    what = f"{where}: {_METADATA}"
    if isinstance(value, Repeated):
        raise CheckpointError(f"{what} has the key {quote(value.key)} twice; {_AGAIN}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is {quote(value)}, not a map from strings to strings; {_AGAIN}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise CheckpointError(f"{what} has {quote(text)} for {quote(key)}, not a string; {_AGAIN}")
        if not is_unicode(key) or not is_unicode(text):
            raise CheckpointError(f"{what} is not valid Unicode at the key {quote(key)}; {_AGAIN}")
    return value


def _entry(name: str, value: Any, data_start: int, file: str) -> TensorEntry:
    where = _tensor(name, file)
    if isinstance(value, Repeated):
        raise CheckpointError(f"{where} has the key {quote(value.key)} twice; {_AGAIN}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is described by {quote(value)}, not by an object; {_AGAIN}")
    if value.keys() != _KEYS:
        raise CheckpointError(f"{where} {_key_problem(value)}; {_AGAIN}")
    dtype = _dtype(value["dtype"], where)
    shape = _shape(value["shape"], where)
    begin, end = _offsets(value["data_offsets"], where)
    length = _length(dtype, shape, where)
    if end - begin != length:
        problem = f"{where} has {end - begin} bytes by its data_offsets and {length} by its shape and dtype"
        raise CheckpointError(f"{problem}; {_AGAIN}")
    return TensorEntry(name, dtype, shape, data_start + begin, data_start + end)


def _key_problem(value: dict[str, Any]) -> str:
    for key in value:
        if key not in _KEYS:
            return f"has the unknown key {quote(key)}"
    return f"lacks the key {min(_KEYS - value.keys())!r}"


def _dtype(value: Any, where: str) -> DType:
    found = DTYPES.get(value) if isinstance(value, str) else None
    if found is None:
        known = ", ".join(DTYPES)
        problem = f"{where} has the dtype {quote(value)}, which is not supported by mergefs"
        raise CheckpointError(f"{problem}; convert it to one of {known}")
    return found


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_size, value)):
        problem = f"{where} has the shape {quote(value)}, not a list of integers from 0 to {LARGEST}"
        raise CheckpointError(f"{problem}; {_AGAIN}")
    return tuple(value)


def _offsets(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        problem = f"{where} has the data_offsets {quote(value)}, not two integers from 0 to {LARGEST}"
        raise CheckpointError(f"{problem}; {_AGAIN}")
    begin, end = value
    if end < begin:
        raise CheckpointError(f"{where} ends at byte {end}, before it begins at {begin}; {_AGAIN}")
    return begin, end


def _is_size(value: Any) -> bool:
    # A bool is an int for isinstance().
    return type(value) is int and 0 <= value <= LARGEST


def _length(dtype: DType, shape: tuple[int, ...], where: str) -> int:
    """Return the bytes of a tensor.

    Axes of length zero are left out of the check for overflow: the other ones must be a size by themselves,
    because numpy and the safetensors library multiply them too.
    """
    length = dtype.itemsize
    for n in shape:
        length *= n or 1
        if length > LARGEST:
            problem = f"{where} has the shape {quote(list(shape))}, which takes more than {LARGEST} bytes"
            raise CheckpointError(f"{problem}; {_AGAIN}")
    return 0 if 0 in shape else length


def _check_tiling(entries: Sequence[TensorEntry], data_start: int, file_size: int, file: str) -> None:
    """Check that tensors in the order of their bytes cover the data section, each byte once."""
    stop, before = data_start, ""
    for entry in entries:
        where = f"{file}: tensor {quote(entry.name)}"
        if entry.start < stop:
            raise CheckpointError(f"{where} overlaps tensor {quote(before)}; {_AGAIN}")
        if entry.start > stop:
            raise CheckpointError(f"{where} has a gap of {entry.start - stop} bytes before it; {_AGAIN}")
        if entry.stop > file_size:
            problem = f"{where} ends at byte {entry.stop} of a file of {file_size} bytes"
            raise CheckpointError(f"{problem}, so the file is truncated; {_AGAIN}")
        stop, before = entry.stop, entry.name
    if stop < file_size:
        raise CheckpointError(f"{file} has {file_size - stop} bytes behind its last tensor; {_AGAIN}")
