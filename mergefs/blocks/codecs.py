"""Encodings: how a block's bytes lie in a pack. See spec/format.md.

Each encoding is a numcodecs codec, or a chain of them, so that a payload can be decoded by naming its codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numcodecs
import numcodecs.zstd as zstd
import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray
from numpy.typing import NDArray

from mergefs.blocks.encoding import TIERED
from mergefs.blocks.encoding import Encoding as Encoding
from mergefs.blocks.exact import Exact
from mergefs.blocks.floats import unsigned
from mergefs.blocks.pack import NO_BASE, Record
from mergefs.blocks.zstd_frames import LEVEL, compress_planes, decompress
from mergefs.dtypes import BY_CODE, DTYPES, DType
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer

WORTH_IT = 0.95
"""A smaller encoding is used when it is at most this share of the raw size."""

WORTH_TIERS = 1 << 16
"""Smaller blocks have no tiers: records and headers would cost more than the choice is worth."""


@dataclass(frozen=True)
class Encoded:
    """A block's payloads and how to read them.

    Attributes:
        encoding: that of the last payload.
        payloads: one, or one for each tier.
        errors: of tiers, the squared error that remains after each.
        sampled: with several tiers, float32[sample, 3]: what the coarse ones give for the sampled elements.
    """

    encoding: Encoding
    payloads: tuple[bytes, ...]
    errors: tuple[float, ...] = ()
    sampled: NDArray[np.float32] | None = None

    @property
    def payload(self) -> bytes:
        """The only payload."""
        (payload,) = self.payloads
        return payload

    def encoding_of(self, tier: int) -> Encoding:
        """Return how one of the payloads is to be read."""
        return self.encoding if tier == len(self.payloads) - 1 else Encoding.TIERS


def encode(raw: Buffer, dtype: DType, base: Buffer | None = None, exact: Exact = "fast") -> Encoded:
    """Encode a block's bytes: with `quick` in a way that is decoded in no time, otherwise in the smallest that pays.

    Args:
        raw: the block's bytes.
        dtype: its element type; U8 for a blob.
        base: the bytes of a block of the same length and dtype to take the difference from, or None.
        exact: the repository's coding.
    """
    if exact == "quick" and dtype.itemsize > 1:
        return _encode_quick(raw, dtype, base)
    limit = int(len(raw) * WORTH_IT)
    if base is not None:
        delta = _ulp_encode(raw, base, dtype)
        if len(delta) <= min(limit, len(raw) * 6 // 10):
            return Encoded(Encoding.ULP_ZSTD, (delta,))
        alone = encode(raw, dtype)
        if len(delta) <= limit and len(delta) < len(alone.payload):
            return Encoded(Encoding.ULP_ZSTD, (delta,))
        return alone
    if dtype.itemsize == 1:
        payload, encoding = zstd.compress(raw, LEVEL), Encoding.ZSTD
    else:
        payload, encoding = _pack(_shuffle(raw, dtype.itemsize), dtype), Encoding.SHUFFLE_ZSTD
    if len(payload) <= limit:
        return Encoded(encoding, (payload,))
    return Encoded(Encoding.RAW, (bytes(raw),))


def encode_tiered(
    raw: Buffer, dtype: DType, base: Buffer, exact: Exact, sample: NDArray[np.int64] | None = None
) -> Encoded:
    """Encode an expert's block as tiers where that applies and pays, else as `encode` does.

    Args:
        raw, dtype, base: see `encode`.
        exact: the coding of the exact tier.
        sample: places of elements whose coarse deltas are wanted.
    """
    from mergefs.blocks import tiers

    found = tiers.encode(raw, base, dtype, exact, sample) if len(raw) >= WORTH_TIERS else None
    if found is None:
        return encode(raw, dtype, base, exact)
    encoding = Encoding.QUICK if exact == "quick" else Encoding.TIERS
    return Encoded(encoding, found.tiers, found.errors, found.sampled if len(found.tiers) > 1 else None)


def _encode_quick(raw: Buffer, dtype: DType, base: Buffer | None) -> Encoded:
    from mergefs.blocks import tiers

    limit = int(len(raw) * WORTH_IT)
    if base is not None:
        payload = tiers.encode_quick(raw, base, dtype)
        if payload is not None and len(payload) <= limit:
            return Encoded(Encoding.QUICK, (payload,))
        delta = encode(raw, dtype, base)
        if delta.encoding is Encoding.ULP_ZSTD:
            return delta
    return Encoded(Encoding.RAW, (bytes(raw),))


def is_sound(record: Record) -> bool:
    """Tell whether a record is of a block that there can be: of a known encoding and dtype, of whole elements, with
    several tiers and a base only where its encoding has them."""
    if record.encoding not in list(Encoding) or record.dtype not in BY_CODE:
        return False
    encoding = Encoding(record.encoding)
    return (
        record.raw_length % BY_CODE[record.dtype].itemsize == 0
        and (record.tiers == 1 or (encoding.needs_base and encoding is not Encoding.ULP_ZSTD))
        and (record.base != NO_BASE) == encoding.needs_base
    )


def decode_tiers(payloads: Sequence[Buffer], raw_length: int, base: Buffer) -> Buffer:
    """Return a block's bytes from its tiers: all, or of `quick` ones the last alone.

    Raises:
        CorruptionError: when they do not decode.
    """
    from mergefs.blocks import tiers

    if len(base) != raw_length:
        raise CorruptionError(f"a base block of {len(base)} bytes for a block of {raw_length}")
    return tiers.decode(payloads, base)


def decode(encoding: int, payload: Buffer, raw_length: int, dtype_code: int, base: Buffer | None = None) -> Buffer:
    """Return the `raw_length` bytes of a block.

    Raises:
        CorruptionError: when the payload does not decode to exactly that many bytes.
    """
    try:
        kind = Encoding(encoding)
        dtype = BY_CODE[dtype_code]
        if kind is Encoding.RAW:
            raw: Buffer = payload
        elif kind is Encoding.ZSTD:
            raw = decompress(payload, raw_length).data
        elif kind in TIERED:
            raise ValueError("its tiers are several payloads")
        elif kind is Encoding.SHUFFLE_ZSTD:
            raw = _unshuffle(decompress(payload, raw_length), dtype.itemsize)
        else:
            if base is None or len(base) != raw_length:
                raise ValueError("its base block is missing or of another length")
            raw = _ulp_decode(decompress(payload, raw_length), base, dtype)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CorruptionError(f"a block's payload does not decode: {error}") from error
    if len(raw) != raw_length:
        raise CorruptionError(f"a block's payload decodes to {len(raw)} bytes instead of {raw_length}")
    return raw


def chain(encoding: int, dtype_code: int, base: Buffer | None = None) -> list[Codec]:
    """Return the numcodecs codecs of an encoding in the order of encoding; decode from the last to the first.

    Args:
        encoding: the number in the pack's record.
        dtype_code: the dtype's number in the pack's record.
        base: the base block's bytes, needed by `mergefs_ulp`.
    """
    kind, dtype = Encoding(encoding), BY_CODE[dtype_code]
    if kind is Encoding.RAW:
        return []
    compressor = numcodecs.Zstd(level=LEVEL)
    if kind is Encoding.ZSTD:
        return [compressor]
    if kind is Encoding.SHUFFLE_ZSTD:
        return [numcodecs.Shuffle(elementsize=dtype.itemsize), compressor]
    if kind in TIERED:
        from mergefs.blocks.tiers.codec import TieredDelta

        return [TieredDelta(base=base)]
    return [UlpDelta(dtype.name, base), compressor]


class UlpDelta(Codec):  # type: ignore[misc]
    """The exact difference of a block from its base block in units in the last place, as byte planes.

    Args:
        dtype: the safetensors name of the element type.
        base: the base block's bytes (not part of the codec's configuration: give it before use).
    """

    codec_id = "mergefs_ulp"

    def __init__(self, dtype: str, base: Buffer | None = None) -> None:
        self.dtype = dtype
        self.base = base

    def encode(self, buf: Any) -> NDArray[np.uint8]:
        """Return uint8[n * itemsize]: the byte planes of the zigzag differences, lowest first."""
        return _difference(_bytes(buf), self._base(), self._type())

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the block's bytes from its planes."""
        raw = _ulp_decode(np.frombuffer(_bytes(buf), np.uint8), self._base(), self._type())
        return numcodecs.compat.ndarray_copy(np.frombuffer(raw, np.uint8), out)

    def get_config(self) -> dict[str, Any]:
        """The configuration without the base's bytes."""
        return {"id": self.codec_id, "dtype": self.dtype}

    def _type(self) -> DType:
        found = DTYPES.get(self.dtype)
        if found is None:
            raise ValueError(f"mergefs_ulp knows no dtype {self.dtype!r}")
        return found

    def _base(self) -> Buffer:
        if self.base is None:
            raise ValueError("mergefs_ulp needs the base block's bytes")
        return self.base


