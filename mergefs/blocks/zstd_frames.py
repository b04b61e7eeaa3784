"""Zstd frames whose claimed size is checked before anything is allocated for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numcodecs.zstd as zstd
import numpy as np
from numpy.typing import NDArray

from mergefs.hashing import Buffer

_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 17
"""The most that a block of a frame may hold."""


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
    parts: list[Buffer] = [_MAGIC, b"\xa0", len(data).to_bytes(4, "little")]  # one segment, its size in 4 bytes
    for block in blocks:
        parts += ((len(block) << 3 | (block is blocks[-1])).to_bytes(3, "little"), block)
    return b"".join(parts)


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
