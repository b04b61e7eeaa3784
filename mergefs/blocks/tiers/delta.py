"""From tiers and the base's block to the expert's delta, part by part.

Where a part can be decoded by itself, nothing is as large as the block but what is stored: a delta takes four bytes an
element, and those of many experts together more than a processor's caches hold.

Memory is bounded by the block; see `decoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.decoder import Opened, exact_bits
from mergefs.blocks.tiers.exact_fast import NO_ORDER, ClassOrder, FastTier
from mergefs.blocks.tiers.exact_quick import FOREIGN, ONLY, OpenTier, QuickTier, QuickTiers
from mergefs.blocks.tiers.kernels import rests, runs, wide
from mergefs.blocks.tiers.scratch import room
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer


class Delta(ABC):
    """The delta that a prefix of a block's tiers gives.

    Attributes:
        name: what errors call the block.
    """

    name = "a block"

    def write(self, first: int, out: NDArray[np.float32]) -> None:
        """Write the elements from `first` on to float32[m]. All are asked for once each, in order, and a multiple of 64
        at a time but for the last.

        Raises:
            CorruptionError: when a tier is damaged or was made for another base.
        """
        try:
            self._write(first, out)
        except (ValueError, RuntimeError) as error:
            raise _damaged(self.name, error) from error

    @abstractmethod
    def _write(self, first: int, out: NDArray[np.float32]) -> None:
        """See `write`; raises ValueError or RuntimeError."""


def open_delta(
    tiers: Sequence[Buffer], base: NDArray[np.uint16], order: ClassOrder | None, slot: int, name: str
) -> Delta:
    """Return the delta of a block that any prefix of its tiers gives.

    Args:
        tiers: the prefix, or of a block with a `quick` tier that one alone.
        base: uint16[n], the base's block.
        order: of its elements, where several blocks are decoded against it.
        slot: see `Opened`.
        name: what errors call the block.

    Raises:
        CorruptionError: see `Delta.write`.
    """
    try:
        # As most are that are read at all in a repository with `quick`.
        alone = OpenTier.read(memoryview(tiers[0]).cast("B"), base.size) if len(tiers) == 1 else None
        delta = _opened(Opened(tiers, base, slot), order, slot) if alone is None else _Quick(alone, base)
    except (ValueError, RuntimeError) as error:
        raise _damaged(name, error) from error
    delta.name = name
    return delta


def _damaged(name: str, error: Exception) -> CorruptionError:
    return CorruptionError(f"{name} is damaged: its tiers do not decode: {error}")


def _opened(opened: Opened, order: ClassOrder | None, slot: int) -> Delta:
    if isinstance(opened.exact, QuickTier):
        return _Quick(OpenTier.among(opened.exact, opened.mask), opened.full)
    if opened.mask is not None:
        return _Runs(opened, slot)
    return _AtOnce(opened, slot, order)


class _Quick(Delta):
    def __init__(self, tier: OpenTier, base: NDArray[np.uint16]) -> None:
        self.tier = tier
        self.base = base

    @cached_property
    def _alone(self) -> QuickTiers:
        return QuickTiers([self.tier], self.base)

    def _write(self, first: int, out: NDArray[np.float32]) -> None:
        self._alone.write(first, ONLY, out[None])
        if first + out.size == self.base.size and self._alone.foreign:
            raise ValueError(FOREIGN)


class Together:
    """The deltas of several experts from one base, of which those that can be are written in one call.

    Args:
        deltas: the experts'.

    Attributes:
        apart: the places of those that have to be written by themselves.
        in_parts: whether writing them part by part pays: most of them are decoded so.
        table: int64[k, ..]: all of them as compiled loops read them; None where some have to be written apart.
    """

    def __init__(self, deltas: Sequence[Delta]) -> None:
        quick = [(row, delta) for row, delta in enumerate(deltas) if isinstance(delta, _Quick)]
        self._names = [delta.name for delta in deltas]
        self._rows = np.array([row for row, _ in quick], np.int64)
        self._tiers = QuickTiers([delta.tier for _, delta in quick], quick[0][1].base) if quick else None
        self.apart = [row for row, delta in enumerate(deltas) if not isinstance(delta, _Quick)]
        self.in_parts = 2 * len(quick) >= len(deltas)
        self.table = None if self.apart or self._tiers is None else self._tiers.table

    def write(self, first: int, out: NDArray[np.float32]) -> None:
        """Write the elements from `first` on to float32[k, m], but in the rows of those that are written apart.

        Parts are asked for in order, of a multiple of 64 elements each but for the last; see `check`.
        """
        if self._tiers is not None:
            self._tiers.write(first, self._rows, out)

    def check(self, row: int) -> None:
        """Check a delta, once all of it was written or used through the table.

        Raises:
            CorruptionError: when its tier was made for another base.
        """
        if row in self.foreign:
            raise _damaged(self._names[row], ValueError(FOREIGN))

    @cached_property
    def foreign(self) -> list[int]:
        """The places of those whose tier was made for another base; see `check`."""
        return [] if self._tiers is None else self._rows[self._tiers.foreign].tolist()


class _AtOnce(Delta):
    """Tiers that are decoded from the first element to the last."""

    def __init__(self, opened: Opened, slot: int, order: ClassOrder | None = None) -> None:
        self._opened = opened
        self._slot = slot
        self._order = order
        self._found: NDArray[np.float32] | None = None

    def _write(self, first: int, out: NDArray[np.float32]) -> None:
        size = self._opened.full.size
        if out.size == size:
            self._decode(out)
            return
        if self._found is None:
            self._found = room(f"delta-{self._slot}", size, np.float32)
            self._decode(self._found)
        out[:] = self._found[first : first + out.size]

    def _decode(self, out: NDArray[np.float32]) -> None:
        opened = self._opened
        if isinstance(opened.exact, FastTier):
            _fast(opened, opened.exact, self._order, out)
        elif opened.exact is not None:
            rests.subtract(exact_bits(opened), opened.full, out)
        elif opened.coarse:
            _coarse(opened, out)
        else:
            out[:] = 0


class Whole(Delta):
    """A delta that is there already, float32[n]."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = values

    def _write(self, first: int, out: NDArray[np.float32]) -> None:
        out[:] = self._values[first : first + out.size]


