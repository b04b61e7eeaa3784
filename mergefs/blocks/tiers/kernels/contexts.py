"""The `small` coding's symbols, and which of its tables serves which class and magnitude."""

from __future__ import annotations

import numpy as np
from numba import int16, int32, int64, uint8, uint16, uint32, uint64

from mergefs.blocks.tiers.kernels.rans import SYMBOLS
from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

DIRECT = 16
"""Rests below this are symbols of their own."""


@_jit
def split(rests, symbols, raw):
    """Write uint16[n] rests as symbols uint8[n] and raw bits; return the bytes of raw bits.

    A rest of 2^k to 2^(k+1) - 1, k >= 4, is symbol 16 + 2 (k - 4) + its next bit; the k - 1 bits below are raw.
    """
    written = 0
    held = uint64(0)
    have = 0
    for i in range(rests.size):
        rest = int64(rests[i])
        if rest < DIRECT:
            symbols[i] = rest
        else:
            k = 4
            while rest >> (k + 1):
                k += 1
            symbols[i] = 16 + 2 * (k - 4) + ((rest >> (k - 1)) & 1)
            held |= uint64(rest & ((1 << (k - 1)) - 1)) << uint64(have)
            have += k - 1
            while have >= 8:
                raw[written] = uint8(held)
                written += 1
                held >>= uint64(8)
                have -= 8
    if have:
        raw[written] = uint8(held)
        written += 1
    return written


@_jit
def join(symbols, raw, rests):
    """Undo `split`; raw has eight bytes of padding. Return how many raw bits were used, -1 where there are too few."""
    for i in range(rests.size):
        rests[i] = symbols[i]
    at = int64(0)
    top = (raw.size - 8) * 8
    for i in range(rests.size):
        s = int64(symbols[i])
        if s >= DIRECT:
            k = 4 + ((s - 16) >> 1)
            if at + k - 1 > top:
                return -1
            j = at >> 3
            word = uint32(raw[j]) | (uint32(raw[j + 1]) << uint32(8)) | (uint32(raw[j + 2]) << uint32(16))
            low = (int64(word) >> (at & 7)) & ((1 << (k - 1)) - 1)
            rests[i] = uint16((1 << k) | ((s & 1) << (k - 1)) | low)
            at += k - 1
    return at


@_jit
def keys(base, q, out):
    """Write 8 class + |q|, uint16[n]."""
    for i in range(base.size):
        out[i] = uint16(uint16((base[i] & uint16(0x7F80)) >> uint16(4)) | uint16(abs(int16(q[i]))))


@_jit
def count(symbols, keys, counts):
    """Add to int64[2048 * 64]: how often each key has each symbol."""
    for i in range(symbols.size):
        counts[(uint32(keys[i]) << uint32(6)) | uint32(symbols[i])] += 1


@_jit
def look_up(base, q, tables, out):
    """Write every element's table number, uint8[n]; tables: uint8[2048] by key."""
    for i in range(base.size):
        out[i] = tables[(int32(base[i] & 0x7F80) >> 4) | abs(int32(q[i]))]


@_jit
def _cost(counts, entry_bits):
    """The bits that these counts (int64[40]) take, with their table."""
    n = 0
    top = 0
    bits = 0.0
    for s in range(SYMBOLS):
        if counts[s]:
            n += counts[s]
            top = s + 1
            bits -= counts[s] * np.log2(float(counts[s]))
    return bits + (n * np.log2(float(n)) if n else 0.0) + entry_bits * (top + 1)


@_jit
def _close(group, first, last, entry_bits, tables, number, totals):
    """Give the classes first to last, with counts int64[8, 40] by magnitude, the tables that cost least.

    One for all magnitudes, one for 0 and one for the others, or one for each. Returns the next table's number.
    """
    everything = group.sum(0)
    one = _cost(everything, entry_bits)
    two = _cost(group[0], entry_bits) + _cost(everything - group[0], entry_bits)
    each = 0.0
    for m in range(8):
        if group[m].any():
            each += _cost(group[m], entry_bits)
    for m in range(8):
        if not group[m].any():
            continue
        t = number
        if not (one <= two and one <= each):
            t += min(m, 1) if two <= each else m
        totals[t] += group[m]
        for c in range(first, last + 1):
            tables[c, m] = t
    if one <= two and one <= each:
        return number + 1
    return number + (2 if two <= each else 8)


@_jit
def choose(counts, entry_bits, tables, totals):
    """Choose tables by estimated bits: neighbouring classes share theirs where that is cheaper.

    Args:
        counts: int64[256, 8, 40], by class, magnitude and symbol; not all 0.
        entry_bits: what an entry of a table costs.
        tables: uint16[256, 8], all 0: the number of the table of every class and magnitude is written to it.
        totals: int64[2049, 40], all 0: the tables' counts.

    Returns:
        (lowest class that occurs, highest, how many tables).
    """
    lowest = -1
    first = -1
    last = -1
    number = 0
    group = np.zeros((8, SYMBOLS), np.int64)
    for c in range(256):
        if not counts[c].any():
            continue
        if first >= 0:
            together = group.sum(0)
            other = counts[c].sum(0)
            joined = _cost(together + other, entry_bits)
            if joined < _cost(together, entry_bits) + _cost(other, entry_bits):
                group += counts[c]
                last = c
                continue
            number = _close(group, first, last, entry_bits, tables, number, totals)
        else:
            lowest = c
        first = c
        last = c
        group[:] = counts[c]
    number = _close(group, first, last, entry_bits, tables, number, totals)
    renumbered = np.zeros(number, np.int64)
    kept = 0
    for t in range(number):
        if totals[t].any():
            renumbered[t] = kept
            totals[kept] = totals[t]
            kept += 1
    for c in range(256):
        for m in range(8):
            tables[c, m] = renumbered[tables[c, m]]
    return lowest, last, kept
