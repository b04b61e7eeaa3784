"""Streams of bits in uint64 words, the lowest bit first, and the same operations on a word for any processor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types, uint64
from numba.extending import intrinsic

from mergefs.compiled import njit

_inline = njit(nogil=True, inline="always", boundscheck=False)
_jit = njit(nogil=True, boundscheck=False)
_intrinsic: Any = intrinsic


@_intrinsic
def count(typingctx, bits):
    """How many of 64 bits are ones."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


def _tables():
    """uint8[65536] each: what `deposit` and `extract` do to 8 bits, at 256 mask + bits."""
    masks, bits = np.divmod(np.arange(1 << 16), 256)
    spread, gathered, used = (np.zeros(1 << 16, np.int64) for _ in range(3))
    for place in range(8):
        taken = masks >> place & 1
        spread |= (bits >> used & taken) << place
        gathered |= (bits >> place & taken) << used
        used += taken
    return spread.astype(np.uint8), gathered.astype(np.uint8)


_SPREAD, _GATHERED = _tables()


@_jit
def deposit(bits, mask):
    """Spread the lowest bits (uint64) to where the mask has ones."""
    found = uint64(0)
    for place in range(0, 64, 8):
        part = (mask >> uint64(place)) & uint64(255)
        found |= uint64(_SPREAD[part << uint64(8) | bits & uint64(255)]) << uint64(place)
        bits >>= count(part)
    return found


@_jit
def extract(bits, mask):
    """Gather the bits (uint64) where the mask has ones to the lowest places."""
    found = uint64(0)
    used = uint64(0)
    for place in range(0, 64, 8):
        part = (mask >> uint64(place)) & uint64(255)
        found |= uint64(_GATHERED[part << uint64(8) | (bits >> uint64(place)) & uint64(255)]) << used
        used += count(part)
    return found


@_inline
def following(words, at):
    """The 64 bits from bit `at` (uint64) on."""
    word, shift = at >> uint64(6), at & uint64(63)
    return (words[word] >> shift) | ((words[word + uint64(1)] << uint64(1)) << (uint64(63) - shift))


@_inline
def append(words, at, bits):
    """Write 64 bits from bit `at` (uint64) on, where the word holds 0; the next one is overwritten."""
    word, shift = at >> uint64(6), at & uint64(63)
    words[word] |= bits << shift
    words[word + uint64(1)] = (bits >> uint64(1)) >> (uint64(63) - shift)
