"""Zarr v3 over a repository: the blocks by their ids, and a model's tensors as arrays. Both are read only.

A block is a chunk: `BlockStore` has a key for every block, `ModelStore` a key for every block of every tensor
of one model, so that Zarr reads exactly the blocks that a selection touches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer

from mergefs import hashing
from mergefs.blocks.geometry import Grid
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.environment import Transaction
from mergefs.errors import CorruptionError
from mergefs.hashing import is_hex_id
from mergefs.manifest import Tensor
from mergefs.serve import zarr_dtypes
from mergefs.serve.cache import BlockCache
from mergefs.serve.view import View
from mergefs.serve.zarr_reading import ReadingStore
from mergefs.store import Store as Repository

CACHE_BYTES = 64 << 20
METADATA = "zarr.json"

zarr_dtypes.register()


class ReadOnlyStore(ReadingStore):
    """The part of a Zarr store that is the same for whatever can be read and not written."""

    def __init__(self, *, read_only: bool = True) -> None:
        if not read_only:
            raise ValueError(f"a {type(self).__name__} is read only")
        super().__init__(read_only=True)

    # -- writing is refused --------------------------------------------------------------------------------

    @property
    def supports_writes(self) -> bool:
        """Nothing can be written."""
        return False

    @property
    def supports_deletes(self) -> bool:
        """Nothing can be deleted."""
        return False

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse.

        Raises:
            ValueError: always.
        """
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse.

        Raises:
            ValueError: always.
        """
        self._check_writable()

    # -- inside --------------------------------------------------------------------------------------------

    def with_read_only(self, read_only: bool = False) -> Store:
        """Return another store on the same data.

        Raises:
            NotImplementedError: when it is to be writable.
        """
        return self._again() if read_only else super().with_read_only(read_only)

    def _again(self) -> Store:
        raise NotImplementedError


class BlockStore(ReadOnlyStore):
    """Every stored block of a repository, blobs included: keys are ids (64 hexadecimal digits), values bytes.

    Args:
        repository: where the blocks are; it stays open for as long as the store is used.
        read_only: nothing but True is possible.
    """

    def __init__(self, repository: Repository, *, read_only: bool = True) -> None:
        super().__init__(read_only=read_only)
        self._repository = repository
        self._reader = BlockReader(repository.catalog, repository.backend)
        # For byte ranges: a block is decoded and checked as a whole, whatever part of it is asked for.
        self._cache = BlockCache(CACHE_BYTES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockStore) and other._repository.path == self._repository.path

    def __repr__(self) -> str:
        return f"BlockStore({str(self._repository.path)!r})"

    def __reduce__(self) -> Any:
        return _open_blocks, (str(self._repository.path),)

    def _again(self) -> BlockStore:
        return BlockStore(self._repository)

    def _value(self, key: str) -> hashing.Buffer | None:
        if self._size(key) is None:
            return None
        try:
            return self._cache.get(key, lambda: self._reader.read(bytes.fromhex(key), Kind.BASE))
        except CorruptionError:
            if self._size(key) is None:  # gc was faster
                return None
            raise

    def _size(self, key: str) -> int | None:
        location = self._repository.catalog.locate(bytes.fromhex(key)) if is_hex_id(key) else None
        return None if location is None else location.record.raw_length

    def _keys(self, prefix: str) -> Iterable[str]:
        # An odd digit at the end is half a byte.
        even = prefix[: len(prefix) & ~1]
        try:
            first = bytes.fromhex(even)
        except ValueError:
            return ()
        with self._repository.catalog.read() as txn:
            return [key for key in _block_ids(txn, first) if key.startswith(prefix)]

    def _names(self, folder: str) -> Iterable[str]:
        return () if folder else self._keys("")


class ModelStore(ReadOnlyStore):
    """A model as a Zarr group: its tensors are arrays, and their blocks are the chunks.

    The dots of a tensor's name become folders: `model.norm.weight` is the array `model/norm/weight`. A Zarr
    array has nothing below it, so a dot stays a dot where what stands before it is itself a tensor's name:
    besides the array `a`, the tensor `a.b` is the array `a.b`, and `a.c.d` is `a.c/d`. A dot also stays where
    there is nothing before or behind it. Slashes, backslashes and percent signs in a name are written `%2F`,
    `%5C` and `%25`; so are, as `%2E`, the dots of a folder that would be `zarr.json` or nothing but dots.

    Each array has the attributes `name` and `dtype` of its tensor; the root group's is `manifest`, the id. The
    dimensions are named `NAME[0]`, `NAME[1]`, ..., no two of them the same, as those of different tensors have nothing
    to do with each other. Chunks at the end of the cut axis are filled up with zeros, as Zarr wants them. Bytes are not
    compressed.

    Args:
        view: the model. Closing the store closes it.
        read_only: nothing but True is possible.
    """

    def __init__(self, view: View, *, read_only: bool = True) -> None:
        super().__init__(read_only=read_only)
        self._view = view

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelStore)
            and other._view.manifest_id == self._view.manifest_id
            and other._view.store.path == self._view.store.path
        )

    def __repr__(self) -> str:
        return f"ModelStore({self._view.manifest_id[:12]!r})"

    def __reduce__(self) -> Any:
        return _open_model, (str(self._view.store.path), self._view.manifest_id)

    def close(self) -> None:
        """Close the store and its view."""
        super().close()
        self._view.close()

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        """The tensors by the paths of their arrays."""
        names = self._view.tensors
        return {array_path(name, names): tensor for name, tensor in names.items()}

    # -- inside --------------------------------------------------------------------------------------------

    def _again(self) -> ModelStore:
        return ModelStore(self._view)

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """What is directly below each group; the root is the empty path."""
        below: dict[str, dict[str, None]] = {"": {}}
        for path in self.arrays:
            parts = path.split("/")
            for depth, part in enumerate(parts):
                below.setdefault("/".join(parts[:depth]), {})[part] = None
        return {path: list(names) for path, names in below.items()}

    @cached_property
    def _root(self) -> bytes:
        # zarr-python nests this by depth, and needs the children of a group next to each other.
        paths = sorted(filter(None, (*self._groups, *self.arrays)), key=lambda p: (p.count("/"), p.rpartition("/")[0]))
        nodes = {path: self._metadata(path) for path in paths}
        consolidated = {"kind": "inline", "must_understand": False, "metadata": nodes}
        return _json({**self._metadata(""), "consolidated_metadata": consolidated})

    def _metadata(self, path: str) -> dict[str, Any]:
        tensor = self.arrays.get(path)
        if tensor is not None:
            return _array_metadata(tensor, self._grid(tensor))
        attributes = {} if path else {"manifest": self._view.manifest_id}
        return {"zarr_format": 3, "node_type": "group", "attributes": attributes}

    def _grid(self, tensor: Tensor) -> Grid:
        return tensor.grid(self._view.manifest.block_elements)

    def _document(self, key: str) -> bytes | None:
        """Return the metadata that a key stands for, or None where it is none."""
        if key == METADATA:
            return self._root
        path, _, name = key.rpartition("/")
        if name != METADATA or not path or not (path in self.arrays or path in self._groups):
            return None
        return _json(self._metadata(path))

    def _chunk(self, key: str) -> tuple[Tensor, int] | None:
        """Return the tensor and the block's number that a key stands for, or None where it is no chunk's."""
        for path, coordinates in _splits(key):
            tensor = self.arrays.get(path)
            if tensor is None:
                continue
            try:
                return tensor, self._grid(tensor).index(coordinates)
            except IndexError:
                return None
        return None

    def _value(self, key: str) -> hashing.Buffer | None:
        document = self._document(key)
        if document is not None:
            return document
        chunk = self._chunk(key)
        if chunk is None:
            return None
        tensor, number = chunk
        block = self._view.block(tensor, number)
        size = self._chunk_size(tensor)
        return block if len(block) == size else bytes(block).ljust(size, b"\0")

    def _size(self, key: str) -> int | None:
        document = self._document(key)
        if document is not None:
            return len(document)
        chunk = self._chunk(key)
        return None if chunk is None else self._chunk_size(chunk[0])

    def _chunk_size(self, tensor: Tensor) -> int:
        return prod(self._grid(tensor).block_shape) * tensor.dtype.itemsize

    def _keys(self, prefix: str) -> Iterable[str]:
        return (key for key in self._all_keys(prefix) if key.startswith(prefix))

    def _all_keys(self, prefix: str) -> Iterator[str]:
        """Yield at least the keys that begin with `prefix`."""
        for path in self._groups:
            yield f"{path}/{METADATA}" if path else METADATA
        for path, tensor in self.arrays.items():
            if prefix.startswith(f"{path}/") or f"{path}/".startswith(prefix):
                yield f"{path}/{METADATA}"
                for coordinates in product(*map(range, self._grid(tensor).counts)):
                    yield "/".join([path, "c", *map(str, coordinates)])

    def _names(self, folder: str) -> Iterable[str]:
        if folder in self._groups:
            return [METADATA, *self._groups[folder]]
        if folder in self.arrays:
            return [METADATA, "c"] if self.arrays[folder].blocks else [METADATA]
        below = f"{folder}/"
        return dict.fromkeys(key[len(below) :].partition("/")[0] for key in self._keys(below))


def array_path(name: str, names: Iterable[str]) -> str:
    """Return the path of a tensor's array; see `ModelStore`.

    Args:
        name: the tensor's name.
        names: the names of all tensors of its model, as something with a quick `in`.
    """
    if not name:
        return "%"
    path = ""
    for at, character in enumerate(name):
        if character == "." and 0 < at < len(name) - 1 and "." not in (name[at - 1], name[at + 1]):
            path += "." if name[:at] in names else "/"
        else:
            path += _ESCAPES.get(character, character)
    return "/".join(_segment(part) for part in path.split("/"))


_ESCAPES = {"/": "%2F", "\\": "%5C", "%": "%25"}


def _segment(part: str) -> str:
    """Keep a part of a path from meaning something to Zarr."""
    return part.replace(".", "%2E") if not part.strip(".") or part == METADATA else part


def _array_metadata(tensor: Tensor, grid: Grid) -> dict[str, Any]:
    endian = {"configuration": {"endian": "little"}} if tensor.dtype.itemsize > 1 else {}
    zero: bool | float = 0.0 if tensor.dtype.is_float else False if tensor.dtype.name == "BOOL" else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": tensor.dtype.numpy_name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.block_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [{"name": "bytes", **endian}],
        "dimension_names": [f"{tensor.name}[{axis}]" for axis in range(len(tensor.shape))],
        "attributes": {"name": tensor.name, "dtype": tensor.dtype.name},
    }


def _splits(key: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the ways in which a key can be an array's path, `c` and block coordinates."""
    parts = key.split("/")
    coordinates: list[int] = []
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] == "c":
            yield "/".join(parts[:at]), coordinates
        if not _COORDINATE.fullmatch(parts[at]):
            return
        coordinates = [int(parts[at]), *coordinates]


_COORDINATE = re.compile("0|[1-9][0-9]{0,18}")


def _block_ids(txn: Transaction, prefix: bytes) -> Iterator[str]:
    for key, _ in txn.items("blocks", prefix):
        if key[32] == 0:
            yield key[:32].hex()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _open_blocks(path: str) -> BlockStore:
    return BlockStore(Repository.open(path))


def _open_model(path: str, manifest: str) -> ModelStore:
    return ModelStore(View(Repository.open(path), manifest, purpose="zarr"))
