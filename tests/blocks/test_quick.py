"""Exact tiers `quick`: with a byte or a nibble an element, as spec/tiers.md says, and straight into merges."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergefs.blocks import tiers
from mergefs.blocks.tiers import exact_quick
from mergefs.blocks.tiers.delta import Together
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer

Bits = NDArray[np.uint16]


def ordered(bits: Bits) -> NDArray[np.int64]:
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, wide ^ 0xFFFF, wide ^ 0x8000)


def differences(expert: Bits, base: Bits) -> NDArray[np.int64]:
    """z of spec/tiers.md, with p = base."""
    signed = ((ordered(expert) - ordered(base) + 0x8000) & 0xFFFF) - 0x8000
    return np.where(signed < 0, -2 * signed - 1, 2 * signed)


def read_nibbles(payload: bytes, base: Bits) -> NDArray[np.int64]:
    """Return z as the specification says, element by element."""
    kind, top, zero, none, wide, more = struct.unpack_from("<BBBBII", payload)
    assert (kind, zero, none) == (6, 0, 0)
    n = base.size
    plane = 32 * -(-n // 64)
    found = np.zeros(n, np.int64)
    for i in range(n):
        run, place = divmod(i, 64)
        both = payload[12 + 32 * run + place % 32]
        found[i] = both >> 4 if place >= 32 else both & 15
    second = payload[12 + plane :]
    below = [i for i in range(n) if (int(base[i]) >> 7) & 255 < top]
    assert len(below) == wide
    for j, i in enumerate(below):
        found[i] += 16 * (second[j // 2] >> 4 if j % 2 else second[j // 2] & 15)
    rest = second[(wide + 1) // 2 :]
    places, values = np.frombuffer(rest, "<u4", more), np.frombuffer(rest, "<u2", more, 4 * more)
    assert len(rest) == 6 * more
    found[places] = values
    return found


def fine_tune(n: int, seed: int, scale: float = 3e-4) -> tuple[Bits, Bits]:
    random = np.random.default_rng(seed)
    values = (0.02 * random.standard_normal(n)).astype(np.float32)
    other = values + (scale * random.standard_normal(n)).astype(np.float32)
    return tuple((v.view(np.uint32) >> 16).astype(np.uint16) for v in (values, other))  # type: ignore[return-value]


def decoded(payload: Buffer, base: Bits) -> Bits:
    return np.frombuffer(tiers.decode([payload], base.tobytes()), np.uint16)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 5000),
    st.integers(0, 1 << 30),
    st.one_of(st.none(), st.integers(0, 255)),
    st.sampled_from(["fine-tune", "any", "same"]),
)
def test_what_is_written_is_read_and_is_what_the_specification_says(
    n: int, seed: int, top: int | None, kind: str
) -> None:
    base, expert = fine_tune(n, seed)
    if kind == "any":
        base, expert = np.random.default_rng(seed).integers(0, 1 << 16, (2, n)).astype(np.uint16)
    elif kind == "same":
        expert = base
    chosen = exact_quick.payload(expert, base)
    assert decoded(chosen, base).tobytes() == expert.tobytes()
    if top is None:
        payload = exact_quick.in_bytes(expert, base)
    else:
        payload = exact_quick.in_nibbles(expert, base, top)
        assert read_nibbles(payload, base).tolist() == differences(expert, base).tolist()
    assert decoded(payload, base).tobytes() == expert.tobytes()
    delta = tiers.decode_delta([payload], base.tobytes())
    with np.errstate(invalid="ignore", over="ignore"):
        expected = widened(expert) - widened(base)
    np.testing.assert_array_equal(delta, expected)


def test_nibbles_are_taken_where_they_save_a_quarter() -> None:
    n = 1 << 17
    for scale, nibbles in ((1e-5, True), (1e-4, True), (3e-4, False), (0.05, False)):
        base, expert = fine_tune(n, 3, scale)
        chosen = exact_quick.payload(expert, base)
        assert (chosen[0] == 6) is nibbles
        in_bytes = exact_quick.in_bytes(expert, base)
        smallest = min(len(exact_quick.in_nibbles(expert, base, top)) for top in range(100, 130))
        assert (smallest < 0.75 * len(in_bytes)) is nibbles
        assert len(chosen) <= 1.03 * smallest if nibbles else chosen == in_bytes


@pytest.mark.parametrize("top", [0, 119, 255])
def test_damage_is_refused_or_another_block(top: int) -> None:
    base, expert = fine_tune(3001, 4)
    payload = exact_quick.in_nibbles(expert, base, top)
    random = np.random.default_rng(5)
    refused = 0
    for cut in (0, 1, 11, 12, len(payload) // 2, len(payload) - 1):
        with pytest.raises(CorruptionError):
            decoded(payload[:cut], base)
    with pytest.raises(CorruptionError):
        decoded(payload + b"\0", base)
    for _ in range(300):
        damaged = bytearray(payload)
        damaged[int(random.choice([random.integers(12), random.integers(len(payload))]))] ^= 1 << int(
            random.integers(8)
        )
        try:
            assert decoded(damaged, base).size == base.size
        except CorruptionError:
            refused += 1
    assert refused > 20


def test_another_base_is_refused_where_it_has_other_classes() -> None:
    base, expert = fine_tune(3001, 4)
    payload = exact_quick.in_nibbles(expert, base, 119)
    with pytest.raises(CorruptionError, match="another base"):
        decoded(payload, np.zeros_like(base))
    with pytest.raises(CorruptionError, match="does not fit"):
        decoded(payload, base[:1500])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 1 << 30), st.lists(st.floats(0, 1), min_size=1, max_size=4), st.booleans())
def test_several_experts_of_which_some_changed_in_some_runs(
    n: int, seed: int, shares: list[float], specials: bool
) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 16, n).astype(np.uint16) if specials else fine_tune(n, seed)[0]
    experts, opened = [], []
    for slot, share in enumerate(shares):
        other = fine_tune(n, seed + slot, scale=(1e-4, 3e-2)[slot % 2])[1]
        changed = np.repeat(random.random(-(-n // 64)) < share, 64)[:n]
        experts.append(np.where(changed, other, base))
        found = tiers.encode_always(experts[-1].tobytes(), base.tobytes(), "quick").tiers
        assert decoded(found[-1], base).tobytes() == experts[-1].tobytes()
        opened.append(tiers.open_delta(found[-1:], base.tobytes(), slot=slot))
    together = Together(opened)
    assert together.apart == []
    assert together.table is not None
    size = 64 * int(random.integers(1, -(-n // 64) + 1))
    for first in range(0, n, size):
        part = np.empty((len(shares), min(size, n - first)), np.float32)
        together.write(first, part)
        for row, expert in zip(part, experts, strict=True):
            mine = slice(first, first + row.size)
            with np.errstate(invalid="ignore", over="ignore"):
                expected = widened(expert[mine]) - widened(base[mine])
            np.testing.assert_array_equal(row, expected)
    for row in range(len(shares)):
        together.check(row)


def widened(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_parts_are_asked_for_in_order() -> None:
    base, expert = fine_tune(9001, 6)
    for payload in (exact_quick.in_nibbles(expert, base, 119), exact_quick.in_bytes(expert, base)):
        whole = tiers.decode_delta([payload], base.tobytes())
        for size in (64, 640, 2048, 8960):
            delta = tiers.open_delta([payload], base.tobytes())
            with pytest.raises(CorruptionError, match="were asked for"):
                delta.write(64, np.empty(64, np.float32))
            for first in range(0, base.size, size):
                part = np.empty(min(size, base.size - first), np.float32)
                delta.write(first, part)
                np.testing.assert_array_equal(part, whole[first : first + part.size])
        with pytest.raises(CorruptionError, match="were asked for"):
            tiers.open_delta([payload], base.tobytes()).write(0, np.empty(65, np.float32))


def test_a_tier_for_another_base_is_found_among_several() -> None:
    """Another base's classes are found when all was used, whatever was read by then."""
    base, expert = fine_tune(5000, 6)
    other = base.copy()
    other[2500:] = 0
    opened = [
        tiers.open_delta([exact_quick.in_nibbles(expert, below, 119)], base.tobytes(), slot=slot, name=f"block {slot}")
        for slot, below in enumerate((base, other, base))
    ]
    together = Together(opened)
    together.write(0, np.empty((3, 5000), np.float32))
    together.check(0)
    together.check(2)
    with pytest.raises(CorruptionError, match=r"block 1 is damaged.*another base"):
        together.check(1)
