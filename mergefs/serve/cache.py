"""A cache of decoded blocks with a limit, in which each block is made once however many threads want it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from mergefs.hashing import Buffer


class BlockCache:
    """Keeps the most recently used blocks up to `limit` bytes.

    Args:
        limit: in bytes; a block larger than it is made and given out, and not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Buffer] = OrderedDict()
        self._making: dict[Hashable, Future[Buffer]] = {}
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], Buffer]) -> Buffer:
        """Return the block of `key`, calling `make` where it is neither kept nor being made.

        An error of `make` reaches every thread that waits for it, and is forgotten.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            waiting = self._making.get(key)
            if waiting is None:
                mine: Future[Buffer] = Future()
                self._making[key] = mine
        if waiting is not None:
            return waiting.result()
        try:
            block = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, block)
        mine.set_result(block)
        return block

    def _keep(self, key: Hashable, block: Buffer) -> None:
        if len(block) > self._limit:
            return
        self._kept[key] = block
        self._bytes += len(block)
        while self._bytes > self._limit:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped)
