"""The coarse tiers: one payload of gaps, then payloads of trits and bits that refine it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers import choice
from mergefs.blocks.tiers.kernels import symbols
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, compress, cut, read_sized, sized
from mergefs.blocks.tiers.scratch import room
from mergefs.blocks.zstd_frames import Frame

SPARE = 40
"""Symbols that a loop may read or write past the last one."""


class Prediction(NamedTuple):
    """How quantised magnitudes become deltas.

    Attributes:
        codes: byte m is the centroid code of magnitude m.
        unit: what codes count.
        grid: the first class that is predicted on the bf16 grid.
    """

    codes: np.uint64
    unit: np.float32
    grid: int

    @classmethod
    def make(cls, codes: NDArray[np.uint8], unit: int, grid: int) -> Prediction:
        """From the codes of magnitudes 1, 2, ... and the unit's exponent field."""
        word = np.zeros(8, np.uint8)
        word[1 : codes.size + 1] = codes
        return cls(word.view("<u8")[0], np.uint32(unit << 23).view(np.float32), grid)


NOTHING = Prediction(np.uint64(0), np.float32(0), 255)
"""The prediction without a tier: q is 0 everywhere."""


def write_sparse(q: NDArray[np.int8], codes: NDArray[np.uint8], header: Header) -> bytes:
    """Return tier 0's payload: q is -1, 0 or 1; the header's x and y are filled in."""
    gaps = room("symbols", q.size + q.size // symbols.SKIP + 1, np.uint8)
    size = symbols.write_gaps(q, room("places", q.size + 1, np.uint32), gaps)
    return header._replace(kind=Kind.SPARSE, x=size, y=size).pack() + codes.tobytes() + compress(gaps[:size])


def write_dense(
    q: NDArray[np.int8], before: NDArray[np.int8], base: NDArray[np.uint16], codes: NDArray[np.uint8], header: Header
) -> bytes:
    """Return the payload that refines `before` to `q` (int8[n]); the header's x and y are filled in."""
    n = q.size
    trits, bits = room("symbols", n + SPARE, np.uint8), room("symbols2", n + SPARE, np.uint8)
    packed_trits, packed_bits = room("packed", n // 5 + 1, np.uint8), room("packed2", n // 8 + 1, np.uint8)
    x, y = choice.split(q, before, base, header.a, trits, bits)
    symbols.pack_trits(trits, x, packed_trits)
    symbols.pack_bits(bits, y, packed_bits)
    return (
        header._replace(kind=Kind.DENSE, x=x, y=y).pack()
        + codes.tobytes()
        + sized(compress(packed_trits[: -(-x // 5)]))
        + compress(packed_bits[: -(-y // 8)])
    )


class CoarseTier(NamedTuple):
    """A coarse payload, taken apart and checked, but not decompressed."""

    depth: int
    header: Header
    codes: memoryview
    frames: tuple[Frame, ...]

    @classmethod
    def read(cls, depth: int, header: Header, payload: memoryview, n: int) -> CoarseTier:
        """Take apart the payload of coarse tier `depth` for a block of n elements.

        Raises:
            ValueError: when it is damaged or none.
        """
        if header.kind is not (Kind.DENSE if depth else Kind.SPARSE):
            raise ValueError(f"tier {depth} has a payload of kind {header.kind.value}")
        if not 0 < header.u < 255:
            raise ValueError(f"tier {depth} counts in units of no size")
        count = 2 ** (depth + 1) - 1
        codes = cut(payload, HEADER_SIZE, count)
        at = HEADER_SIZE + count
        if depth == 0:
            if header.x != header.y or header.y > n + n // symbols.SKIP:
                raise ValueError("tier 0 has more symbols than its block")
            return cls(depth, header, codes, (Frame(payload[at:], header.y),))
        if header.x + header.y > n:
            raise ValueError(f"tier {depth} has more symbols than its block")
        trits, end = read_sized(payload, at)
        frames = (Frame(trits, -(-header.x // 5)), Frame(payload[end:], -(-header.y // 8)))
        return cls(depth, header, codes, frames)

    @property
    def prediction(self) -> Prediction:
        """How this tier's magnitudes become deltas."""
        return Prediction.make(np.frombuffer(self.codes, np.uint8), self.header.u, self.header.g)

    def refine(self, contents: list[NDArray[np.uint8]], q: NDArray[np.int8], base: NDArray[np.uint16]) -> None:
        """Take the tier, with its frames' contents, into q (int8[n], zeros before tier 0).

        Raises:
            ValueError: when it does not fit the block or its base.
        """
        if self.depth == 0:
            if not symbols.read_gaps(contents[0], q):
                raise ValueError("tier 0 does not fit its block")
            return
        n = q.size
        trits, bits = room("trits", n + SPARE, np.int8), room("bits", n + SPARE + -n % 8, np.int8)
        choice.unpack_trits(contents[0], symbols.TRITS, trits)
        symbols.unpack_bits(contents[1], symbols.BITS, bits)
        if choice.refine(q, trits, bits, base, self.header.a) != (self.header.x, self.header.y):
            raise ValueError(f"tier {self.depth} was made for another base")
