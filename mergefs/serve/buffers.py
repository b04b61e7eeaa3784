"""Buffers for blocks that are kept, used again and again.

A block that stays in memory for long, among the many short-lived buffers that making blocks takes, keeps the memory
around it from being used well: a cache of 256 MiB took 60 MiB more than that. So what is kept is moved to buffers of
its own, which go back to where they came from when nobody has a piece of them any more.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np

from mergefs.hashing import Buffer

_UNIT = 64 << 10
"""Buffers are multiples of it; what is smaller than it is left where it is."""


class Buffers:
    """Gives out copies of blocks. Safe for many threads.

    Args:
        spare: bytes of unused buffers that are kept for later.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._free: dict[int, list[mmap.mmap]] = {}
        self._unused = 0
        self._used = 0
        # Taken again by the thread that has it when a garbage collection in the middle gives a buffer back.
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """The bytes of buffers that somebody has a view of."""
        return self._used

    def hold(self, block: Buffer) -> Buffer:
        """Return a copy of a block, whose buffer is used again once no view of it is left."""
        size = len(block)
        if size < _UNIT:
            return bytes(block)
        room = -(-size // _UNIT) * _UNIT
        with self._lock:
            free = self._free.get(room)
            buffer = free.pop() if free else None
            if buffer is not None:
                self._unused -= room
            self._used += room
        # Pages that were never touched take no memory.
        buffer = buffer or mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        holder = np.frombuffer(buffer, np.uint8, size)
        holder[:] = np.frombuffer(block, np.uint8)
        weakref.finalize(holder, self._take_back, buffer, room).atexit = False
        return memoryview(holder)

    def _take_back(self, buffer: mmap.mmap, room: int) -> None:
        with self._lock:
            self._used -= room
            if self._unused + room <= self._spare:
                self._free.setdefault(room, []).append(buffer)
                self._unused += room
