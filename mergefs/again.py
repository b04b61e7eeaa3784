"""Beginning once more where gc took what a command was going to use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from mergefs.errors import BlocksCollectedError

ATTEMPTS = 5

P = ParamSpec("P")
T = TypeVar("T")


def again_if_collected(work: Callable[P, T]) -> Callable[P, T]:
    """Make a function begin once more after a `BlocksCollectedError`, up to `ATTEMPTS` times in all.

    It has to look names up itself, as they may name something else by then, and to leave nothing half done.
    """

    @wraps(work)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(ATTEMPTS - 1):
            with suppress(BlocksCollectedError):
                return work(*args, **kwargs)
        return work(*args, **kwargs)

    return repeated
