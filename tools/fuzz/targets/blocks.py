"""What blocks are stored as: encodings, zstd frames, Huffman codes, numcodecs' codecs."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence

import numpy as np

from mergefs.blocks import codecs, zstd_frames
from mergefs.blocks.codecs import Encoding, UlpDelta
from mergefs.dtypes import BY_CODE, DTYPES
from mergefs.errors import CorruptionError
from mergefs.hashing import digest
from tools.fuzz.mutate import change_bytes
from tools.fuzz.target import Mutate, Run, Target

_HEAD = struct.Struct("<BBI")
_MAGIC = re.compile(re.escape(b"\x28\xb5\x2f\xfd"))


def noise(seed: int, size: int) -> bytes:
    """Return bytes of a skewed distribution."""
    values = np.random.default_rng(seed).normal(0, 9, size)
    return values.astype(np.int8).tobytes()


def frames() -> list[bytes]:
    """Return zstd frames of every kind of block."""
    found = [zstd_frames.store(b""), zstd_frames.store(b"abc"), zstd_frames.store(noise(1, 9000))]
    for size in (0, 1, 300, 3000, 20_000):
        planes = np.frombuffer(noise(2, size), np.uint8)
        found.append(zstd_frames.compress_planes(planes.reshape(1, -1)))
        found.append(bytes(zstd_frames.zstd.compress(planes, 1)))
    found.append(bytes(zstd_frames.zstd.compress(bytes(5000), 1)))
    return found


def change_frames(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    """Change the content of a frame that lies somewhere in the data, and pack it again; bytes where there is none.

    Where the four bytes before it were its length, they are again.
    """
    starts = [found.start() for found in _MAGIC.finditer(data)]
    if not starts or rng.randrange(4) == 0:
        return change_bytes(rng, data, kept)
    start = rng.choice(starts)
    later = [at for at in starts if at > start]
    stop = len(data)
    sized = start >= 4 and start + int.from_bytes(data[start - 4 : start], "little") <= len(data)
    if sized and int.from_bytes(data[start - 4 : start], "little") > 4:
        stop = start + int.from_bytes(data[start - 4 : start], "little")
    elif later:
        return change_bytes(rng, data, kept)
    try:
        size = zstd_frames.content_size(data[start:stop])
        content = zstd_frames.decompress(data[start:stop], size).tobytes() if size < 1 << 20 else b""
    except (ValueError, RuntimeError):
        return change_bytes(rng, data, kept)
    changed = change_bytes(rng, content, ())
    if rng.randrange(3):  # of the length that is expected
        changed = (changed + content)[: len(content)]
    frame = zstd_frames.store(changed) if rng.randrange(2) else bytes(zstd_frames.zstd.compress(changed, 1))
    if rng.randrange(20) == 0:
        frame = _claiming(rng, frame)
    before = data[:start]
    if sized and stop < len(data) + 1 and stop != len(data):
        before = data[: start - 4] + len(frame).to_bytes(4, "little")
    found = before + frame + data[stop:]
    return change_bytes(rng, found, kept) if rng.randrange(6) == 0 else found


def _claiming(rng: random.Random, frame: bytes) -> bytes:
    """Return a frame whose header says another size."""
    size = rng.choice((0, 1, 1 << 16, 1 << 20, 1 << 32, 1 << 40, (1 << 64) - 1))
    head = 9 if frame[4] >> 6 == 2 else 6
    return frame[:4] + b"\xe0" + size.to_bytes(8, "little") + frame[head:]


def _frame() -> Run:
    room = np.empty(3 << 18, np.uint8)

    def run(data: bytes) -> None:
        claimed = zstd_frames.content_size(data)
        size = min(claimed, 1 << 18)
        contents = zstd_frames.decompress_all([zstd_frames.Frame(data, size)], room)
        alone = zstd_frames.decompress(data, size)
        assert contents[0].tobytes() == alone.tobytes()
        again = zstd_frames.decompress_all([zstd_frames.Frame(data, size)] * 3, room)
        assert all(content.tobytes() == alone.tobytes() for content in again)

    return run


def _several() -> Run:
    good = zstd_frames.store(b"good" * 10), bytes(zstd_frames.zstd.compress(b"better" * 100, 1))
    room = np.empty(1 << 20, np.uint8)

    def run(data: bytes) -> None:
        claimed = min(zstd_frames.content_size(data), 1 << 18)
        asked = [zstd_frames.Frame(good[0], 40), zstd_frames.Frame(data, claimed), zstd_frames.Frame(good[1], 600)]
        contents = zstd_frames.decompress_all(asked, room)
        assert contents[0].tobytes() == b"good" * 10
        assert [len(content) for content in contents] == [40, claimed, 600]

    return run


_ENCODINGS = (Encoding.RAW, Encoding.ZSTD, Encoding.SHUFFLE_ZSTD, Encoding.ULP_ZSTD, Encoding.TIERS)


def _payload_seeds() -> list[bytes]:
    found = []
    for name in ("BF16", "U8", "F32", "F64", "F8_E4M3", "I64"):
        dtype = DTYPES[name]
        raw, base = noise(3, 4096), noise(4, 4096)
        for below in (None, base, raw[:-8] + base[-8:]):
            encoded = codecs.encode(raw, dtype, below)
            found.append(_HEAD.pack(encoded.encoding, dtype.code, len(raw)) + encoded.payload)
    return found


def _payload() -> Run:
    base = noise(4, 4096)

    def run(data: bytes) -> None:
        if len(data) < _HEAD.size:
            return
        encoding, dtype, size = _HEAD.unpack_from(data)
        size %= 1 << 16
        below = base[:size] if encoding == Encoding.ULP_ZSTD else None
        assert len(codecs.decode(encoding, data[_HEAD.size :], size, dtype, below)) == size

    return run


def _payload_mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    head, payload = data[: _HEAD.size], data[_HEAD.size :]
    if rng.randrange(4) == 0 and len(head) == _HEAD.size:
        encoding, dtype, size = _HEAD.unpack(head)
        head = _HEAD.pack(
            rng.choice((encoding, rng.randrange(7))),
            rng.choice((dtype, rng.randrange(18), 255)),
            rng.choice((size, size - 1, size + 1, 4096, 4095, 4, 0, size // 2, 65535, rng.randrange(1 << 16)))
            % (1 << 32),
        )
        if rng.randrange(2):
            return head + payload
    return head + change_frames(rng, payload, [other[_HEAD.size :] for other in kept[:16]])


def _ulp() -> Run:
    base = noise(4, 4096)

    def run(data: bytes) -> None:
        if not data:
            return
        name = list(DTYPES)[data[0] % len(DTYPES)]
        codec = UlpDelta(name, base[: 4096 - data[0] % 3])
        assert len(bytes(codec.decode(data[1:]))) == len(data) - 1
        codec.encode(data[1:])

    return run


def _ulp_seeds() -> list[bytes]:
    found = []
    for number, name in enumerate(DTYPES):
        found.append(bytes([number]) + UlpDelta(name, noise(4, 4096)).encode(noise(5, 4096)).tobytes())
    return found


def _round_trip() -> Run:
    """Whatever bytes a block has, they come back."""

    def run(data: bytes) -> None:
        dtype = list(BY_CODE.values())[data[0] % len(BY_CODE) if data else 0]
        raw = data[1:]
        raw = raw[: len(raw) // 16 * 16]
        first, second = raw[: len(raw) // 2], raw[len(raw) // 2 :]
        for base in (None, second):
            encoded = codecs.encode(first, dtype, base)
            below = base if encoded.encoding.needs_base else None
            found = codecs.decode(encoded.encoding, encoded.payload, len(first), dtype.code, below)
            assert digest(found) == digest(first)

    return run


def _round_trip_seeds() -> list[bytes]:
    return [bytes([n]) + noise(n, 64 << n) for n in range(8)] + [b"\x09" + noise(9, 60_000), b"\x03" + bytes(9000)]


def _stretched(change: Mutate) -> Mutate:
    """Return a way that now and then repeats its input, as what is short has no codes of its own."""

    def mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
        found = change(rng, data, kept)
        return found * rng.randrange(2, 9) if rng.randrange(8) == 0 else found

    return mutate


_REFUSED = (ValueError, RuntimeError)
"""What functions say that their callers make a CorruptionError of."""

TARGETS = (
    Target("zstd-frame", frames, _frame, change_frames, 50, _REFUSED, 1 << 17),
    Target("zstd-frames", frames, _several, change_frames, 60, _REFUSED, 1 << 17),
    Target("block-payload", _payload_seeds, _payload, _payload_mutate, 70, (CorruptionError,)),
    Target("ulp-codec", _ulp_seeds, _ulp, change_bytes, 80, (ValueError,)),
    Target("block-round-trip", _round_trip_seeds, _round_trip, _stretched(change_bytes), 12, ()),
)
