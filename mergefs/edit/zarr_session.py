"""The tensors of a session as a Zarr v3 store that can be written to: a chunk that is set is written into its file.

What a chunk of a tensor is, and what arrays are called, is said in `mergefs.serve.zarr_store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zarr.core.buffer import Buffer

from mergefs.edit.commit import read_headers
from mergefs.errors import UserError
from mergefs.manifest import Tensor
from mergefs.serve.zarr_reading import ReadingStore
from mergefs.serve.zarr_store import METADATA, ModelStore, _json

if TYPE_CHECKING:
    from mergefs.edit.content import Content
    from mergefs.edit.session import Session


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a session's files."""

    tensor: Tensor
    path: str
    content: Content
    size: int
    start: int


class _Tensors:
    """The tensors of a session's files, as what a `ModelStore` needs of a view.

    Raises:
        CheckpointError: when the files make no checkpoint.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.manifest = session.view.manifest
        self.manifest_id = session.manifest_id
        self.store = session.store
        self.places: dict[str, _Place] = {}
        for path, header in read_headers(session.contents(), session.folder).items():
            for entry in header.tensors if header else ():
                tensor = Tensor(entry.name, entry.dtype, entry.shape, ())
                blocks = (None,) * len(tensor.grid(self.manifest.block_elements))
                file = session.tree.file(path)
                self.places[entry.name] = _Place(replace(tensor, blocks=blocks), path, file, file.size, entry.start)
        self.tensors = {name: place.tensor for name, place in self.places.items()}

    def block(self, tensor: Tensor, number: int) -> bytes:
        """Return the bytes of a block of a tensor, as they are now."""
        content, offset, size = self._where(tensor, number)
        return content.read(offset, size).ljust(size, b"\0")

    def write(self, tensor: Tensor, number: int, data: memoryview | bytes) -> None:
        """Write the bytes of a block; those behind its end are left out."""
        content, offset, size = self._where(tensor, number)
        content.write(offset, data[:size])

    def close(self) -> None:
        """Do nothing: the session is closed by whoever has it."""

    def _where(self, tensor: Tensor, number: int) -> tuple[Content, int, int]:
        place = self.places[tensor.name]
        first, stop = tensor.grid(self.manifest.block_elements).extent(number)
        width = tensor.dtype.itemsize
        if not self._session.tree.is_at(place.path, place.content) or place.content.size != place.size:
            raise UserError(f"'{place.path}' was replaced since the Zarr store was made: make another one")
        return place.content, place.start + first * width, (stop - first) * width


class _Model(ModelStore):
    """The tensors as keys; without consolidated metadata, which would be outdated as soon as an array is made."""

    @cached_property
    def _root(self) -> bytes:
        return _json(self._metadata(""))


class SessionStore(ReadingStore):
    """A session's tensors as a Zarr group, for reading and writing.

    Setting a chunk of a tensor writes into the file that holds it. Everything else that is set or deleted is kept
    beside the files, and becomes new or removed tensors when the session is committed; see
    `mergefs.edit.zarr_commit`. Which tensors there are is taken from the files when the store is made.

    Args:
        session: what is changed. Closing the store does not close it.
        read_only: refuse to write.

    Raises:
        CheckpointError: when the session's files make no checkpoint.
    """

    def __init__(self, session: Session, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._session = session
        self._tensors = _Tensors(session)
        self._model = _Model(self._tensors)  # type: ignore[arg-type]
        self._changed = session.keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionStore) and other._session is self._session

    def __repr__(self) -> str:
        return f"SessionStore({self._session.id!r})"

    def __reduce__(self) -> Any:
        return _again, (str(self._session.store.path), self._session.id, self.read_only)

    def with_read_only(self, read_only: bool = False) -> SessionStore:
        """Return another store on the same session."""
        return SessionStore(self._session, read_only=read_only)

    @property
    def supports_writes(self) -> bool:
        """Keys can be set."""
        return True

    @property
    def supports_deletes(self) -> bool:
        """Keys can be deleted."""
        return True

    # -- writing -------------------------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> None:
        """Set a key.

        Raises:
            ValueError: when the store is read-only.
            TypeError: when the value is no buffer.
        """
        await self._ensure_open()
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Do what `set` does, on this thread."""
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"a value is a zarr Buffer, not {type(value).__name__}")
        data = value.to_bytes()
        chunk = self._chunk(key)
        if chunk is not None and len(data) == self._model._chunk_size(chunk[0]):
            self._tensors.write(*chunk, data)
            self._changed.forget([key])
        elif chunk is None and self._model._document(key) == data:
            self._changed.forget([key])
        else:
            self._changed.put(key, data)

    async def delete(self, key: str) -> None:
        """Delete a key; a deleted chunk is one of zeros, as everywhere in Zarr.

        Raises:
            ValueError: when the store is read-only.
        """
        await self._ensure_open()
        await asyncio.to_thread(self.delete_sync, key)

    def delete_sync(self, key: str) -> None:
        """Do what `delete` does, on this thread."""
        self._check_writable()
        chunk = self._chunk(key)
        if chunk is not None:
            self._tensors.write(*chunk, bytes(self._model._chunk_size(chunk[0])))
        if self._model._size(key) is None:
            self._changed.forget([key])
        else:
            self._changed.delete(key)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The tensors of the files by the paths of their arrays, deleted ones included."""
        return self._model.arrays

    def value(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            KeyError: when there is none.
        """
        value = self._value(key)
        if value is None:
            raise KeyError(key)
        return bytes(value)

    # -- inside --------------------------------------------------------------------------------------------

    def _chunk(self, key: str) -> tuple[Tensor, int] | None:
        """Return the tensor and the block's number that a key stands for, while its array is that of the tensor."""
        found = self._model._chunk(key)
        if found is None:
            return None
        document = f"{self._paths[found[0].name]}/{METADATA}"
        return None if self._changed.knows(document) else found

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {tensor.name: path for path, tensor in self._model.arrays.items()}

    def _value(self, key: str) -> Any:
        value = self._changed.get(key)
        if value is not None or key in self._changed.deleted:
            return value
        return self._model._value(key)

    def _size(self, key: str) -> int | None:
        size = self._changed.size(key)
        if size is not None or key in self._changed.deleted:
            return size
        return self._model._size(key)

    def _keys(self, prefix: str) -> Iterable[str]:
        deleted = self._changed.deleted
        kept = [key for key in self._model._keys(prefix) if key not in deleted]
        known = set(kept)
        return kept + sorted(key for key in self._changed.given if key.startswith(prefix) and key not in known)

    def _names(self, folder: str) -> Iterable[str]:
        if not self._changed:
            return self._model._names(folder)
        below = f"{folder}/" if folder else ""
        return dict.fromkeys(key[len(below) :].partition("/")[0] for key in self._keys(below))


def _again(path: str, identity: str, read_only: bool) -> SessionStore:
    from mergefs.edit.session import reopened

    return SessionStore(reopened(path, identity), read_only=read_only)
