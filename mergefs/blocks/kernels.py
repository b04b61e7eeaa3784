"""Compiled loops over the elements of one block. Every function releases the interpreter lock.

Importing this module loads numba, so it is imported only where blocks are encoded or decoded.
"""

from __future__ import annotations

import numpy as np

from mergefs.compiled import njit

_jit = njit(nogil=True, boundscheck=False)

HISTOGRAM_BINS = 1 << 15
SKETCH_SIZE = 128


@_jit
def shuffle(source, width, out):
    """Write byte i of every element of `source` (uint8[n * width]) into plane i of `out` (same size)."""
    n = source.size // width
    for plane in range(width):
        start = plane * n
        for i in range(n):
            out[start + i] = source[i * width + plane]


@_jit
def unshuffle(source, width, out):
    """Undo `shuffle`."""
    n = source.size // width
    for plane in range(width):
        start = plane * n
        for i in range(n):
            out[i * width + plane] = source[start + i]


@_jit
def shuffle2(source, out):
    """`shuffle` for two-byte elements, in one pass."""
    n = source.size // 2
    for i in range(n):
        out[i] = source[2 * i]
        out[n + i] = source[2 * i + 1]


@_jit
def unshuffle2(source, out):
    """Undo `shuffle2`."""
    n = source.size // 2
    for i in range(n):
        out[2 * i] = source[i]
        out[2 * i + 1] = source[n + i]


@_jit
def difference16(expert, base, is_float, out):
    """Write the zigzag difference of two uint16[n] blocks as two byte planes into `out` (uint8[2 n]).

    Floats are first mapped to integers in the order of their values (negative bits inverted, the sign bit of
    the others set); differences are taken modulo 2**16.
    """
    n = expert.size
    for i in range(n):
        e = np.uint32(expert[i])
        b = np.uint32(base[i])
        if is_float:
            e ^= np.uint32(0x8000) | (np.uint32(0x7FFF) * (e >> np.uint32(15)))
            b ^= np.uint32(0x8000) | (np.uint32(0x7FFF) * (b >> np.uint32(15)))
        d = (e - b) & np.uint32(0xFFFF)
        z = (d << np.uint32(1)) ^ (np.uint32(0xFFFF) * (d >> np.uint32(15)))
        out[i] = z & np.uint32(0xFF)
        out[n + i] = (z >> np.uint32(8)) & np.uint32(0xFF)


@_jit
def restore16(planes, base, is_float, out):
    """Undo `difference16`: planes (uint8[2 n]) and base (uint16[n]) give the expert's uint16[n]."""
    n = base.size
    for i in range(n):
        z = np.uint32(planes[i]) | (np.uint32(planes[n + i]) << np.uint32(8))
        d = (z >> np.uint32(1)) ^ (np.uint32(0xFFFF) * (z & np.uint32(1)))
        b = np.uint32(base[i])
        if is_float:
            b ^= np.uint32(0x8000) | (np.uint32(0x7FFF) * (b >> np.uint32(15)))
            o = (b + d) & np.uint32(0xFFFF)
            o ^= np.uint32(0x8000) | (np.uint32(0x7FFF) * (np.uint32(1) - (o >> np.uint32(15))))
            out[i] = o
        else:
            out[i] = (b + d) & np.uint32(0xFFFF)


