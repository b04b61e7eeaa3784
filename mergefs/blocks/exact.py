"""The codings of the exact tier by name. Apart from the tiers, so that opening a repository does not load them."""

from __future__ import annotations

from typing import Literal, get_args

from mergefs.errors import UserError

Exact = Literal["fast", "small", "quick"]
"""The codings of the exact tier: zstd's decoding speed, an entropy coder with context, or nibbles as they are."""

CODINGS: tuple[Exact, ...] = get_args(Exact)


def check_exact(name: str) -> Exact:
    """Return a coding's name as one.

    Raises:
        UserError: when there is no such coding.
    """
    for known in CODINGS:
        if name == known:
            return known
    raise UserError(f"the exact tier has no coding {name!r}: choose one of {', '.join(CODINGS)}")
