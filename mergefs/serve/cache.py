"""A cache of decoded blocks with a limit, in which each block is made once however many threads want it."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from mergefs.hashing import Buffer
from mergefs.serve.buffers import Buffers

Make = Callable[[], Buffer]

_EXPECTED = 64
"""So many blocks may be expected; of more, the first ones are forgotten again."""

_SPARE = 4 << 20
"""Bytes of buffers that nothing is in."""


@dataclass(frozen=True)
class CacheFigures:
    """What a cache has done so far.

    Attributes:
        hits: blocks that were there, or being made already, when somebody wanted them.
        misses: blocks that had to be made for who wanted them.
        ahead: blocks that were made because somebody was expected to want them.
        bytes: kept now.
        limit: the most that is kept, in bytes, without what is left for making blocks.
    """

    hits: int
    misses: int
    ahead: int
    bytes: int
    limit: int


@dataclass(eq=False)
class _Job:
    """A block to be made.

    Attributes:
        key, make: of the block.
        result: the block, or the error of making it.
    """

    key: Hashable
    make: Make
    result: Future[Buffer] = field(default_factory=Future)


class BlockCache:
    """Keeps the most recently used blocks up to `limit` bytes. Safe for many threads.

    Without threads of its own, a block is made by the thread that wants it first. With them it is made by one of
    them: blocks that somebody waits for come first, then those that are only expected. However many threads wait,
    only so many blocks are under way, and none of them competes for the processor's caches.

    Args:
        limit: in bytes; a block larger than it is made and given out, and not kept.
        threads: how many make blocks; 0 leaves it to those who want them.
        aside: bytes of the limit, but at most half of it, that are left for making blocks.
    """

    def __init__(self, limit: int, threads: int = 0, aside: int = 0) -> None:
        self._limit = limit - min(limit // 2, aside)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._kept: OrderedDict[Hashable, Buffer] = OrderedDict()
        self._jobs: dict[Hashable, _Job] = {}
        self._urgent: deque[_Job] = deque()
        self._expected: OrderedDict[_Job, None] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = self._ahead = 0
        self._closed = False
        self._buffers = Buffers(min(_SPARE, self._limit // 8)) if threads else None
        self._threads = [threading.Thread(target=self._serve, name="blocks", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def get(self, key: Hashable, make: Make) -> Buffer:
        """Return the block of `key`, having it made where it is neither kept nor being made.

        An error of `make` reaches every thread that waits for it, and is forgotten.
        """
        return self.get_all([(key, make)])[0]

    def get_all(self, wanted: Sequence[tuple[Hashable, Make]]) -> list[Buffer]:
        """Return blocks, having those made at the same time that are neither kept nor being made; see `get`."""
        mine: list[_Job] = []
        with self._lock:
            found = [self._find(key, make, mine) for key, make in wanted]
        for job in mine:
            self._run(job)
        return [block.result.result() if isinstance(block, _Job) else block for block in found]

    def _find(self, key: Hashable, make: Make, mine: list[_Job]) -> Buffer | _Job:
        """Return a block, or who makes it; a job that this thread has to do itself is added to `mine`."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._hits += 1
            return kept
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key, make)
            self._misses += 1
            if self._closed or not self._threads:
                mine.append(job)
            else:
                self._urgent.append(job)
                self._work.notify()
            return job
        self._hits += 1
        if job in self._expected:
            del self._expected[job]
            self._urgent.append(job)
        return job

    def expect(self, key: Hashable, make: Make) -> None:
        """Have a block made when the threads have nothing more urgent to do; without threads, do nothing."""
        if not self._threads:
            return
        with self._lock:
            if self._closed or key in self._kept or key in self._jobs:
                return
            job = self._jobs[key] = _Job(key, make)
            self._expected[job] = None
            if len(self._expected) > _EXPECTED:
                forgotten, _ = self._expected.popitem(last=False)
                del self._jobs[forgotten.key]
            self._work.notify()

    @property
    def works_ahead(self) -> bool:
        """Whether `expect` has any effect."""
        return bool(self._threads)

    @property
    def figures(self) -> CacheFigures:
        """What has been done so far."""
        with self._lock:
            return CacheFigures(self._hits, self._misses, self._ahead, self._bytes, self._limit)

    def close(self) -> None:
        """End the threads; what nobody waits for is not made any more, and what is wanted later its user makes."""
        with self._lock:
            self._closed = True
            for job in self._expected:
                del self._jobs[job.key]
            self._expected.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            del job  # and with it the block

    def _next(self) -> _Job | None:
        """Return what is to be made next, waiting for it; None when the cache is closed."""
        with self._lock:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if self._expected:
                    self._ahead += 1
                    return self._expected.popitem(last=False)[0]
                if self._closed:
                    return None
                self._work.wait()

    def _run(self, job: _Job) -> None:
        try:
            block = job.make()
        except BaseException as error:
            with self._lock:
                del self._jobs[job.key]
            job.result.set_exception(error)
            return
        if self._buffers is not None and len(block) <= self._limit:
            block = self._buffers.hold(block)
        with self._lock:
            del self._jobs[job.key]
            self._keep(job.key, block)
        job.result.set_result(block)

    def _keep(self, key: Hashable, block: Buffer) -> None:
        if len(block) > self._limit:
            return
        self._kept[key] = block
        self._bytes += len(block)
        del block
        # What somebody still reads is in memory too, whether it is kept or not.
        while self._kept and (
            self._bytes > self._limit or (self._buffers is not None and self._buffers.used > self._limit)
        ):
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped)
            del dropped
