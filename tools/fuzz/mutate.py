"""Ways to change an input: as bytes, as JSON, as a length and JSON, as lines, as text made of words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from tools.fuzz.target import Mutate

_NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    31,
    32,
    63,
    64,
    127,
    128,
    254,
    255,
    256,
    4095,
    4096,
    32767,
    32768,
    65535,
    65536,
]
_NUMBERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64]

_TEXTS = [
    "", "a", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "a/../b", "a//b", "\0", "\x1b[2J", "\x1b]0;x\x07",
    "\n",
    "\u202e", "\ud800", "\udcff", "é", "\U0001f600", "a" * 300, "a" * 5000, "model.safetensors", "NaN", "inf", "-0",
    "1e999", "0x10", "true", "null", "C:\\x", "con", "%s", "{}", "'", '"', "__class__",
    "!!python/object/apply:os.system",
    "0" * 64, "f" * 64, "(a+)+$", "[", "BF16", "F32", "U8", "9",
]  # fmt: skip


class Pairs(list[tuple[Any, Any]]):
    """An object of JSON whose keys may be there twice."""


class Raw(str):
    """JSON as it is to be written."""


_RAWS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "1.5", "1e-400", "0" * 40, "9" * 5000, "-1", "[" * 3000,
    "[" * 100 + "]" * 100, '{"a":' * 1500, "[[[[]]]]" * 2, '"\\ud800"', '"\\u0000"', "tru", '"', "{", "01", "1.",
    "\ufeff1",
    "[" * 3000 + "]" * 3000,
]  # fmt: skip


def change_bytes(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    """Change bytes here and there."""
    out = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        size = len(out)
        at = rng.randrange(size + 1)
        match rng.randrange(9):
            case 0 if size:
                out[at % size] ^= 1 << rng.randrange(8)
            case 1 if size:
                out[at % size] = rng.choice((0, 1, 127, 128, 254, 255, rng.randrange(256)))
            case 2:
                width = rng.choice((1, 2, 4, 8))
                number = (rng.choice(_NUMBERS) + rng.randrange(-1, 2)) % (1 << (8 * width))
                out[at : at + width] = number.to_bytes(width, "little")
            case 3:
                del out[at : at + rng.randrange(1, 1 + min(64, max(1, size)))]
            case 4:
                end = at + rng.randrange(1, 65)
                out[at:at] = out[at:end]
            case 5:
                out[at:at] = rng.randbytes(rng.randrange(1, 17))
            case 6:
                other = rng.choice(kept) if kept else data
                start = rng.randrange(len(other) + 1)
                end = rng.randrange(size + 1)
                out[min(at, end) : max(at, end)] = other[start : start + rng.randrange(1, 65)]
            case 7 if rng.randrange(4) == 0:
                del out[at:]
            case 8 if size >= 4:
                width = rng.choice((1, 2, 4))
                at %= size - width + 1
                number = int.from_bytes(out[at : at + width], "little") + rng.randrange(-16, 17)
                out[at : at + width] = (number % (1 << (8 * width))).to_bytes(width, "little")
    return bytes(out)


def change_json(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    """Change values, keys and their order in JSON; bytes where it is none."""
    try:
        value = json.loads(data, object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return change_bytes(rng, data, kept)
    value = edited(rng, value)
    try:
        found = dumped(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    return change_bytes(rng, found, kept) if rng.randrange(12) == 0 else found


def canonical_json(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    """As `change_json`, and mostly in canonical form."""
    found = change_json(rng, data, kept)
    if rng.randrange(10) == 0:
        return found
    try:
        value = json.loads(found)
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return found


def edited(rng: random.Random, value: Any) -> Any:
    """Return a value of JSON, some of it changed."""
    for _ in range(1 << rng.randrange(3)):
        value = _edit(rng, value)
    return value


def _edit(rng: random.Random, value: Any) -> Any:
    nodes = list(islice(_places(value), 2000))
    if not nodes or rng.randrange(40) == 0:
        return _fresh(rng)
    parent, place = rng.choice(nodes)
    old = parent[place][1] if isinstance(parent, Pairs) else parent[place]

    def put(new: Any) -> None:
        if isinstance(parent, Pairs):
            parent[place] = (parent[place][0], new)
        else:
            parent[place] = new

    match rng.randrange(9):
        case 0 | 1:
            put(_near(rng, old))
        case 2:
            put(_fresh(rng))
        case 3:
            del parent[place]
        case 4:
            parent.insert(rng.randrange(len(parent) + 1), parent[place])
        case 5:
            other, there = rng.choice(nodes)
            copied = dumped(other[there][1] if isinstance(other, Pairs) else other[there])
            put(Raw(copied[:5000]))
        case 6 if isinstance(parent, Pairs):
            key = (
                rng.choice(_TEXTS)
                if rng.randrange(2)
                else rng.choice([k for p, i in nodes if isinstance(p, Pairs) for k in [p[i][0]]])
            )
            parent[place] = (key, old)
        case 7:
            put([old] if rng.randrange(2) else Pairs([("a", old)]))
        case 8 if isinstance(old, list):
            rng.shuffle(old)
    return value


def _places(value: Any, depth: int = 0) -> Any:
    if isinstance(value, list) and depth < 50:
        for place, item in enumerate(value):
            yield value, place
            yield from _places(item[1] if isinstance(value, Pairs) else item, depth + 1)


def _near(rng: random.Random, old: Any) -> Any:
    """Return a value that is like another one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, -old, old * 2, old * 1024, old // 2, rng.choice(_NUMBERS), float(old)))
    if isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        return rng.choice(
            (old[:at] + rng.choice(_TEXTS) + old[at:], old[:at], old.upper(), old * 2, rng.choice(_TEXTS))
        )
    if isinstance(old, Pairs):
        return Pairs(old[: rng.randrange(len(old) + 1)])
    if isinstance(old, list):
        return rng.choice((old * 2, old[: rng.randrange(len(old) + 1)], old[::-1], []))
    return _fresh(rng)


