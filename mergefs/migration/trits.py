"""Coarse tiers as the first repositories had them: numbers in base 3, five in a byte, where there are streams of bits
now. See spec/migration.md."""

from __future__ import annotations

import struct

import numpy as np

from mergefs.blocks import zstd_frames
from mergefs.blocks.tiers.layout import (
    HEADER_SIZE,
    Header,
    Kind,
    compress_noise,
    cut,
    header_start,
    read_header,
    read_sized,
    sized,
)

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_U32 = struct.Struct("<I")
HEAD = HEADER_SIZE + 7 + 8
"""So many bytes of a payload tell whether it is in the old form: header, at most 7 codes, two numbers."""


def has_trits(payload: memoryview, tier: int) -> bool:
    """Tell from the beginning (`HEAD` bytes) of a payload of tier 1 or 2 whether it is in the old form.

    There a frame follows four bytes behind the codes; now its length is there, which is never the frames' magic.
    """
    at = HEADER_SIZE + _codes(tier) + _U32.size
    return payload[:1] == bytes([Kind.DENSE]) and payload[at : at + 4] == _ZSTD_MAGIC


def rewritten(payload: bytes, tier: int) -> bytes:
    """Return a coarse payload in the form of now.

    What decodes from all tiers is the same, bit for bit; what decodes from coarse tiers alone may differ by a rounding.

    Args:
        payload: of a coarse tier, in whichever form.
        tier: 0, 1 or 2.

    Raises:
        ValueError, RuntimeError: when it is damaged.
    """
    view = memoryview(payload)
    start = header_start(view)
    mask, view = view[:start], view[start:]
    header = read_header(view)
    at = HEADER_SIZE + _codes(tier)
    codes = cut(view, HEADER_SIZE, at - HEADER_SIZE)
    head = _on_grid(header, codes).pack() + bytes(codes)
    if not has_trits(view, tier):
        return bytes(mask) + head + bytes(view[at:])
    frame, bits = read_sized(view, at)
    packed = zstd_frames.decompress(frame, -(-header.x // 5))
    if packed.size and packed.max() > 242:
        raise ValueError(f"tier {tier} has five digits that are more than 22222")
    trits = (packed[:, None] // np.array([1, 3, 9, 27, 81], np.uint8) % 3).reshape(-1)[: header.x]
    signs = trits[trits > 0] == 2
    streams = [compress_noise(np.packbits(bit, bitorder="little")) for bit in (trits > 0, signs)]
    return bytes(mask) + head + _U32.pack(signs.size) + b"".join(map(sized, streams)) + bytes(view[bits:])


def _codes(tier: int) -> int:
    return int(2 ** (tier + 1)) - 1


def _on_grid(header: Header, codes: memoryview) -> Header:
    """Return a header whose grid begins where no size is of too many ulps."""
    largest = max(codes) * 2.0 ** (header.u - 127)
    grid = header.g
    while grid < 255 and largest >= 1.5 * 2.0 ** (max(grid, 2) - 128):
        grid += 1
    return header._replace(g=grid)
