"""Read-ahead follows readers, not files."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from mergefs.serve.read_ahead import ReadAhead


def wanted(ahead: ReadAhead, reads: list[int]) -> list[int]:
    return [part for first in reads for part in ahead.read(first, first + 1)]


def test_who_reads_on_is_served_ahead() -> None:
    ahead = ReadAhead(4)
    assert wanted(ahead, [0, 1, 2, 3, 4]) == []
    assert wanted(ahead, [5]) == [6, 7, 8, 9]
    assert wanted(ahead, [6, 7]) == [10, 11]


def test_requests_that_overtake_one_another_are_one_reader() -> None:
    ahead = ReadAhead(4)
    assert wanted(ahead, [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]) == [8, 9, 10, 11, 12, 13]


def test_reading_here_and_there_asks_for_nothing() -> None:
    ahead = ReadAhead(4)
    assert wanted(ahead, [100 * place for place in random.Random(1).sample(range(1000), 500)]) == []


def test_the_readers_of_one_descriptor_do_not_disturb_each_other() -> None:
    """Eight readers far apart, and somebody who jumps about between them."""
    ahead = ReadAhead(4)
    order = random.Random(3)
    places = [1000 * n for n in range(8)]
    told: dict[int, list[int]] = {n: [] for n in range(8)}
    for step in range(50):
        for n in order.sample(range(8), 8):
            told[n] += wanted(ahead, [places[n] + step])
            assert wanted(ahead, [100_000 + order.randrange(10**9)]) == []
    for n in range(8):
        assert told[n] == list(range(places[n] + 6, places[n] + 50 + 4))


@given(st.lists(st.integers(0, 40), max_size=60))
def test_no_part_behind_a_reader_is_asked_for(reads: list[int]) -> None:
    ahead = ReadAhead(4)
    furthest = -1
    for first in reads:
        furthest = max(furthest, first)
        assert all(part > 0 and part <= furthest + 4 for part in ahead.read(first, first + 1))
