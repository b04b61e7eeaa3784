"""Keeping blocks that were derived for a reader, so that nobody derives them again: in a file beside the repository's
packs for as long as a mount lives, or in packs.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path

from mergefs.blocks.writer import BlockWriter
from mergefs.errors import CorruptionError, MergefsError
from mergefs.hashing import Buffer
from mergefs.manifest import Tensor
from mergefs.merge.lazy import Deriver
from mergefs.merge.remembered import TABLE
from mergefs.store import Store

log = logging.getLogger(__name__)


class ScratchFile:
    """Bytes by keys in a file without a name, the last ones up to a limit. Safe for many threads.

    The file is written round and round; what is written over is forgotten.

    Args:
        limit: of the file, in bytes.
        folder: where it lies.
    """

    def __init__(self, limit: int, folder: Path) -> None:
        self._limit = limit
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self._places: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # in the order of the file, from _next on
        self._next = 0

    def get(self, key: Hashable) -> bytes | None:
        """Return what was put under a key, or None where it is not there any more."""
        with self._lock:
            place = self._places.get(key)
            if place is None:
                return None
            data = os.pread(self._file.fileno(), place[1], place[0])
        return data if len(data) == place[1] else None

    def put(self, key: Hashable, data: Buffer) -> None:
        """Keep bytes, in the place of those that were put first.

        Raises:
            OSError: when the disk is full.
        """
        size = len(data)
        with self._lock:
            if not 0 < size <= self._limit or key in self._places:
                return
            if self._next + size > self._limit:
                self._forget(self._limit)
                self._next = 0
            self._forget(self._next + size)
            if os.pwrite(self._file.fileno(), data, self._next) == size:
                self._places[key] = self._next, size
                self._next += size

    def close(self) -> None:
        """Give the disk's space back."""
        self._file.close()

    def _forget(self, stop: int) -> None:
        """Forget what lies from where is written next to before `stop`: what was put first of all."""
        while self._places:
            key, (offset, _) = next(iter(self._places.items()))
            if not self._next <= offset < stop:
                return
            del self._places[key]


class Storing:
    """Stores blocks that were derived in packs, as a merge does. Safe for many threads.

    They are protected until `close`; then a merge that is materialized takes them over, or gc frees them.

    Args:
        store: the repository, open for writing.
    """

    _IDLE_SECONDS = 2.0

    def __init__(self, store: Store) -> None:
        self._lease = store.lease("mount --store")
        self._writer = BlockWriter(store.catalog, store.backend, store.path / "tmp", self._lease, sync=store.sync)
        self._lock = threading.Lock()
        self._last = 0.0
        self._open = 0
        self._failed = False

    def derive(self, deriver: Deriver, tensor: Tensor, number: int) -> Buffer:
        """Derive a block and have it stored; where it cannot be, that is logged, and the reader has it all the same.

        Raises:
            CorruptionError: when a block that is needed is missing or damaged.
        """
        raw, key, made = deriver.encoded(tensor.name, number, self._writer.known)
        with self._lock:
            if not self._failed:
                try:
                    self._writer.note(TABLE, key, made.block)
                    if made.encoded is None:
                        self._writer.reuse(made.block)
                    else:
                        dtype = tensor.dtype.code
                        self._writer.add(made.block, made.encoded, raw_length=len(raw), dtype=dtype, base=made.root)
                except (OSError, MergefsError):
                    self._failed = True
                    log.exception("derived blocks are not stored any more")
            self._open += 1
            self._last = time.monotonic()
        return raw

    def flush(self, *, idle: bool = False) -> None:
        """Make durable and known what was stored so far.

        Args:
            idle: only where nothing was added for a while.
        """
        with self._lock:
            if self._open and not self._failed and not (idle and time.monotonic() - self._last < self._IDLE_SECONDS):
                self._writer.flush()
                self._open = 0

    def close(self) -> None:
        """Store the rest and end the protection."""
        try:
            self.flush()
        finally:
            self._writer.__exit__(None, None, None)
            self._lease.release()


class KeptBlocks:
    """Derived blocks for the views of one repository. Safe for many threads.

    Args:
        scratch: keeps them in a file, or None.
        storing: stores them in packs, or None.
    """

    def __init__(self, scratch: ScratchFile | None = None, storing: Storing | None = None) -> None:
        self._scratch = scratch
        self._storing = storing

    def get(self, deriver: Deriver, tensor: Tensor, number: int, derive: Callable[[], Buffer]) -> Buffer:
        """Return a block of a lazy merge: as it was kept, or as an earlier merge stored it, or derived.

        Args:
            deriver: of the merge.
            tensor: the merged tensor.
            number: of the block.
            derive: derives it.

        Raises:
            CorruptionError: when a block that is needed is missing or damaged.
        """
        key = (deriver.plan, tensor.name, number)
        if self._scratch is not None and (kept := self._scratch.get(key)) is not None:
            return kept
        try:
            stored = deriver.remembered(tensor.name, number)
        except CorruptionError as error:
            log.warning("%s; deriving it again", error)  # or gc took it just now
            stored = None
        if stored is not None:
            return stored
        if self._storing is not None:
            return self._storing.derive(deriver, tensor, number)
        block = derive()
        if self._scratch is not None:
            try:
                self._scratch.put(key, block)
            except OSError as error:
                log.warning("a derived block is not kept: %s", error)
        return block

    def tend(self) -> None:
        """Do what is to be done from time to time."""
        if self._storing is not None:
            self._storing.flush(idle=True)

    def close(self) -> None:
        """Give back what is used."""
        if self._storing is not None:
            self._storing.close()
        if self._scratch is not None:
            self._scratch.close()
