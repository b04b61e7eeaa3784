"""What the readers of foreign files share: strict JSON, and messages that are safe to print.

Names and paths in a checkpoint come from strangers. In a message they are escaped and cut, so that they can
neither drive a terminal nor fill a log.
"""

from __future__ import annotations

import json
import os
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mergefs.errors import CheckpointError

LONGEST_JSON = 100_000_000
"""The most bytes of JSON that are read from one file; the safetensors library's own limit for a header."""

LARGEST = 2**63 - 1
"""The largest size, offset or length: what a file offset and a numpy index can hold."""

# 2**63 - 1 has 19 digits. What is longer is never turned into an int: that takes quadratic time.
_MOST_DIGITS = 19
_LONGEST_PATH = 500

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlist = 8
_repr.maxlevel = 2


@dataclass(frozen=True, slots=True)
class NotAnInteger:
    """A number that no size or offset can be: a fraction, an exponent, `-0`, or far too many digits."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Repeated:
    """Stands where an object has a key twice; whoever knows the place says so."""

    key: str


def quote(value: object) -> str:
    """Return a name, or a value of JSON, as a message shows it: escaped, cut to a few hundred characters."""
    return _repr.repr(value)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as a message shows it: plain where it can be printed, else escaped; its end if long."""
    text = os.fspath(path)
    if len(text) > _LONGEST_PATH:
        text = "..." + text[-_LONGEST_PATH:]
    return text if text and text.isprintable() else repr(text)


def reason(error: OSError | ValueError) -> str:
    """Return why the system could not open or read a file, without the path that Python adds."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "its path is malformed"


def flaw(name: str) -> str | None:
    """Return what is wrong with the name of a tensor or file, or None when nothing is."""
    if not name:
        return "is empty"
    if not is_unicode(name):
        return "is not valid Unicode"
    if not name.isprintable() and any(unicodedata.category(c) == "Cc" for c in name):
        return "has control characters"
    return None


def is_unicode(text: str) -> bool:
    """Tell whether `text` is free of lone surrogates, that is, whether it can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_object(data: bytes, what: str, remedy: str) -> tuple[dict[str, Any], list[str]]:
    """Return the one JSON object that `data` holds, and the keys that some object inside it has twice.

    An inner object with a repeated key is replaced by `Repeated`; a number that is not a plain integer of
    reasonable length, by `NotAnInteger`.

    Args:
        data: JSON in UTF-8.
        what: what it is, for the message, such as `the header of model.safetensors`.
        remedy: what the user is to do, the end of the message.

    Raises:
        CheckpointError: when it is not UTF-8, not JSON, nested too deep, not an object, or has a key twice at
            the outermost level.
    """
    repeated: list[str] = []
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_collector(repeated),
            parse_float=NotAnInteger,
            parse_int=_integer,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 at byte {error.start}; {remedy}") from None
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos}"
        raise CheckpointError(f"{what} is not JSON ({problem}); {remedy}") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON ({error}); {remedy}") from None
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deep; {remedy}") from None
    if isinstance(value, Repeated):
        raise CheckpointError(f"{what} has the key {quote(value.key)} twice; {remedy}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object; {remedy}")
    return value, repeated


def _collector(repeated: list[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any] | Repeated]:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        key = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        repeated.append(key)
        return Repeated(key)

    return collect


def _integer(text: str) -> int | NotAnInteger:
    if text == "-0" or len(text.removeprefix("-")) > _MOST_DIGITS:
        return NotAnInteger(text)
    return int(text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
