"""The parts of manifests and plans, each checked for being of its kind.

What is not raises ValueError, TypeError or AttributeError, of which who decodes makes a CorruptionError.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from mergefs.hashing import is_hex_id


def cut(message: str, longest: int = 500) -> str:
    """Return a message, or the beginning of a long one: it may quote what a stranger wrote."""
    return message if len(message) <= longest else message[:longest] + "..."


def only(value: dict[str, Any], keys: Set[str]) -> None:
    """Check that an object has exactly these keys."""
    if not isinstance(value, dict) or set(value) != keys:
        raise ValueError(f"keys {sorted(value)} instead of {sorted(keys)}")


def hex_id(value: Any) -> str:
    """Return an id."""
    if not isinstance(value, str) or not is_hex_id(value):
        raise ValueError(f"{value!r} is not an id")
    return value


def items(value: Any) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def flag(value: Any) -> bool:
    """Return true or false."""
    if type(value) is not bool:
        raise ValueError(f"{value!r} is no flag")
    return value


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def natural(value: Any) -> int:
    """Return an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def positive(value: Any) -> int:
    """Return an integer of at least 1."""
    if natural(value) == 0:
        raise ValueError("0 is not a positive number")
    return int(value)


def real(value: Any) -> float:
    """Return a real number, which is written as the shortest text that reads back the same."""
    number = float(text(value))
    if repr(number) != value:
        raise ValueError(f"{value!r} is no number in its shortest form")
    return number
