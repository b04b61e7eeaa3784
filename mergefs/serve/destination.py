"""Where an export is written to: a folder of this machine, or one of any file system that fsspec knows.

Both take whole files only, can go on where an earlier, interrupted export of the same stopped, and have nothing that
looks like a model before all of it is there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from mergefs.backend import flush_folder
from mergefs.errors import DestinationError, MergefsError
from mergefs.hashing import Buffer
from mergefs.json_input import load_json
from mergefs.serve.layout import OutputFile
from mergefs.units import format_size

MARKER = ".mergefs-export.json"
"""In a folder elsewhere: which export it is that is not finished yet, and which of its files are."""

_READ_BYTES = 8 << 20
_FLUSH_BYTES = 32 << 20


class Destination(Protocol):
    """A folder that files are written to, several at once where the caller wishes."""

    def has(self, file: OutputFile) -> bool:
        """Tell whether an earlier export of the same has written a file."""

    def write(self, file: OutputFile, buffers: Iterable[Buffer]) -> None:
        """Write a file that is there when the buffers end well and otherwise not."""

    def sha256(self, path: str) -> str:
        """Read a file that was written again, and return its SHA-256."""

    def remove(self, path: str) -> None:
        """Remove a file that was written."""


@contextmanager
def opened(
    target: str | os.PathLike[str],
    key: str,
    files: list[OutputFile],
    options: dict[str, Any] | None = None,
    *,
    sync: bool = True,
) -> Iterator[Destination]:
    """Give a destination to fill, which becomes visible as a model when the block ends well.

    Args:
        target: a folder that is absent or empty, or the URL of one.
        key: the same for exports that write the same files, a name for a file.
        files: that are going to be written.
        options: for fsspec, with a URL.
        sync: flush what is written to the disk, where it is a folder of this machine.

    Raises:
        DestinationError: when the target holds anything, or cannot be written.
    """
    text = os.fspath(target)
    if "://" not in text and "::" not in text:
        with _local(Path(text), key, files, sync=sync) as destination:
            yield destination
        return
    import fsspec

    with _reaching(text):
        fs, root = fsspec.url_to_fs(text, **(options or {}))
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        with _local(Path(root), key, files, sync=sync) as destination:
            yield destination
        return
    with _remote(fs, root, text, key) as elsewhere:
        yield elsewhere


# -- folders of this machine -------------------------------------------------------------------------------


class _LocalFolder:
    """A hidden folder beside the one that it is going to be."""

    def __init__(self, folder: Path, key: str, *, sync: bool) -> None:
        self.folder = folder
        self._sync = sync
        self._unfinished = folder / f".unfinished-{key}"

    def has(self, file: OutputFile) -> bool:
        """See `Destination`."""
        try:
            return (self.folder / file.path).stat().st_size == file.size
        except OSError:
            return False

    def write(self, file: OutputFile, buffers: Iterable[Buffer]) -> None:
        """See `Destination`."""
        target = self.folder / file.path
        temporary = self._unfinished / hashlib.sha256(file.path.encode()).hexdigest()
        with writing(target):
            self._unfinished.mkdir(exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with _Flusher(descriptor, sync=self._sync) as flusher:
                for buffer in buffers:
                    with writing(target):
                        write(descriptor, buffer)
                        flusher.wrote(len(buffer))
                with writing(target):
                    flusher.finish()
                    if self._sync:
                        os.fsync(descriptor)
            with writing(target):
                os.rename(temporary, target)
        finally:
            os.close(descriptor)

    def sha256(self, path: str) -> str:
        """See `Destination`; what is read comes from the disk where the system allows it."""
        with writing(self.folder / path), open(self.folder / path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _sum(iter(lambda: file.read(_READ_BYTES), b""))

    def remove(self, path: str) -> None:
        """See `Destination`."""
        with writing(self.folder / path):
            (self.folder / path).unlink()

    def finish(self, files: list[OutputFile]) -> None:
        """Make everything durable and leave nothing but the files."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        there = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if not path.is_dir()}
        lost = sorted({file.path for file in files} - there)
        if lost:
            raise DestinationError(
                f"'{lost[0]}' is not there after it was written: {self.folder.parent} does not tell names apart that"
                " differ in case only; export to another file system"
            )
        for name in sorted(there - {file.path for file in files}):
            (self.folder / name).unlink()  # of an earlier export that was interrupted
        if not self._sync:
            return
        for path in {self.folder, *(parent for file in files for parent in _parents(self.folder, file.path))}:
            _flush_folder(path)

    def is_worth_keeping(self, files: list[OutputFile]) -> bool:
        """Tell whether something is in finished files; what is not finished is removed."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        return any(file.size and self.has(file) for file in files)


class _Flusher:
    """Has the kernel write a file to the disk while more of it is being made."""

    def __init__(self, descriptor: int, *, sync: bool) -> None:
        self._sync = sync
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mergefs-flush")
        self._running: Future[None] | None = None
        self._dirty = 0

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)

    def wrote(self, size: int) -> None:
        self._dirty += size
        if self._sync and self._dirty >= _FLUSH_BYTES and (self._running is None or self._running.done()):
            self.finish()
            self._running = self._thread.submit(os.fdatasync, self._descriptor)
            self._dirty = 0

    def finish(self) -> None:
        """Wait for what is under way, and raise what went wrong with it."""
        if self._running is not None:
            self._running.result()


@contextmanager
def _local(directory: Path, key: str, files: list[OutputFile], *, sync: bool) -> Iterator[_LocalFolder]:
    destination = Path(os.path.realpath(directory))
    _check_destination(destination, directory)
    made = [parent for parent in destination.parents if not parent.exists()]
    part = destination.parent / f".{destination.name[:200]}.part-{key}"
    folder = _LocalFolder(part, key, sync=sync)
    lock = -1
    try:
        with writing(directory):
            part.parent.mkdir(parents=True, exist_ok=True)
            _check_space(part.parent, sum(file.size for file in files if not folder.has(file)))
            part.mkdir(exist_ok=True)
        lock = _locked(part, directory)
        yield folder
        folder.finish(files)
        with writing(directory):
            if destination.exists():
                shutil.copymode(destination, part)
            # Replaces an empty folder and fails on anything else that has come to be there meanwhile.
            os.rename(part, destination)
    except BaseException as error:
        if lock >= 0:
            _abandon(folder, files, error, destination)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        if lock >= 0:
            os.close(lock)
    if sync:
        with suppress(OSError):
            _flush_folder(destination.parent)


def _abandon(folder: _LocalFolder, files: list[OutputFile], error: BaseException, destination: Path) -> None:
    """Keep the finished files of an export that was interrupted; nothing of one that can never be finished."""
    hopeless = isinstance(error, MergefsError) and not isinstance(error, DestinationError)
    hopeless = hopeless or (destination.exists() and (not destination.is_dir() or any(destination.iterdir())))
    if hopeless or not folder.is_worth_keeping(files):
        shutil.rmtree(folder.folder, ignore_errors=True)
    elif isinstance(error, DestinationError):
        kept = f"{error}; what is finished is kept in {folder.folder}: export again to go on"
        raise DestinationError(kept) from error


def _locked(part: Path, asked: Path) -> int:
    """Return the descriptor that holds the lock of a folder, for as long as it is open."""
    with writing(asked):
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # In a folder where others may write, somebody may have made it to have a hand in the export.
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise DestinationError(f"{part} belongs to another user: export to a folder that only you can write to")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.fstat(descriptor).st_ino == os.stat(part).st_ino
    except OSError:
        mine = False
    if not mine:
        os.close(descriptor)
        raise DestinationError(f"the same is being exported to {asked} by another process: let it finish")
    return descriptor


def _check_destination(destination: Path, asked: Path) -> None:
    with writing(asked):
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
            f"{format_size(size)} are to be written, and {folder} has only {format_size(free)} of free space"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a DestinationError."""
    try:
        yield
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error.strerror or error}") from error


