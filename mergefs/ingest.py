"""Ingest: a checkpoint becomes blocks, statistics and a manifest, in one streaming pass.

Where the bytes come from is its `Contents`: the files of a directory, or whatever can say what a file would hold.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks import codecs
from mergefs.blocks.codecs import Encoded
from mergefs.blocks.floats import squared_norm
from mergefs.blocks.geometry import grid
from mergefs.blocks.pack import NO_BASE
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.writer import BlockWriter
from mergefs.checkpoint.directory import Checkpoint, CheckpointFile, open_checkpoint
from mergefs.checkpoint.safetensors import TensorEntry
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import BlocksCollectedError, CheckpointError, CorruptionError, UserError
from mergefs.hashing import Buffer, digest
from mergefs.manifest import Blob, FileRecipe, Lineage, Manifest, Tensor, TensorData, safe_path
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.adapters import check_delta
from mergefs.planner.fitting import prepare, prepare_delta
from mergefs.refs import check_ref_name
from mergefs.statistics.measure import BlockMeasure, Collector, coarse_sample, measure_block, unchanged_block
from mergefs.statistics.sample import positions
from mergefs.statistics.stored import with_stored_bytes
from mergefs.statistics.tensor import products_key, statistics_key
from mergefs.store import Publication, Store

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        manifest: the id of the model.
        ref: its name here.
        previous: the id of the manifest that the ref named before, or None.
        raw_bytes: bytes of the checkpoint's files.
        stored_bytes: bytes added to the repository's packs and manifests.
        blocks_new, blocks_reused: different blocks (blobs included) that were added, or were there already.
        seconds: wall time.
        kind: `model`, `adapter` or `delta`.
        format: what it was taken from: `safetensors` or `zarr`.
    """

    manifest: str
    ref: str
    previous: str | None
    raw_bytes: int
    stored_bytes: int
    blocks_new: int
    blocks_reused: int
    seconds: float
    kind: str = "model"
    format: str = "safetensors"


class Contents(Protocol):
    """The bytes of a checkpoint's files."""

    def read(self, file: int, start: int, size: int) -> bytes:
        """Return bytes of a file that has them. Runs on many threads.

        Args:
            file: its number among the checkpoint's files.
            start, size: which bytes.

        Raises:
            CheckpointError: when they cannot be read.
        """

    def close(self) -> None:
        """Give back what reading needs."""


