"""Zstd frames whose claimed size is checked before anything is allocated for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numcodecs.zstd as zstd
import numpy as np
from numpy.typing import NDArray

from mergefs.hashing import Buffer

_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 17
"""The most that a block of a frame may hold."""

_RAW, _REPEATED, _COMPRESSED = 0, 1, 2
"""Types of blocks."""

LEVEL = 1
"""What zstd is asked for: higher levels look for matches, of which there are few in weights."""


class Frame(NamedTuple):
    """A frame, and the bytes that it has to hold."""

    data: Buffer
    size: int


def decompress(payload: Buffer, size: int) -> NDArray[np.uint8]:
    """Return the `size` bytes of a frame.

    Raises:
        ValueError, RuntimeError: when it is not one, or of another size.
    """
    check(Frame(payload, size))
    out = np.empty(size, np.uint8)
    if size:
        zstd.decompress(payload, out)
    return out


def decompress_all(frames: Sequence[Frame], out: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Decompress several frames side by side into the beginning of `out`, and return their contents, read-only.

    One that is stored as it is stays where it is.

    One call for all of them: zstd asks the processor for its features whenever it makes a context, which a virtual
    machine answers in some 15 microseconds, as long as a frame of 20 KB takes.

    Args:
        frames: checked here.
        out: room, uint8, at least as long as all of them together.

    Raises:
        ValueError, RuntimeError: when one of them is damaged or of another size.
    """
    contents: list[NDArray[np.uint8]] = []
    packed, end = [], 0
    for frame in frames:
        size, at = _header(frame.data)
        _expect(size, frame.size)
        content = _stored(frame, at)
        if content is None:
            content = out[end : end + size]
            end += size
            if size:
                packed.append((frame, content))
        contents.append(content)
    if len(packed) > 1 and _takes_several():
        zstd.decompress(b"".join([frame.data for frame, _ in packed]), out[:end])
    else:
        for frame, content in packed:
            zstd.decompress(frame.data, content)
    for content in contents:
        content.flags.writeable = False  # all of them, as compiled loops tell the two apart
    return contents


def store(data: Buffer) -> bytes:
    """Return a frame that holds the data as it is."""
    data = memoryview(data).cast("B")
    blocks = [data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK)] or [data]
    return _frame(len(data), [_block(_RAW, bytes(block)) for block in blocks])


def compress_planes(planes: NDArray[np.uint8]) -> bytes:
    """Return a frame that holds byte planes (uint8[width, n]).

    Noise is written as Huffman codes of its bytes, which is smaller than what zstd's first levels make of it, and read
    and written faster (see `huffman`); zstd compresses the rest.
    """
    from mergefs.blocks import huffman

    blocks: list[bytes] = []
    left: tuple[int, int] | None = None
    room = np.empty(_BLOCK, np.uint8)
    flat = planes.reshape(-1)
    for start, stop in _cuts(*planes.shape):
        size = huffman.put_block(flat[start:stop], room) if stop - start >= huffman.SMALLEST else 0
        if size:
            blocks.append(_block(_COMPRESSED, room[:size].tobytes()))
        elif left is None:
            left, place = (start, stop), len(blocks)
        elif left[1] == start:
            left = (left[0], stop)
        else:  # its blocks would begin with the distances of matches at which those of the first part ended
            return bytes(zstd.compress(flat, LEVEL))
    if left is not None:
        blocks[place:place] = _blocks_of(flat[slice(*left)])
    return _frame(flat.size, blocks or [_block(_RAW, b"")])


def _cuts(width: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield where the blocks of byte planes begin and end: none of them holds parts of two planes."""
    for plane in range(width):
        for start in range(plane * n, (plane + 1) * n, _BLOCK):
            yield start, min(start + _BLOCK, (plane + 1) * n)


def _block(kind: int, content: bytes) -> bytes:
    """Return a block that is not the last one; one that repeats a byte is not among its kinds."""
    return (len(content) << 3 | kind << 1).to_bytes(3, "little") + content


def _blocks_of(data: NDArray[np.uint8]) -> list[bytes]:
    """Return the blocks of the frame that zstd makes of some bytes, none of them the last one.

    They may go wherever no block before them has matches: they then refer to nothing but themselves.
    """
    frame = zstd.compress(data, LEVEL)
    blocks = []
    at, last = _header(frame)[1], False
    while not last:
        head = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        end = at + 3 + (1 if kind == _REPEATED else size)
        blocks.append((head & ~1).to_bytes(3, "little") + frame[at + 3 : end])
        at = end
    return blocks


def _frame(size: int, blocks: Sequence[bytes]) -> bytes:
    """Return the frame of blocks that hold `size` bytes, in one segment whose size takes four bytes."""
    last = blocks[-1]
    return b"".join([_MAGIC, b"\xa0", size.to_bytes(4, "little"), *blocks[:-1], bytes([last[0] | 1]), last[1:]])


def check(frame: Frame) -> None:
    """Raise ValueError unless the frame claims to hold what it has to."""
    _expect(_header(frame.data)[0], frame.size)


def content_size(payload: Buffer) -> int:
    """Return the content size in a zstd frame's header."""
    return _header(payload)[0]


def _expect(claimed: int, size: int) -> None:
    if claimed != size:
        raise ValueError(f"a zstd frame of {claimed} bytes where {size} are expected")


def _header(payload: Buffer) -> tuple[int, int]:
    """Return the content size in a zstd frame's header (RFC 8878, section 3.1.1.1), and where the header ends."""
    head = bytes(payload[:18])
    if len(head) < 6 or head[:4] != _MAGIC:
        raise ValueError("not a zstd frame")
    descriptor = head[4]
    single_segment = bool(descriptor & 0x20)
    at = 5 + (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    flag = descriptor >> 6
    width = (1 if single_segment else 0, 2, 4, 8)[flag]
    if not width or len(head) < at + width:
        raise ValueError("a zstd frame without its content size")
    return int.from_bytes(head[at : at + width], "little") + (256 if flag == 1 else 0), at + width


def _stored(frame: Frame, at: int) -> NDArray[np.uint8] | None:
    """Return the content where the block at `at` holds all of it as it is, and nothing else is in the frame."""
    data, size = frame
    end = at + 3 + size
    if len(data) != end or size > _BLOCK or data[4] & 4 or int.from_bytes(data[at : at + 3], "little") != size << 3 | 1:
        return None
    return np.frombuffer(data, np.uint8, size, at + 3)


@functools.cache
def _takes_several() -> bool:
    """Whether this numcodecs decompresses frames that follow one another (0.16.4 and newer)."""
    try:
        return bytes(zstd.decompress(zstd.compress(b"a", 1) + zstd.compress(b"b", 1))) == b"ab"
    except RuntimeError:
        return False