def write(descriptor: int, buffer: Buffer) -> None:
    """Write all of a buffer."""
    data = memoryview(buffer)
    while data:
        data = data[os.write(descriptor, data) :]


def _parents(folder: Path, path: str) -> Iterator[Path]:
    for parent in (folder / path).parents:
        if parent == folder:
            return
        yield parent


def _flush_folder(folder: Path) -> None:
    with writing(folder):
        flush_folder(folder)


# -- folders elsewhere -------------------------------------------------------------------------------------


class _RemoteFolder:
    """A folder with a marker in it until it is whole."""

    def __init__(self, fs: Any, root: str, url: str, key: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._url = url
        self._key = key
        self._finished: dict[str, int] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, or go on with what is there."""
        marker = self._at(MARKER)
        with _reaching(self._url):
            present = self._fs.find(self._root) if self._fs.exists(self._root) else []
            if not present:
                self._fs.makedirs(self._root, exist_ok=True)
            elif not self._fs.exists(marker) or (known := load_json(self._fs.cat_file(marker)))["export"] != self._key:
                raise DestinationError(f"{self._url} is not an empty folder: name one that does not exist yet")
            else:
                self._finished = dict(known["finished"])
        self._mark()

    def has(self, file: OutputFile) -> bool:
        """See `Destination`."""
        if self._finished.get(file.path) != file.size:
            return False
        with _reaching(self._url):
            path = self._at(file.path)
            return bool(self._fs.exists(path) and self._fs.size(path) == file.size)

    def write(self, file: OutputFile, buffers: Iterable[Buffer]) -> None:
        """See `Destination`."""
        path = self._at(file.path)
        with _reaching(self._url):
            if "/" in file.path:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            target = self._fs.open(path, "wb", autocommit=False)
        try:
            for buffer in buffers:
                with _reaching(self._url):
                    target.write(buffer)
            with _reaching(self._url):
                target.close()
                if hasattr(target, "commit"):
                    target.commit()
        except BaseException:
            with suppress(Exception):
                target.discard()
            # Not every file system can write a file aside.
            with suppress(Exception):
                self._fs.rm_file(path)
            raise
        with self._lock:
            self._finished[file.path] = file.size
            self._mark()

    def sha256(self, path: str) -> str:
        """See `Destination`."""
        with _reaching(self._url), self._fs.open(self._at(path), "rb") as file:
            return _sum(iter(lambda: file.read(_READ_BYTES), b""))

    def remove(self, path: str) -> None:
        """See `Destination`."""
        with self._lock:
            del self._finished[path]
            self._mark()
        with _reaching(self._url):
            self._fs.rm_file(self._at(path))

    def finish(self) -> None:
        """Take the marker away."""
        with _reaching(self._url):
            self._fs.rm_file(self._at(MARKER))

    def _mark(self) -> None:
        text = json.dumps({"export": self._key, "finished": self._finished}).encode()
        with _reaching(self._url):
            self._fs.pipe_file(self._at(MARKER), text)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextmanager
def _remote(fs: Any, root: str, url: str, key: str) -> Iterator[_RemoteFolder]:
    folder = _RemoteFolder(fs, root, url, key)
    folder.start()
    yield folder
    folder.finish()


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn whatever a file system raises into a DestinationError."""
    try:
        yield
    except MergefsError:
        raise
    except Exception as error:
        known = errno.errorcode.get(error.errno or 0) if isinstance(error, OSError) else None
        raise DestinationError(f"{url} cannot be written: {error or known or type(error).__name__}") from error


def _sum(chunks: Iterable[bytes]) -> str:
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return sha256.hexdigest()
