"""Canonical JSON: the form in which manifests and plans are hashed and stored (RFC 8785, without numbers
other than integers that a double holds exactly)."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from mergefs.errors import CorruptionError, MergefsError

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | bool | None"

_LARGEST_INTEGER = 2**53 - 1


def encode(value: Json) -> bytes:
    """Return `value` as canonical JSON in UTF-8.

    Object keys are sorted by their UTF-16 code units, as RFC 8785 says; there is no white space. Real numbers
    are written as strings by whoever makes the value.

    Raises:
        MergefsError: for a float, an integer beyond 2**53 - 1, a key that is not a string, a lone surrogate.
    """
    try:
        return _dump(_ordered(value))
    except UnicodeEncodeError as error:
        raise MergefsError(f"a string with a lone surrogate has no canonical form: {error}") from error


def decode(data: bytes) -> Any:
    """Return the value of canonical JSON, refusing anything that is not in canonical form.

    Raises:
        CorruptionError: when `data` is not JSON or not canonical.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique_pairs, parse_float=_no_float, parse_int=_exact_integer)
        # Where all keys are ASCII, Python sorts them as RFC 8785 does, and in a tenth of the time.
        again = _dump(value, sort_keys=True) if data.isascii() else encode(value)
    except (ValueError, MergefsError, RecursionError) as error:
        raise CorruptionError(f"not canonical JSON: {error}") from error
    if again != data:
        raise CorruptionError("not canonical JSON: keys are unsorted, or there is white space")
    return value


def _dump(value: Any, *, sort_keys: bool = False) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys)
    return text.encode("utf-8")


def _exact_integer(text: str) -> int:
    value = int(text)
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"the integer {text} has no exact double")
    return value


_PLAIN = {str, type(None)}


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise MergefsError(f"canonical JSON has string keys only, not {key!r}")
        return {k: _ordered(value[k]) for k in sorted(value, key=_utf16)}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= _PLAIN:
            return value  # the ids of a tensor's blocks: there may be a million of them
        return [_ordered(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        if abs(value) > _LARGEST_INTEGER:
            raise MergefsError(f"the integer {value} has no exact double")
        return value
    raise MergefsError(f"canonical JSON holds no {type(value).__name__}")


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_float(text: str) -> Any:
    raise ValueError(f"the number {text} is not an integer")
