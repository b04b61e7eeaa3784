"""Views that stay open for a while after their last use: opening one costs a lease and reading its manifest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What a pool holds."""

    def close(self) -> None:
        """End the lease."""


Opened = TypeVar("Opened", bound=Closable)


@dataclass
class _Entry(Generic[Opened]):
    value: Opened
    users: int = 0


class Pool(Generic[Opened]):
    """The things used last by their manifests' ids. Safe for many threads.

    Those in use stay open, and of the others the `idle` ones that were used last. They are closed when another is
    opened, never by `release`: that may be called by the garbage collector, at any moment on any thread, so it does
    nothing but count. The lock is held for looking up, opening and closing.

    Args:
        make: opens what belongs to an id.
        idle: how many stay open that nobody uses.
    """

    def __init__(self, make: Callable[[str], Opened], idle: int) -> None:
        self._make = make
        self._idle = idle
        # Taken again by the thread that has it when a garbage collection in the middle releases something.
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, _Entry[Opened]] = OrderedDict()

    def acquire(self, manifest: str) -> Opened:
        """Return what belongs to an id; it stays open until `release`.

        Raises:
            Exception: what opening it raises.
        """
        with self._lock:
            if manifest not in self._entries:
                self._close_idle(self._idle - 1)
                self._entries[manifest] = _Entry(self._make(manifest))
            entry = self._entries[manifest]
            self._entries.move_to_end(manifest)
            entry.users += 1
            return entry.value

    def release(self, manifest: str) -> None:
        """Say that one of those who acquired it does not use it any more; also after `close`."""
        with self._lock:
            if manifest in self._entries:
                self._entries[manifest].users -= 1

    @contextmanager
    def using(self, manifest: str) -> Iterator[Opened]:
        """Use what belongs to an id for the length of the block."""
        value = self.acquire(manifest)
        try:
            yield value
        finally:
            self.release(manifest)

    def close_idle(self) -> None:
        """Close everything that nobody uses."""
        with self._lock:
            self._close_idle(0)

    def close(self) -> None:
        """Close everything, in use or not."""
        with self._lock:
            while self._entries:
                self._entries.popitem()[1].value.close()

    def _close_idle(self, keep: int) -> None:
        """Close what nobody uses but for the `keep` used last."""
        idle = [manifest for manifest, entry in self._entries.items() if not entry.users]
        for manifest in idle[: max(0, len(idle) - keep)]:
            self._entries.pop(manifest).value.close()
