"""The exact tier `quick`: the expert's difference from the base as it is, which takes most room and least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import quick as kernels
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, header_start, masked_size, read_header, split_mask
from mergefs.blocks.tiers.scratch import room

SURVEYED = 1 << 13
"""About how many elements are looked at to choose how all are written."""

_ALONE = tuple(kind for kind in Kind if kind.alone)

NIBBLES_PAY = 0.75
"""Nibbles have to be smaller than that share of bytes: they take two to four times as long to decode."""


def write(
    expert: NDArray[np.uint16], rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]
) -> bytes:
    """Return the payload; see `payload`. The rests are those of the other codings."""
    return payload(expert, base)


def payload(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> bytes:
    """Return the payload of the expert's bits (uint16[n]): in nibbles where that seems to save a quarter."""
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
    places, values = room("places", n + 1, np.uint32), room("values", n, np.uint16)
    low, second = room("symbols", _plane_size(n), np.uint8), room("symbols2", (n + 1) // 2, np.uint8)
    wide, count = kernels.take_nibbles(expert, base, _limit(top), low, second, places, values)
    header = Header(Kind.NIBBLES, top, 0, 0, wide, count)
    escapes = places[:count].astype("<u4").data, values[:count].astype("<u2").data
    return b"".join((header.pack(), low.data, second[: (wide + 1) // 2].data, *escapes))


def _limit(top: int) -> int:
    """Return the bits of the smallest magnitude of a class."""
    return top << 7


def _plane_size(n: int) -> int:
    return -(-n // kernels.RUN) * (kernels.RUN // 2)


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
    pays = total / 2 + costs[top] < NIBBLES_PAY * (total + 5.0 * beyond_byte.sum())
    return top if pays else None


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

    def row(self, before: NDArray[np.uint32] | None) -> tuple[int, ...]:
        """Return the tier as compiled loops read it; see `kernels.deltas`.

        Args:
            before: see `OpenTier`.
        """
        what, limit = (kernels.BYTES, 0) if self.top is None else (kernels.NIBBLES, _limit(self.top))
        start, escapes = _address(self.data), self.escapes
        low, at = start + HEADER_SIZE, start + escapes
        runs = 0 if before is None else _address(before)
        return (what, low, low + self.low, limit, self.wide, at, at + 4 * self.more, self.more, runs, 0, 0)


class OpenTier(NamedTuple):
    """A tier and what it is about.

    Attributes:
        tier: the tier.
        before: uint32[runs + 1], how many runs of 64 elements of the block that it is about lie before each run and
            before the end; None where that is all of them.
    """

    tier: QuickTier
    before: NDArray[np.uint32] | None

    @classmethod
    def read(cls, payload: memoryview, n: int) -> OpenTier | None:
        """Take apart a payload for a block of n elements, with the mask before it; None where it is another coding's.

        Raises:
            ValueError, RuntimeError: when it is damaged.
        """
        start = header_start(payload)
        if start >= len(payload) or payload[start] not in _ALONE:
            return None
        mask, payload = split_mask(payload, n)
        return cls.among(QuickTier.read(read_header(payload), payload, masked_size(mask, n)), mask)

    @classmethod
    def among(cls, tier: QuickTier, mask: NDArray[np.uint8] | None) -> OpenTier:
        """Return the tier of changed runs.

        Args:
            tier: see the attributes.
            mask: uint8[runs], 1 for each changed run; None where all are.
        """
        if mask is None:
            return cls(tier, None)
        before = np.zeros(mask.size + 1, np.uint32)
        np.cumsum(mask, out=before[1:])
        return cls(tier, before)

    def bits(self, base: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
        """Write the expert's bits of a block (uint16[n]) from the base's.

        Raises:
            ValueError: when the tier was made for another base.
        """
        opened = QuickTiers([self], base)
        kernels.bits(opened.table[0], base, out)
        if opened.foreign:
            raise ValueError(FOREIGN)


class QuickTiers:
    """Several `quick` tiers of one base, decoded together.

    Args:
        tiers: of blocks of as many elements as the base.
        base: uint16[n], the whole block.

    Attributes:
        table: int64[k, ..], what the compiled loops read, and note how far they came.
    """

    def __init__(self, tiers: Sequence[OpenTier], base: NDArray[np.uint16]) -> None:
        self._base = base
        self._tiers = tiers  # whose arrays have to stay
        self._written = 0
        rows = [opened.tier.row(opened.before) for opened in tiers]
        self.table = np.array(rows, np.int64).reshape(len(rows), kernels.COLUMNS)

    def write(self, first: int, rows: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write the exact deltas of a part, whose first element lies at `first`; parts are asked for in order.

        Args:
            rows: int64[k], which rows of `out` they are.
            out: float32[.., m], a multiple of 64 elements but for the last part.

        Raises:
            ValueError: when they are not.
        """
        stop = first + out.shape[1]
        if first != self._written or (stop % kernels.RUN and stop != self._base.size):
            raise ValueError(f"elements {first} to {stop} were asked for after the first {self._written}")
        kernels.deltas(self.table, self._base, first, stop, rows, out)
        self._written = stop

    @property
    def foreign(self) -> list[int]:
        """Which of the tiers were made for another base, once all of the block was written."""
        same = self.table[:, kernels.EXPECTED] == self.table[:, kernels.FOUND]
        return np.flatnonzero(~same.all(axis=1)).tolist()


def _address(array: NDArray[np.generic]) -> int:
    # Through `ctypes.data` it would take several times as long.
    return int(array.__array_interface__["data"][0])


FOREIGN = "the exact tier was made for another base"

ONLY = np.zeros(1, np.int64)
"""The row of a single delta."""
