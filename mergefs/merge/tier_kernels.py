"""Compiled loops from tiers to a merge's bytes, a tile at a time: no expert's delta is ever as large as a block.

One call merges a block. Each one releases the interpreter lock, and waits for it when it returns; what loops call in
turn does not.
"""

from __future__ import annotations

import numpy as np

from mergefs.blocks.kernels import narrow_bf16, widen_bf16
from mergefs.blocks.tiers.kernels.quick import deltas as read_deltas
from mergefs.compiled import njit
from mergefs.merge.kernels import combine, drop, elect_singles

_jit = njit(nogil=True)

TILE = 2048
"""Elements that are merged at a time: the deltas of a few experts stay in the nearest cache. A multiple of the runs of
tiers."""


@_jit
def _read(tiers, base, start, stop, drops, first, factors, rows, room, values):
    """Return the deltas of a tile, dropped and rescaled, float32[k, stop - start] in `room`, and write the base's
    elements to `values` (float32[TILE])."""
    size = stop - start
    deltas = room[: rows.size * size].reshape(rows.size, size)
    read_deltas(tiers, base, start, stop, rows, deltas)
    for k in range(len(drops)):
        drop(deltas[k], first + start, drops[k, 0], drops[k, 1], drops[k, 2])
    for k in range(factors.size):
        row = deltas[k]
        for i in range(size):
            row[i] *= factors[k]
    widen_bf16(base[start:stop], values[:size].view(np.uint32))
    return deltas


@_jit
def combine_tiers(tiers, base, first, drops, factors, base_scale, coefficients, out):
    """`kernels.combine` of bf16, from the base's bits to the result's.

    Args:
        tiers, base, first, drops, factors, out: see `elect_tiers`.
        base_scale, coefficients: see `kernels.combine`.
    """
    rows, room = np.arange(len(tiers)), np.empty(len(tiers) * TILE, np.float32)
    values, found = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for start in range(0, base.size, TILE):
        stop = min(start + TILE, base.size)
        deltas = _read(tiers, base, start, stop, drops, first, factors, rows, room, values)
        combine(values[: stop - start], base_scale, deltas, coefficients, found[: stop - start])
        narrow_bf16(found[: stop - start].view(np.uint32), out[start:stop])


@_jit
def elect_tiers(tiers, base, first, drops, factors, thresholds, weights, normalize, scale, out):
    """`kernels.elect` of bf16, from the base's bits to the result's.

    Args:
        tiers: int64[k, ..], the experts' tiers as `tiers.kernels.quick.deltas` reads them, nothing of which was used.
        base, out: uint16[n].
        first: number of the first element in its tensor.
        drops: uint64[k, 3]: for each expert the halves of the key and the limit of `kernels.drop`; [0, 3] where nothing
            is dropped.
        factors: float32[k], which the deltas are multiplied by; float32[0] where they are not.
        thresholds, weights, normalize, scale: see `kernels.elect`.
    """
    rows, room = np.arange(len(tiers)), np.empty(len(tiers) * TILE, np.float32)
    values, found = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for start in range(0, base.size, TILE):
        stop = min(start + TILE, base.size)
        deltas = _read(tiers, base, start, stop, drops, first, factors, rows, room, values)
        merged = found[: stop - start]
        elect_singles(values[: stop - start], deltas, thresholds, weights, normalize, scale, merged)
        narrow_bf16(merged.view(np.uint32), out[start:stop])
