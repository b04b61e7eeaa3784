"""What all payloads begin with: a mask of changed runs before the first one, and a header. See spec/tiers.md."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import numcodecs.zstd as zstd
import numpy as np
from numpy.typing import NDArray

from mergefs.blocks import zstd_frames
from mergefs.hashing import Buffer

COARSE_TIERS = 3
MASK = 0x80
RUN = 64
ALL_CLASSES = 255
PAYS = 0.95
"""Packing noise has to bring it down to this share: zstd takes 1 ns a byte for what is read in 0.03."""

_MASK_HEADER = struct.Struct("<BI")
_HEADER = struct.Struct("<BBBBII")
_U32 = struct.Struct("<I")
HEADER_SIZE = _HEADER.size


class Kind(enum.IntEnum):
    """What a payload is: its first byte, after the mask."""

    SPARSE = 1
    DENSE = 2
    FAST = 3
    SMALL = 4
    QUICK = 5
    NIBBLES = 6

    @property
    def exact(self) -> bool:
        """Whether it restores the exact bits."""
        return self >= Kind.FAST

    @property
    def alone(self) -> bool:
        """Whether it does so without the tiers before it."""
        return self >= Kind.QUICK


_KINDS = {kind.value: kind for kind in Kind}  # the enum's own look-up takes longer than all else in reading a header


class Header(NamedTuple):
    """The fields of a payload's header, by their names in the specification."""

    kind: Kind
    a: int
    g: int
    u: int
    x: int
    y: int

    def pack(self) -> bytes:
        """Return its 12 bytes."""
        return _HEADER.pack(*self)


def read_header(payload: memoryview) -> Header:
    """Return the header of a payload that has no mask (any more).

    Raises:
        ValueError: when it is too short or of an unknown kind.
    """
    if len(payload) < HEADER_SIZE:
        raise ValueError(f"a payload of {len(payload)} bytes")
    kind, *fields = _HEADER.unpack_from(payload)
    if kind not in _KINDS:
        raise ValueError(f"a payload of kind {kind}")
    return Header(_KINDS[kind], *fields)


def cut(payload: memoryview, start: int, size: int) -> memoryview:
    """Return exactly `size` bytes from `start` on.

    Raises:
        ValueError: when the payload ends before.
    """
    if start + size > len(payload):
        raise ValueError(f"a payload of {len(payload)} bytes where at least {start + size} are needed")
    return payload[start : start + size]


def compress(data: Buffer | NDArray[np.uint8]) -> bytes:
    """Return a zstd frame. Higher levels search for matches, which noise does not have: larger, and slower."""
    return bytes(zstd.compress(data, 1))


def compress_noise(data: NDArray[np.uint8]) -> bytes:
    """Return a zstd frame of what may be noise: stored as it is, which decodes for nothing, unless packing pays."""
    frame = compress(data)
    return frame if len(frame) <= PAYS * data.size else zstd_frames.store(data.data)


def sized(frame: bytes) -> bytes:
    """Return a frame with its length before it."""
    return _U32.pack(len(frame)) + frame


def read_sized(payload: memoryview, start: int) -> tuple[memoryview, int]:
    """Return the frame whose length is at `start`, and where it ends."""
    (size,) = _U32.unpack(cut(payload, start, 4))
    return cut(payload, start + 4, size), start + 4 + size


def header_start(payload: memoryview) -> int:
    """Return where the header of a first payload begins, from its first bytes: behind the mask where it has one.

    Where these are too few to say, that is behind their end.
    """
    if not payload or payload[0] != MASK:
        return 0
    if len(payload) < _MASK_HEADER.size:
        return len(payload)
    _, size = _MASK_HEADER.unpack_from(payload)
    return _MASK_HEADER.size + int(size)


def masked_size(mask: NDArray[np.uint8] | None, n: int) -> int:
    """Return how many of n elements lie in changed runs."""
    if mask is None:
        return n
    found = RUN * int(np.count_nonzero(mask))
    return found - (RUN * mask.size - n if mask.size and mask[-1] else 0)


def write_mask(mask: NDArray[np.uint8]) -> bytes:
    """Return the mask of changed runs (uint8[ceil(n / 64)], 0 or 1) as it stands before the first payload."""
    frame = compress(np.packbits(mask))
    return _MASK_HEADER.pack(MASK, len(frame)) + frame


def split_mask(payload: memoryview, n: int) -> tuple[NDArray[np.uint8] | None, memoryview]:
    """Return the mask before a first payload (None where it has none), and the payload without it.

    Raises:
        ValueError, RuntimeError: when the mask is damaged or not of a block of n elements.
    """
    if not payload or payload[0] != MASK:
        return None, payload
    frame, end = read_sized(payload, 1)
    runs = -(-n // RUN)
    packed = zstd_frames.decompress(frame, -(-runs // 8))
    return np.unpackbits(packed, count=runs), payload[end:]