@_jit
def difference64(expert, base, bits, is_float, out):
    """As `difference16` for elements of `bits` (8, 32 or 64) bits: any unsigned arrays [n] into byte planes."""
    n = expert.size
    top = np.uint64(bits - 1)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    sign = np.uint64(1) << top
    one = np.uint64(1)
    zero = np.uint64(0)
    for i in range(n):
        e = np.uint64(expert[i])
        b = np.uint64(base[i])
        if is_float:
            e = (~e & mask) if e & sign else e | sign
            b = (~b & mask) if b & sign else b | sign
        d = (e - b) & mask
        z = ((d << one) & mask) ^ (mask if d & sign else zero)
        for plane in range(bits // 8):
            out[plane * n + i] = (z >> np.uint64(8 * plane)) & np.uint64(0xFF)


@_jit
def restore64(planes, base, bits, is_float, out):
    """Undo `difference64`."""
    n = base.size
    top = np.uint64(bits - 1)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    sign = np.uint64(1) << top
    one = np.uint64(1)
    zero = np.uint64(0)
    for i in range(n):
        z = zero
        for plane in range(bits // 8):
            z |= np.uint64(planes[plane * n + i]) << np.uint64(8 * plane)
        d = (z >> one) ^ (mask if z & one else zero)
        b = np.uint64(base[i])
        if is_float:
            b = (~b & mask) if b & sign else b | sign
            o = (b + d) & mask
            out[i] = (o ^ sign) if o & sign else (~o & mask)
        else:
            out[i] = (b + d) & mask


@_jit
def widen_bf16(source, out):
    """uint16[n] bits of bf16 to uint32[n] bits of float32."""
    for i in range(source.size):
        out[i] = np.uint32(source[i]) << np.uint32(16)


@_jit
def narrow_bf16(source, out):
    """uint32[n] bits of float32 to uint16[n] bits of bf16, to nearest, ties to even; NaN stays NaN."""
    for i in range(source.size):
        bits = source[i]
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = (bits >> np.uint32(16)) | np.uint32(0x0040)
        else:
            rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            out[i] = (bits + rounding) >> np.uint32(16)


@_jit
def look_up(source, table, out):
    """out[i] = table[source[i]]: unsigned[n] through float32[256 or 65536] to float32[n]."""
    for i in range(source.size):
        out[i] = table[source[i]]


@_jit
def squares(values):
    """Return the sum of the squares of float32[n] or float64[n], in float64."""
    lanes = np.zeros(16, np.float64)
    whole = values.size // 16 * 16
    for start in range(0, whole, 16):
        for lane in range(16):
            value = np.float64(values[start + lane])
            lanes[lane] += value * value
    for i in range(whole, values.size):
        lanes[0] += np.float64(values[i]) * np.float64(values[i])
    return lanes.sum()


@_jit
def measure(expert, base, first, signs, histogram, sketch, inexact):
    """Statistics of one block's delta.

    The sketch is a count sketch: element e of the tensor is added to lane e mod 128 with a sign that is the
    product of signs[e mod 65536] and a sign drawn from e div 65536, the same for every expert.

    Args:
        expert, base: float32[n] values.
        first: the number of the block's first element in its tensor.
        signs: float32[65536], each -1 or 1.
        histogram: uint32[32768], added to: counts of |delta| by the upper 16 bits of its float32.
        sketch: float64[128], added to.
        inexact: uint32[n + 1], written to: the bits of those |delta| whose lower 16 bits are not zero.

    Returns:
        (energy, inner product with the base, largest |delta|, non-finite elements, length of inexact). Elements
        with a non-finite delta are left out of everything else.
    """
    lanes = 128
    energy = np.zeros(lanes, np.float64)
    inner = np.zeros(lanes, np.float64)
    delta = np.empty(lanes, np.float32)
    magnitude = np.empty(lanes, np.float32)
    bits = magnitude.view(np.uint32)
    largest = np.uint32(0)
    not_finite = 0
    count = 0
    n = expert.size
    start = 0
    while start < n:
        # Rows end where lanes do, so that within a row the lane is the place.
        element = first + start
        lane = element % lanes
        stop = min(lanes - lane, n - start)
        page = np.uint64(element >> 16) * np.uint64(0x9E3779B97F4A7C15)
        page ^= page >> np.uint64(32)
        page *= np.uint64(0xD6E8FEB86659FD93)
        sign = np.float32(-1.0) if page >> np.uint64(63) else np.float32(1.0)
        at = element & 0xFFFF
        for i in range(stop):
            delta[i] = expert[start + i] - base[start + i]
            magnitude[i] = abs(delta[i])
        top = np.uint32(0)
        for i in range(stop):
            top = max(top, bits[i])
        if top >= np.uint32(0x7F800000):
            top = np.uint32(0)
            for i in range(stop):
                if bits[i] >= np.uint32(0x7F800000):
                    not_finite += 1
                    delta[i] = 0.0
                    histogram[0] -= np.uint32(1)
                    magnitude[i] = 0.0
                top = max(top, bits[i])
        largest = max(largest, top)
        for i in range(stop):
            histogram[bits[i] >> np.uint32(16)] += np.uint32(1)
            inexact[count] = bits[i]
            count += (bits[i] & np.uint32(0xFFFF)) != np.uint32(0)
        for i in range(stop):
            value = np.float64(delta[i])
            energy[lane + i] += value * value
            inner[lane + i] += value * np.float64(base[start + i]) if value != 0.0 else 0.0
            sketch[lane + i] += np.float64(sign * signs[at + i] * delta[i])
        start += stop
    out = np.empty(1, np.uint32)
    out[0] = largest
    return energy.sum(), inner.sum(), out.view(np.float32)[0], not_finite, count


@_jit
def measure_bf16(expert, base, first, signs, histogram, sketch, inexact):
    """`measure` of uint16[n] bits of bf16, widened a part at a time that stays in the first cache."""
    part = 4096
    values = np.empty(part, np.float32)
    below = np.empty(part, np.float32)
    energy = 0.0
    inner = 0.0
    largest = np.float32(0.0)
    not_finite = 0
    count = 0
    for start in range(0, expert.size, part):
        size = min(part, expert.size - start)
        widen_bf16(expert[start : start + size], values.view(np.uint32))
        widen_bf16(base[start : start + size], below.view(np.uint32))
        more, product, top, odd, found = measure(
            values[:size], below[:size], first + start, signs, histogram, sketch, inexact[count:]
        )
        energy += more
        inner += product
        largest = max(largest, top)
        not_finite += odd
        count += found
    return energy, inner, largest, not_finite, count
