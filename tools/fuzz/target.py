"""What a fuzz target is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mergefs.errors import MergefsError

Run = Callable[[bytes], object]
Mutate = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
"""Changes an input; the last operand is what has been kept so far, to take parts from."""

BASIC_BYTES = 16 << 20
BYTES_PER_BYTE = 64
"""An execution may allocate its target's basic bytes and `BYTES_PER_BYTE` times its input (spec/hostile-input.md)."""


@dataclass(frozen=True)
class Target:
    """Something that reads input of strangers.

    Attributes:
        name: on the command line.
        seeds: makes valid inputs.
        prepare: makes the function that reads one; called once in the process that fuzzes, so that it may keep files.
        mutate: changes an input.
        share: how many of 1,000 executions over all targets are this one's.
        refused: exceptions that are answers; all others are crashes.
        largest: longest input in bytes.
        basic: bytes that an execution may allocate whatever its input.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    prepare: Callable[[], Run]
    mutate: Mutate
    share: int
    refused: tuple[type[BaseException], ...] = (MergefsError,)
    largest: int = 1 << 16
    basic: int = BASIC_BYTES

    def allowed_bytes(self, size: int) -> int:
        """Return how much an execution may allocate for an input of `size` bytes."""
        return self.basic + BYTES_PER_BYTE * size