@dataclass(frozen=True)
class _Piece:
    """A run of a file's bytes that becomes one block.

    Attributes:
        tensor: the tensor that it belongs to, or None for a blob.
        number, first: of the block in its tensor, and of its first element.
        base: the block at the same place of the base (32 bytes), or None where there is none.
    """

    file: int
    start: int
    size: int
    tensor: _Target | None = None
    number: int = 0
    first: int = 0
    base: bytes | None = None

    @property
    def sample(self) -> NDArray[np.int64]:
        """Which of its elements are sampled."""
        assert self.tensor is not None
        entry = self.tensor.entry
        width = entry.dtype.itemsize
        return positions((entry.stop - entry.start) // width, self.first, self.first + self.size // width)


@dataclass(frozen=True)
class _Target:
    """A tensor that is being ingested.

    Attributes:
        entry: its entry in the safetensors header.
        base_dtype: the base's dtype of the tensor of the same name, which may have another number of rows, or None.
        is_measured: whether the shapes are the same, so that there are statistics of the difference.
    """

    entry: TensorEntry
    base_dtype: DType | None
    is_measured: bool


@dataclass(frozen=True)
class _Done:
    """A piece whose block is ready to be stored.

    Attributes:
        encoded: None when the block is stored already.
        root: the block that it is encoded against.
        errors: what remains of its delta after each tier, where it has several.
        coarse: float32[sample, 3]: what these tiers give for the sampled elements.
        squares: the sum of the elements' squares, where the tensor has no base.
    """

    piece: _Piece
    raw: bytes
    block: bytes
    encoded: Encoded | None
    root: bytes
    measure: BlockMeasure | None
    errors: tuple[float, ...] = ()
    coarse: NDArray[np.float32] | None = None
    squares: float | None = None


def ingest(
    store: Store,
    path: str | Path,
    name: str,
    *,
    base: str | None = None,
    kind: str = "model",
    threads: int | None = None,
    progress: Progress | None = None,
) -> IngestReport:
    """Take a checkpoint into a repository.

    Args:
        store: the repository.
        path: a Hugging Face directory or a safetensors file.
        name: the ref for it.
        base: the ref or id of the model that it was fine-tuned from: its blocks are stored as differences from
            that model's, and statistics of the differences are kept for planning. An adapter is for any model, and has
            no base here.
        kind: `delta` for a checkpoint whose tensors are differences from the base's: it is stored as it is, and a
            recipe that names it means the base with these added. What else it is, it says itself.
        threads: how many to work with; all cores by default.
        progress: told how far it is.

    Raises:
        CheckpointError: when the checkpoint is damaged or incomplete; the repository is then as before.
        NotFoundError: when the base does not exist.
        RefNameError: when the name is malformed.
        UserError: when a delta has no base.
        RecipeError: when it does not fit its base.
    """
    check_ref_name(name)
    checkpoint = open_checkpoint(path)
    return take_in(
        store,
        checkpoint,
        lambda: _FileContents(checkpoint),
        name,
        base=base,
        kind=kind,
        threads=threads,
        progress=progress,
    )


def take_in(
    store: Store,
    checkpoint: Checkpoint,
    contents: Callable[[], Contents],
    name: str,
    *,
    base: str | None = None,
    kind: str = "model",
    threads: int | None = None,
    progress: Progress | None = None,
) -> IngestReport:
    """Take a checkpoint in whose headers have been read.

    Args:
        checkpoint: its files.
        contents: opens what has their bytes.
        store, name, base, kind, threads, progress: see `ingest`.

    Raises: see `ingest`.
    """
    check_ref_name(name)
    base_id = None if base is None else store.resolve(base)
    if kind == "delta":
        if base_id is None:
            raise UserError("a delta needs the model that it is to be added to: name it with --base")
        _check_delta(store, checkpoint, base_id, name)
    elif checkpoint.is_adapter:
        kind, base_id = "adapter", None
    for file in checkpoint.files:
        if not safe_path(file.path):
            raise CheckpointError(f"{file.source}: the file name {file.path!r} cannot be stored; rename the file")
    for attempt in range(_ATTEMPTS):
        try:
            if base is not None:  # it may name another model by now
                base_id = store.resolve(base) if not checkpoint.is_adapter else None
            with closing(contents()) as opened:
                return _ingest(store, checkpoint, opened, name, base_id, kind, threads or available_cores(), progress)
        except BlocksCollectedError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def window(threads: int) -> int:
    """Return how many blocks are under way at once."""
    return 2 * threads + 2


def _ingest(
    store: Store,
    checkpoint: Checkpoint,
    contents: Contents,
    name: str,
    base_id: str | None,
    kind: str,
    threads: int,
    progress: Progress | None,
) -> IngestReport:
    began = time.monotonic()
    base = None if base_id is None else store.manifest(base_id)
    total = sum(file.size for file in checkpoint.files)
    with ExitStack() as stack:
        lease = stack.enter_context(store.lease("ingest", [] if base_id is None else [base_id]))
        writer = stack.enter_context(
            BlockWriter(store.catalog, store.backend, store.path / "tmp", lease, sync=store.sync)
        )
        worker = _Worker(store, writer, contents)
        gathered = _Gathered(checkpoint)
        done_bytes = 0
        pieces = _pieces(checkpoint, None if kind == "delta" else base, store.block_elements)
        for done in ordered(worker, pieces, threads=threads, window=window(threads)):
            _store_block(writer, done)
            gathered.add(done)
            done_bytes += done.piece.size
            if progress:
                progress(done_bytes, total)
        writer.flush()
        manifest = gathered.manifest(store.block_elements)
        report = _publish(store, manifest, name, gathered, base_id, kind, total, writer, began)
        if base is not None and kind == "delta":
            prepare_delta(store, base, manifest, name, lease)
        elif base is not None:
            prepare(store, base, manifest, lease)
        return replace(report, seconds=time.monotonic() - began)


def _publish(
    store: Store,
    manifest: Manifest,
    name: str,
    gathered: _Gathered,
    base_id: str | None,
    kind: str,
    raw_bytes: int,
    writer: BlockWriter,
    began: float,
) -> IngestReport:
    with store.catalog.read() as txn:
        known = txn.get("manifests", bytes.fromhex(manifest.id)) is not None
    stored = writer.stored_bytes + (0 if known else len(manifest.encoded))
    # Of a model that others may be fine-tuned from: what methods need that measure angles.
    statistics: Publication = [
        ("products", products_key(manifest.id, manifest.id, manifest.id, tensor), np.float64(norm).tobytes())
        for tensor, norm in gathered.squares.items()
    ]
    entry: dict[str, object] = {"raw_bytes": raw_bytes, "kind": kind}
    if base_id is not None and base_id != manifest.id:
        entry["base"] = base_id
        statistics = [*statistics, *_statistics(store, manifest, base_id, gathered.collectors)]
    previous = store.publish(manifest, name, entry, extra=statistics)
    return IngestReport(
        manifest.id,
        name,
        None if previous == manifest.id else previous,
        raw_bytes,
        stored,
        writer.new_blocks,
        writer.reused_blocks,
        time.monotonic() - began,
        kind,
    )


def _check_delta(store: Store, checkpoint: Checkpoint, base_id: str, name: str) -> None:
    """Check that a delta fits its base before anything is stored.

    Raises:
        UserError: when it is an adapter.
        RecipeError: see `check_delta`.
    """
    if checkpoint.is_adapter:
        raise UserError(
            f"'{name}' is a LoRA adapter: leave --kind and --base out, and name it as BASE+{name} in recipes"
        )
    theirs = {tensor: Tensor(tensor, e.dtype, e.shape, ()) for tensor, (_, e) in checkpoint.tensors.items()}
    check_delta(store.manifest(base_id), theirs, name)


def _statistics(store: Store, manifest: Manifest, base_id: str, collectors: dict[str, Collector]) -> Publication:
    """Return the catalog's entries for what was collected."""
    base = store.manifest(base_id)
    with store.catalog.read() as txn:
        finished = {
            name: with_stored_bytes(txn, collector.finish(), manifest.tensor_by_name[name], base.tensor_by_name[name])
            for name, collector in collectors.items()
        }
    return [
        ("statistics", statistics_key(manifest.id, base_id, name), found.encode()) for name, found in finished.items()
    ]


class _FileContents:
    """The files of a checkpoint's directory, open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = checkpoint.files
        with ExitStack() as stack:
            self._descriptors = [_open(file, stack) for file in self._files]
            self._open = stack.pop_all()

    def read(self, file: int, start: int, size: int) -> bytes:
        """See `Contents`."""
        source, descriptor = self._files[file].source, self._descriptors[file]
        try:
            raw = os.pread(descriptor, size, start)
            while len(raw) < size:
                more = os.pread(descriptor, size - len(raw), start + len(raw))
                if not more:
                    raise CheckpointError(
                        f"{source} became shorter while it was read: let its writer finish, then ingest it again"
                    )
                raw += more
        except OSError as error:
            raise CheckpointError(f"{source} cannot be read: {error.strerror}") from error
        return raw

    def close(self) -> None:
        """See `Contents`."""
        self._open.close()


def _open(file: CheckpointFile, stack: ExitStack) -> int:
    try:
        descriptor = os.open(file.source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file.source} cannot be read: {error.strerror}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _pieces(checkpoint: Checkpoint, base: Manifest | None, block_elements: int) -> Iterator[_Piece]:
    blob_size = 2 * block_elements
    for number, file in enumerate(checkpoint.files):
        end_of_blobs = file.size if file.header is None else len(file.header.raw)
        for start in range(0, end_of_blobs, blob_size):
            yield _Piece(number, start, min(blob_size, end_of_blobs - start))
        for entry in file.header.tensors if file.header else ():
            yield from _tensor_pieces(number, entry, base, block_elements)


def _tensor_pieces(file: int, entry: TensorEntry, base: Manifest | None, block_elements: int) -> Iterator[_Piece]:
    twin = base.tensor_by_name.get(entry.name) if base else None
    if twin is not None and (len(twin.shape), twin.shape[1:]) != (len(entry.shape), entry.shape[1:]):
        twin = None
    target = _Target(entry, twin.dtype if twin else None, twin is not None and twin.shape == entry.shape)
    width = entry.dtype.itemsize
    # Of a tensor with another number of rows, the blocks at the same places: rows that both have are compared.
    extents = list(twin.grid(block_elements).elements()) if twin else []
    for number, (first, stop) in enumerate(grid(entry.shape, block_elements).elements()):
        block = twin.blocks[number] if twin and extents[number : number + 1] == [(first, stop)] else None
        yield _Piece(
            file,
            entry.start + first * width,
            (stop - first) * width,
            target,
            number,
            first,
            None if block is None else bytes.fromhex(block),
        )


class _Worker:
    """Reads, hashes, measures and encodes one piece. Runs on many threads."""

    def __init__(self, store: Store, writer: BlockWriter, contents: Contents) -> None:
        self._catalog = store.catalog
        self._exact = store.exact
        self._reader = BlockReader(store.catalog, store.backend)
        self._writer = writer
        self._contents = contents

    def __call__(self, piece: _Piece) -> _Done:
        raw = self._contents.read(piece.file, piece.start, piece.size)
        block = digest(raw)
        if piece.tensor is None:
            encoded = None if self._writer.known(block) else codecs.encode(raw, DTYPES["U8"])
            return _Done(piece, raw, block, encoded, NO_BASE, None)
        entry, base_dtype = piece.tensor.entry, piece.tensor.base_dtype
        if piece.base is None or base_dtype is None:
            encoded = None if self._writer.known(block) else codecs.encode(raw, entry.dtype, exact=self._exact)
            squares = squared_norm(raw, entry.dtype) if entry.dtype.is_float and base_dtype is None else None
            return _Done(piece, raw, block, encoded, NO_BASE, None, squares=squares)
        if block == piece.base and entry.dtype is base_dtype:
            is_measured = entry.dtype.is_float and piece.tensor.is_measured
            same = unchanged_block(piece.size // entry.dtype.itemsize, piece.sample) if is_measured else None
            return _Done(piece, raw, block, None, NO_BASE, same)
        known = self._writer.known(block)
        measurable = entry.dtype.is_float and base_dtype.is_float and piece.tensor.is_measured
        if known and not measurable:
            return _Done(piece, raw, block, None, NO_BASE, None)
        read = self._reader.read_with_root(piece.base, Kind.BASE)
        base = read[piece.base]
        sample = piece.sample
        measure = measure_block(raw, entry.dtype, base, base_dtype, piece.first, sample) if measurable else None
        # A block that was added here and is in no closed pack yet is encoded again, for its errors' sake.
        if known and self._catalog.locate(block) is not None:
            with suppress(BlocksCollectedError):
                return self._stored(piece, raw, block, measure, read, base_dtype)
        if entry.dtype is not base_dtype:
            return _Done(piece, raw, block, codecs.encode(raw, entry.dtype, exact=self._exact), NO_BASE, measure)
        root, root_raw = next(iter(read.items()))
        encoded = codecs.encode_tiered(raw, entry.dtype, root_raw, self._exact, sample)
        coarse = coarse_sample(encoded.sampled, root_raw, entry.dtype, base, base_dtype, sample)
        return _Done(piece, raw, block, encoded, root, measure, encoded.errors, coarse)

    def _stored(
        self,
        piece: _Piece,
        raw: bytes,
        block: bytes,
        measure: BlockMeasure | None,
        read: dict[bytes, Buffer],
        base_dtype: DType,
    ) -> _Done:
        """Return what is to be done with a block that is stored already: nothing but to learn its errors.

        Raises:
            BlocksCollectedError: when gc has taken it meanwhile.
        """
        assert piece.tensor is not None
        assert piece.base is not None
        base, dtype = read[piece.base], piece.tensor.entry.dtype
        try:
            depths = self._reader.read_with_depths(block, Kind.EXPERT, read, piece.sample)
        except CorruptionError as error:
            if self._catalog.locate(block) is None:
                raise BlocksCollectedError(f"block {block.hex()} was collected while it was read") from error
            raise
        root = base if depths.root is None else depths.root
        coarse = coarse_sample(depths.sampled, root, dtype, base, base_dtype, piece.sample)
        return _Done(piece, raw, block, None, NO_BASE, measure, depths.errors, coarse)


def _store_block(writer: BlockWriter, done: _Done) -> None:
    piece = done.piece
    if done.encoded is not None:
        dtype = piece.tensor.entry.dtype if piece.tensor else DTYPES["U8"]
        writer.add(done.block, done.encoded, raw_length=piece.size, dtype=dtype.code, base=done.root)
    elif piece.base == done.block:
        writer.share(done.block)
    else:
        writer.reuse(done.block)


class _Gathered:
    """What the finished pieces add up to: files, tensors and statistics."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._sha256 = [hashlib.sha256() for _ in checkpoint.files]
        self._blobs: list[list[Blob]] = [[] for _ in checkpoint.files]
        self._blocks: dict[str, list[str]] = {}
        self.collectors: dict[str, Collector] = {}
        self.squares: dict[str, float] = {}

    def add(self, done: _Done) -> None:
        """Take the next piece, in the order of the files' bytes."""
        piece = done.piece
        self._sha256[piece.file].update(done.raw)
        if piece.tensor is None:
            self._blobs[piece.file].append(Blob(done.block.hex(), piece.size))
            return
        entry = piece.tensor.entry
        self._blocks.setdefault(entry.name, []).append(done.block.hex())
        if done.squares is not None:
            self.squares[entry.name] = self.squares.get(entry.name, 0.0) + done.squares
        if done.measure is not None:
            if entry.name not in self.collectors:
                elements = (entry.stop - entry.start) // entry.dtype.itemsize
                self.collectors[entry.name] = Collector(elements)
            self.collectors[entry.name].add(done.measure, done.errors, done.coarse)

    def manifest(self, block_elements: int) -> Manifest:
        """Return the model's manifest, once all pieces are in."""
        files, tensors = [], []
        for number, file in enumerate(self._checkpoint.files):
            entries = file.header.tensors if file.header else ()
            segments: list[Blob | TensorData] = [*self._blobs[number], *(TensorData(entry.name) for entry in entries)]
            files.append(FileRecipe(file.path, file.size, self._sha256[number].hexdigest(), tuple(segments)))
            tensors += [
                Tensor(entry.name, entry.dtype, entry.shape, tuple(self._blocks.get(entry.name, ())))
                for entry in entries
            ]
        files.sort(key=lambda recipe: recipe.path)
        return Manifest(block_elements, tuple(files), tuple(tensors), Lineage("checkpoint"))
