"""The numbers of encodings, and which payloads of a block have to be read. See spec/format.md."""

from __future__ import annotations

import enum

EXACT = 9
"""The depth that means a block's exact bytes, however many tiers it has."""


class Encoding(enum.IntEnum):
    """How a payload is to be read. The numbers are part of the format."""

    RAW = 0
    ZSTD = 1
    SHUFFLE_ZSTD = 2
    ULP_ZSTD = 3
    TIERS = 4
    QUICK = 5
    """An exact tier that is decoded without the coarse ones; these are `TIERS`."""

    @property
    def needs_base(self) -> bool:
        """Whether another block's bytes are needed to decode it."""
        return self in (Encoding.ULP_ZSTD, *TIERED)


TIERED = (Encoding.TIERS, Encoding.QUICK)
"""The encodings of tiers."""
