"""How many of the expert blocks from which a merge takes deltas are compared with their ids.

What is given out as bytes always is, and every payload with its check. A delta is made without the block's bytes, so
that comparing costs making them; spec/decisions/0012-checked-ids.md has what.
"""

from __future__ import annotations

import itertools
import os
import random

from mergefs.errors import UserError

VARIABLE = "MERGEFS_CHECK_BLOCKS"
DEFAULT = "sampled"
EVERY = {"always": 1, "sampled": 64, "never": 0}
"""By the setting's name, of how many blocks one is compared; 0 for none."""


def chosen_checking(given: str | None) -> str:
    """Return the setting: what was given, or else what MERGEFS_CHECK_BLOCKS says, or else `sampled`.

    Raises:
        UserError: when it is none.
    """
    setting = given or os.environ.get(VARIABLE) or DEFAULT
    if setting not in EVERY:
        where = "" if given else f" in {VARIABLE}"
        raise UserError(f"'{setting}'{where} is no way to check blocks: it is {', '.join(EVERY)}")
    return setting


class Sampler:
    """Says of which blocks it is the turn. Safe to use from many threads.

    Args:
        every: of how many blocks one is; 0 for none. Which one comes first is random, so that the same merge does not
            always compare the same blocks.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = itertools.count(random.randrange(every) if every else 0)

    def is_due(self) -> bool:
        """Tell whether this block is to be compared."""
        return self._every > 0 and next(self._count) % self._every == 0
