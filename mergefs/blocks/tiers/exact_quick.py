"""The exact tier `quick`: the expert's difference from the base as it is, which takes most room and least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import quick as kernels
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind
from mergefs.blocks.tiers.scratch import ALONE, room

SURVEYED = 1 << 13
"""About how many elements are looked at to choose how all are written."""

BYTES_PAY = 0.95
"""Nibbles have to be smaller than that share of bytes: they take longer to decode."""


def write(
    expert: NDArray[np.uint16], rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]
) -> bytes:
    """Return the payload; see `payload`. The rests are those of the other codings."""
    return payload(expert, base)


def payload(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> bytes:
    """Return the payload of the expert's bits (uint16[n]): in nibbles or in bytes, whichever seems smaller."""
    top = _top(expert, base)
    return in_bytes(expert, base) if top is None else in_nibbles(expert, base, top)


def in_bytes(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> bytes:
    """Return the payload of the expert's bits (uint16[n]) with a byte for each element."""
    n = base.size
    low, places, values = room("symbols", n, np.uint8), room("places", n + 1, np.uint32), room("values", n, np.uint16)
    count = kernels.take_bytes(expert, base, low, places, values)
    high = (values[:count] >> 8).astype(np.uint8)
    header = Header(Kind.QUICK, 0, 0, 0, n, count)
    return b"".join((header.pack(), low.data, places[:count].astype("<u4").data, high.data))


def in_nibbles(expert: NDArray[np.uint16], base: NDArray[np.uint16], top: int) -> bytes:
    """Return the payload of the expert's bits (uint16[n]) with a nibble an element, two in classes below `top`."""
    n = base.size
    wide = int(kernels.count_below(base, top))
    below = Below.find(base, top, wide, ALONE).places
    places, values = room("places", n + 1, np.uint32), room("values", n, np.uint16)
    low, second = room("symbols", _plane_size(n), np.uint8), room("symbols2", (wide + 1) // 2, np.uint8)
    count = kernels.take_nibbles(expert, base, below, low, second, places, values)
    header = Header(Kind.NIBBLES, top, 0, 0, wide, count)
    escapes = places[:count].astype("<u4").data, values[:count].astype("<u2").data
    return b"".join((header.pack(), low.data, second.data, *escapes))


def _plane_size(n: int) -> int:
    return -(-n // kernels.RUN) * kernels.LANES


def _top(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> int | None:
    """Return the class below which elements are to have two nibbles; None where all are to have a byte.

    Small numbers differ by more units, so that it is classes from the first one on.
    """
    counts = np.zeros((256, 3), np.int64)
    kernels.survey(expert, base, max(1, base.size // SURVEYED) * kernels.RUN, counts)
    every, beyond_nibble, beyond_byte = counts.T
    narrow, wide = 6.0 * beyond_nibble, every / 2 + 6.0 * beyond_byte
    # The cost of each top from 0 to 255: wide below it, narrow from it on.
    costs = (np.cumsum(wide) - wide) + (narrow.sum() - (np.cumsum(narrow) - narrow))
    top = int(np.argmin(costs))
    total = every.sum()
    pays = total / 2 + costs[top] < BYTES_PAY * (total + 5.0 * beyond_byte.sum())
    return top if pays else None


class Below(NamedTuple):
    """The elements of a base whose class is below some top.

    Attributes:
        places: uint32[count], ascending.
        starts: uint32[runs + 1], how many lie before each run of 64, and before the end.
    """

    places: NDArray[np.uint32]
    starts: NDArray[np.uint32]

    @classmethod
    def find(cls, base: NDArray[np.uint16], top: int, count: int, slot: int) -> Below:
        """Find them in uint16[n]; they are in this thread's room.

        Args:
            count: how many there are.
            slot: see `decoder.Opened`.
        """
        places = room(f"below-{slot}", count + 1, np.uint32)
        starts = room(f"starts-{slot}", -(-base.size // kernels.RUN) + 1, np.uint32)
        kernels.find_below(base, top, places, starts)
        return cls(places[:count], starts)


_NONE = Below(np.empty(0, np.uint32), np.empty(0, np.uint32))


class QuickTier(NamedTuple):
    """A `quick` payload, taken apart and checked.

    Attributes:
        data: uint8[..], the payload.
        low: bytes of its first plane.
        top: the class below which elements have a second nibble; None where the first plane has bytes.
        wide: how many those are.
        more: how many elements take more.
    """

    data: NDArray[np.uint8]
    low: int
    top: int | None
    wide: int
    more: int

    @classmethod
    def read(cls, header: Header, payload: memoryview, n: int) -> QuickTier:
        """Take apart a payload for n elements.

        Raises:
            ValueError: when it is damaged.
        """
        more = header.y
        if header.kind is Kind.NIBBLES:
            found = cls(np.frombuffer(payload, np.uint8), _plane_size(n), header.a, header.x, more)
            fits = found.wide <= n and len(payload) == found.escapes + 6 * more
        else:
            found = cls(np.frombuffer(payload, np.uint8), n, None, 0, more)
            fits = header.x == n and len(payload) == found.escapes + 5 * more
        if more > n or not fits:
            raise ValueError("the exact tier's header does not fit its block")
        if more and not kernels.fits(found.data, found.escapes, more, n):
            raise ValueError("the exact tier's places do not fit its block")
        return found

    @property
    def escapes(self) -> int:
        """Where in the payload the places of elements are that take more."""
        return HEADER_SIZE + self.low + (self.wide + 1) // 2

    def row(self, below: Below, before: NDArray[np.uint32] | None) -> tuple[int, ...]:
        """Return the tier as compiled loops read it; see `kernels.deltas`.

        Args:
            below: the elements that have a second nibble.
            before: see `OpenTier`.
        """
        what = kernels.BYTES if self.top is None else kernels.NIBBLES
        start, escapes = _address(self.data), self.escapes
        low, at = start + HEADER_SIZE, start + escapes
        places, starts = (_address(array) for array in below)
        runs = 0 if before is None else _address(before)
        return (what, low, low + self.low, places, starts, self.wide, at, at + 4 * self.more, self.more, 0, runs)


class OpenTier(NamedTuple):
    """A tier and what it is about.

    Attributes:
        tier: the tier.
        base: uint16[n], the base's elements that it is about.
        before: uint32[runs + 1], how many runs of 64 elements of the block that it is about lie before each run and
            before the end; None where that is all of them.
        slot: see `decoder.Opened`.
    """

    tier: QuickTier
    base: NDArray[np.uint16]
    before: NDArray[np.uint32] | None
    slot: int

    @classmethod
    def among(cls, tier: QuickTier, base: NDArray[np.uint16], mask: NDArray[np.uint8] | None, slot: int) -> OpenTier:
        """Return the tier of changed runs.

        Args:
            tier, base, slot: see the attributes.
            mask: uint8[runs], 1 for each changed run; None where all are.
        """
        if mask is None:
            return cls(tier, base, None, slot)
        before = np.zeros(mask.size + 1, np.uint32)
        np.cumsum(mask, out=before[1:])
        return cls(tier, base, before, slot)

    def bits(self, base: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
        """Write the expert's bits of a block (uint16[N]) from the base's.

        Raises:
            ValueError: when the tier was made for another base.
        """
        kernels.bits(QuickTiers([self], base).table[0], base, out)


class QuickTiers:
    """Several `quick` tiers of one base, decoded together. A thread has one of more than one tier at a time.

    Args:
        tiers: of blocks of as many elements as the base.
        base: uint16[n], the whole block.

    Attributes:
        table: int64[k, ..], what the compiled loops read.

    Raises:
        ValueError: when a tier was made for another base.
    """

    def __init__(self, tiers: Sequence[OpenTier], base: NDArray[np.uint16]) -> None:
        self._base = base
        self._tiers = tiers  # whose arrays have to stay
        # Experts of one base have few tops, and what lies below one is found once for all that are about the same.
        shared: dict[int, Below] = {}
        self._below: list[Below] = []
        rows = []
        for opened in tiers:
            tier, known = opened.tier, shared if opened.before is None else {}
            if tier.top is None:
                below = _NONE
            else:
                below = known.get(tier.top) or _below(opened, tier.top)
                known[tier.top] = below
            if below.places.size != tier.wide:
                raise ValueError("the exact tier was made for another base")
            self._below.append(below)
            rows.append(tier.row(below, opened.before))
        self.table = np.array(rows, np.int64).reshape(len(rows), kernels.COLUMNS)

    def write(self, first: int, rows: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write the exact deltas of a part, whose first element lies at `first`; parts are asked for in order.

        Args:
            rows: int64[k], which rows of `out` they are.
            out: float32[.., m].
        """
        kernels.deltas(self.table, self._base, first, first + out.shape[1], rows, out)


def _below(opened: OpenTier, top: int) -> Below:
    return Below.find(opened.base, top, int(kernels.count_below(opened.base, top)), opened.slot)


def _address(array: NDArray[np.generic]) -> int:
    # Through `ctypes.data` it would take several times as long.
    return int(array.__array_interface__["data"][0])


ONLY = np.zeros(1, np.int64)
"""The row of a single delta."""
