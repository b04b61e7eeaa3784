"""From one coding of the exact tier to another, with the coarse tiers as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.exact import Exact
from mergefs.blocks.tiers.decoder import Opened
from mergefs.blocks.tiers.encoder import EXACT_WRITERS
from mergefs.blocks.tiers.layout import Kind, header_start
from mergefs.blocks.tiers.scratch import ALONE
from mergefs.hashing import Buffer

_CODINGS: dict[int, Exact] = {
    Kind.FAST: "fast",
    Kind.SMALL: "small",
    Kind.QUICK: "quick",
    Kind.NIBBLES: "quick",
}


def coding(head: memoryview) -> Exact | None:
    """Return the coding of an exact tier from the beginning of its payload; None where that does not say."""
    start = header_start(head)
    return _CODINGS.get(head[start]) if start < len(head) else None


def recode(tiers: Sequence[Buffer], base: NDArray[np.uint16], exact: Exact) -> bytes:
    """Return the exact tier of a block in a coding, from all of its tiers.

    Nothing is quantised anew: the coarse tiers may be those of another encoder.

    Raises:
        ValueError, RuntimeError: when the tiers do not fit the block.
    """
    opened = Opened(tiers, base, ALONE)
    if opened.exact is None:
        raise ValueError("the exact tier is missing")
    expert = np.empty(opened.base.size, np.uint16)
    q, rest = opened.restore(expert)
    payload = EXACT_WRITERS[exact](expert, rest, opened.base, q)
    # The mask stands before the first tier, and before an exact one that can be read alone.
    first = memoryview(tiers[0]).cast("B")
    mask = bytes(first[: header_start(first)])
    return mask + payload if exact == "quick" or len(tiers) == 1 else payload
