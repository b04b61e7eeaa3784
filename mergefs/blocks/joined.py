"""Reading payloads that lie close together in one go.

A merge knows beforehand which payloads it will read, and in which order. Tiers of one depth lie in the order of the
blocks, so that most of them follow each other: one large read costs less than many small ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from mergefs.backend import Backend
from mergefs.blocks.pack import pack_name
from mergefs.catalog.tables import Location
from mergefs.hashing import Buffer

LARGEST_GAP = 32 << 10
"""Bytes between two payloads that are read through rather than skipped: a disk gives them in the time of a seek."""

LONGEST = 1 << 20
"""Bytes of one read."""


@dataclass
class _Run:
    """Payloads that are read together.

    Attributes:
        pack: their pack (32 bytes).
        start, stop: the run's place in it.
        waiting: payloads that nobody has taken yet.
        data: the bytes, once they are read.
        lock: held while they are being read.
        following: the next run in the pack, which is fetched while this one is used.
    """

    pack: bytes
    start: int
    stop: int
    waiting: int = 0
    data: bytes | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    following: _Run | None = None


class JoinedReads:
    """Gives out payloads, of which several are read at once. Safe to use from many threads.

    Args:
        backend: what holds the packs.
        wanted: what will be read, once each, in about the order of `take`.
        spare: how many bytes in all may be read that nobody wants, or None for any number.
        longest: bytes of one read; each payload is kept until it is taken.
        apart: packs in which nothing is read through, because it is read otherwise.
    """

    def __init__(
        self,
        backend: Backend,
        wanted: Iterable[Location],
        spare: int | None,
        *,
        longest: int = LONGEST,
        apart: Container[bytes] = (),
    ) -> None:
        self._backend = backend
        self._runs: dict[tuple[bytes, int], _Run] = {}
        self._lock = threading.Lock()
        open_runs: dict[bytes, _Run] = {}
        for location in wanted:
            record = location.record
            if (location.pack, record.offset) in self._runs:
                continue  # wanted twice: who comes second reads it alone
            run = open_runs.get(location.pack)
            stop = record.offset + record.length
            gap = -1 if run is None else record.offset - run.stop
            widest = 0 if location.pack in apart else LARGEST_GAP
            joins = run is not None and 0 <= gap <= widest and stop - run.start <= longest
            if run is None or not joins or (spare is not None and gap > spare):
                before, run = run, _Run(location.pack, record.offset, stop)
                open_runs[location.pack] = run
                if before is not None:
                    before.following = run
            elif spare is not None:
                spare -= gap
            run.stop = stop
            run.waiting += 1
            self._runs[location.pack, record.offset] = run

    def take(self, location: Location, count: Callable[[int], None]) -> Buffer | None:
        """Return a payload; None when it is not expected.

        Args:
            location: where it lies.
            count: told how many bytes are going to be read, where they have not been read yet.

        Raises:
            FileNotFoundError: when the pack is gone.
        """
        offset = location.record.offset
        with self._lock:
            run = self._runs.pop((location.pack, offset), None)
        if run is None:
            return None
        with run.lock:
            if run.data is None:
                count(run.stop - run.start)
                run.data = self._backend.get(pack_name(run.pack), run.start, run.stop - run.start)
                if run.following is not None:
                    soon, run.following = run.following, None
                    self._backend.expect(pack_name(soon.pack), soon.start, soon.stop - soon.start)
            data = run.data
            run.waiting -= 1
            if run.waiting == 0:
                run.data = b""
        at = offset - run.start
        return memoryview(data)[at : at + location.record.length]
