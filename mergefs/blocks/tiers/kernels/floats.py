"""What is done to a single bf16. All are inlined into the loops that use them."""

from __future__ import annotations

import numpy as np
from numba import int32, uint16, uint32, uint64

from mergefs.compiled import njit

_inline = njit(nogil=True, inline="always")


@_inline
def value(bits):
    """The float32 value of a bf16's bits (uint16)."""
    return np.uint32(uint32(bits) << uint32(16)).view(np.float32)


@_inline
def ordered(bits):
    """The integer (uint16) that orders bf16 bits like their values: o(x) of spec/tiers.md."""
    return uint16(bits ^ uint16(uint16(0x8000) | uint16(-(int32(bits) >> 15))))


@_inline
def unordered(order):
    """Undo `ordered`."""
    return uint16(order ^ uint16(uint16(0x8000) | uint16((int32(order) >> 15) - 1)))


@_inline
def rounded(number):
    """The bits (uint16) of a finite float32 rounded to bf16, to nearest, ties to even."""
    bits = np.float32(number).view(np.uint32)
    return uint16(uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@_inline
def step(base, q, codes, unit):
    """The signed size (float32) of a predicted delta.

    The centroid, an 8-bit integer times a power of two and so exact, but at least an ulp of the base: that is what
    the outer bin of a coarse class holds.
    """
    magnitude = uint32(abs(q))
    half = uint32(codes) if magnitude < uint32(4) else uint32(codes >> uint64(32))
    code = int32(uint32(half >> ((magnitude & uint32(3)) << uint32(3))) & uint32(255))
    exponent = max(int32(base >> uint16(7)) & 255, 8) - 7
    ulp = np.uint32(uint32(exponent) << uint32(23)).view(np.float32)
    size = np.float32(max(np.float32(np.float32(code) * unit), ulp))
    return np.uint32(size.view(np.uint32) | (uint32(q) & uint32(0x80000000))).view(np.float32)
