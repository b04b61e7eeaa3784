"""How an archive's files are written, by the kind of file system that it lies on: whole, durable where that can be
known, and refs only as long as nobody else has moved them."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from mergefs.backend import flush_folder

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}
"""Protocols of stores that show an object only when all of it is there."""


_PIECE = 8 << 20


class Slot(Protocol):
    """The place of a ref, looked at before what is in it is read."""

    def write(self, data: bytes, *, new: bool) -> bool:
        """Put a ref there; False when somebody else has written or made it since the look.

        Args:
            data: the ref's copy.
            new: whether there was none.
        """


class Placing:
    """Any file system: a ref that is new is made only where there is none, if the file system can do that; one that is
    replaced is whatever others have made of it meanwhile."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def put(self, path: str, data: bytes) -> None:
        """Store a small object."""
        self._files.makedirs(_folder(path), exist_ok=True)
        self._files.pipe_file(path, data)

    def put_file(self, source: Path, path: str, temporary: str) -> None:
        """Store a file whose name appears when it is whole."""
        for folder in (_folder(temporary), _folder(path)):
            self._files.makedirs(folder, exist_ok=True)
        self._files.put_file(str(source), temporary)
        self._files.mv(temporary, path)

    @contextmanager
    def slot(self, path: str) -> Iterator[Slot]:
        """Look at the place of a ref."""
        self._files.makedirs(_folder(path), exist_ok=True)
        yield _PlainSlot(self._files, path)


class _PlainSlot:
    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path

    def write(self, data: bytes, *, new: bool) -> bool:
        """See `Slot`."""
        try:
            self._files.pipe_file(self._path, data, mode="create" if new else "overwrite")
        except FileExistsError:
            return False
        return True


class ObjectStorePlacing(Placing):
    """A store whose objects appear whole."""

    def put_file(self, source: Path, path: str, temporary: str) -> None:
        """See `Placing.put_file`."""
        self._files.put_file(str(source), path)


class S3Placing(ObjectStorePlacing):
    """S3 and what speaks its language: refs are written under the condition that they are what they were."""

    @contextmanager
    def slot(self, path: str) -> Iterator[Slot]:
        """See `Placing.slot`."""
        try:
            tag = str(self._files.info(path, refresh=True)["ETag"])
        except FileNotFoundError:
            tag = ""
        yield _S3Slot(self._files, path, tag)


class _S3Slot:
    def __init__(self, files: Any, path: str, tag: str) -> None:
        self._files = files
        self._path = path
        self._tag = tag

    def write(self, data: bytes, *, new: bool) -> bool:
        """See `Slot`."""
        if new == bool(self._tag):
            return False  # made or removed between the look and the reading
        condition = {"IfMatch": self._tag} if self._tag else {"IfNoneMatch": "*"}
        try:
            self._files.pipe_file(self._path, data, **condition)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            answer = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if answer in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return False
            raise
        return True


class LocalPlacing(Placing):
    """A folder of this machine: everything is flushed, and refs are written under a lock on their folder."""

    def __init__(self, files: Any, *, sync: bool) -> None:
        super().__init__(files)
        self._sync = sync

    def put(self, path: str, data: bytes) -> None:
        """See `Placing.put`."""
        self._files.makedirs(_folder(path), exist_ok=True)
        part = f"{_folder(path)}/.{secrets.token_hex(8)}"
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        self._flush_name(path)

    def put_file(self, source: Path, path: str, temporary: str) -> None:
        """See `Placing.put_file`."""
        for folder in (_folder(temporary), _folder(path)):
            self._files.makedirs(folder, exist_ok=True)
        with source.open("rb") as reading, open(temporary, "wb") as writing:
            while piece := reading.read(_PIECE):
                writing.write(piece)
            writing.flush()
            if self._sync:
                os.fsync(writing.fileno())
        os.replace(temporary, path)
        self._flush_name(path)

    @contextmanager
    def slot(self, path: str) -> Iterator[Slot]:
        """See `Placing.slot`."""
        self._files.makedirs(_folder(path), exist_ok=True)
        descriptor = os.open(_folder(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield _LocalSlot(self, path)
        finally:
            os.close(descriptor)

    def _flush_name(self, path: str) -> None:
        """Make a file's name durable, and those of its folder and the one above, which may be new."""
        for folder in list(Path(path).parents)[:3] if self._sync else ():
            flush_folder(folder)


class _LocalSlot:
    def __init__(self, placing: LocalPlacing, path: str) -> None:
        self._placing = placing
        self._path = path

    def write(self, data: bytes, *, new: bool) -> bool:
        """See `Slot`: nobody else can have written it."""
        self._placing.put(self._path, data)
        return True


def placing(files: Any, *, sync: bool = True) -> Placing:
    """Return how a file system of fsspec's is written to, and whether a folder of this machine is flushed."""
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if protocols & {"file", "local"}:
        return LocalPlacing(files, sync=sync)
    if protocols & {"s3", "s3a"}:
        return S3Placing(files)
    return ObjectStorePlacing(files) if protocols & _OBJECT_STORES else Placing(files)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
