"""A bounded pipeline: work on many threads, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ordered(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, window: int) -> Iterator[Result]:
    """Yield `work(item)` for every item in the order of the items, computed on `threads` threads.

    At most `window` results are under way or waiting at any time, so that memory stays bounded. When the
    consumer stops or a piece of work fails, what has not begun is not begun.
    """
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="mergefs")
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
