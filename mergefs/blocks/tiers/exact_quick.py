"""The exact tier `quick`: the expert's difference from the base as it is, which takes most room and least time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import quick as kernels
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, cut
from mergefs.blocks.tiers.scratch import room


def write(
    expert: NDArray[np.uint16], rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]
) -> bytes:
    """Return the payload; see `payload`. The rests are those of the other codings."""
    return payload(expert, base)


def payload(expert: NDArray[np.uint16], base: NDArray[np.uint16]) -> bytes:
    """Return the payload of the expert's bits (uint16[n])."""
    n = base.size
    low = room("symbols", n, np.uint8)
    places, high = room("places", n + 1, np.uint32), room("symbols2", n + 1, np.uint8)
    count = kernels.take(expert, base, low, places, high)
    return (
        Header(Kind.QUICK, 0, 0, 0, n, count).pack()
        + low.tobytes()
        + places[:count].astype("<u4").tobytes()
        + high[:count].tobytes()
    )


class QuickTier(NamedTuple):
    """A `quick` payload, taken apart and checked."""

    low: NDArray[np.uint8]
    places: NDArray[np.uint32]
    high: NDArray[np.uint8]

    @classmethod
    def read(cls, header: Header, payload: memoryview, n: int) -> QuickTier:
        """Take apart a payload for n elements.

        Raises:
            ValueError: when it is damaged.
        """
        if header.x != n or header.y > n or len(payload) != HEADER_SIZE + n + 5 * header.y:
            raise ValueError("the exact tier's header does not fit its block")
        low = np.frombuffer(cut(payload, HEADER_SIZE, n), np.uint8)
        places = np.frombuffer(cut(payload, HEADER_SIZE + n, 4 * header.y), "<u4").astype(np.uint32)
        if not kernels.fits(places, n):
            raise ValueError("the exact tier's places do not fit its block")
        return cls(low, places, np.frombuffer(payload[HEADER_SIZE + n + 4 * header.y :], np.uint8))

    def bits(self, base: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
        """Write the expert's bits (uint16[n])."""
        kernels.bits(self.low, self.places, self.high, base, out)


class QuickTiers:
    """Several `quick` tiers of one base, decoded together.

    Args:
        tiers: of blocks of as many elements as the base.
        base: uint16[n].
    """

    def __init__(self, tiers: Sequence[QuickTier], base: NDArray[np.uint16]) -> None:
        self._tiers = tiers  # whose arrays have to stay
        self._base = base
        self._table = np.zeros((len(tiers), 5), np.uint64)
        for row, tier in zip(self._table, tiers, strict=True):
            # Through `ctypes.data` it would take several times as long.
            row[:4] = (*(array.__array_interface__["data"][0] for array in tier), tier.places.size)

    def write(self, first: int, rows: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write the exact deltas of a part, whose first element lies at `first`; parts are asked for in order.

        Args:
            rows: int64[k], which rows of `out` they are.
            out: float32[.., m].
        """
        kernels.deltas(self._table, self._base[first : first + out.shape[1]], first, rows, out)


ONLY = np.zeros(1, np.int64)
"""The row of a single delta."""
