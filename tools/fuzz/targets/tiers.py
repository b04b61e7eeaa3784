"""Payloads of tiers, of every kind, against bases that they were made for and others."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from mergefs.blocks import tiers
from mergefs.blocks.exact import CODINGS
from mergefs.blocks.tiers.codec import TieredDelta, join, split
from mergefs.blocks.tiers.delta import Together
from mergefs.blocks.tiers.exact_quick import in_bytes, in_nibbles
from mergefs.errors import CorruptionError
from tools.fuzz.mutate import change_bytes
from tools.fuzz.target import Run, Target
from tools.fuzz.targets.blocks import change_frames, noise

_HEADER = struct.Struct("<BBBBII")
_SIZES = (1, 7, 64, 130, 1000, 5000, 20_000)


@cache
def bases() -> tuple[bytes, ...]:
    """Return the blocks that payloads are decoded against; an input says which by its first byte."""
    found = []
    for number, size in enumerate(_SIZES):
        values = np.random.default_rng(number).normal(0, 0.02, size).astype(np.float32)
        found.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    return (*found, b"", noise(1, 2000), bytes(512), b"\xff" * 600, noise(3, 999))


def _expert(base: bytes, seed: int, share: float = 1.0) -> bytes:
    """Return a block like a fine-tune's, of which some runs of 64 elements are the base's."""
    rng = np.random.default_rng(seed)
    below = np.frombuffer(base, "<u2")
    values = (below.astype(np.uint32) << 16).view(np.float32)
    moved = values + rng.normal(0, 1e-3, values.size).astype(np.float32)
    bits = (moved.view(np.uint32) >> 16).astype("<u2")
    kept = np.repeat(rng.random(-(-below.size // 64)) >= share, 64)[: below.size]
    return np.where(kept, below, bits).astype("<u2").tobytes()


def _seeds(coding: str) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        found = []
        for number, base in enumerate(bases()[: len(_SIZES)]):
            for share in (1.0, 0.2):
                codec = TieredDelta(coding, base)  # type: ignore[arg-type]
                found.append(bytes([number]) + codec.encode(_expert(base, number, share)))
        # few changes, for which there is the exact tier alone
        base = bases()[5]
        expert = bytearray(base)
        expert[100] ^= 1
        found.append(b"\x05" + TieredDelta(coding, base).encode(bytes(expert)))  # type: ignore[arg-type]
        found.append(b"\x08" + TieredDelta(coding, bases()[8]).encode(noise(2, 2000)))  # type: ignore[arg-type]
        return found + (_quick_seeds() if coding == "quick" else [])

    return make


def _quick_seeds() -> list[bytes]:
    """Return payloads of both kinds, whichever would be chosen, alone."""
    found = []
    for number, base in enumerate(bases()[: len(_SIZES)]):
        below, expert = (np.frombuffer(raw, "<u2") for raw in (base, _expert(base, number)))
        for payload in (in_bytes(expert, below), *(in_nibbles(expert, below, top) for top in (0, 118, 122, 255))):
            found.append(bytes([number]) + join([payload]))
    return found


def _decode() -> Run:
    """Decode every prefix, alone and with what the base's order is, and write the exact tier in every coding."""

    def run(data: bytes) -> None:
        if not data:
            return
        base = bases()[data[0] % len(bases())]
        payloads = split(memoryview(data)[1:])
        try:
            order = tiers.class_order(base) if len(base) % 2 == 0 else None
            exact = tiers.decode(payloads, base)
            delta = tiers.decode_delta(payloads, base, order=order)
            again = tiers.decode_delta(payloads, base)
            assert len(exact) == len(base) and delta.tobytes() == again.tobytes() == _in_parts(payloads, base)
            assert tiers.coding(payloads[-1]) in CODINGS
            for coding in CODINGS:
                other = [*payloads[:-1], tiers.recode(payloads, base, coding)]
                assert bytes(tiers.decode(other, base)) == bytes(exact)
        finally:
            for depth in range(len(payloads)):
                _prefix(payloads[:depth], base)

    return run


