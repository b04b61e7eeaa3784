"""An interleaved rANS coder: eight states in turn over one stream of 16-bit words, tables of 12 bits.

A symbol's table is given by its context. Frequencies of a table add up to 4096.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint8, uint16, uint32, uint64

from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

BITS = 12
SYMBOLS = 40
LANES = 8
START = 1 << 16


@_jit
def normalise(counts, frequencies):
    """Scale int64[tables, 40] counts to frequencies that add up to 4096, none of a counted symbol 0."""
    whole = 1 << BITS
    for table in range(counts.shape[0]):
        n = 0
        for s in range(SYMBOLS):
            n += counts[table, s]
        if n == 0:
            frequencies[table, 0] = whole
            continue
        total = 0
        for s in range(SYMBOLS):
            f = 0
            if counts[table, s]:
                f = max(1, (counts[table, s] * whole + n // 2) // n)
            frequencies[table, s] = f
            total += f
        while total != whole:  # the commonest gives or takes what rounding left
            most = 0
            for s in range(SYMBOLS):
                if frequencies[table, s] > frequencies[table, most]:
                    most = s
            change = max(whole - total, 1 - frequencies[table, most])
            frequencies[table, most] += change
            total += change


@_jit
def fill_table(frequencies, table):
    """Write the decoder's table, uint32[tables * 4096]; return False where frequencies do not add up to 4096.

    An entry holds a symbol in its lowest 8 bits, the slot's place among the symbol's slots in the next 12, and the
    symbol's frequency - 1 in the highest 12.
    """
    whole = 1 << BITS
    for t in range(frequencies.shape[0]):
        first = 0
        for s in range(SYMBOLS):
            f = int64(frequencies[t, s])
            if first + f > whole:
                return False
            for k in range(f):
                table[(t << BITS) + first + k] = uint32(((f - 1) << 20) | (k << 8) | s)
            first += f
        if first != whole:
            return False
    return True


@_jit
def encode(symbols, keys, tables, frequencies, words, states):
    """Encode uint8[n] symbols, last first, n a multiple of 8.

    Args:
        keys: uint16[n], the symbols' contexts.
        tables: uint8[2048], the number of the table of each.
        frequencies: int64[tables, 40].
        words: uint16[n or more], filled from its end.
        states: uint32[8], the final states are written to it.

    Returns:
        Where the words begin.
    """
    slots = np.zeros((frequencies.shape[0] << 6, 2), np.uint32)
    for t in range(frequencies.shape[0]):
        first = 0
        for s in range(SYMBOLS):
            slots[(t << 6) | s, 0] = frequencies[t, s]
            slots[(t << 6) | s, 1] = first
            first += frequencies[t, s]
    for lane in range(LANES):
        states[lane] = START
    at = words.size
    for i in range(symbols.size - 1, -1, -1):
        j = (int64(tables[keys[i]]) << 6) | int64(symbols[i])
        f = slots[j, 0]
        x = states[i & 7]
        if uint64(x) >= (uint64(f) << uint64(32 - BITS)):
            at -= 1
            words[at] = uint16(x)
            x = uint32(x >> uint32(16))
        d = uint32(x // f)
        states[i & 7] = uint32((d << uint32(BITS)) + (x - uint32(d * f)) + slots[j, 1])
    return at


@njit(nogil=True, inline="always")
def _advance(entry, x):
    """The state after an entry's symbol, before it takes a word."""
    y = uint32(((entry >> uint32(20)) + uint32(1)) * (x >> uint32(BITS)))
    return uint32(y + ((entry >> uint32(8)) & uint32(4095)))


@njit(nogil=True, inline="always")
def _entry(table, context, x):
    return table[(uint32(context) << uint32(BITS)) | (x & uint32(4095))]


@njit(nogil=True, inline="always")
def _refilled(y, word):
    return uint32((y << uint32(16)) | uint32(word)) if y < uint32(START) else y


# The eight lanes are written out so that their states stay in registers: a loop over an array of states takes half as
# long again.
@_jit
def decode(words, states, contexts, table, out):
    """Undo `encode`; n is a multiple of 8.

    Args:
        words: uint16[k + 8], eight of them padding.
        states: uint32[8].
        contexts: uint8[n], the number of each symbol's table.
        table: of `fill_table`, for every context that occurs.
        out: uint8[n], written to.

    Returns:
        How many words were used, or -1 where there are too few or the states do not end where they began.
    """
    p = int64(0)
    top = int64(words.size - 8)
    x0, x1, x2, x3 = uint32(states[0]), uint32(states[1]), uint32(states[2]), uint32(states[3])
    x4, x5, x6, x7 = uint32(states[4]), uint32(states[5]), uint32(states[6]), uint32(states[7])
    for i in range(0, out.size // 8 * 8, 8):
        if p > top:
            return -1
        e = _entry(table, contexts[i], x0)
        out[i] = uint8(e)
        y = _advance(e, x0)
        x0 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 1], x1)
        out[i + 1] = uint8(e)
        y = _advance(e, x1)
        x1 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 2], x2)
        out[i + 2] = uint8(e)
        y = _advance(e, x2)
        x2 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 3], x3)
        out[i + 3] = uint8(e)
        y = _advance(e, x3)
        x3 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 4], x4)
        out[i + 4] = uint8(e)
        y = _advance(e, x4)
        x4 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 5], x5)
        out[i + 5] = uint8(e)
        y = _advance(e, x5)
        x5 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 6], x6)
        out[i + 6] = uint8(e)
        y = _advance(e, x6)
        x6 = _refilled(y, words[p])
        p += int64(y < uint32(START))
        e = _entry(table, contexts[i + 7], x7)
        out[i + 7] = uint8(e)
        y = _advance(e, x7)
        x7 = _refilled(y, words[p])
        p += int64(y < uint32(START))
    at_start = (x0 == START) & (x1 == START) & (x2 == START) & (x3 == START)
    at_start &= (x4 == START) & (x5 == START) & (x6 == START) & (x7 == START)
    return p if at_start else -1


@_jit
def write_tables(frequencies, out):
    """Write int64[tables, 40]: each a count of symbols, then their frequencies, 7 bits a byte; return the length."""
    k = 0
    for t in range(frequencies.shape[0]):
        n = 0
        for s in range(SYMBOLS):
            if frequencies[t, s]:
                n = s + 1
        out[k] = n
        k += 1
        for s in range(n):
            f = frequencies[t, s]
            while f >= 128:
                out[k] = 128 | (f & 127)
                k += 1
                f >>= 7
            out[k] = f
            k += 1
    return k


@_jit
def read_tables(source, frequencies):
    """Undo `write_tables` into zeros int64[tables, 40]; return the bytes read, or -1 where they are damaged."""
    k = 0
    size = source.size
    for t in range(frequencies.shape[0]):
        if k >= size or source[k] > SYMBOLS:
            return -1
        n = int64(source[k])
        k += 1
        for s in range(n):
            f = int64(0)
            shift = 0
            while True:
                if k >= size or shift > 14:
                    return -1
                byte = int64(source[k])
                k += 1
                f |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            frequencies[t, s] = f
    return k
