"""The coarse tiers: one payload of gaps, then payloads of bits that refine it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import symbols, wide
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, compress, compress_noise, cut, read_sized, sized
from mergefs.blocks.tiers.scratch import room
from mergefs.blocks.zstd_frames import Frame

_U32 = struct.Struct("<I")
STREAMS = ("changes", "signs", "bits")


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
    def make(cls, codes: bytes, unit: int, grid: int) -> Prediction:
        """From the codes of magnitudes 1, 2, ... and the unit's exponent field."""
        return cls(np.uint64(int.from_bytes(codes, "little") << 8), np.float32(2.0 ** (unit - 127)), grid)


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
    changes, signs, bits = streams = [_stream(name, q.size) for name in STREAMS]
    x, s, y = wide.split(q, before, base, header.a, changes, signs, bits)
    packed = [words.view(np.uint8)[: -(-count // 8)] for words, count in zip(streams, (x, s, y), strict=True)]
    changes_frame, signs_frame, bits_frame = map(compress_noise, packed)
    return (
        header._replace(kind=Kind.DENSE, x=x, y=y).pack()
        + codes.tobytes()
        + _U32.pack(s)
        + sized(changes_frame)
        + sized(signs_frame)
        + bits_frame
    )


def _stream(name: str, n: int) -> NDArray[np.uint64]:
    """Return room for as many bits as n elements can have: every loop may read the word after the last."""
    return room(name, n // 64 + 2, np.uint64)


class CoarseTier(NamedTuple):
    """A coarse payload, taken apart and checked, but not decompressed."""

    depth: int
    header: Header
    codes: bytes
    signs: int
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
        codes = bytes(cut(payload, HEADER_SIZE, count))
        at = HEADER_SIZE + count
        if max(codes) * 2.0 ** (header.u - 127) >= 1.5 * 2.0 ** (max(header.g, 2) - 128):
            raise ValueError(f"tier {depth} has sizes of too many ulps")
        if depth == 0:
            if header.x != header.y or header.y > n + n // symbols.SKIP:
                raise ValueError("tier 0 has more symbols than its block")
            return cls(depth, header, codes, 0, (Frame(payload[at:], header.y),))
        if header.x + header.y > n:
            raise ValueError(f"tier {depth} has more symbols than its block")
        (signs,) = _U32.unpack(cut(payload, at, _U32.size))
        if signs > header.x:
            raise ValueError(f"tier {depth} has more signs than changes")
        changes_frame, at = read_sized(payload, at + _U32.size)
        signs_frame, at = read_sized(payload, at)
        data = (changes_frame, signs_frame, payload[at:])
        counts = (header.x, signs, header.y)
        frames = tuple(Frame(frame, -(-count // 8)) for frame, count in zip(data, counts, strict=True))
        return cls(depth, header, codes, signs, frames)

    @property
    def prediction(self) -> Prediction:
        """How this tier's magnitudes become deltas."""
        return Prediction.make(self.codes, self.header.u, self.header.g)


class Coarse(NamedTuple):
    """What loops read coarse tiers from.

    Attributes:
        gaps: uint8[m], tier 0.
        streams: uint64[tiers, 3, n // 64 + 2], changes, signs and bits of the tiers that refine it.
        limits: int64[tiers], the first classes that take no part.
        used: uint64[tiers, 3], how much of the streams is used.
        q: int8[n], room.
    """

    gaps: NDArray[np.uint8]
    streams: NDArray[np.uint64]
    limits: NDArray[np.int64]
    used: NDArray[np.uint64]
    q: NDArray[np.int8]

    @classmethod
    def make(cls, tiers: Sequence[CoarseTier], contents: list[NDArray[np.uint8]], n: int) -> Coarse:
        """Arrange the contents of the tiers' frames, in order, for a block of n elements."""
        finer = tiers[1:]
        words = n // 64 + 2
        streams = room("streams", 3 * len(finer) * words, np.uint64).reshape(len(finer), 3, words)
        for content, stream in zip(contents[1:], streams.reshape(-1, words), strict=True):
            stream.view(np.uint8)[: content.size] = content
        limits = np.array([tier.header.a for tier in finer], np.int64)
        gaps = contents[0] if tiers else np.frombuffer(b"", np.uint8)
        return cls(gaps, streams, limits, np.zeros((len(finer), 3), np.uint64), room("q", n, np.int8))

    def check(self, tiers: Sequence[CoarseTier], gaps_fit: bool) -> None:
        """Raise ValueError unless exactly all of it was used."""
        if not gaps_fit:
            raise ValueError("tier 0 does not fit its block")
        for tier, used in zip(tiers[1:], self.used.tolist(), strict=True):
            if used != [tier.header.x, tier.signs, tier.header.y]:
                raise ValueError(f"tier {tier.depth} was made for another base")