def _fresh(rng: random.Random) -> Any:
    match rng.randrange(7):
        case 0:
            return rng.choice(_NUMBERS) * rng.choice((1, -1))
        case 1 | 2:
            return rng.choice(_TEXTS)
        case 3:
            return rng.choice((None, True, False, 0.5, -0.0))
        case 4:
            return Raw(rng.choice(_RAWS))
        case 5:
            return Pairs([(rng.choice(_TEXTS), rng.choice(_NUMBERS)) for _ in range(rng.randrange(4))])
        case _:
            return [rng.choice(_NUMBERS) for _ in range(rng.choice((0, 1, 2, 3, 8, 40)))]


def dumped(value: Any) -> str:
    """Return JSON in which objects may have keys twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


def with_length(change: Mutate) -> Mutate:
    """Return a way to change what lies behind its own length in eight bytes, which mostly stays right."""

    def mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
        if rng.randrange(8) == 0:
            return change_bytes(rng, data, kept)
        stop = 8 + int.from_bytes(data[:8], "little")
        text = change(rng, data[8:stop], [other[8:] for other in kept[:4]])
        rest = data[stop:]
        if rng.randrange(4) == 0:
            rest = rest[: rng.randrange(len(rest) + 1)] if rng.randrange(2) else rest + rng.randbytes(4)
        return len(text).to_bytes(8, "little") + text + rest

    return mutate


def lines(change: Mutate, fixed: Callable[[bytes], bytes] = bytes) -> Mutate:
    """Return a way to change a text line by line.

    Args:
        change: of one line's content.
        fixed: gives a line what it needs to be whole, such as its checksum.
    """

    def mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
        if rng.randrange(10) == 0:
            return change_bytes(rng, data, kept)
        found = data.split(b"\n")
        for _ in range(1 << rng.randrange(3)):
            at = rng.randrange(len(found))
            match rng.randrange(6):
                case 0 if len(found) > 1:
                    del found[at]
                case 1:
                    found.insert(rng.randrange(len(found) + 1), found[at])
                case 2 if kept:
                    other = rng.choice(kept).split(b"\n")
                    found.insert(at, rng.choice(other))
                case _:
                    found[at] = fixed(change(rng, found[at], ()))
        return b"\n".join(found)

    return mutate


def words(*known: str) -> Mutate:
    """Return a way to change a text by putting words into it that mean something there."""
    encoded = [word.encode("utf-8", "surrogatepass") for word in (*known, *_TEXTS)]

    def mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
        out = bytearray(data)
        for _ in range(1 << rng.randrange(3)):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(4):
                case 0 | 1:
                    out[at:at] = rng.choice(encoded)
                case 2:
                    out[at : at + rng.randrange(1, 24)] = rng.choice(encoded)
                case _:
                    out = bytearray(change_bytes(rng, bytes(out), kept))
        return bytes(out)

    return mutate


def either(*ways: Mutate) -> Mutate:
    """Return a way that is one of several, each time another."""

    def mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
        return rng.choice(ways)(rng, data, kept)

    return mutate
