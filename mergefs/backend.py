"""Where objects lie: a small interface of immutable named byte strings, and its local-file implementation.

Names are relative paths such as `packs/ab/abcd.pack`. Objects never change, so that any store that can put,
get a range, list and delete will do.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path


class Backend(ABC):
    """A place for immutable objects."""

    @abstractmethod
    def get(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes from `offset` (to the end when None); fewer when the object ends before.

        Raises:
            FileNotFoundError: when there is no such object.
        """

    def expect(self, name: str, offset: int, size: int) -> None:
        """Note that these bytes will be asked for soon; they may be fetched meanwhile. Nothing happens when there is no
        such object."""
        return

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store an object durably and all at once; an object that exists already is left as it is."""

    @abstractmethod
    def adopt(self, name: str, path: Path) -> None:
        """Make a finished, durable local file the object `name`; the file is gone from `path` afterwards."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; nothing happens when it is not there."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return an object's size in bytes.

        Raises:
            FileNotFoundError: when there is no such object.
        """

    def exists(self, name: str) -> bool:
        """Tell whether there is such an object."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the name and size of every object whose name begins with the folder `prefix`."""


class LocalBackend(Backend):
    """Objects as files below a folder.

    Args:
        root: the folder.
        sync: whether files and folders are flushed to the disk before a call returns.
    """

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        self.root = root
        self._sync = sync

    def get(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """See `Backend.get`. The kernel is told not to read ahead: what is counted is what is read."""
        descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            wanted = os.fstat(descriptor).st_size - offset if size is None else size
            return _read_at(descriptor, offset, max(0, wanted))
        finally:
            os.close(descriptor)

    def expect(self, name: str, offset: int, size: int) -> None:
        """See `Backend.expect`: the kernel reads them into its cache while we go on."""
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def put(self, name: str, data: bytes) -> None:
        """See `Backend.put`."""
        if self.exists(name):
            self._flush_name(self.root / name)  # who stored it may not have come that far
        else:
            self.replace(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Store bytes durably and all at once, in the place of those that have the name: the configuration's."""
        temporary = self.root / "tmp" / f"{os.getpid()}-{os.urandom(8).hex()}"
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        self.adopt(name, temporary)

    def adopt(self, name: str, path: Path) -> None:
        """See `Backend.adopt`."""
        target = self.root / name
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(path, target)
        self._flush_name(target)

    def delete(self, name: str) -> None:
        """See `Backend.delete`."""
        (self.root / name).unlink(missing_ok=True)

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        return (self.root / name).stat().st_size

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Backend.list`."""
        for path in sorted((self.root / prefix).rglob("*")):
            try:
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), path.stat().st_size
            except FileNotFoundError:
                continue

    def _flush_name(self, path: Path) -> None:
        """Make a file's name durable, and that of its folder, which another process may just have made."""
        self._flush_folder(path.parent)
        if path.parent.parent.is_relative_to(self.root):
            self._flush_folder(path.parent.parent)

    def _flush_folder(self, folder: Path) -> None:
        if self._sync:
            flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    have = len(data)
    while have < size and (data := os.pread(descriptor, size - have, offset + have)):
        parts.append(data)
        have += len(data)
    return b"".join(parts)
