"""Blocks of zstd frames that are Huffman codes of their bytes, without matches (RFC 8878, section 3.1.1.3.1).

The planes of differences are noise with a skewed distribution. In it zstd finds short matches by chance, which take
longer to find and to follow, and more bytes, than the codes of the bytes themselves; its interface cannot be told not
to look for any. Any zstd decoder reads these blocks.

Importing this module loads numba.
"""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

LARGEST = 1 << 17
"""The most bytes of a block."""

SMALLEST = 1 << 10
"""Fewer bytes are not worth a table of codes."""

LONGEST = 11
"""Bits of a code, at most."""

_STATES = 64
"""States of the entropy coder for the table of codes, the most that are allowed there."""


@_jit
def histogram(data):
    """Return how often each byte occurs in uint8[n], int64[256]."""
    counts = np.zeros((4, 256), np.int64)  # four, because neighbours are often the same
    whole = data.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, data[i]] += 1
        counts[1, data[i + 1]] += 1
        counts[2, data[i + 2]] += 1
        counts[3, data[i + 3]] += 1
    for i in range(whole, data.size):
        counts[0, data[i]] += 1
    return counts.sum(axis=0)


@_jit
def code_lengths(counts):
    """Return the length of each byte's code, int64[256], at most `LONGEST` and 0 where it does not occur.

    At least two bytes have to occur. No such code gives fewer bits. It is found by package-merge (Larmore and
    Hirschberg, JACM 1990, doi 10.1145/79147.79150): of the bytes and of pairs of what was in the list before, the
    cheapest are taken; a byte's code is as long as the number of lists in which it is.
    """
    occurring = np.flatnonzero(counts)
    order = occurring[np.argsort(counts[occurring], kind="mergesort")]
    n = order.size
    listed, pairs = np.empty(2 * n, np.int64), np.empty(n, np.int64)  # what they cost
    is_byte = np.zeros((LONGEST, 2 * n), np.bool_)
    size = 0
    for level in range(LONGEST):
        for pair in range(size // 2):
            pairs[pair] = listed[2 * pair] + listed[2 * pair + 1]
        size = n + size // 2
        byte, pair = 0, 0
        for at in range(size):
            first = byte < n and (pair >= size - n or counts[order[byte]] <= pairs[pair])
            is_byte[level, at] = first
            if first:
                listed[at] = counts[order[byte]]
                byte += 1
            else:
                listed[at] = pairs[pair]
                pair += 1
    lengths = np.zeros(256, np.int64)
    taken = 2 * n - 2
    for level in range(LONGEST - 1, -1, -1):
        chosen = int(np.count_nonzero(is_byte[level, :taken]))
        for byte in range(chosen):
            lengths[order[byte]] += 1
        taken = 2 * (taken - chosen)
    return lengths


@_jit
def _repeats(data):
    """Tell whether of 64 words of 8 bytes, one or more is the same as the word before."""
    words = data[: data.size // 8 * 8].view(np.uint64)
    count = 0
    for i in range(1, words.size):
        count += words[i] == words[i - 1]
    return count * 64 >= words.size


@_jit
def _codes(lengths, longest):
    """Return each byte's code, its length in the upper half: uint32[256]. Longer codes come first."""
    first = np.zeros(LONGEST + 2, np.int64)
    for length in lengths:
        first[length] += 1
    code = 0
    for length in range(longest, 0, -1):
        count = first[length]
        first[length] = code
        code = (code + count) >> 1
    found = np.zeros(256, np.uint32)
    for byte in range(256):
        length = lengths[byte]
        if length:
            found[byte] = np.uint32((length << 16) | first[length])
            first[length] += 1
    return found


@_jit
def _shares(weights):
    """Return how many of the coder's states each weight has, int64[12]; all of them in one where it cannot be used."""
    counts = np.zeros(LONGEST + 1, np.int64)
    for weight in weights:
        counts[weight] += 1
    shares = np.zeros(LONGEST + 1, np.int64)
    for weight in range(LONGEST + 1):
        if counts[weight]:
            shares[weight] = max(1, (counts[weight] * _STATES + weights.size // 2) // weights.size)
    while shares.sum() != _STATES:
        shares[np.argmax(shares)] += 1 if shares.sum() < _STATES else -1
    return shares


@_jit
def _put(out, at, value, size):
    """Add a number of `size` bits at bit `at` of out (uint8[...], 0 from there on), and return where it ends."""
    for bit in range(size):
        out[(at + bit) >> 3] |= np.uint8(((value >> bit) & 1) << ((at + bit) & 7))
    return at + size


@_jit
def _put_shares(shares, out):
    """Write the description of the coder (RFC 8878, section 4.1.1), and return its bytes."""
    at = _put(out, 0, 1, 4)  # 6 bits of state
    left = _STATES
    weight = 0
    while left > 0:
        share = shares[weight]
        width = 0
        while (left + 1) >> width:
            width += 1
        few = (1 << width) - 2 - left
        half = 1 << (width - 1)
        value = share + 1
        if value < few:
            at = _put(out, at, value, width - 1)
        else:
            at = _put(out, at, value + few if value >= half else value, width)
        left -= share
        weight += 1
        if share == 0:
            more = 0
            while shares[weight + more] == 0:
                more += 1
            weight += more
            while more >= 3:
                at = _put(out, at, 3, 2)
                more -= 3
            at = _put(out, at, more, 2)
    return (at + 7) >> 3


@_jit
def _put_weights(weights, out):
    """Write weights (int64[m]) by the entropy coder (RFC 8878, section 4.2.1.2); return their bytes, 0 if it cannot."""
    shares = _shares(weights)
    if weights.size < 2 or shares.max() == _STATES:
        return 0
    start = _put_shares(shares, out)
    # What a decoder does in each state: which weight it gives, and between which states it goes on.
    symbol = np.empty(_STATES, np.int64)
    place = 0
    for weight in range(LONGEST + 1):
        for _ in range(shares[weight]):
            symbol[place] = weight
            place = (place + (_STATES >> 1) + (_STATES >> 3) + 3) & (_STATES - 1)
    width, lowest = np.empty(_STATES, np.int64), np.empty(_STATES, np.int64)
    upcoming = shares.copy()
    for state in range(_STATES):
        number = upcoming[symbol[state]]
        upcoming[symbol[state]] += 1
        bits = 0
        while number << bits < _STATES:
            bits += 1
        width[state] = bits
        lowest[state] = (number << bits) - _STATES
    # Two decoders take turns, and stop when bits are missing: their last states are such that they ask for some.
    states = np.empty(2, np.int64)
    for i in range(weights.size - 2, weights.size):
        state = 0
        while symbol[state] != weights[i]:
            state += 1
        states[i & 1] = state
    at = 8 * start
    for i in range(weights.size - 3, -1, -1):
        following = states[i & 1]
        state = 0
        while symbol[state] != weights[i] or not lowest[state] <= following < lowest[state] + (1 << width[state]):
            state += 1
        at = _put(out, at, following - lowest[state], width[state])
        states[i & 1] = state
    at = _put(out, at, states[1], 6)
    at = _put(out, at, states[0], 6)
    at = _put(out, at, 1, 1)
    return (at + 7) >> 3


@_jit
def _put_table(lengths, longest, out):
    """Write the table of codes, and return its bytes, 0 where it cannot be described."""
    last = 255
    while lengths[last] == 0:
        last -= 1
    weights = np.empty(last, np.int64)  # the last one's follows from the others'
    for byte in range(last):
        weights[byte] = longest + 1 - lengths[byte] if lengths[byte] else 0
    packed = np.zeros(512, np.uint8)
    size = _put_weights(weights, packed)
    plain = (last + 1) >> 1
    if 0 < size < 128 and (size < plain or last > 128):
        out[0] = size
        out[1 : 1 + size] = packed[:size]
        return 1 + size
    if last > 128:
        return 0
    out[0] = 127 + last
    out[1 : 1 + plain] = 0
    for byte in range(last):
        out[1 + (byte >> 1)] |= np.uint8(weights[byte] << (0 if byte & 1 else 4))
    return 1 + plain


@_jit
def _put_stream(data, codes, words):
    """Write the codes of uint8[n] from the last to the first to words (uint32[...]), and return their bytes."""
    held, bits, at = np.uint64(0), np.uint64(0), 0
    low, half, full = np.uint64(0xFFFF), np.uint64(16), np.uint64(32)
    i = data.size - 1
    if data.size & 1:
        code = np.uint64(codes[data[i]])
        held, bits = code & low, code >> half
        i -= 1
    while i > 0:
        one, two = np.uint64(codes[data[i]]), np.uint64(codes[data[i - 1]])
        both = (one & low) | ((two & low) << (one >> half))
        held |= both << bits
        bits += (one >> half) + (two >> half)
        words[at] = np.uint32(held)
        if bits >= full:
            at += 1
            held >>= full
            bits -= full
        i -= 2
    held |= np.uint64(1) << bits
    words[at] = np.uint32(held)
    words[at + 1] = np.uint32(held >> full)
    return 4 * at + int((bits >> np.uint64(3)) + np.uint64(1))


@_jit
def put_block(data, out):
    """Write the content of a compressed block of uint8[n], and return its bytes; 0 where it would not be shorter, or
    where bytes repeat, which matches are better for.

    Args:
        data: of `SMALLEST` to `LARGEST` bytes.
        out: uint8[...], room for as many.
    """
    if _repeats(data):
        return 0
    counts = histogram(data)
    lengths = code_lengths(counts)
    longest = lengths.max()
    table = np.empty(256, np.uint8)
    at = _put_table(lengths, longest, table)
    quarter = (data.size + 3) >> 2
    needed = (counts * lengths).sum() // 8 + 4
    if at == 0 or 5 + at + 6 + needed + 1 >= data.size:
        return 0
    codes = _codes(lengths, longest)
    out[5 : 5 + at] = table[:at]
    jump = 5 + at
    at = jump + 6
    words = np.empty((quarter * LONGEST >> 5) + 3, np.uint32)
    stored = words.view(np.uint8)
    for stream in range(4):
        size = _put_stream(data[stream * quarter : (stream + 1) * quarter], codes, words)
        out[at : at + size] = stored[:size]
        at += size
        if stream < 3:
            out[jump + 2 * stream] = size & 255
            out[jump + 2 * stream + 1] = size >> 8
    head = 2 | 3 << 2 | data.size << 4 | (at - 5) << 22  # compressed, four streams, both sizes in 18 bits
    for i in range(5):
        out[i] = (head >> (8 * i)) & 255
    out[at] = 0  # no sequences
    return at + 1
