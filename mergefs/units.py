"""Sizes as people write them: `2GiB`, `512 MB`, `1048576`."""

from __future__ import annotations

import re

from mergefs.errors import UserError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` stands for (KiB, MiB, GiB, TiB or kB, MB, GB, TB; K is KiB).

    Raises:
        UserError: when it is not a size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UserError(f"'{text}' is not a size: write it like 2GiB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def format_size(size: int) -> str:
    """Return a size for people, with three significant digits."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    for unit in units:
        if value < 1024 or unit == units[-1]:
            return f"{size} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    raise AssertionError
