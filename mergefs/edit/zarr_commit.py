"""Making tensors of the arrays that were created, replaced or deleted through Zarr, before a session is committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import zarr

from mergefs.checkpoint.directory import INDEX
from mergefs.checkpoint.safetensors import Header, build_header
from mergefs.dtypes import DTYPES, DType
from mergefs.edit.commit import read_headers
from mergefs.errors import UserError
from mergefs.json_input import load_json
from mergefs.serve.zarr_store import METADATA

if TYPE_CHECKING:
    from mergefs.edit.content import Content
    from mergefs.edit.session import Session
    from mergefs.edit.zarr_session import SessionStore

_COPY_BYTES = 8 << 20
_OWN_ATTRIBUTES = frozenset(("name", "dtype", "manifest"))
_BY_NUMPY = {dtype.numpy_name: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class _Made:
    """An array that becomes a tensor."""

    name: str
    dtype: DType
    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


@dataclass(frozen=True)
class _Kept:
    """A tensor that stays as it is, in another place."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    content: Content
    start: int
    stop: int


def apply_keys(session: Session) -> None:
    """Write what was made and deleted through Zarr into the session's files of weights.

    An array becomes the tensor that its attribute `name` names, else the one that is called like its path with dots. It
    takes the place of the tensor whose array it replaced; a new one is added behind the last tensor of the last file of
    weights, and to the index where there is one. Tensors whose arrays were deleted are left out.

    Raises:
        UserError: when there is a key that belongs to no array, attributes that a tensor cannot have, an element type
            that safetensors files do not have, or a name that is taken.
    """
    keys, store = session.keys, session.zarr()
    documents = {key.removesuffix(METADATA).strip("/") for key in keys.given | keys.deleted if _is_document(key)}
    replaced = {tensor.name: path for path, tensor in store.arrays.items() if path in documents}
    made = dict(_made(store, keys.given))
    if not replaced and not made:
        keys.forget(keys.given | keys.deleted)  # groups, and chunks of zeros, which lie in the files
        return
    new = {path: array for path, array in made.items() if path not in replaced.values()}
    by_tensor = {name: made[path] for name, path in replaced.items() if path in made}
    headers = {path: header for path, header in read_headers(session.contents(), session.folder).items() if header}
    home: dict[str, str] = {}
    for number, path in enumerate(sorted(headers)):
        tensors = list(_tensors(session, path, headers[path], set(replaced), by_tensor))
        if number == len(headers) - 1:
            tensors += new.values()
        for tensor in tensors:
            if tensor.name in home:
                raise UserError(f"two tensors would be called '{tensor.name}': rename one of the arrays")
            home[tensor.name] = path
        if (new and number == len(headers) - 1) or any(entry.name in replaced for entry in headers[path].tensors):
            _rewrite(session, path, headers[path], tensors)
    _update_index(session, home)
    keys.forget(keys.given | keys.deleted)


def _made(store: SessionStore, given: set[str]) -> Iterator[tuple[str, _Made]]:
    """Yield the arrays that were made, by their paths, once everything that was set is known to belong to one."""
    arrays: dict[str, _Made] = {}
    for key in sorted(key for key in given if _is_document(key)):
        path = key.removesuffix(METADATA).strip("/")
        document = load_json(store.value(key))
        if others := set(document.get("attributes", {})) - _OWN_ATTRIBUTES:
            raise UserError(
                f"'{path}' has the attribute '{min(others)}', which no file of the model can hold: delete it"
            )
        if document.get("node_type") == "array":
            arrays[path] = _array(store, path, document)
    for key in given:
        folder = key.rpartition("/c/")[0] if "/c/" in key else key.removesuffix("/c")
        if not _is_document(key) and folder not in arrays:
            raise UserError(f"the key '{key}' belongs to no array and cannot be committed: delete it")
    yield from arrays.items()


def _array(store: SessionStore, path: str, document: dict[str, Any]) -> _Made:
    try:
        array = zarr.open_array(store, path=path, mode="r")
        dtype = _BY_NUMPY.get(array.dtype.name)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"the array '{path}' cannot be read: {error}") from error
    if dtype is None:
        raise UserError(f"the array '{path}' is of {array.dtype}, which safetensors files do not have: convert it")
    name = document.get("attributes", {}).get("name", unquote(path.replace("/", ".")))
    return _Made(str(name), dtype, array)


def _tensors(
    session: Session, path: str, header: Header, replaced: set[str], by_tensor: dict[str, _Made]
) -> Iterator[_Made | _Kept]:
    content = session.tree.file(path)
    for entry in header.tensors:
        if entry.name not in replaced:
            yield _Kept(entry.name, entry.dtype, entry.shape, content, entry.start, entry.stop)
        elif entry.name in by_tensor:
            yield by_tensor[entry.name]


def _rewrite(session: Session, path: str, header: Header, tensors: list[_Made | _Kept]) -> None:
    """Write a file of weights anew, and put it in the place of the old one."""
    file = session.tree.anonymous()
    try:
        file.append(build_header([(t.name, t.dtype, t.shape) for t in tensors], header.metadata))
        for tensor in tensors:
            for data in _bytes(tensor):
                file.append(data)
    except BaseException:
        session.tree.forget(file)
        raise
    session.tree.place(file, path)


def _bytes(tensor: _Made | _Kept) -> Iterator[bytes]:
    """Yield a tensor's bytes, a bounded run at a time."""
    if isinstance(tensor, _Kept):
        for start in range(tensor.start, tensor.stop, _COPY_BYTES):
            yield tensor.content.read(start, min(_COPY_BYTES, tensor.stop - start))
        return
    array = tensor.array
    little = tensor.dtype.numpy
    if not array.shape:
        yield array[()].astype(little).tobytes()
        return
    for start in range(0, array.shape[0], max(1, array.chunks[0])):
        yield array[start : start + max(1, array.chunks[0])].astype(little).tobytes()


def _update_index(session: Session, home: dict[str, str]) -> None:
    """Have the index, where there is one, say which file each tensor is in."""
    file = session.tree.files().get(INDEX)
    if file is None:
        return
    value = load_json(file.read(0, file.size))
    sizes = {}
    for path in set(home.values()):
        content = session.tree.file(path)
        sizes[path] = content.size - 8 - int.from_bytes(content.read(0, 8), "little")
    value["weight_map"] = home
    if isinstance(value.get("metadata"), dict):
        value["metadata"]["total_size"] = sum(sizes.values())
    new = session.tree.anonymous()
    new.write(0, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())
    session.tree.place(new, INDEX)


def _is_document(key: str) -> bool:
    return key.rpartition("/")[2] == METADATA
