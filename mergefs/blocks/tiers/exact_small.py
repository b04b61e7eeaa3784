"""The exact tier `small`: rANS with the class and the magnitude as context."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.tiers.kernels import contexts, rans
from mergefs.blocks.tiers.layout import HEADER_SIZE, Header, Kind, compress, cut
from mergefs.blocks.tiers.scratch import room
from mergefs.blocks.zstd_frames import Frame, content_size

MOST_TABLES = 64
"""So that decoding needs at most 1 MiB for them, whatever a payload claims."""

ENTRY_BITS = 9
"""About what an entry of a table costs."""

_SIZES = struct.Struct("<II")
_STATES = 4 * rans.LANES
_LONGEST_TABLE = 1 + 3 * rans.SYMBOLS


def write(
    expert: NDArray[np.uint16], rests: NDArray[np.uint16], base: NDArray[np.uint16], q: NDArray[np.int8]
) -> bytes:
    """Return the payload of the zigzag rests (uint16[n])."""
    n = base.size
    padded = n + -n % rans.LANES
    symbols, keys = room("symbols", padded, np.uint8), room("grouped", padded, np.uint16)
    raw = room("raw", 2 * n + 8, np.uint8)
    raw_size = contexts.split(rests, symbols[:n], raw)
    contexts.keys(base, q, keys[:n])
    first, last, tables, totals = _choose(symbols[:n], keys[:n])
    # The padding is of a context whose table is 0, and of its commonest symbol, which costs least.
    symbols[n:] = int(np.argmax(totals[0]))
    keys[n:] = np.flatnonzero(tables.ravel() == 0)[0]
    frequencies = np.zeros_like(totals)
    rans.normalise(totals, frequencies)
    words, states = room("words", padded + 16, np.uint16), np.empty(rans.LANES, np.uint32)
    used = words[rans.encode(symbols, keys, tables.ravel(), frequencies, words, states) :]
    written = np.empty(len(totals) * _LONGEST_TABLE, np.uint8)
    size = rans.write_tables(frequencies, written)
    frame = compress(tables[first : last + 1].tobytes() + written[:size].tobytes())
    return (
        Header(Kind.SMALL, first, last, len(totals), n, used.size).pack()
        + _SIZES.pack(len(frame), raw_size)
        + states.astype("<u4").tobytes()
        + used.astype("<u2").tobytes()
        + frame
        + raw[:raw_size].tobytes()
    )


def _choose(
    symbols: NDArray[np.uint8], keys: NDArray[np.uint16]
) -> tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]:
    """Return the lowest and highest class, uint8[256, 8] numbers of tables, and int64[tables, 40] their counts."""
    totals = np.zeros((2049, rans.SYMBOLS), np.int64)
    if not symbols.size:
        return 0, 0, np.zeros((256, 8), np.uint8), totals[:1]
    counts = np.zeros(256 * 8 * 64, np.int64)
    contexts.count(symbols, keys, counts)
    by_class = counts.reshape(256, 8, 64)[:, :, : rans.SYMBOLS]
    entry_bits, number = ENTRY_BITS, MOST_TABLES + 1
    while number > MOST_TABLES:  # the dearer an entry, the fewer tables, down to one
        tables = np.zeros((256, 8), np.uint16)
        totals[:] = 0
        first, last, number = contexts.choose(by_class, float(entry_bits), tables, totals)
        entry_bits *= 4
    return first, last, tables.astype(np.uint8), totals[:number]


class SmallTier(NamedTuple):
    """A `small` payload, taken apart and checked, but not decompressed."""

    header: Header
    frames: tuple[Frame, ...]
    states: NDArray[np.uint32]
    words: memoryview
    raw: memoryview

    @classmethod
    def read(cls, header: Header, payload: memoryview, n: int) -> SmallTier:
        """Take apart a payload for n elements.

        Raises:
            ValueError: when it is damaged.
        """
        if header.x != n or header.g < header.a or not 0 < header.u <= MOST_TABLES:
            raise ValueError("the exact tier's header does not fit its block")
        tables_size, raw_size = _SIZES.unpack(cut(payload, HEADER_SIZE, _SIZES.size))
        at = HEADER_SIZE + _SIZES.size
        states = np.frombuffer(cut(payload, at, _STATES), "<u4")
        at += _STATES
        words = cut(payload, at, 2 * header.y)
        at += len(words)
        tables = cut(payload, at, tables_size)
        at += tables_size
        raw = cut(payload, at, raw_size)
        if at + raw_size != len(payload):
            raise ValueError("the exact tier has bytes at its end that are not its own")
        size = content_size(tables)
        if size > 8 * (header.g - header.a + 1) + header.u * _LONGEST_TABLE:
            raise ValueError("the exact tier's tables are too long")
        return cls(header, (Frame(tables, size),), states, words, raw)

    def rests(
        self, contents: list[NDArray[np.uint8]], base: NDArray[np.uint16], q: NDArray[np.int8]
    ) -> NDArray[np.uint16]:
        """Return the zigzag rests (uint16[n]) from the frame's content.

        Raises:
            ValueError: when the tier is damaged or was made for another base.
        """
        n = base.size
        tables, table = self._tables(contents[0])
        padded = n + -n % rans.LANES
        numbers, symbols = room("contexts", padded, np.uint8), room("symbols", padded, np.uint8)
        contexts.look_up(base, q, tables.ravel(), numbers[:n])
        numbers[n:] = 0
        words = _padded(self.words, 2 * rans.LANES, "words").view(np.uint16)
        if rans.decode(words, self.states, numbers, table, symbols) != self.header.y:
            raise ValueError("the exact tier's symbols are damaged")
        out = room("rests", n, np.uint16)
        bits = contexts.join(symbols[:n], _padded(self.raw, 8, "raw"), out)
        if bits < 0 or -(-bits // 8) != len(self.raw):
            raise ValueError("the exact tier's raw bits are damaged")
        return out

    def _tables(self, content: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return uint8[256, 8] numbers of tables, and the decoder's table uint32[tables * 4096]."""
        first, last, number = self.header.a, self.header.g, self.header.u
        rows = last - first + 1
        tables = np.zeros((256, 8), np.uint8)
        if content.size < 8 * rows:
            raise ValueError("the exact tier's tables are too short")
        tables[first : last + 1] = content[: 8 * rows].reshape(rows, 8)
        frequencies = np.zeros((number, rans.SYMBOLS), np.int64)
        table = room("table", number << rans.BITS, np.uint32)
        rest = content[8 * rows :]
        if (
            int(tables.max()) >= number
            or rans.read_tables(rest, frequencies) != rest.size
            or not rans.fill_table(frequencies, table)
        ):
            raise ValueError("the exact tier's tables are damaged")
        return tables, table


def _padded(source: memoryview, padding: int, name: str) -> NDArray[np.uint8]:
    """Return the bytes with `padding` zeros behind them, for loops that read a little further."""
    out = room(name + "-read", len(source) + padding, np.uint8)
    out[: len(source)] = np.frombuffer(source, np.uint8)
    out[len(source) :] = 0
    return out
