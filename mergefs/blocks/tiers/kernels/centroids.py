"""The sizes of coarse deltas by class and magnitude. All are bf16 numbers."""

from __future__ import annotations

import numpy as np
from numba import int32, uint16, uint32

from mergefs.compiled import njit

_inline = njit(nogil=True, inline="always", boundscheck=False)


@_inline
def size(code, unit, exponent, grid):
    """The bits (uint16) of the size of a delta in a class: at least an ulp of it.

    Args:
        code: of the magnitude, an integer.
        unit: float32, the power of two that codes count.
        exponent: the class.
        grid: the first class whose deltas are multiples of its ulp.
    """
    field = max(int32(exponent), int32(8)) - int32(7)
    ulp = np.uint32(uint32(field) << uint32(23)).view(np.float32)
    found = np.float32(np.float32(code) * np.float32(unit))
    shift = field - int32(np.float32(unit).view(np.uint32) >> uint32(23))  # a code counts 2^-shift ulps
    if exponent >= grid and shift > 0:
        # To nearest, ties to even. A code is below 2^8, so by 10 places nothing is left.
        shift = min(shift, int32(10))
        kept = int32(code) >> shift
        rest = int32(code) - (kept << shift)
        half = int32(1) << (shift - int32(1))
        kept += int32(rest > half) | (int32(rest == half) & kept & int32(1))
        found = np.float32(kept) * ulp
    return uint16(np.float32(max(found, ulp)).view(np.uint32) >> uint32(16))
