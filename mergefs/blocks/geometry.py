"""Where a tensor is cut into blocks.

The grid counts elements, not bytes, so that a tensor has the same grid in every dtype and a merge of bf16
and float32 models lines up block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

MOST_BLOCK_ELEMENTS = 1 << 27
"""Of a block, in any repository."""


@dataclass(frozen=True)
class Grid:
    """The regular grid of one tensor: the shape of its blocks, and how they lie in its bytes.

    Attributes:
        shape: the tensor's shape.
        block_shape: (1, ..., 1, r, full, ..., full); the last block of every run along the cut axis may be
            shorter. All ones for a scalar; a zero-length axis counts as one.
        axis: the cut axis (0 for a scalar).
    """

    shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    axis: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each axis; their product is `len(self)`."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.block_shape, strict=True))

    def __len__(self) -> int:
        return prod(self.counts)

    def elements(self) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) element numbers of each block, in order; together they tile the tensor."""
        if not len(self):
            return
        if not self.shape:
            yield 0, 1
            return
        slab = prod(self.shape[self.axis + 1 :])
        run, n = self.block_shape[self.axis], self.shape[self.axis]
        for prefix in range(prod(self.shape[: self.axis])):
            for row in range(0, n, run):
                first = (prefix * n + row) * slab
                yield first, first + min(run, n - row) * slab

    def extent(self, number: int) -> tuple[int, int]:
        """Return the first and stop element numbers of one block."""
        if not self.shape:
            return 0, 1
        slab = prod(self.shape[self.axis + 1 :])
        prefix, place = divmod(number, self.counts[self.axis])
        n, run = self.shape[self.axis], self.block_shape[self.axis]
        row = place * run
        first = (prefix * n + row) * slab
        return first, first + min(run, n - row) * slab

    def numbers(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which block each of these elements, by their numbers in the tensor, lies in."""
        if not self.shape:
            return np.zeros_like(elements)
        rows = elements // prod(self.shape[self.axis + 1 :])
        prefix, row = np.divmod(rows, self.shape[self.axis])
        return np.asarray(prefix * self.counts[self.axis] + row // self.block_shape[self.axis])

    def firsts(self) -> NDArray[np.int64]:
        """Return the number of each block's first element, and behind them how many elements there are."""
        if not self.shape:
            return np.array([0, 1])
        slab = prod(self.shape[self.axis + 1 :])
        rows = np.arange(0, self.shape[self.axis], self.block_shape[self.axis])
        prefixes = np.arange(prod(self.shape[: self.axis])) * self.shape[self.axis]
        return np.append((prefixes[:, None] + rows).ravel() * slab, prod(self.shape))

    def index(self, coordinates: Sequence[int]) -> int:
        """Return the number of the block at these block coordinates (a Zarr chunk key).

        Raises:
            IndexError: when there is no such block.
        """
        counts = self.counts
        if len(coordinates) != len(counts):
            raise IndexError(f"{len(coordinates)} coordinates for {len(counts)} axes")
        number = 0
        for c, n in zip(coordinates, counts, strict=True):
            if not 0 <= c < n:
                raise IndexError(f"block coordinate {c} is outside 0..{n - 1}")
            number = number * n + c
        return number


def grid(shape: Sequence[int], block_elements: int) -> Grid:
    """Cut a tensor of `shape` into blocks of at most `block_elements` elements.

    The first axis whose slab (the elements behind one of its indices) fits is cut into runs of as many indices as
    fit, the last one shorter; every axis before it is cut into single indices. Where a run ends does not depend on how
    long the axis is, so that tensors with another number of rows have the same blocks as far as they are the same.
    """
    dims = tuple(int(n) for n in shape)
    if not dims or 0 in dims:
        return Grid(dims, tuple(max(1, n) for n in dims), 0)
    axis = next(a for a in range(len(dims)) if prod(dims[a + 1 :]) <= block_elements)
    run = min(dims[axis], max(1, block_elements // prod(dims[axis + 1 :])))
    return Grid(dims, (1,) * axis + (run,) + dims[axis + 1 :], axis)
