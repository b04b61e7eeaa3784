"""Export: a model becomes an ordinary directory, byte for byte what it was ingested or merged as, or in other shards or
another dtype."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergefs.errors import CorruptionError, DestinationError, MergefsError
from mergefs.hashing import Buffer, hex_digest
from mergefs.manifest import safe_path
from mergefs.pipeline import available_cores, ordered
from mergefs.serve.destination import Destination, opened
from mergefs.serve.layout import OutputFile, Part, lay_out, output_dtype
from mergefs.serve.view import View

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

FILES_AT_ONCE = 4
_FEW = 4
"""A file of no more blocks is decoded by the thread that writes it."""


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        directory: where the model is now.
        files, bytes: how much is there.
        files_kept: how many of these an earlier, interrupted export had written.
        verified: whether all was read again and compared.
        seconds: wall time.
    """

    directory: Path | str
    files: int
    bytes: int
    files_kept: int
    verified: bool
    seconds: float


def export(
    view: View,
    directory: str | Path,
    *,
    shard_size: int | None = None,
    dtype: str | None = None,
    verify: bool = False,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a model's files into a directory that is a model when all of it is there, and not before.

    An export that was interrupted goes on where it stopped when the same is exported to the same place again: files
    that it had finished are not written anew.

    Args:
        view: the model.
        directory: absent, or an empty folder; missing folders above it are made. A text with `://` is a URL for fsspec.
        shard_size: the most bytes of tensors in a file of weights; see `mergefs.serve.layout.lay_out`.
        dtype: `bfloat16`, `float16` or `float32`, for all float tensors.
        verify: read everything again and compare it.
        threads: how many to decode with; all cores by default.
        storage_options: for fsspec, with a URL.
        progress: told how far it is.

    Raises:
        DestinationError: when the directory holds anything or cannot be written; what was finished is kept, hidden,
            where that can be gone on with.
        CorruptionError: when a block is missing or damaged, or a file has another SHA-256 than it should; nothing is
            left then.
        UserError: when the model cannot have such shards or dtype.
    """
    began = time.monotonic()
    converted = output_dtype(dtype)
    files = lay_out(view, shard_size, converted)
    for file in files:
        if not safe_path(file.path):
            raise CorruptionError(f"the model {view.manifest_id[:12]} has a file of the unsafe name {file.path!r}")
    total = sum(file.size for file in files)
    key = hex_digest(json.dumps([view.manifest_id, shard_size, converted.name if converted else None]).encode())[:16]
    told = _Told(progress, total)
    sums: dict[str, str] = {}
    with opened(directory, key, files, storage_options, sync=view.store.sync) as destination:
        missing = [file for file in files if not destination.has(file)]
        told.add(total - sum(file.size for file in missing))
        sums = _write_all(missing, destination, threads or available_cores(), told)
        if verify:
            _verify(files, destination, sums)
    for file in files:
        if file.is_stored and file.sha256 is None and file.path in sums:
            remember(view, file.path, sums[file.path])
    return ExportReport(directory, len(files), total, len(files) - len(missing), verify, time.monotonic() - began)


class _Told:
    """Adds up the bytes that are done and tells them on; also tells those who do them to stop."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self.stopping = threading.Event()

    def add(self, size: int) -> None:
        if self.stopping.is_set():
            raise InterruptedError
        with self._lock:
            self._done += size
            if self._progress and size:
                self._progress(self._done, self._total)


def _write_all(files: list[OutputFile], destination: Destination, threads: int, told: _Told) -> dict[str, str]:
    """Write files, several at once, and return their SHA-256 by path."""

    at_once = min(FILES_AT_ONCE, threads, len(files))
    # Small files need no threads of their own, and large ones share them, so that memory is the same for any number.
    large = min(sum(len(file.parts) > _FEW for file in files), at_once)
    each = min(threads, max(2, -(-threads // max(1, large))))

    def write(file: OutputFile) -> tuple[str, str]:
        told.add(0)
        return file.path, _write_one(file, destination, each, told)

    if at_once < 2:
        return dict(map(write, files))
    # The configuration comes last, and alone: with it a folder looks like a model.
    *most, last = files
    with ThreadPoolExecutor(at_once, thread_name_prefix="mergefs-export") as pool:
        running = [pool.submit(write, file) for file in most]
        try:
            sums = dict(future.result() for future in as_completed(running))
        except BaseException:
            told.stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {**sums, **dict([write(last)])}


def _write_one(file: OutputFile, destination: Destination, threads: int, told: _Told) -> str:
    """Write a file and return its SHA-256."""
    buffers: Iterator[Buffer] = map(_call, file.parts)
    if len(file.parts) > _FEW:
        buffers = ordered(_call, file.parts, threads=threads, window=2 * threads + 2)
    sha256 = hashlib.sha256()
    with closing(_checked(file, buffers, sha256, told)) as checked:
        destination.write(file, checked)
    return sha256.hexdigest()


def _call(part: Part) -> Buffer:
    return part()


def _checked(file: OutputFile, buffers: Iterator[Buffer], sha256: Any, told: _Told) -> Generator[Buffer]:
    """Pass a file's bytes on, and raise at their end when they are not right, before they are taken for a file."""
    size = 0
    try:
        for buffer in buffers:
            sha256.update(buffer)
            size += len(buffer)
            yield buffer
            told.add(len(buffer))
    finally:
        if isinstance(buffers, Generator):
            buffers.close()
    if size != file.size or file.sha256 not in (None, sha256.hexdigest()):
        raise CorruptionError(f"the file {file.path} comes out with another SHA-256 than it was stored with")


def _verify(files: list[OutputFile], destination: Destination, written: dict[str, str]) -> None:
    """Compare what was written with what should be there, and remove what is something else.

    Raises:
        DestinationError: when something was.
    """
    wrong = [f for f in files if destination.sha256(f.path) != (written.get(f.path) or expected_sha256(f))]
    for file in wrong:
        destination.remove(file.path)
    if wrong:
        names = ", ".join(file.path for file in wrong)
        raise DestinationError(f"{names}: other bytes are read than were written, so the disk or network is at fault")


def expected_sha256(file: OutputFile, threads: int = 1) -> str:
    """Return the SHA-256 that a file of an export has, made from its blocks where it is not known."""
    if file.sha256 is not None:
        return file.sha256
    sha256 = hashlib.sha256()
    for buffer in ordered(_call, file.parts, threads=threads, window=2 * threads + 2):
        sha256.update(buffer)
    return sha256.hexdigest()


def remember(view: View, path: str, sha256: str) -> None:
    """Keep the SHA-256 of a stored file, for the next who asks."""
    # It only saves the next reader some work: a catalog that cannot be written is no reason to fail.
    with suppress(MergefsError, OSError):
        view.store.remember_sha256(view.manifest_id, path, sha256)
