"""Runs of 64 elements in which nothing changed, which are left out of every tier."""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)
_inline = njit(nogil=True, inline="always", boundscheck=False)

RUN = 64


@_jit
def changed(expert, base, mask):
    """Set mask (uint8[ceil(n / 64)]) to 1 for every run that holds a change, else 0; return how many do."""
    whole = base.size // RUN
    some = 0
    for run in range(mask.size):
        differing = np.uint16(0)
        if run < whole:  # of a fixed length, so that it compiles to vector instructions
            mine, below = expert[run * RUN :], base[run * RUN :]
            for i in range(RUN):
                differing |= mine[i] ^ below[i]
        else:
            for i in range(run * RUN, base.size):
                differing |= expert[i] ^ base[i]
        mask[run] = differing != 0
        some += differing != 0
    return some


@_jit
def take(source, mask, out):
    """Gather the elements of changed runs into `out`; return how many there are."""
    k = 0
    n = source.size
    for run in range(mask.size):
        if mask[run]:
            size = min(RUN, n - run * RUN)
            _move(source[run * RUN :], out[k:], size)
            k += size
    return k


@_jit
def put(source, mask, out):
    """Scatter gathered elements back to their runs of `out`; the others stay as they are."""
    k = 0
    n = out.size
    for run in range(mask.size):
        if mask[run]:
            size = min(RUN, n - run * RUN)
            _move(source[k:], out[run * RUN :], size)
            k += size


@_inline
def _move(source, out, size):
    if size == RUN:  # as above
        for i in range(RUN):
            out[i] = source[i]
    else:
        for i in range(size):
            out[i] = source[i]
