"""Every encoding gives back exactly the bytes that went in."""

from __future__ import annotations

from typing import Any

import numcodecs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from mergefs.blocks.codecs import Encoding, UlpDelta, chain, decode, encode
from mergefs.blocks.encoding import TIERED
from mergefs.dtypes import DTYPES, DType
from mergefs.errors import CorruptionError

NAMES = list(DTYPES)
SPECIAL = {
    "BF16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF],
    "F16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFFFF],
    "F32": [0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    "F64": [0, 1 << 63, 1, 0x7FEFFFFFFFFFFFFF, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 2**64 - 1],
    "F8_E4M3": list(range(256)),
    "F8_E5M2": list(range(256)),
}

LENGTHS = st.integers(0, 200)


def elements(dtype: DType) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Return arrays of arbitrary bits."""
    return numpy_st.arrays(np.dtype(f"u{dtype.itemsize}"), LENGTHS)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[DType, bytes, bytes]:
    """Return a dtype and two blocks of one length, near each other or not."""
    dtype = DTYPES[draw(st.sampled_from(NAMES))]
    base = draw(elements(dtype))
    bits = base.dtype
    near = draw(st.booleans())
    other = draw(
        numpy_st.arrays(
            bits, base.shape, elements=st.integers(0, 3) if near else st.integers(0, 2 ** (8 * bits.itemsize) - 1)
        )
    )
    with np.errstate(over="ignore"):
        raw = (base + other).astype(bits) if near else other
    return dtype, raw.tobytes(), base.tobytes()


def through(dtype: DType, raw: bytes, base: bytes | None) -> Encoding:
    """Check one block's way there and back, and by numcodecs; return how it was encoded."""
    encoded = encode(raw, dtype, base)
    needed = base if encoded.encoding.needs_base else None
    assert len(encoded.payload) <= len(raw)
    assert bytes(decode(encoded.encoding, encoded.payload, len(raw), dtype.code, needed)) == raw
    data: Any = encoded.payload
    for codec in reversed(chain(encoded.encoding, dtype.code, needed)):
        data = codec.decode(data)
    assert bytes(memoryview(data)) == raw
    return encoded.encoding


@given(pairs())
@settings(deadline=None)  # kernels are compiled on first use
def test_any_block_comes_back(case: tuple[DType, bytes, bytes]) -> None:
    dtype, raw, base = case
    through(dtype, raw, None)
    through(dtype, raw, base)
    through(dtype, raw, raw)


@given(st.sampled_from(NAMES), st.integers(1, 3000), st.integers(0, 2**32 - 1))
@example("BF16", 2048, 0)
@settings(max_examples=40, deadline=None)
def test_blocks_that_compress_come_back(name: str, count: int, seed: int) -> None:
    dtype = DTYPES[name]
    random = np.random.default_rng(seed)
    bits = np.dtype(f"u{dtype.itemsize}")
    base = random.integers(0, np.iinfo(bits).max, count, bits, endpoint=True)
    step = random.integers(0, 2, count).astype(bits)
    with np.errstate(over="ignore"):
        raw = (base + step).astype(bits)
    found = through(dtype, raw.tobytes(), base.tobytes())
    if count >= 1000:
        assert found is Encoding.ULP_ZSTD
        assert through(dtype, step.tobytes(), None) in (Encoding.ZSTD, Encoding.SHUFFLE_ZSTD)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_floats_come_back_from_any_other(name: str) -> None:
    dtype = DTYPES[name]
    values = np.array(SPECIAL[name], f"u{dtype.itemsize}")
    raw, base = (np.ascontiguousarray(a).tobytes() for a in np.meshgrid(values, values))
    assert raw != base
    through(dtype, raw, base)
    through(dtype, base, raw)
    codec = UlpDelta(name, base)
    assert codec.decode(codec.encode(raw)).tobytes() == raw


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "BF16", "F16"])
def test_every_difference_of_small_floats_comes_back(name: str) -> None:
    dtype = DTYPES[name]
    size = 1 << 8 * dtype.itemsize
    base = np.arange(size).astype(f"u{dtype.itemsize}")
    for shift in (0, 1, size // 2 - 1, size // 2, size // 2 + 1, size - 1):
        through(dtype, np.roll(base, shift).tobytes(), base.tobytes())


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_unchanged_blocks(name: str) -> None:
    dtype = DTYPES[name]
    through(dtype, b"", None)
    through(dtype, b"", b"")
    raw = np.random.default_rng(0).bytes(1024 * dtype.itemsize)
    assert through(dtype, raw, None) is Encoding.RAW
    assert through(dtype, raw, raw) is Encoding.ULP_ZSTD
    assert len(encode(raw, dtype, raw).payload) < 60


@pytest.mark.parametrize("name", NAMES)
def test_the_codec_is_known_to_numcodecs(name: str) -> None:
    random = np.random.default_rng(1)
    raw, base = random.bytes(64), random.bytes(64)
    codec = numcodecs.get_codec({"id": "mergefs_ulp", "dtype": name})
    assert isinstance(codec, UlpDelta)
    assert codec.get_config() == {"id": "mergefs_ulp", "dtype": name}
    with pytest.raises(ValueError, match="base"):
        codec.encode(raw)
    codec.base = base
    planes = codec.encode(raw)
    assert codec.decode(planes).tobytes() == raw
    out = np.empty(64, np.uint8)
    codec.decode(planes, out)
    assert out.tobytes() == raw


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        encode(bytes(8), DTYPES["BF16"], bytes(6))
    found = encode(bytes(4096), DTYPES["BF16"], bytes(4096))
    assert found.encoding is Encoding.ULP_ZSTD
    for base in (None, bytes(4094)):
        with pytest.raises(CorruptionError, match="base"):
            decode(found.encoding, found.payload, 4096, DTYPES["BF16"].code, base)


@pytest.mark.parametrize("encoding", [encoding for encoding in Encoding if encoding not in TIERED])
def test_payloads_that_are_damaged_are_corruption(encoding: Encoding) -> None:
    dtype = DTYPES["F32"]
    base = np.arange(1024, dtype=np.float32).tobytes()
    raw = {
        Encoding.RAW: np.random.default_rng(0).bytes(4096),
        Encoding.ZSTD: bytes(4096),
        Encoding.SHUFFLE_ZSTD: bytes(4096),
        Encoding.ULP_ZSTD: base,
    }[encoding]
    kind = DTYPES["U8"] if encoding is Encoding.ZSTD else dtype
    found = encode(raw, kind, base if encoding.needs_base else None)
    assert found.encoding is encoding
    for payload in (found.payload[:-1], b"", b"\0" * 20):
        with pytest.raises(CorruptionError):
            decode(encoding, payload, len(raw), kind.code, base)
    for raw_length in (0, 4092, 4100):
        with pytest.raises(CorruptionError):
            decode(encoding, found.payload, raw_length, kind.code, base)


def test_unknown_numbers_are_corruption() -> None:
    with pytest.raises(CorruptionError):
        decode(200, b"", 0, DTYPES["U8"].code)
    with pytest.raises(CorruptionError):
        decode(Encoding.SHUFFLE_ZSTD, b"", 0, 250)
