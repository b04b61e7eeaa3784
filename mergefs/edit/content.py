"""The contents of one file of a session: the model's bytes, with what was written laid over them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EXTENT = 1 << 16
"""Bytes of the runs in which a file of the model is taken over where it is written to."""

ReadBase = Callable[[str, int, int], bytes]
"""Reads bytes of a file of the model: path, offset, size."""

Append = Callable[..., None]
"""Appends a record to the journal."""


class Content:
    """What a file holds. Safe to use from many threads.

    Bytes that were written lie at their places in a sparse file. Of a file of the model, every extent of `EXTENT`
    bytes is either still the model's or wholly in that file: one that is written to in part is copied there before.

    Attributes:
        number: names the sparse file and the file's changes in the journal.
        base: the file of the model whose bytes are below, or None.
        kept: how many of its first bytes are still to be seen.
        size: in bytes.
        local: the extents that lie in the sparse file; of no meaning without a base.
        mtime: nanoseconds since 1970.
        mode: permissions.
        opened: how many use it at the moment.

    Args:
        folder: where the sparse file is.
        read_base: reads the model.
        append: writes the journal.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        read_base: ReadBase,
        append: Append,
        *,
        base: str | None = None,
        kept: int = 0,
        size: int = 0,
        mtime: int = 0,
        mode: int = 0o644,
    ) -> None:
        self.number = number
        self.base = base
        self.kept = kept
        self.size = size
        self.local: set[int] = set()
        self.mtime = mtime
        self.mode = mode
        self.opened = 0
        self.dirty = False
        self._path = folder / str(number)
        self._read_base = read_base
        self._append = append
        self._lock = threading.Lock()

    def is_unchanged(self, start: int, stop: int) -> bool:
        """Tell whether these bytes are still those of the base at the same place."""
        if self.base is None or stop > self.kept:
            return False
        return self.local.isdisjoint(range(start // EXTENT, -(-stop // EXTENT)))

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end."""
        with self._lock:
            stop = min(offset + size, self.size)
            if offset >= stop:
                return b""
            runs = list(self._runs(offset, stop))
            base, kept = self.base, self.kept
        # Without the lock: a block of the model may have to be decoded.
        parts = [self._local(a, b) if is_local else self._below(base, kept, a, b) for is_local, a, b in runs]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Write bytes at a place, behind the end too; return how many."""
        if not data:
            return 0
        with self._lock:
            stop = offset + len(data)
            size = max(self.size, stop)
            first, last = offset // EXTENT, (stop - 1) // EXTENT
            try:
                with _opened(self._path) as file:
                    if self.base is not None:
                        for extent in {first, last} - self.local:
                            self._take_over(file, extent, offset, stop)
                    _write_at(file, offset, data)
            except OSError:
                self._cut()
                raise
            # Before the journal: a flush that the journal is in then comes after the data.
            self._touch()
            new = self.base is not None and not self.local.issuperset(range(first, last + 1))
            if new or size != self.size:
                self._append("write", self.number, first if new else 0, last + 1 if new else 0, size)
            if new:
                self.local.update(range(first, last + 1))
            self.size = size
        return len(data)

    def append(self, data: bytes | memoryview) -> int:
        """Write bytes at the end, wherever it is now."""
        return self.write(self.size, data)

    def truncate(self, size: int) -> None:
        """Cut the file, or make it longer with zeros."""
        with self._lock:
            self._touch()
            if size != self.size:
                # First the journal: a sparse file that is too long is cut when the session is opened again.
                self._append("cut", self.number, size)
                self.apply_cut(size)
                self._cut()

    def sync(self) -> None:
        """Have what was written reach the disk."""
        self.dirty = False
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def stored(self) -> int:
        """Bytes that the sparse file takes."""
        try:
            return os.stat(self._path).st_blocks * 512
        except FileNotFoundError:
            return 0

    def drop(self) -> None:
        """Remove the sparse file; the content is not usable afterwards where it has one."""
        self._path.unlink(missing_ok=True)

    def keep_journal(self, append: Append) -> None:
        """Have changes appended elsewhere from now on."""
        self._append = append

    # -- for the journal -----------------------------------------------------------------------------------

    def apply_write(self, first: int, stop: int, size: int) -> None:
        """Do what a record of a write says."""
        self.local.update(extents(first, stop, size))
        self.size = size

    def apply_cut(self, size: int) -> None:
        """Do what a record of a truncation says."""
        if size < self.size:
            self.kept = min(self.kept, size)
            self.local = {extent for extent in self.local if extent * EXTENT < size}
            if not self.kept:
                self.base = None
        self.size = size

    def mend(self) -> None:
        """Take back what a process wrote behind the end without saying so in the journal before it ended."""
        if self._path.exists():
            self._cut()

    # -- inside --------------------------------------------------------------------------------------------

    def _runs(self, start: int, stop: int) -> Iterator[tuple[bool, int, int]]:
        """Yield (whether it is in the sparse file, start, stop) of the runs of a range."""
        if self.base is None:
            yield True, start, stop
            return
        at = start
        while at < stop:
            extent = at // EXTENT
            is_local = extent in self.local
            extent += 1
            while extent * EXTENT < stop and (extent in self.local) == is_local:
                extent += 1
            end = min(stop, extent * EXTENT)
            yield is_local, at, end
            at = end

    def _local(self, start: int, stop: int) -> bytes:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return bytes(stop - start)
        try:
            parts, at = [], start
            while at < stop and (data := os.pread(descriptor, stop - at, at)):
                parts.append(data)
                at += len(data)
        finally:
            os.close(descriptor)
        return b"".join((*parts, bytes(stop - at))) if at < stop or len(parts) > 1 else parts[0]

    def _below(self, base: str | None, kept: int, start: int, stop: int) -> bytes:
        end = min(stop, kept)
        data = self._read_base(base, start, end - start) if base is not None and start < end else b""
        return data if len(data) == stop - start else data.ljust(stop - start, b"\0")

    def _take_over(self, file: int, extent: int, start: int, stop: int) -> None:
        """Copy an extent of the model into the sparse file, unless a write is going to cover all of it that counts."""
        first = extent * EXTENT
        end = min(first + EXTENT, self.size)
        if first < end and not (start <= first and end <= stop):
            _write_at(file, first, self._below(self.base, self.kept, first, end))

    def _cut(self) -> None:
        with _opened(self._path) as file:
            os.ftruncate(file, self.size)

    def _touch(self) -> None:
        self.dirty = True
        self.mtime = time.time_ns()


def extents(first: int, stop: int, size: int) -> range:
    """Return the numbers of extents that a journal says are written to.

    Raises:
        ValueError, TypeError: when a file of `size` bytes has none of these numbers.
    """
    if not 0 <= first <= stop <= -(-size // EXTENT):
        raise ValueError(f"a file of {size} bytes has no extents {first} to {stop}")
    return range(first, stop)


class _opened:  # noqa: N801 - used like a function
    """A sparse file, open for writing."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
