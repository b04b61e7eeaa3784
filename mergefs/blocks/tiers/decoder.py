"""Tiers taken apart, and from them to the expert's exact bits; its delta: see `delta`.

Every function raises ValueError or RuntimeError for payloads that do not fit the block. Memory is bounded by the block:
every size that a payload claims is compared with what a block of that many elements can have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks import zstd_frames
from mergefs.blocks.tiers.coarse import NOTHING, Coarse, CoarseTier, Prediction
from mergefs.blocks.tiers.exact_fast import FastTier
from mergefs.blocks.tiers.exact_quick import OpenTier, QuickTier
from mergefs.blocks.tiers.exact_small import SmallTier
from mergefs.blocks.tiers.kernels import rests, runs, wide
from mergefs.blocks.tiers.layout import COARSE_TIERS, Kind, header_start, read_header, split_mask
from mergefs.blocks.tiers.scratch import ALONE, room
from mergefs.hashing import Buffer


class Opened:
    """The tiers of a block, taken apart.

    Args:
        tiers: the first ones of the block, or of a `quick` one the last alone.
        base: uint16[N], the base's block.
        slot: of the thread's room for the elements in changed runs; blocks that are open at once have different
            ones.

    Attributes:
        full: uint16[N], the base's block.
        base: uint16[n], its elements in changed runs, which are what tiers are about.
        mask: which runs those are, or None where they are all.
        coarse: the coarse tiers in order.
        exact: the exact one, or None.
    """

    def __init__(self, tiers: Sequence[Buffer], base: NDArray[np.uint16], slot: int) -> None:
        self.full = base
        self.base = base
        self.mask: NDArray[np.uint8] | None = None
        self.coarse: list[CoarseTier] = []
        self.exact: FastTier | SmallTier | QuickTier | None = None
        payloads = [memoryview(tier).cast("B") for tier in tiers]
        if payloads:
            before = payloads[0][: header_start(payloads[0])]
            self.mask, payloads[0] = split_mask(payloads[0], base.size)
        if self.mask is not None:
            taken = room(f"base-{slot}", base.size, np.uint16)
            self.base = taken[: runs.take(base, self.mask, taken)]
        if len(payloads) > COARSE_TIERS + 1:
            raise ValueError(f"a block of {len(payloads)} tiers")
        n = self.base.size
        for index, payload in enumerate(payloads):
            if index > 0 and before and payload[: len(before)] == before:
                # The mask stands again before an exact tier that is read without the others.
                payload = payload[len(before) :]
                if not read_header(payload).kind.alone:
                    raise ValueError("a mask before a tier that is not read alone")
            elif index > 0 and before and read_header(payload).kind.alone:
                raise ValueError("the exact tier has not the first one's mask")
            header = read_header(payload)
            if not header.kind.exact:
                self.coarse.append(CoarseTier.read(index, header, payload, n))
            elif index < len(payloads) - 1:
                raise ValueError("an exact tier before the last one")
            else:
                self.exact = _EXACT[header.kind].read(header, payload, n)
        if len(self.coarse) > COARSE_TIERS or (self.exact is not None and len(self.coarse) not in (0, COARSE_TIERS)):
            raise ValueError(f"a block of {len(self.coarse)} coarse tiers")

    def unpack(self) -> tuple[Coarse, list[NDArray[np.uint8]]]:
        """Return what the coarse tiers hold, and the contents of the exact tier's frames."""
        frames = [frame for tier in self.coarse for frame in tier.frames]
        count = len(frames)
        if self.exact is not None and not isinstance(self.exact, QuickTier):
            frames.extend(self.exact.frames)
        contents = zstd_frames.decompress_all(frames, room("frames", sum(f.size for f in frames), np.uint8))
        return Coarse.make(self.coarse, contents[:count], self.base.size), contents[count:]

    def predict(self) -> tuple[NDArray[np.uint16], NDArray[np.int8], list[NDArray[np.uint8]]]:
        """Return what the coarse tiers predict of the expert's bits (uint16[n]), the quantised magnitudes (int8[n]),
        and the contents of the exact tier's frames.

        Raises:
            ValueError: when a tier does not fit the block.
        """
        coarse, contents = self.unpack()
        codes, unit, _ = self.prediction
        predicted = room("predicted", self.base.size, np.uint16)
        coarse.check(self.coarse, wide.predictions(self.base, coarse, codes, unit, predicted))
        return predicted, coarse.q, contents

    def restore(self, out: NDArray[np.uint16]) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Write the expert's bits (uint16[n]), and return the quantised magnitudes (int8[n]) and the rests (uint16[n]).

        Raises:
            ValueError: when a tier is missing or does not fit the block.
        """
        predicted, q, contents = self.predict()
        if isinstance(self.exact, QuickTier):
            OpenTier.among(self.exact, None).bits(self.base, out)
            rest = room("rests", self.base.size, np.uint16)
            rests.take(out, predicted, q, rest)
            return q, rest
        if self.exact is None:
            raise ValueError("the exact tier is missing")
        rest = self.exact.rests(contents, self.base, q)
        rests.apply(rest, predicted, q, out)
        return q, rest

    @property
    def prediction(self) -> Prediction:
        """The last coarse tier's."""
        return self.coarse[-1].prediction if self.coarse else NOTHING


def exact(tiers: Sequence[Buffer], base: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return the expert's bits, uint16[n], from all of a block's tiers."""
    opened = Opened(tiers, base, ALONE)
    if opened.exact is None:
        raise ValueError("the exact tier is missing")
    return exact_bits(opened)


def exact_bits(opened: Opened) -> NDArray[np.uint16]:
    """Return the expert's bits, uint16[N], from tiers of which the last is exact."""
    if isinstance(opened.exact, QuickTier):
        found = np.empty(opened.full.size, np.uint16)
        OpenTier.among(opened.exact, opened.mask).bits(opened.full, found)
        return found
    found = np.empty(opened.base.size, np.uint16)
    opened.restore(found)
    if opened.mask is None:
        return found
    out = opened.full.copy()
    runs.put(found, opened.mask, out)
    return out


_EXACT: dict[Kind, type[FastTier | SmallTier | QuickTier]] = {
    Kind.FAST: FastTier,
    Kind.SMALL: SmallTier,
    Kind.QUICK: QuickTier,
    Kind.NIBBLES: QuickTier,
}
