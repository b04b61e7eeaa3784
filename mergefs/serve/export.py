"""Export: a model becomes an ordinary directory, byte for byte what it was ingested or merged as."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from mergefs.errors import CorruptionError, DestinationError, MergefsError
from mergefs.hashing import Buffer
from mergefs.manifest import safe_path
from mergefs.pipeline import available_cores, ordered
from mergefs.serve.view import FileInfo, View
from mergefs.units import format_size

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        directory: where the model is now.
        files, bytes: how much was written.
        seconds: wall time.
    """

    directory: Path
    files: int
    bytes: int
    seconds: float


def export(
    view: View, directory: Path, *, threads: int | None = None, progress: Progress | None = None
) -> ExportReport:
    """Write a model's files into a directory that appears at its name only when it is whole.

    Args:
        view: the model.
        directory: absent, or an empty folder; missing folders above it are made.
        threads: how many to decode with; all cores by default.
        progress: told how far it is.

    Raises:
        DestinationError: when the directory holds anything or cannot be written; nothing of it is left then.
        CorruptionError: when a block is missing or damaged, or a file has another SHA-256 than it should.
    """
    began = time.monotonic()
    files = list(view.files.values())
    for file in files:
        if not safe_path(file.path):
            raise CorruptionError(f"the model {view.manifest_id[:12]} has a file of the unsafe name {file.path!r}")
    total = sum(file.size for file in files)
    with _appearing(directory, total) as folder:
        sums = _write_files(view, files, folder, threads or available_cores(), _Told(progress, total))
    for file in files:
        if file.sha256 is None:
            _remember(view, file.path, sums[file.path])
    return ExportReport(directory, len(files), total, time.monotonic() - began)


class _Told:
    """Adds up the bytes that are done and tells them on."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, size: int) -> None:
        self._done += size
        if self._progress:
            self._progress(self._done, self._total)


def _write_files(view: View, files: list[FileInfo], folder: Path, threads: int, told: _Told) -> dict[str, str]:
    """Write every file below `folder` and return their SHA-256 by path."""
    counts = {file.path: view.file_parts(file.path) for file in files}
    parts = ((path, number) for path, count in counts.items() for number in range(count))
    sums = {}
    # One pipeline runs through all files, so that the next file is decoded while this one reaches the disk.
    buffers = ordered(lambda part: view.part(*part), parts, threads=threads, window=2 * threads + 2)
    with closing(cast("Generator[Buffer]", buffers)):
        for file in files:
            sums[file.path] = _write_file(file, folder, islice(buffers, counts[file.path]), told)
    for path in {folder, *(parent for file in files for parent in _parents(folder, file.path))}:
        _flush_folder(path)
    return sums


def _write_file(file: FileInfo, folder: Path, buffers: Iterable[Buffer], told: _Told) -> str:
    target = folder / file.path
    sha256 = hashlib.sha256()
    size = 0
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for buffer in buffers:
            sha256.update(buffer)
            size += len(buffer)
            with _writing(target):
                _write(descriptor, buffer)
            told.add(len(buffer))
        with _writing(target):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    found = sha256.hexdigest()
    if size != file.size or file.sha256 not in (None, found):
        raise CorruptionError(f"the file {file.path} comes out with another SHA-256 than it was stored with")
    return found


def _write(descriptor: int, buffer: Buffer) -> None:
    data = memoryview(buffer)
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def _appearing(directory: Path, size: int) -> Iterator[Path]:
    """Give a folder to fill that becomes `directory` when the block ends well, and is gone otherwise."""
    destination = Path(os.path.realpath(directory))
    _check_destination(destination, directory)
    made = [parent for parent in destination.parents if not parent.exists()]
    part = destination.parent / f".{destination.name[:200]}.part-{secrets.token_hex(4)}"
    try:
        with _writing(directory):
            part.parent.mkdir(parents=True, exist_ok=True)
            _check_space(part.parent, size)
            part.mkdir()
        yield part
        with _writing(directory):
            if destination.exists():
                shutil.copymode(destination, part)
            # Replaces an empty folder and fails on anything else that has come to be there meanwhile.
            os.rename(part, destination)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    with suppress(OSError):
        _flush_folder(destination.parent)


def _check_destination(destination: Path, asked: Path) -> None:
    with _writing(asked):
        if not destination.exists():
            return
        if not destination.is_dir() or any(destination.iterdir()):
            raise DestinationError(f"{asked} is not an empty folder: name one that does not exist yet")
        if destination.is_mount() or destination == Path.cwd():
            raise DestinationError(f"{asked} is a mount point or the current folder: name a new folder inside it")


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DestinationError(
            f"the model has {format_size(size)}, and {folder} has only {format_size(free)} of free space"
        )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a DestinationError."""
    try:
        yield
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error.strerror or error}") from error


def _parents(folder: Path, path: str) -> Iterator[Path]:
    for parent in (folder / path).parents:
        if parent == folder:
            return
        yield parent


def _flush_folder(folder: Path) -> None:
    with _writing(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remember(view: View, path: str, sha256: str) -> None:
    # It only saves the next reader some work: a catalog that cannot be written is no reason to fail.
    with suppress(MergefsError, OSError):
        view.store.remember_sha256(view.manifest_id, path, sha256)
