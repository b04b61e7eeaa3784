"""What refs may be called, and their copies `refs/NAME.json`, from which a catalog is made anew: spec/catalog.md."""

from __future__ import annotations

import json
from typing import Any

from mergefs.errors import CorruptionError, RefNameError
from mergefs.hashing import hex_digest, is_hex_id
from mergefs.json_input import load_json

REF_COPIES = "refs"
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@+-")


def encode_ref_copy(entry: dict[str, Any]) -> bytes:
    """Return the bytes of a ref's copy: a line of JSON, and a line with its hash."""
    line = json.dumps(entry, sort_keys=True).encode()
    return line + b"\n" + hex_digest(line).encode() + b"\n"


def decode_ref_copy(data: bytes) -> dict[str, Any]:
    """Read a ref's copy.

    Raises:
        CorruptionError: when it is damaged.
    """
    line, _, rest = data.partition(b"\n")
    if rest != hex_digest(line).encode() + b"\n":
        raise CorruptionError("the copy of a ref is damaged: its bytes have another hash")
    try:
        entry = load_json(line)
        whole = (
            isinstance(entry, dict)
            and is_hex_id(entry["manifest"])
            and (entry["previous"] is None or is_hex_id(entry["previous"]))
            and isinstance(entry["time"], (int, float))
            and isinstance(entry.get("about", {}), dict)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"the copy of a ref is malformed: {error!r}") from error
    if not whole:
        raise CorruptionError("the copy of a ref is malformed: a part of it is of another kind")
    return dict(entry)


def ref_copy_name(name: str) -> str:
    """Return the object name of the copy of a ref."""
    return f"{REF_COPIES}/{name}.json"


def check_ref_name(name: str) -> None:
    """Check a ref's name: 1 to 200 letters, digits and `._@+-`, not beginning with `.` or `-`.

    Raises:
        RefNameError: when it is malformed, or could be taken for a manifest's id.
    """
    if not name or len(name) > 200 or not set(name) <= _CHARACTERS or name[0] in ".-" or ".." in name:
        raise RefNameError(
            f"{name!r} cannot be a name: use up to 200 letters, digits and . _ @ + -, with no .. and beginning"
            " with a letter or digit"
        )
    if is_hex_id(name):
        raise RefNameError(f"{name!r} cannot be a name: it looks like a manifest's id")


def may_be_ref(name: str) -> bool:
    """Tell whether a name that somebody gave can be looked up."""
    return 0 < len(name) <= 200 and set(name) <= _CHARACTERS
