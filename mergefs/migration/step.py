"""What one step from a version to the next did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Done:
    """See `MigrateReport`."""

    blocks_rewritten: int = 0
    statistics_dropped: int = 0
    refs_copied: int = 0
    damaged: tuple[str, ...] = ()

    def __add__(self, other: Done) -> Done:
        return Done(
            self.blocks_rewritten + other.blocks_rewritten,
            self.statistics_dropped + other.statistics_dropped,
            self.refs_copied + other.refs_copied,
            self.damaged + other.damaged,
        )