class _Runs(_AtOnce):
    """Tiers of changed runs alone."""

    def _decode(self, out: NDArray[np.float32]) -> None:
        opened = self._opened
        assert opened.mask is not None
        taken = room("runs", opened.base.size, np.float32)
        if opened.exact is None:
            out[:] = 0
            _coarse(opened, taken)
        else:
            rests.subtract(opened.full, opened.full, out)  # 0 wherever the base is finite
            if isinstance(opened.exact, FastTier):
                _fast(opened, opened.exact, None, taken)
            else:
                rests.subtract(exact_bits(opened), opened.full, out)
                return
        runs.put(taken, opened.mask, out)


def _coarse(opened: Opened, out: NDArray[np.float32]) -> None:
    """Write the delta that coarse tiers predict of the elements in changed runs."""
    coarse, _ = opened.unpack()
    codes, unit, grid = opened.prediction
    coarse.check(opened.coarse, wide.deltas(opened.base, coarse, codes, unit, grid, out))


def _fast(opened: Opened, tier: FastTier, order: ClassOrder | None, out: NDArray[np.float32]) -> None:
    """Write the exact delta of the elements in changed runs, part by part, without the bits in between."""
    coarse, contents = opened.unpack()
    codes, unit, _ = opened.prediction
    places = tier.starts.copy()
    by_place = NO_ORDER
    if order is not None:
        tier.check(order.starts[1:])
        by_place = order.places
    grouped = tier.grouped(contents)
    coarse.check(opened.coarse, wide.exact_deltas(opened.base, coarse, codes, unit, grouped, places, by_place, out))
    if order is None:
        tier.check(places[:256])
