"""The tiered encoding as a numcodecs codec: all tiers in one buffer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numcodecs
import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray

from mergefs.blocks import tiers
from mergefs.blocks.exact import CODINGS
from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer


class TieredDelta(Codec):  # type: ignore[misc]
    """A bf16 block as tiers of its delta from its base block.

    Any bf16 block can be encoded, also one for which `tiers.encode` says that it does not pay.

    Args:
        exact: the exact tier's coding, `fast`, `small` or `quick`.
        base: the base block's bytes (not part of the codec's configuration: give it before use).
    """

    codec_id = "mergefs_tiers"

    def __init__(self, exact: tiers.Exact = "fast", base: Buffer | None = None) -> None:
        if exact not in CODINGS:
            raise ValueError(f"mergefs_tiers has no exact coding {exact!r}")
        self.exact = exact
        self.base = base

    def encode(self, buf: Any) -> bytes:
        """Return the number of tiers (1 byte), the length of each (4 bytes), and the tiers."""
        return join(tiers.encode_always(_bytes(buf), self._base(), self.exact).tiers)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the block's bytes."""
        raw = tiers.decode(split(_bytes(buf)), self._base())
        return numcodecs.compat.ndarray_copy(np.frombuffer(raw, np.uint8), out)

    def get_config(self) -> dict[str, Any]:
        """The configuration without the base's bytes."""
        return {"id": self.codec_id, "exact": self.exact}

    def _base(self) -> Buffer:
        if self.base is None:
            raise ValueError("mergefs_tiers needs the base block's bytes")
        return self.base


def join(payloads: Sequence[Buffer]) -> bytes:
    """Return tiers in one buffer, as `TieredDelta.encode` does."""
    return struct.pack(f"<B{len(payloads)}I", len(payloads), *map(len, payloads)) + b"".join(payloads)


def split(buffer: memoryview) -> list[memoryview]:
    """Return the tiers in a buffer of `TieredDelta.encode`.

    Raises:
        CorruptionError: when their lengths are not the buffer's.
    """
    count = buffer[0] if buffer else 0
    at = 1 + 4 * count
    if not 0 < count <= COARSE_TIERS + 1 or len(buffer) < at:
        raise CorruptionError("a buffer of tiers does not begin with their lengths")
    found = []
    for size in struct.unpack_from(f"<{count}I", buffer, 1):
        found.append(buffer[at : at + size])
        at += size
    if at != len(buffer):
        raise CorruptionError(f"tiers of {at} bytes in a buffer of {len(buffer)}")
    return found


def _bytes(buf: Any) -> memoryview:
    return memoryview(ensure_contiguous_ndarray(buf).view(np.uint8))
