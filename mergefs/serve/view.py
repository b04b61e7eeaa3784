"""Views: a manifest opened for reading, as files and as tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.errors import CorruptionError, NotFoundError
from mergefs.hashing import Buffer
from mergefs.manifest import Blob, FileRecipe, Manifest, Tensor
from mergefs.merge.lazy import Deriver, load_plan
from mergefs.serve.cache import BlockCache
from mergefs.serve.kept import KeptBlocks
from mergefs.serve.read_ahead import ReadAhead
from mergefs.store import Store

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE_BYTES = 256 << 20

_AHEAD = 6
"""Parts of a file that are made ahead of each reader, where the cache has threads for it."""

_AHEAD_ON_DISK = 24
"""Parts of which the stored bytes are fetched ahead: those are smaller, and the disk is slower than memory."""


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
        cache: a cache to share with other views, in the place of one of its own.
        kept: where blocks that were derived are kept besides, for all views of a repository.
        counter: where bytes are counted, for several views.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        purpose: str = "view",
        cache: BlockCache | None = None,
        kept: KeptBlocks | None = None,
        counter: ReadCounter | None = None,
    ) -> None:
        self._store = store
        self.manifest_id, self._lease = store.lookup(purpose, name)
        try:
            self.manifest: Manifest = store.manifest(self.manifest_id)
        except BaseException:
            self._lease.release()
            raise
        self.counter = counter or ReadCounter()
        self.cache = cache or BlockCache(cache_bytes)
        self._kept = kept
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
        pieces = self.pieces(self._file(path), offset, size)
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, file: FileRecipe, offset: int, size: int | None = None) -> list[memoryview]:
        """Return what `read` returns, as pieces of the blocks, uncopied."""
        stop = file.size if size is None else min(file.size, offset + size)
        if offset >= stop:
            return []
        starts, parts = self._layout(file)
        covered = parts[bisect_right(starts, offset) - 1 : bisect_right(starts, stop - 1)]
        if self.cache.works_ahead:
            blocks = self.cache.get_all([(self._key(part), partial(self._make, part)) for part in covered])
        else:
            blocks = [self._bytes(part) for part in covered]  # one after another: a file may be larger than memory
        return [
            memoryview(block)[max(0, offset - part.start) : stop - part.start]
            for part, block in zip(covered, blocks, strict=True)
        ]

    def parts_of(self, file: FileRecipe, offset: int, size: int) -> tuple[int, int]:
        """Return the numbers of the part of a file with a byte, and of the one after that with the last of `size`."""
        starts, _ = self._layout(file)
        return bisect_right(starts, offset) - 1, bisect_right(starts, max(offset, offset + size - 1))

    def expect(self, file: FileRecipe, numbers: range) -> None:
        """Have parts of a file made before they are read, where the cache has threads for it."""
        _, parts = self._layout(file)
        for part in parts[numbers.start : numbers.stop]:
            self.cache.expect(self._key(part), partial(self._make, part))

    def fetch(self, file: FileRecipe, numbers: range) -> None:
        """Have the stored bytes that parts of a file are made from brought from the disk meanwhile."""
        _, parts = self._layout(file)
        for part in parts[numbers.start : numbers.stop]:
            if part.block is not None:
                self._reader.expect_whole(bytes.fromhex(part.block))
            elif part.tensor is not None:
                self._deriver.expect(part.tensor.name, part.number)

    def reader(self, path: str) -> FileReader:
        """Return a file that is open for reading.

        Raises:
            NotFoundError: when there is no such file.
        """
        return FileReader(self, self._file(path))

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

    @property
    def recipe(self) -> str | None:
        """The recipe of a merge, as it was given; None for other models.

        Raises:
            CorruptionError: when its plan is missing or damaged.
        """
        plan = self.manifest.lineage.plan
        return None if plan is None else load_plan(self._store, plan).recipe

    def sha256(self, path: str) -> str | None:
        """Return a file's SHA-256 where somebody has computed it by now, in hexadecimal."""
        return self._file(path).sha256 or self._store.known_sha256(self.manifest_id, path)

    @cached_property
    def _deriver(self) -> Deriver:
        return Deriver(self._store, self.manifest, self.counter)

    def _key(self, part: _Part) -> Hashable:
        """Return the name of a part's bytes among those of all models."""
        return part.block or (self.manifest_id, part.tensor.name if part.tensor else "", part.number)

    def _bytes(self, part: _Part) -> Buffer:
        return self.cache.get(self._key(part), partial(self._make, part))

    def _make(self, part: _Part) -> Buffer:
        if part.block is not None:
            kind = Kind.METADATA if part.tensor is None else Kind.BASE
            made = self._reader.read(bytes.fromhex(part.block), kind)
        else:
            assert part.tensor is not None
            derived = partial(self._deriver.block, part.tensor.name, part.number)
            made = derived() if self._kept is None else self._kept.get(self._deriver, part.tensor, part.number, derived)
        if len(made) != part.size:
            raise CorruptionError(f"a block of {len(made)} bytes where manifest {self.manifest_id} says {part.size}")
        return made

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


class FileReader:
    """A file of a view, open for reading. Safe to use from many threads, and by many readers at once.

    Where the view's cache has threads, what each reader goes on to is made before it asks.
    """

    def __init__(self, view: View, file: FileRecipe) -> None:
        self._view = view
        self._file = file
        self._made = ReadAhead(_AHEAD)
        self._fetched = ReadAhead(_AHEAD_ON_DISK)

    def pieces(self, offset: int, size: int) -> list[memoryview]:
        """Return up to `size` bytes from `offset`, fewer at the file's end, as pieces of the blocks, uncopied.

        Raises:
            CorruptionError: when a block is missing or damaged.
        """
        if self._view.cache.works_ahead:
            first, stop = self._view.parts_of(self._file, offset, size)
            self._view.expect(self._file, self._made.read(first, stop))
            self._view.fetch(self._file, self._fetched.read(first, stop))
        return self._view.pieces(self._file, offset, size)
