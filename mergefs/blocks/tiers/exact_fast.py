"""The exact tier `fast`: byte planes in the order of the elements' classes, compressed with zstd."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import rests as kernels
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, compress, cut, read_sized, sized
from mergefs.blocks.tiers.scratch import room
from mergefs.blocks.zstd_frames import Frame
from mergefs.hashing import Buffer


def write(
    expert: NDArray[np.uint16], rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]
) -> bytes:
    """Return the payload of the zigzag rests (uint16[n])."""
    n = base.size
    starts = np.empty(257, np.uint64)
    kernels.count_classes(base, starts)
    grouped, low = room("grouped", n, np.uint16), room("symbols", n, np.uint8)
    with_high = int(starts[kernels.group(rests, base, starts.copy(), grouped)])
    high = room("symbols2", with_high, np.uint8)
    kernels.planes(grouped, low, high)
    counts = np.diff(starts.astype(np.int64))
    occurring = np.flatnonzero(counts)
    first, last = (int(occurring[0]), int(occurring[-1])) if n else (0, 0)
    return (
        Header(Kind.FAST, first, last, 0, n, with_high).pack()
        + counts[first : last + 1].astype("<u4").tobytes()
        + sized(compress(low))
        + compress(high)
    )


class FastTier(NamedTuple):
    """A `fast` payload, taken apart and checked, but not decompressed.

    Attributes:
        starts: uint64[257], where each class begins in the order of classes.
    """

    starts: NDArray[np.uint64]
    frames: tuple[Frame, ...]

    @classmethod
    def read(cls, header: Header, payload: memoryview, n: int) -> FastTier:
        """Take apart a payload for n elements.

        Raises:
            ValueError: when it is damaged.
        """
        if header.x != n or header.y > n or header.g < header.a:
            raise ValueError("the exact tier's header does not fit its block")
        counts = np.frombuffer(cut(payload, HEADER_SIZE, 4 * (header.g - header.a + 1)), "<u4")
        ends = np.cumsum(counts, dtype=np.uint64)
        if ends[-1] != n:
            raise ValueError("the exact tier's classes do not fit its block")
        starts = np.full(257, n, np.uint64)
        starts[: header.a + 1] = 0
        starts[header.a + 1 : header.g + 2] = ends
        low, end = read_sized(payload, HEADER_SIZE + counts.nbytes)
        return cls(starts, (Frame(low, n), Frame(payload[end:], header.y)))

    def rests(
        self, contents: list[NDArray[np.uint8]], base: NDArray[np.uint16], q: NDArray[np.int8]
    ) -> NDArray[np.uint16]:
        """Return the zigzag rests (uint16[n]) from the frames' contents.

        Raises:
            ValueError: when the tier was made for another base.
        """
        places = self.starts.copy()
        out = room("rests", base.size, np.uint16)
        kernels.ungroup(self.grouped(contents), base, places, out)
        self.check(places[:256])
        return out

    def grouped(self, contents: list[NDArray[np.uint8]]) -> NDArray[np.uint16]:
        """Return the rests in the order of classes, uint16[2 n]: twice as long as they are, so that with whatever base
        no class can run past the end."""
        grouped = room("grouped", 2 * contents[0].size, np.uint16)
        kernels.join(contents[0], contents[1], grouped)
        return grouped

    def check(self, ends: NDArray[np.uint64]) -> None:
        """Check where the base's classes end (uint64[256]).

        Raises:
            ValueError: when the tier was made for another base.
        """
        if not np.array_equal(ends, self.starts[1:]):
            raise ValueError("the exact tier was made for another base")


class ClassOrder:
    """Where the elements of a base's block lie when all lie in the order of their classes.

    It is found when it is first asked for, in about the time that decoding one block without it takes longer.
    """

    def __init__(self, base: Buffer) -> None:
        self._raw = base

    @cached_property
    def _base(self) -> NDArray[np.uint16]:
        return np.frombuffer(self._raw, np.uint16)

    @cached_property
    def starts(self) -> NDArray[np.uint64]:
        """uint64[257], where each class begins."""
        found = np.empty(257, np.uint64)
        kernels.count_classes(self._base, found)
        return found

    @cached_property
    def places(self) -> NDArray[np.uint32]:
        """uint32[n], the place of each element."""
        found = room("order", self._base.size, np.uint32)
        kernels.order(self._base, self.starts.copy(), found)
        return found


NO_ORDER = np.empty(0, np.uint32)
"""Stands for the places where there is no order."""
