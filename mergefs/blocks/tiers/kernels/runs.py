"""Runs of 64 elements in which nothing changed, which are left out of every tier."""

from __future__ import annotations

import numba

_jit = numba.njit(nogil=True, cache=True, boundscheck=False)

RUN = 64


@_jit
def changed(expert, base, mask):
    """Set mask (uint8[ceil(n / 64)]) to 1 for every run that holds a change, else 0; return how many do."""
    n = base.size
    some = 0
    for run in range(mask.size):
        mask[run] = 0
        for i in range(run * RUN, min(n, (run + 1) * RUN)):
            if expert[i] != base[i]:
                mask[run] = 1
                some += 1
                break
    return some


@_jit
def take(source, mask, out):
    """Gather the elements of changed runs into `out`; return how many there are."""
    k = 0
    n = source.size
    for run in range(mask.size):
        if mask[run]:
            for i in range(run * RUN, min(n, (run + 1) * RUN)):
                out[k] = source[i]
                k += 1
    return k


@_jit
def put(source, mask, out):
    """Scatter gathered elements back to their runs of `out`; the others stay as they are."""
    k = 0
    n = out.size
    for run in range(mask.size):
        if mask[run]:
            for i in range(run * RUN, min(n, (run + 1) * RUN)):
                out[i] = source[k]
                k += 1
