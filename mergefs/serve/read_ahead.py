"""Which parts of a file are wanted next, told from the reads so far: of each reader, not of the file.

One open file may have many readers: threads that fault pages of one mapping, processes that share a descriptor. Each
goes on from where it is, and none of them disturbs what is known of the others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

_READERS = 64
"""Of so many readers of one open file the positions are known."""

_PATIENCE = 6
"""Parts that a reader has to read one after another before more are expected: the kernel reads ahead by itself, and
around every page that is missing, and that says nothing about the reader."""

_SLACK = 8
"""How far from where it was a reader may go on: requests of one reader overtake one another."""


@dataclass
class _Reader:
    """Somebody who reads on.

    Attributes:
        next: the part after the last one that was read.
        read: parts that were read one after another.
        told: the part after the last one that was said to be wanted next.
    """

    next: int
    read: int
    told: int


class ReadAhead:
    """Follows the readers of one open file. Safe for many threads.

    Args:
        window: how many parts ahead of a reader are wanted.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._numbers = 0

    def read(self, first: int, stop: int) -> range:
        """Note that the parts from `first` to before `stop` are read; return those that are wanted next and were not
        said to be before."""
        with self._lock:
            reader = self._find(first)
            if reader is None:
                self._add(_Reader(stop, stop - first, stop))
                return range(0)
            if stop > reader.next:
                reader.read += stop - reader.next
                reader.next = stop
            if reader.read < _PATIENCE:
                return range(0)
            begin, end = max(reader.told, reader.next), reader.next + self._window
            reader.told = max(reader.told, end)
            return range(begin, end)

    def _find(self, first: int) -> _Reader | None:
        for number, reader in reversed(self._readers.items()):
            if reader.next - _SLACK <= first <= reader.next + _SLACK // 2:
                self._readers.move_to_end(number)
                return reader
        return None

    def _add(self, reader: _Reader) -> None:
        self._numbers += 1
        self._readers[self._numbers] = reader
        if len(self._readers) > _READERS:
            self._readers.popitem(last=False)