def _in_parts(payloads: Sequence[memoryview], base: bytes) -> bytes:
    """Return a delta's bytes as merges write it: in parts, and with others in one call."""
    opened = [tiers.open_delta(payloads, base, slot=slot) for slot in range(2)]
    together = Together(opened)
    found = np.empty((2, len(base) // 2), np.float32)
    for first in range(0, found.shape[1], 128):
        part = np.empty((2, min(128, found.shape[1] - first)), np.float32)
        together.write(first, part)
        for row in together.apart:
            opened[row].write(first, part[row])
        found[:, first : first + part.shape[1]] = part
    together.check(0)
    assert found[0].tobytes() == found[1].tobytes()
    return found[0].tobytes()


def _prefix(payloads: Sequence[memoryview], base: bytes) -> None:
    try:
        assert tiers.decode_delta(payloads, base).size == len(base) // 2
    except CorruptionError:
        pass


def _mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    """Change one of an input's payloads: its header, its frames, or its bytes."""
    try:
        payloads = [bytes(payload) for payload in split(memoryview(data)[1:])]
    except CorruptionError:
        return change_bytes(rng, data, kept)
    number = data[0]
    choice = rng.randrange(20)
    if choice == 0:
        return change_bytes(rng, data, kept)
    if choice == 1:
        number = rng.randrange(len(bases()) + 1)
    elif choice == 2:
        rng.shuffle(payloads)
    elif choice == 3:
        del payloads[rng.randrange(len(payloads))]
    elif choice == 4 and kept:
        try:
            payloads[rng.randrange(len(payloads))] = bytes(rng.choice(split(memoryview(rng.choice(kept))[1:])))
        except CorruptionError:
            return data
    else:
        place = rng.randrange(len(payloads))
        payloads[place] = _change(rng, payloads[place])
    return bytes([number]) + join(payloads or [b""])


def _change(rng: random.Random, payload: bytes) -> bytes:
    at = 5 + int.from_bytes(payload[1:5], "little") if payload[:1] == b"\x80" else 0
    if rng.randrange(4) == 0 and len(payload) >= at + _HEADER.size:
        fields = list(_HEADER.unpack_from(payload, at))
        which = rng.randrange(len(fields))
        most = 256 if which < 4 else 1 << 32
        old = fields[which]
        fields[which] = (
            rng.choice((0, 1, most - 1, most // 2, old + 1, old - 1, old ^ 1, old * 2, rng.randrange(most))) % most
        )
        return payload[:at] + _HEADER.pack(*fields) + payload[at + _HEADER.size :]
    if rng.randrange(3):
        return change_frames(rng, payload, ())
    return change_bytes(rng, payload, ())


def _encode() -> Run:
    """Whatever bits a block and its base have, all of the tiers are the block."""

    def run(data: bytes) -> None:
        coding = CODINGS[data[0] % len(CODINGS)] if data else CODINGS[0]
        raw = data[1:]
        half = len(raw) // 4 * 2
        expert, base = raw[:half], raw[half : 2 * half]
        found = tiers.encode_always(expert, base, coding).tiers
        assert bytes(tiers.decode(found, base)) == expert
        for depth in range(len(found) + 1):
            tiers.decode_delta(found[:depth], base)

    return run


def _pair_seeds() -> list[bytes]:
    found = []
    for number, base in enumerate(bases()[: len(_SIZES)]):
        for coding in range(len(CODINGS)):
            found.append(bytes([coding]) + _expert(base, number, 0.5 if number % 2 else 1.0) + base)
    return [*found, b"\0" + noise(1, 4000), b"\1" + bytes(4000), b"\2" + b"\x7f\x80" * 900]


TARGETS = (
    *(
        Target(f"tiers-{coding}", _seeds(coding), _decode, _mutate, 25, (CorruptionError,), 1 << 17)
        for coding in CODINGS
    ),
    Target("tiers-round-trip", _pair_seeds, _encode, change_bytes, 5, (), 1 << 17),
)
