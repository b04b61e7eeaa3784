"""Budgets as people write them: `2GiB`, `10%`."""

from __future__ import annotations

import re

from mergefs.errors import BudgetError, UserError
from mergefs.units import parse_size

_SHARE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,18})?)\s*%")


def parse_budget(text: str, expert_raw_bytes: int) -> int:
    """Return how many expert bytes a budget allows.

    Args:
        text: a size, or a share in per cent of `expert_raw_bytes`.
        expert_raw_bytes: what a naive merge would read: the tensor bytes of all experts.

    Raises:
        BudgetError: when it is neither, or zero, or more than 100 %.
    """
    share = _SHARE.fullmatch(text.strip())
    try:
        size = int(expert_raw_bytes * float(share[1]) / 100) if share else parse_size(text)
    except UserError:
        raise BudgetError(f"'{text}' is not a budget: write it like 10% or 2GiB") from None
    if share and float(share[1]) > 100:
        raise BudgetError(f"a budget of {text} is more than everything: give at most 100%")
    if size <= 0:
        raise BudgetError(f"a budget of {text} reads no expert byte: give more")
    return size
