"""Arrays that a thread keeps for its next block.

A fresh array of a megabyte costs its page faults, about 0.2 ns an element each: several of them would take longer than
a coarse tier's decoding. A thread keeps some 20 bytes for every element of its largest block.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 1 << 16
MOST = 1 << 23
"""Larger arrays are not kept."""

ALONE = -1
"""The slot of tiers that are used up before others are opened; see `decoder.Opened`."""

_kept = threading.local()


def room(name: str, size: int, dtype: type[Any]) -> NDArray[Any]:
    """Return dtype[size] that is valid until this thread asks for the same name again. It is not cleared."""
    found: NDArray[Any] | None = getattr(_kept, name, None)
    if found is None or found.size < size:
        found = np.empty(max(size, LEAST), dtype)
        if size <= MOST:
            setattr(_kept, name, found)
    return found[:size]
