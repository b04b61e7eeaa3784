"""Views: a manifest opened for reading, as files and as tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.errors import NotFoundError
from mergefs.hashing import Buffer
from mergefs.manifest import Blob, FileRecipe, Manifest, Tensor
from mergefs.merge.lazy import Deriver
from mergefs.serve.cache import BlockCache
from mergefs.store import Store

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class FileInfo:
    """A file of a view.

    Attributes:
        path: relative, with `/` between folders.
        size: in bytes.
        sha256: hexadecimal, or None where nobody has computed it yet.
    """

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of a file's bytes that is one block, or one blob (tensor None)."""

    start: int
    size: int
    block: str | None
    tensor: Tensor | None
    number: int


class View:
    """A model opened for reading. Safe to use from many threads. Holds a lease until `close`.

    Args:
        store: the repository.
        name: a ref, a manifest's id, or its beginning.
        cache_bytes: the most that is kept of decoded blocks.
        purpose: what the lease says.
    """

    def __init__(
        self, store: Store, name: str, *, cache_bytes: int = DEFAULT_CACHE_BYTES, purpose: str = "view"
    ) -> None:
        self._store = store
        self.manifest_id = store.resolve(name)
        self._lease = store.reading(purpose, [self.manifest_id])
        self.manifest: Manifest = store.manifest(self.manifest_id)
        self.counter = ReadCounter()
        self.cache = BlockCache(cache_bytes)
        self._reader = BlockReader(store.catalog, store.backend, self.counter)
        self._parts: dict[str, tuple[list[int], list[_Part]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lease back."""
        self._lease.release()

    @property
    def store(self) -> Store:
        """The repository."""
        return self._store

    # -- files ---------------------------------------------------------------------------------------------

    @cached_property
    def files(self) -> Mapping[str, FileInfo]:
        """The files by their paths."""
        return {
            file.path: FileInfo(
                file.path, file.size, file.sha256 or self._store.known_sha256(self.manifest_id, file.path)
            )
            for file in self.manifest.files
        }

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes of a file from `offset`, fewer at its end, all of the rest when None.

        Raises:
            NotFoundError: when there is no such file.
            CorruptionError: when a block is missing or damaged.
        """
        file = self._file(path)
        stop = file.size if size is None else min(file.size, offset + size)
        if offset >= stop:
            return b""
        starts, parts = self._layout(file)
        index = bisect_right(starts, offset) - 1
        pieces = []
        at = offset
        while at < stop:
            part = parts[index]
            data = memoryview(self._bytes(part))
            piece = data[at - part.start : stop - part.start]
            pieces.append(piece)
            at += len(piece)
            index += 1
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def blocks(self, path: str) -> Iterator[Buffer]:
        """Yield all of a file's bytes, block by block, past the cache.

        Raises:
            NotFoundError: when there is no such file.
        """
        for part in self._layout(self._file(path))[1]:
            yield self._make(part)

    def file_parts(self, path: str) -> int:
        """Return how many blocks and blobs a file has."""
        return len(self._layout(self._file(path))[1])

    def starts(self, path: str) -> Sequence[int]:
        """Return where in a file each of its blocks and blobs begins.

        Raises:
            NotFoundError: when there is no such file.
        """
        return self._layout(self._file(path))[0]

    def part(self, path: str, number: int) -> Buffer:
        """Return one block or blob of a file, past the cache."""
        return self._make(self._layout(self._file(path))[1][number])

    # -- tensors -------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by their names."""
        return self.manifest.tensor_by_name

    def block(self, tensor: Tensor, number: int) -> Buffer:
        """Return the bytes of one block of a tensor."""
        first, stop = tensor.grid(self.manifest.block_elements).extent(number)
        size = (stop - first) * tensor.dtype.itemsize
        return self._bytes(_Part(0, size, tensor.blocks[number], tensor, number))

    def fresh_block(self, tensor: Tensor, number: int) -> Buffer:
        """Return the bytes of one block of a tensor, past the cache."""
        first, stop = tensor.grid(self.manifest.block_elements).extent(number)
        return self._make(_Part(0, (stop - first) * tensor.dtype.itemsize, tensor.blocks[number], tensor, number))

    def tensor_bytes(self, name: str) -> bytearray:
        """Return all bytes of a tensor.

        Raises:
            NotFoundError: when there is no such tensor.
        """
        tensor = self._tensor(name)
        out = bytearray(tensor.nbytes)
        at = 0
        for number, (block, (first, stop)) in enumerate(zip(tensor.blocks, self._extents(tensor), strict=True)):
            part = _Part(0, (stop - first) * tensor.dtype.itemsize, block, tensor, number)
            out[at : at + part.size] = self._make(part)
            at += part.size
        return out

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a torch tensor of its own dtype and shape, with memory of its own.

        Raises:
            NotFoundError: when there is no such tensor.
        """
        import torch

        tensor = self._tensor(name)
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype.torch)
        return torch.frombuffer(self.tensor_bytes(name), dtype=tensor.dtype.torch).reshape(tensor.shape)

    def state_dict(
        self,
        tensors: str | Iterable[str] = "*",
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        threads: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return tensors by name. Blocks are decoded straight into their memory, so that there is no second copy.

        Args:
            tensors: a shell pattern of names, such as `model.layers.0.*`, or the names.
            device: where the tensors are to be.
            dtype: what float tensors are converted to, block by block; others stay as they are.
            threads: how many to decode with; all cores by default.

        Raises:
            NotFoundError: when there is no tensor of one of the names.
            UserError: when the dtype is not one of floats.
            CorruptionError: when a block is missing or damaged.
        """
        from mergefs.serve.torch_tensors import load

        return load(self, tensors, device=device, dtype=dtype, threads=threads)

    # -- inside --------------------------------------------------------------------------------------------

    @cached_property
    def _deriver(self) -> Deriver:
        return Deriver(self._store, self.manifest, self.counter)

    def _bytes(self, part: _Part) -> Buffer:
        key = part.block or (part.tensor.name if part.tensor else "", part.number)
        return self.cache.get(key, lambda: self._make(part))

    def _make(self, part: _Part) -> Buffer:
        if part.block is not None:
            kind = Kind.METADATA if part.tensor is None else Kind.BASE
            return self._reader.read(bytes.fromhex(part.block), kind)
        assert part.tensor is not None
        return self._deriver.block(part.tensor.name, part.number)

    def _file(self, path: str) -> FileRecipe:
        try:
            return self.manifest.file_by_path[path]
        except KeyError:
            raise NotFoundError(f"the model {self.manifest_id[:12]} has no file '{path}'") from None

    def _tensor(self, name: str) -> Tensor:
        try:
            return self.manifest.tensor_by_name[name]
        except KeyError:
            raise NotFoundError(f"the model {self.manifest_id[:12]} has no tensor '{name}'") from None

    def _extents(self, tensor: Tensor) -> list[tuple[int, int]]:
        return list(tensor.grid(self.manifest.block_elements).elements())

    def _layout(self, file: FileRecipe) -> tuple[list[int], list[_Part]]:
        found = self._parts.get(file.path)
        if found is None:
            parts = list(self._file_parts(file))
            found = self._parts[file.path] = ([part.start for part in parts], parts)
        return found

    def _file_parts(self, file: FileRecipe) -> Iterator[_Part]:
        at = 0
        for segment in file.segments:
            if isinstance(segment, Blob):
                yield _Part(at, segment.size, segment.block, None, 0)
                at += segment.size
                continue
            tensor = self.manifest.tensor_by_name[segment.tensor]
            for number, (first, stop) in enumerate(self._extents(tensor)):
                size = (stop - first) * tensor.dtype.itemsize
                yield _Part(at, size, tensor.blocks[number], tensor, number)
                at += size
