"""Making a session's files a manifest that shares every block that was not touched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mergefs.blocks import codecs
from mergefs.blocks.codecs import Encoded
from mergefs.blocks.geometry import grid
from mergefs.blocks.pack import NO_BASE
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.writer import BlockWriter
from mergefs.checkpoint import adapter
from mergefs.checkpoint.directory import INDEX, SUFFIX, open_checkpoint
from mergefs.checkpoint.safetensors import Header
from mergefs.checkpoint.strict import LONGEST_JSON
from mergefs.dtypes import DTYPES, DType
from mergefs.edit.content import Content
from mergefs.errors import CheckpointError
from mergefs.hashing import digest
from mergefs.manifest import Blob, FileRecipe, Lineage, Manifest, Tensor, TensorData
from mergefs.pipeline import available_cores, ordered
from mergefs.serve.view import View
from mergefs.store import Store

_LENGTH_BYTES = 8
_SKIPPED = (".git/", ".cache/")  # as an ingest does


@dataclass(frozen=True)
class Made:
    """A manifest whose blocks are stored.

    Attributes:
        manifest: the parent itself where nothing was changed.
        kept: blocks and blobs of the parent that it shares without anybody having looked at them.
    """

    manifest: Manifest
    kept: int


@dataclass(frozen=True)
class _Piece:
    """A run of a file's bytes that becomes one block.

    Attributes:
        tensor: the tensor that it belongs to, or None for a blob.
        twin: the block at that place of the parent (32 bytes), of the same length and dtype, or None.
    """

    content: Content
    start: int
    size: int
    dtype: DType
    tensor: str | None
    twin: bytes | None


@dataclass(frozen=True)
class _Done:
    piece: _Piece
    block: bytes
    raw: bytes
    encoded: Encoded | None
    root: bytes


def make_manifest(
    store: Store, writer: BlockWriter, view: View, contents: Mapping[str, Content], scratch: Path, threads: int | None
) -> Made:
    """Store what is new of a session's files, and return the manifest.

    A file of weights with the header of before keeps its tensors: their untouched blocks are shared without being
    read, the others are stored as differences from what they replace, where that is smaller. What is in another file
    of weights is cut and stored as an ingest would. All other files are blobs.

    Args:
        store: the repository.
        writer: of it; flushed at the end.
        view: the model that was changed.
        contents: the files by their paths.
        scratch: a folder for small files.
        threads: how many to hash and encode with; all cores by default.

    Raises:
        CheckpointError: when a file of weights is damaged, or the files make no checkpoint.
    """
    headers = read_headers(contents, scratch)
    work = _Work(store, writer, view, threads or available_cores())
    files, tensors = [], []
    for path, content in contents.items():
        if path.startswith(_SKIPPED):
            continue
        recipe, found = work.file(path, content, headers.get(path))
        files.append(recipe)
        tensors += found
    writer.flush()
    parent = view.manifest
    manifest = Manifest(parent.block_elements, tuple(files), tuple(tensors), parent.lineage)
    if manifest.encoded == parent.encoded:
        return Made(parent, work.kept)
    origin = parent.lineage if manifest.is_lazy else Lineage("edit")
    lineage = replace(origin, kind="edit", parent=parent.id)
    return Made(Manifest(parent.block_elements, manifest.files, manifest.tensors, lineage), work.kept)


class _Work:
    def __init__(self, store: Store, writer: BlockWriter, view: View, threads: int) -> None:
        self._view = view
        self._parent = view.manifest
        self._writer = writer
        self._threads = threads
        self._exact = store.exact
        self._reader = BlockReader(store.catalog, store.backend)
        self._run = 2 * store.block_elements
        self.kept = 0

    def file(self, path: str, content: Content, header: Header | None) -> tuple[FileRecipe, list[Tensor]]:
        """Return a file's recipe and its tensors."""
        source = None if content.base is None else self._parent.file_by_path[content.base]
        untouched = source is not None and source.size == content.size and content.is_unchanged(0, content.size)
        names = [s.tensor for s in source.segments if isinstance(s, TensorData)] if source else []
        if header is None:
            if source is not None and untouched and not names:
                self.kept += len(source.segments)
                return replace(source, path=path), []
            return self._blobs(path, content), []
        if source is not None and names and _blob_bytes(source) == len(header.raw) and source.size == content.size:
            same = untouched or content.is_unchanged(0, len(header.raw))
            if same or content.read(0, len(header.raw)) == self._view.read(source.path, 0, len(header.raw)):
                return self._patched(path, content, source, names, untouched)
        return self._weights(path, content, header)

    def _patched(
        self, path: str, content: Content, source: FileRecipe, names: list[str], untouched: bool
    ) -> tuple[FileRecipe, list[Tensor]]:
        """Take over a file of weights with its header, and look at the blocks that were touched."""
        tensors = [self._parent.tensor_by_name[name] for name in names]
        if untouched:
            self.kept += sum(len(tensor.blocks) for tensor in tensors)
            return replace(source, path=path), tensors
        blocks = {tensor.name: list(tensor.blocks) for tensor in tensors}
        places: list[tuple[str, int]] = []
        pieces: list[_Piece] = []
        for tensor, number, start, size in self._places(source):
            if content.is_unchanged(start, start + size):
                self.kept += 1
                continue
            twin = tensor.blocks[number]
            twin_id = None if twin is None else bytes.fromhex(twin)
            places.append((tensor.name, number))
            pieces.append(_Piece(content, start, size, tensor.dtype, tensor.name, twin_id))
        for (name, number), done in zip(places, self._store(pieces, tiered=False), strict=True):
            blocks[name][number] = done.block.hex()
        changed = [replace(tensor, blocks=tuple(blocks[tensor.name])) for tensor in tensors]
        # Whoever wants the hash of all of it would have to read all of it.
        sha256 = source.sha256 if changed == tensors else None
        return FileRecipe(path, source.size, sha256, source.segments), changed

    def _weights(self, path: str, content: Content, header: Header) -> tuple[FileRecipe, list[Tensor]]:
        """Cut and store a file of weights as an ingest does, against the parent's tensors of the same names."""
        pieces = list(self._blob_pieces(content, 0, len(header.raw)))
        for entry in header.tensors:
            twin = self._parent.tensor_by_name.get(entry.name)
            if twin is not None and (twin.dtype, twin.shape) != (entry.dtype, entry.shape):
                twin = None
            width = entry.dtype.itemsize
            for number, (first, stop) in enumerate(grid(entry.shape, self._parent.block_elements).elements()):
                block = twin.blocks[number] if twin else None
                start, size = entry.start + first * width, (stop - first) * width
                twin_id = None if block is None else bytes.fromhex(block)
                pieces.append(_Piece(content, start, size, entry.dtype, entry.name, twin_id))
        sha256 = hashlib.sha256()
        blobs: list[Blob | TensorData] = []
        blocks: dict[str, list[str]] = {entry.name: [] for entry in header.tensors}
        for done in self._store(pieces, tiered=True):
            sha256.update(done.raw)
            if done.piece.tensor is None:
                blobs.append(Blob(done.block.hex(), done.piece.size))
            else:
                blocks[done.piece.tensor].append(done.block.hex())
        segments = (*blobs, *(TensorData(entry.name) for entry in header.tensors))
        tensors = [Tensor(e.name, e.dtype, e.shape, tuple(blocks[e.name])) for e in header.tensors]
        return FileRecipe(path, header.file_size, sha256.hexdigest(), segments), tensors

    def _blobs(self, path: str, content: Content) -> FileRecipe:
        """Cut and store a file that holds no weights."""
        sha256 = hashlib.sha256()
        segments: list[Blob | TensorData] = []
        for done in self._store(self._blob_pieces(content, 0, content.size), tiered=False):
            sha256.update(done.raw)
            segments.append(Blob(done.block.hex(), done.piece.size))
        return FileRecipe(path, content.size, sha256.hexdigest(), tuple(segments))

    def _blob_pieces(self, content: Content, start: int, stop: int) -> Iterator[_Piece]:
        for at in range(start, stop, self._run):
            yield _Piece(content, at, min(self._run, stop - at), DTYPES["U8"], None, None)

    def _store(self, pieces: list[_Piece] | Iterator[_Piece], *, tiered: bool) -> Iterator[_Done]:
        work = partial(self._prepare, tiered=tiered)
        for done in ordered(work, pieces, threads=self._threads, window=2 * self._threads + 2):
            if done.encoded is None:
                self._writer.reuse(done.block)
            else:
                size, code = done.piece.size, done.piece.dtype.code
                self._writer.add(done.block, done.encoded, raw_length=size, dtype=code, base=done.root)
            yield done

    def _prepare(self, piece: _Piece, *, tiered: bool) -> _Done:
        """Read, hash and encode a piece. Runs on many threads."""
        raw = piece.content.read(piece.start, piece.size)
        if len(raw) != piece.size:
            raise CheckpointError("a file became shorter while it was being committed: try again")
        block = digest(raw)
        if block == piece.twin or self._writer.known(block):
            return _Done(piece, block, raw, None, NO_BASE)
        if piece.twin is None:
            return _Done(piece, block, raw, codecs.encode(raw, piece.dtype, exact=self._exact), NO_BASE)
        root, root_raw = next(iter(self._reader.read_with_root(piece.twin, Kind.BASE).items()))
        if tiered:
            encoded = codecs.encode_tiered(raw, piece.dtype, root_raw, self._exact)
        else:
            encoded = codecs.encode(raw, piece.dtype, root_raw, self._exact)
        return _Done(piece, block, raw, encoded, root)

    def _places(self, source: FileRecipe) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield each block of a file's tensors: tensor, number, place in the file, size."""
        at = 0
        for segment in source.segments:
            if isinstance(segment, Blob):
                at += segment.size
                continue
            tensor = self._parent.tensor_by_name[segment.tensor]
            for number, (first, stop) in enumerate(tensor.grid(self._parent.block_elements).elements()):
                size = (stop - first) * tensor.dtype.itemsize
                yield tensor, number, at, size
                at += size


