"""Any prefix of tiers decodes, all of them are exact, and damage is an error or other values, never a crash."""

from __future__ import annotations

import functools
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file

from mergefs.blocks import tiers, zstd_frames
from mergefs.blocks.tiers import encoder
from mergefs.blocks.tiers.codec import TieredDelta
from mergefs.blocks.tiers.kernels import plain, streams, symbols, wide
from mergefs.dtypes import DTYPES
from mergefs.errors import CorruptionError

BF16 = DTYPES["BF16"]
EXACT: tuple[tiers.Exact, ...] = ("fast", "small", "quick")
VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "tiers.json"
SPECIAL = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x0080,
    0x7EFF,
    0x7F00,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC1,
    0xFFFF,
)
Bits = NDArray[np.uint16]

quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bf16(values: Any) -> Bits:
    """Return values cut to bf16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(bits: Bits) -> NDArray[np.float32]:
    """Return the values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


KINDS = {
    "fine-tune": lambda g, r, n: (bf16(g), bf16(g + r.normal(0, 3e-4, n))),
    "coarse grid": lambda g, r, n: (bf16(g), bf16(g + r.normal(0, 3e-5, n))),
    "fine grid": lambda g, r, n: (bf16(g), bf16(g + r.normal(0, 3e-2, n))),
    "any bits": lambda g, r, n: (r.integers(0, 65536, n), r.integers(0, 65536, n)),
    "any finite": lambda g, r, n: (r.integers(0, 65536, n) & 0xBFFF, r.integers(0, 65536, n) & 0xBFFF),
    "special": lambda g, r, n: (r.choice(SPECIAL, n), r.choice(SPECIAL, n)),
    "special in a fine-tune": lambda g, r, n: (
        np.where(r.random(n) < 0.1, r.choice(SPECIAL[:7], n), bf16(g)),
        np.where(r.random(n) < 0.1, r.choice(SPECIAL[:7], n), bf16(g + r.normal(0, 3e-4, n))),
    ),
    "signed zeros": lambda g, r, n: (r.integers(0, 2, n) << 15, r.integers(0, 2, n) << 15),
    "subnormal": lambda g, r, n: (r.integers(0, 256, n), r.integers(0, 2, n) << 15 | r.integers(0, 256, n)),
    "equal": lambda g, r, n: (bf16(g), bf16(g)),
    "base of zeros": lambda g, r, n: (np.zeros(n), bf16(g)),
    "to zero": lambda g, r, n: (bf16(g), np.zeros(n)),
    "one nan": lambda g, r, n: (bf16(g), np.where(np.arange(n) == n // 2, 0x7FC1, bf16(g + r.normal(0, 3e-4, n)))),
    "some rows": lambda g, r, n: (bf16(g), bf16(g + r.normal(0, 3e-4, n) * (np.arange(n) // 96 % 5 == 0))),
    "huge": lambda g, r, n: (bf16(g * 1e38), bf16(g * 1.1e38)),
    "outlier": lambda g, r, n: (bf16(g), bf16(g + r.normal(0, 3e-4, n) + (np.arange(n) == n // 3) * 1e30)),
}


def block(kind: str, n: int, seed: int) -> tuple[Bits, Bits]:
    """Return a base and an expert, uint16[n]."""
    random = np.random.default_rng(seed)
    with np.errstate(over="ignore", invalid="ignore"):
        base, expert = KINDS[kind](random.normal(0, 0.05, n), random, n)
    return np.asarray(base).astype(np.uint16), np.asarray(expert).astype(np.uint16)


lengths = st.one_of(st.integers(0, 200), st.integers(201, 3000), st.sampled_from([4095, 4096, 4097, 8191, 20001]))
blocks = st.builds(block, st.sampled_from(list(KINDS)), lengths, st.integers(0, 2**32 - 1))


@pytest.fixture
def always_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give blocks of any size coarse tiers."""
    monkeypatch.setattr(encoder, "FEWEST", 1)


def check(base: Bits, expert: Bits, exact: tiers.Exact) -> tuple[bytes, ...]:
    """Check what every block's tiers have to be, and return them."""
    raw, base_raw = expert.tobytes(), base.tobytes()
    encoded = tiers.encode_always(raw, base_raw, exact)
    assert tiers.decode(encoded.tiers, base_raw) == raw
    assert len(encoded.errors) == len(encoded.tiers) in (1, 4)
    with np.errstate(invalid="ignore", over="ignore"):
        true = value(expert) - value(base)
    np.testing.assert_array_equal(tiers.decode_delta(encoded.tiers, base_raw), true)
    assert not tiers.decode_delta((), base_raw).any()
    for depth in range(1, len(encoded.tiers)):
        delta = tiers.decode_delta(encoded.tiers[:depth], base_raw)
        assert delta.dtype == np.float32
        assert delta.shape == base.shape
        measured = float(((true.astype(np.float64) - delta) ** 2).sum())
        assert encoded.errors[depth - 1] == pytest.approx(measured, rel=0.01)
    assert encoded.errors[-1] == 0
    return encoded.tiers


@quick
@given(blocks, st.sampled_from(EXACT))
def test_every_block_is_exact(pair: tuple[Bits, Bits], exact: tiers.Exact) -> None:
    check(*pair, exact)


@quick
@given(blocks, st.sampled_from(EXACT))
def test_every_block_is_exact_with_coarse_tiers(
    always_coarse: None, pair: tuple[Bits, Bits], exact: tiers.Exact
) -> None:
    check(*pair, exact)


@quick
@given(st.data(), st.integers(0, 70), st.sampled_from(EXACT))
def test_any_bits_are_exact(always_coarse: None, data: st.DataObject, n: int, exact: tiers.Exact) -> None:
    bits = st.lists(st.integers(0, 65535) | st.sampled_from(SPECIAL), min_size=n, max_size=n)
    base, expert = (np.array(data.draw(bits), np.uint16) for _ in range(2))
    check(base, expert, exact)


@quick
@given(blocks, st.sampled_from(EXACT))
def test_encode_gives_none_or_exact_tiers(pair: tuple[Bits, Bits], exact: tiers.Exact) -> None:
    base, expert = pair
    found = tiers.encode(expert.tobytes(), base.tobytes(), BF16, exact)
    if found is not None:
        assert np.isfinite(value(base)).all()
        assert np.isfinite(value(expert)).all()
        assert sum(map(len, found.tiers)) < 2 * base.size
        assert tiers.decode(found.tiers, base.tobytes()) == expert.tobytes()


@pytest.mark.parametrize("kind", ["one nan", "special", "any bits", "any finite"])
def test_blocks_for_other_encodings(kind: str) -> None:
    base, expert = block(kind, 20000, 1)
    assert tiers.encode(expert.tobytes(), base.tobytes(), BF16) is None


def test_only_bf16_has_tiers() -> None:
    base, expert = (bits.tobytes() for bits in block("fine-tune", 20000, 1))
    for dtype in DTYPES.values():
        assert (tiers.encode(expert, base, dtype) is None) == (dtype.name != "BF16")


def test_lengths_have_to_agree() -> None:
    base, expert = (bits.tobytes() for bits in block("fine-tune", 5000, 1))
    with pytest.raises(ValueError, match="length"):
        tiers.encode(expert, base[:-2], BF16)
    found = tiers.encode_always(expert, base, "fast")
    with pytest.raises(ValueError, match="does not fit"):
        tiers.decode_delta(found.tiers, base, np.empty(4999, np.float32))


@pytest.mark.parametrize(
    ("expert", "sizes", "errors"),
    [
        ("expert-lr1e-5", (0.25, 0.19), (0.75, 0.30, 0.14)),
        ("expert-lr2e-5", (0.28, 0.225), (0.88, 0.38, 0.14)),
        ("expert-lr1e-4", (0.40, 0.345), (0.88, 0.43, 0.17)),
    ],
)
def test_real_matrices(
    slices: Path, expert: str, sizes: tuple[float, float], errors: tuple[float, float, float]
) -> None:
    """Whole sizes, and the relative error of each coarse depth, with its bytes at most a fifth of raw."""
    raw = coarse = 0
    energy, left = 0.0, np.zeros(3)
    whole = dict.fromkeys(EXACT, 0)
    bases, experts = (load_file(slices / name / "model.safetensors") for name in ("base", expert))
    for name, tensor in bases.items():
        if tensor.ndim < 2 or "embedding" in name:
            continue
        base, changed = (t.view(torch.int16).numpy().view(np.uint16).ravel() for t in (tensor, experts[name]))
        raw += changed.nbytes
        energy += float(((value(changed) - value(base)).astype(np.float64) ** 2).sum())
        for exact in EXACT:
            found = tiers.encode(changed.tobytes(), base.tobytes(), BF16, exact)
            assert found is not None
            assert tiers.decode(found.tiers, base.tobytes()) == changed.tobytes()
            whole[exact] += sum(map(len, found.tiers))
        left += found.errors[:3]
        coarse += sum(map(len, found.tiers[:3]))
    assert whole["fast"] / raw < sizes[0]
    assert whole["small"] / raw < sizes[1]
    assert coarse / raw < 0.2
    assert (np.sqrt(left / energy) < errors).all()


@st.composite
def damage(draw: st.DrawFn, payload: bytes) -> bytes:
    """Return a payload that something happened to."""
    changed = bytearray(payload)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "head", "cut", "grow", "word", "copy"]))
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        if kind == "grow":
            changed += draw(st.binary(min_size=1, max_size=20))
        elif kind == "cut":
            del changed[at:]
        elif not changed:
            break
        elif kind == "flip":
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "head":
            changed[at % min(64, len(changed))] = draw(st.integers(0, 255))
        elif kind == "word":
            at %= min(80, len(changed))
            changed[at : at + 4] = struct.pack("<I", draw(st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1])))
        else:
            start = draw(st.integers(0, len(changed) - 1))
            changed[at : at + 16] = changed[start : start + 16]
    return bytes(changed)


def decodes_or_refuses(payloads: list[bytes], base: Bits) -> None:
    """Check that nothing but a CorruptionError comes of any prefix."""
    for depth in range(1, len(payloads) + 1):
        try:
            assert tiers.decode_delta(payloads[:depth], base.tobytes()).shape == base.shape
        except CorruptionError:
            pass
    try:
        assert len(tiers.decode(payloads, base.tobytes())) == 2 * base.size
    except CorruptionError:
        pass


CASES = [(case, exact) for case in (("fine-tune", 6001), ("some rows", 30011), ("any bits", 999)) for exact in EXACT]
cases = st.sampled_from(CASES)


@functools.cache
def sound_tiers(case: tuple[tuple[str, int], tiers.Exact]) -> tuple[Bits, tuple[bytes, ...]]:
    """Return a block's base and its tiers."""
    (kind, n), exact = case
    base, expert = block(kind, n, 5)
    return base, tiers.encode_always(expert.tobytes(), base.tobytes(), exact).tiers


@settings(quick, max_examples=400)
@given(st.data(), cases)
def test_damage_is_refused_or_gives_other_values(data: st.DataObject, case: Any) -> None:
    base, sound = sound_tiers(case)
    payloads = list(sound)
    at = data.draw(st.integers(0, len(payloads) - 1))
    payloads[at] = data.draw(damage(payloads[at]))
    decodes_or_refuses(payloads, base)


@settings(quick, max_examples=100)
@given(st.data(), cases)
def test_tiers_of_other_blocks(data: st.DataObject, case: Any) -> None:
    base, _ = sound_tiers(case)
    every = [payload for other in CASES for payload in sound_tiers(other)[1]]
    decodes_or_refuses(data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=6)), base)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_claimed_sizes_allocate_nothing(case: Any) -> None:
    base, sound = sound_tiers(case)
    tiers.decode(sound, base.tobytes())  # what a thread keeps is there already
    for at, payload in enumerate(sound):
        for start in range(min(len(payload), 60)):
            changed = payload[:start] + b"\xff\xff\xff\x7f" + payload[start + 4 :]
            tracemalloc.start()
            decodes_or_refuses([*sound[:at], changed, *sound[at + 1 :]], base)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < (1 << 20) + 64 * base.size


def test_truncated_and_misplaced_tiers() -> None:
    base, sound = sound_tiers(CASES[0])
    raw = base.tobytes()
    for payloads in (sound[:3], sound[1:], sound[::-1], (*sound, sound[-1]), (sound[0], sound[3]), (b"",), ()):
        with pytest.raises(CorruptionError):
            tiers.decode(payloads, raw)
    with pytest.raises(CorruptionError, match="another base"):
        tiers.decode(sound, (base ^ 0x0080).tobytes())


def words(n: int, fill: int = 0) -> list[NDArray[np.uint64]]:
    """Return room for the three streams of a tier of n elements."""
    return [np.full(n // 64 + 2, fill, np.uint64) for _ in range(3)]


def unpacked(stream: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
    """Return the first bits of a stream."""
    return np.unpackbits(stream.view(np.uint8), count=count, bitorder="little")


def largest_code(unit: float, grid: int) -> int:
    """Return the largest code that a tier may have."""
    limit = 1.5 * 2.0 ** (max(grid, 2) - 128) / float(unit)
    return int(min(np.ceil(limit) - 1, 255))


@quick
@given(st.integers(0, 300) | st.integers(8000, 40000), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_both_forms_of_a_loop_agree(n: int, seed: int, limit: int) -> None:
    """Vectors and words give the same bytes and the same values as the plain loops."""
    random = np.random.default_rng(seed)
    base = bf16(random.normal(0, 0.05, n))
    expert = bf16(value(base) + random.normal(0, 3e-3, n))
    before = random.integers(-3, 4, n).astype(np.int8)
    sign = np.where(before == 0, random.choice([-1, 1], n), np.sign(before))
    q = (2 * before + sign * random.integers(0, 2, n)).astype(np.int8)
    unit = np.float32(2.0**-14)
    codes = np.uint64(
        int.from_bytes(random.integers(0, largest_code(unit, limit) + 1, 8, np.uint8).tobytes(), "little")
    )
    results: list[list[Any]] = []
    for form in (plain, wide):
        delta, predicted = np.zeros(n, np.float32), np.zeros(n, np.uint16)
        sizes = form.table(codes, unit, limit)
        form.delta(base, q, sizes, delta)
        form.predict(base, q, codes, unit, predicted)
        error = form.remaining(expert, base, q, sizes, np.empty(1024, np.float32))
        written = words(n, 2**64 - 1)
        counts = form.split(q, before, base, limit, *written)
        for stream, count in zip(written, counts, strict=True):
            assert not unpacked(stream, -(-count // 8) * 8)[count:].any()
        refined, used = before.copy(), np.zeros(3, np.uint64)
        half = n // 128 * 64
        form.refine(refined[:half], base[:half], limit, *written, used)
        form.refine(refined[half:], base[half:], limit, *written, used)
        assert tuple(used.tolist()) == counts
        results.append([delta, predicted, error, *map(unpacked, written, counts), refined])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    active = base >> 7 & 255 < limit if limit < 255 else np.ones(n, bool)
    np.testing.assert_array_equal(results[0][-1], np.where(active, q, 2 * before))


@quick
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2))
def test_bits_are_spread_and_gathered(numbers: list[int]) -> None:
    bits, mask = numbers
    places = [place for place in range(64) if mask >> place & 1]
    spread = sum((bits >> index & 1) << place for index, place in enumerate(places))
    gathered = sum((bits >> place & 1) << index for index, place in enumerate(places))
    assert int(streams.deposit(np.uint64(bits), np.uint64(mask))) == spread
    assert int(streams.extract(np.uint64(bits), np.uint64(mask))) == gathered


@pytest.mark.parametrize("grid", [0, 1, 5, 9, 116, 124, 255])
def test_sizes_of_deltas(grid: int) -> None:
    """On the grid: multiples of the ulp of the base's class, to nearest, ties to even, and at least an ulp."""
    bases = np.arange(512, dtype=np.uint16) << 7
    for unit in (1, 100, 117, 121, 130):
        for magnitude, code in enumerate((0, 1, 3, 100, 128, 192, 255), 1):
            code = min(code, largest_code(2.0 ** (unit - 127), grid))
            codes = np.uint64(code << 8 * magnitude)
            size = code * 2.0 ** (unit - 127)
            ulps = 2.0 ** (np.maximum(bases >> 7 & 255, 8) - 134.0)
            expected = np.maximum(np.where((bases >> 7 & 255) >= grid, np.rint(size / ulps) * ulps, size), ulps)
            for form in (plain, wide):
                delta = np.empty(512, np.float32)
                sizes = form.table(codes, np.float32(2.0 ** (unit - 127)), grid)
                form.delta(bases, np.full(512, -magnitude, np.int8), sizes, delta)
                np.testing.assert_array_equal(delta, -expected)


def test_sizes_of_many_ulps_are_refused() -> None:
    base, sound = sound_tiers(CASES[0])
    for at in range(3):
        changed = bytearray(sound[at])
        changed[3] = changed[2]  # the unit's exponent is the grid's
        with pytest.raises(CorruptionError, match="ulps"):
            tiers.decode_delta([*sound[:at], bytes(changed)], base.tobytes())


def plainly(base: Bits, coarse: Any) -> NDArray[np.int8] | None:
    """Return the q of a block's coarse tiers by plain loops."""
    q: NDArray[np.int8] = coarse.q[: base.size]
    if not symbols.read_gaps(coarse.gaps, q, base.size):
        return None
    for limit, tier, used in zip(coarse.limits, coarse.streams, coarse.used, strict=True):
        plain.refine(q, base, limit, *tier, used)
    return q


def plain_deltas(base: Bits, coarse: Any, codes: Any, unit: Any, grid: int, out: NDArray[np.float32]) -> bool:
    """`wide.deltas`, plainly."""
    q = plainly(base, coarse)
    if q is not None:
        plain.delta(base, q, plain.table(codes, unit, grid), out)
    return q is not None


def plain_predictions(base: Bits, coarse: Any, codes: Any, unit: Any, out: Bits) -> bool:
    """`wide.predictions`, plainly."""
    q = plainly(base, coarse)
    if q is not None:
        plain.predict(base, q, codes, unit, out)
    return q is not None


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("kind", ["fine-tune", "runs"])
def test_a_delta_in_parts_is_the_whole_one(exact: tiers.Exact, kind: str) -> None:
    """Of blocks that are open at the same time, as many as there are slots."""
    n = 70001
    rng = np.random.default_rng(7)
    if kind == "runs":
        base, expert = block("fine-tune", n, 3)
        expert = np.where(np.arange(n) % 8192 < 512, expert, base).astype(np.uint16)
    else:
        base, expert = block("fine-tune", n, 3)
    other = (expert + rng.integers(0, 3, n)).astype(np.uint16)
    stored = [check(base, each, exact) for each in (expert, other)]
    for depth in range(len(stored[0]) + 1):
        whole = [tiers.decode_delta(found[:depth], base.tobytes()) for found in stored]
        opened = [tiers.open_delta(found[:depth], base.tobytes(), slot=slot) for slot, found in enumerate(stored)]
        assert bytes(tiers.decode(stored[1], base.tobytes())) == other.tobytes()  # in room of its own
        parts = np.full((2, n), np.nan, np.float32)
        first = 0
        while first < n:
            stop = min(n, first + 64 * int(rng.integers(1, 600)))
            for row, delta in enumerate(opened):
                delta.write(first, parts[row, first:stop])
            first = stop
        np.testing.assert_array_equal(parts, whole)
    if exact == "quick":
        delta = tiers.open_delta(stored[0][-1:], base.tobytes())
        half = np.empty(n // 128 * 64, np.float32)
        delta.write(0, half)
        np.testing.assert_array_equal(half, whole[0][: half.size])


@pytest.mark.parametrize("exact", EXACT)
def test_plain_loops_give_the_same_payloads(monkeypatch: pytest.MonkeyPatch, exact: tiers.Exact) -> None:
    base, expert = block("fine-tune", 70001, 3)
    found = check(base, expert, exact)
    deltas = [tiers.decode_delta(found[:depth], base.tobytes()) for depth in range(4)]
    for name in ("predict", "remaining", "split", "table"):
        monkeypatch.setattr(wide, name, getattr(plain, name))
    monkeypatch.setattr(wide, "deltas", plain_deltas)
    monkeypatch.setattr(wide, "predictions", plain_predictions)
    assert check(base, expert, exact) == found
    for depth, delta in enumerate(deltas):
        np.testing.assert_array_equal(tiers.decode_delta(found[:depth], base.tobytes()), delta)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70000, 1 << 17, (1 << 17) + 1, 300_001])
def test_stored_frames(size: int) -> None:
    """Any reader of zstd reads them; beside others, and damaged, they are read or refused like others."""
    data = np.random.default_rng(size).bytes(size)
    stored, packed = zstd_frames.store(data), bytes(numcodecs.zstd.compress(b"a" * size, 1))
    assert not size or bytes(numcodecs.zstd.decompress(stored)) == data  # numcodecs reads no empty frame
    frames = [zstd_frames.Frame(frame, size) for frame in (stored, packed, stored, packed)]
    found = zstd_frames.decompress_all(frames, np.empty(4 * size, np.uint8))
    assert [content.tobytes() for content in found] == [data, b"a" * size] * 2
    for damaged in (stored[:-1], stored + b"x", stored[:9] + b"\xff" + stored[10:]) if size else ():
        with pytest.raises((ValueError, RuntimeError)):
            zstd_frames.decompress_all([zstd_frames.Frame(damaged, size)], np.empty(size, np.uint8))


def test_frames_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a numcodecs that cannot decompress several frames in one call."""
    monkeypatch.setattr(zstd_frames, "_takes_several", lambda: False)
    check(*block("fine-tune", 6001, 5), "fast")


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 333, 5001])
def test_numcodecs(exact: tiers.Exact, kind: str, n: int) -> None:
    base, expert = block(kind, n, 2)
    numcodecs.register_codec(TieredDelta)
    made = TieredDelta(exact, base.tobytes())
    codec = numcodecs.get_codec(made.get_config())
    assert codec.get_config() == {"id": "mergefs_tiers", "exact": exact}
    with pytest.raises(ValueError, match="base"):
        codec.encode(expert)
    codec.base = base.tobytes()
    buffer = codec.encode(expert)
    assert bytes(made.decode(buffer)) == expert.tobytes()
    out = np.empty(2 * n, np.uint8)
    made.decode(buffer, out)
    assert out.tobytes() == expert.tobytes()
    for damaged in (buffer[:-1], b"", b"\0", b"\xff" + buffer[1:], buffer + b"x"):
        with pytest.raises(CorruptionError):
            made.decode(damaged)


def test_numcodecs_knows_no_other_exact_coding() -> None:
    with pytest.raises(ValueError, match="no exact coding"):
        TieredDelta("other")  # type: ignore[arg-type]


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda v: v["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    base = bytes.fromhex(vector["base"])
    payloads = [bytes.fromhex(payload) for payload in vector["tiers"]]
    if vector["expert"] is None:
        with pytest.raises(CorruptionError):
            tiers.decode(payloads, base)
        return
    assert tiers.decode(payloads, base).hex() == vector["expert"]
    for depth, delta in enumerate(vector["deltas"], 1):
        assert tiers.decode_delta(payloads[:depth], base).astype("<f4").tobytes().hex() == delta
