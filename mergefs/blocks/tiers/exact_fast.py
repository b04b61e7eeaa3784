"""The exact tier `fast`: byte planes in the order of the elements' classes, compressed with zstd."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import rests as kernels
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, compress, cut, read_sized, sized
from mergefs.blocks.tiers.scratch import room
from mergefs.blocks.zstd_frames import Frame


def write(rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]) -> bytes:
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
        n = base.size
        grouped = room("grouped", 2 * n, np.uint16)  # twice: whatever the base, no class can run past its end
        kernels.join(contents[0], contents[1], grouped)
        out = room("rests", n, np.uint16)
        places = self.starts.copy()
        kernels.ungroup(grouped, base, places, out)
        if not np.array_equal(places[:256], self.starts[1:]):
            raise ValueError("the exact tier was made for another base")
        return out