def _blob_bytes(source: FileRecipe) -> int:
    return sum(segment.size for segment in source.segments if isinstance(segment, Blob))


def read_headers(contents: Mapping[str, Content], scratch: Path) -> dict[str, Header | None]:
    """Return the header of every file that holds weights: as an ingest of these files would find it, with all that it
    checks.

    Args:
        contents: the files by their paths.
        scratch: a folder for small files.

    Raises:
        CheckpointError: when an ingest would refuse them.
    """
    # An ingest looks at names, sizes and headers: a folder with just these says which files are what.
    with TemporaryDirectory(dir=scratch, prefix="headers-") as folder:
        root = Path(folder)
        for path, content in contents.items():
            if "/" not in path:
                with open(root / path, "wb") as file:
                    file.write(content.read(0, _looked_at(path, content)))
                    file.truncate(content.size)
        try:
            checkpoint = open_checkpoint(root)
        except CheckpointError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # of a file that was just written: the disk is at fault
            message = str(error).replace(f"{root}/", "").replace(str(root), "the session")
            raise CheckpointError(f"the session cannot be committed as it is: {message}") from None
        return {file.path: file.header for file in checkpoint.files}


def _looked_at(path: str, content: Content) -> int:
    """Return how many bytes of a file an ingest reads to know what it is."""
    if path.endswith(SUFFIX):
        length = int.from_bytes(content.read(0, _LENGTH_BYTES), "little")
        return min(content.size, _LENGTH_BYTES + min(length, LONGEST_JSON))
    return content.size if path in (INDEX, adapter.CONFIG) and content.size <= LONGEST_JSON else 0