def _bytes(buf: Any) -> memoryview:
    return memoryview(ensure_contiguous_ndarray(buf).view(np.uint8))


def _shuffle(raw: Buffer, width: int) -> NDArray[np.uint8]:
    from mergefs.blocks import kernels

    source = np.frombuffer(raw, np.uint8)
    out = np.empty(source.size, np.uint8)
    if width == 2:
        kernels.shuffle2(source, out)
    else:
        kernels.shuffle(source, width, out)
    return out


def _unshuffle(planes: NDArray[np.uint8], width: int) -> memoryview:
    from mergefs.blocks import kernels

    if planes.size % width:
        raise ValueError(f"planes of {planes.size} bytes for elements of {width}")
    out = np.empty(planes.size, np.uint8)
    if width == 2:
        kernels.unshuffle2(planes, out)
    else:
        kernels.unshuffle(planes, width, out)
    return out.data


def _difference(raw: Buffer, base: Buffer, dtype: DType) -> NDArray[np.uint8]:
    from mergefs.blocks import kernels

    width = dtype.itemsize
    expert_bits, base_bits = unsigned(raw, width), unsigned(base, width)
    if expert_bits.size != base_bits.size:
        raise ValueError("a block and its base differ in length")
    planes = np.empty(expert_bits.size * width, np.uint8)
    if width == 2:
        kernels.difference16(expert_bits, base_bits, dtype.is_float, planes)
    else:
        kernels.difference64(expert_bits, base_bits, 8 * width, dtype.is_float, planes)
    return planes


def _ulp_encode(raw: Buffer, base: Buffer, dtype: DType) -> bytes:
    return _pack(_difference(raw, base, dtype), dtype)


def _pack(planes: NDArray[np.uint8], dtype: DType) -> bytes:
    """Compress the byte planes of elements, uint8[n * itemsize]."""
    return compress_planes(planes.reshape(dtype.itemsize, -1))


def _ulp_decode(planes: NDArray[np.uint8], base: Buffer, dtype: DType) -> memoryview:
    from mergefs.blocks import kernels

    width = dtype.itemsize
    if planes.size != len(base):
        raise ValueError(f"planes of {planes.size} bytes for a base block of {len(base)}")
    base_bits = unsigned(base, width)
    out = np.empty(base_bits.size, base_bits.dtype)
    if width == 2:
        kernels.restore16(planes, base_bits, dtype.is_float, out)
    else:
        kernels.restore64(planes, base_bits, 8 * width, dtype.is_float, out)
    return memoryview(out.view(np.uint8))
