"""The block cache: each block made once, the limit, what comes first, errors."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergefs.serve.buffers import Buffers
from mergefs.serve.cache import BlockCache

SIZE = 1 << 17


class Maker:
    """Makes blocks of one byte repeated, and counts."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.made: Counter[int] = Counter()
        self.order: list[int] = []
        self._lock = threading.Lock()
        self._seconds = seconds

    def __call__(self, number: int) -> Callable[[], bytes]:
        def make() -> bytes:
            with self._lock:
                self.made[number] += 1
                self.order.append(number)
            time.sleep(self._seconds)
            return bytes([number % 256]) * SIZE

        return make


@pytest.fixture(params=[0, 1, 2])
def cache(request: pytest.FixtureRequest) -> Iterator[BlockCache]:
    made = BlockCache(100 * SIZE, request.param)
    yield made
    made.close()


def test_a_block_that_twenty_threads_want_is_made_once(cache: BlockCache) -> None:
    maker = Maker(0.02)
    together = threading.Barrier(20)

    def want(_: int) -> list[bytes]:
        together.wait()
        return [bytes(cache.get(number, maker(number))) for number in range(10)]

    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(want, range(20)))
    assert set(maker.made.values()) == {1}
    assert all(blocks == [bytes([number]) * SIZE for number in range(10)] for blocks in results)
    figures = cache.figures
    assert (figures.misses, figures.hits) == (10, 190)


def test_what_was_used_last_is_kept_within_the_limit() -> None:
    for threads in (0, 2):
        cache = BlockCache(4 * SIZE, threads)
        maker = Maker()
        for number in (0, 1, 2, 3, 0, 4, 0, 5, 0):
            cache.get(number, maker(number))
            assert cache.figures.bytes <= 4 * SIZE
        assert maker.made[0] == 1
        cache.get(1, maker(1))
        assert maker.made[1] == 2
        assert cache.get(99, lambda: bytes(5 * SIZE)) == bytes(5 * SIZE)
        assert cache.figures.bytes <= 4 * SIZE
        cache.close()


def test_what_readers_still_hold_counts_too() -> None:
    cache = BlockCache(8 * SIZE, 1)
    maker = Maker()
    held = [cache.get(number, maker(number)) for number in range(100)]
    assert cache.figures.bytes == 0
    assert [block[0] for block in held] == list(range(100))
    held.clear()
    cache.get(0, maker(0))
    assert cache.figures.bytes == SIZE
    cache.close()


def test_an_error_reaches_all_who_wait_and_is_forgotten(cache: BlockCache) -> None:
    def fail() -> bytes:
        time.sleep(0.02)
        raise ValueError("damaged")

    def want(_: int) -> str:
        with pytest.raises(ValueError) as raised:
            cache.get(1, fail)
        return str(raised.value)

    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(want, range(5))) == ["damaged"] * 5
    assert cache.get(1, lambda: b"whole") == b"whole"


def test_what_somebody_waits_for_comes_before_what_is_expected() -> None:
    cache = BlockCache(1000 * SIZE, 1)
    maker = Maker(0.01)
    begun, go_on = threading.Event(), threading.Event()

    def first() -> bytes:
        begun.set()
        go_on.wait(10)
        return b"first"

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(cache.get, "first", first)]
        begun.wait(10)
        for number in range(5):
            cache.expect(number, maker(number))
        waiting.append(threads.submit(cache.get, 9, maker(9)))
        waiting.append(threads.submit(cache.get, 3, maker(3)))  # expected already, and now wanted
        while cache.figures.misses + cache.figures.hits < 3:
            time.sleep(0.001)
        go_on.set()
        assert [block.result()[0] for block in waiting] == [ord("f"), 9, 3]
    while cache.figures.ahead < 4:
        time.sleep(0.001)
    cache.close()
    assert sorted(maker.order[:2]) == [3, 9]
    assert maker.order[2:] == [0, 1, 2, 4]


def test_blocks_that_were_expected_long_ago_are_forgotten() -> None:
    cache = BlockCache(1000 * SIZE, 1)
    maker = Maker()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> bytes:
        begun.set()
        go_on.wait(10)
        return b"first"

    cache.expect("first", first)
    begun.wait(10)
    for number in range(200):
        cache.expect(number, maker(number))
    go_on.set()
    while cache.figures.ahead < 65:
        time.sleep(0.001)
    cache.close()
    assert maker.order == list(range(136, 200))
    assert cache.get(0, maker(0))[0] == 0


def test_without_threads_nothing_is_made_ahead() -> None:
    cache, maker = BlockCache(1000 * SIZE), Maker()
    cache.expect(1, maker(1))
    assert not cache.works_ahead
    assert not maker.made


def test_after_its_end_a_cache_still_answers() -> None:
    cache, maker = BlockCache(1000 * SIZE, 2), Maker()
    cache.get(1, maker(1))
    cache.close()
    assert [cache.get(number, maker(number))[0] for number in (1, 2)] == [1, 2]
    assert maker.made == {1: 1, 2: 1}


@given(st.lists(st.tuples(st.binary(max_size=300_000), st.booleans()), max_size=12))
def test_buffers_hold_what_was_put_in(blocks: list[tuple[bytes, bool]]) -> None:
    buffers = Buffers(1 << 20)
    held = []
    for block, keep in blocks:
        copy = buffers.hold(block)
        assert copy == block
        if keep:
            held.append((block, copy))
        del copy
        assert all(copy == block for block, copy in held)
    needed = sum(-(-len(block) // (64 << 10)) * (64 << 10) for block, _ in held if len(block) >= 64 << 10)
    assert buffers.used == needed
