"""The one hash of mergefs: BLAKE3, 32 bytes, written as 64 lower-case hexadecimal digits.

Why BLAKE3: see spec/decisions/0001-hash.md.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import blake3

_HEX_ID = re.compile(r"[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]*")
_HEX_PREFIX = re.compile(r"[0-9a-f]{8,64}")

ID_BYTES = 32

Buffer: TypeAlias = bytes | bytearray | memoryview

Hasher = blake3.blake3
"""An incremental hasher with `update(buffer)`, `digest()` and `hexdigest()`."""


def digest(data: Buffer) -> bytes:
    """Return the 32-byte hash of `data`."""
    return bytes(blake3.blake3(data).digest())


def hex_digest(data: Buffer) -> str:
    """Return the hash of `data` as 64 lower-case hexadecimal digits."""
    return str(blake3.blake3(data).hexdigest())


def is_hex_id(text: str) -> bool:
    """Tell whether `text` is a whole id (64 lower-case hexadecimal digits)."""
    return _HEX_ID.fullmatch(text) is not None


def is_hex(text: str) -> bool:
    """Tell whether there are only lower-case hexadecimal digits in `text`."""
    return _HEX.fullmatch(text) is not None


def is_hex_prefix(text: str) -> bool:
    """Tell whether `text` may stand for an id on the command line (8 to 64 digits)."""
    return _HEX_PREFIX.fullmatch(text) is not None
