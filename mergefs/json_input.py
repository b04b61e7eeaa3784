"""JSON that somebody else may have written, or that the disk may have changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mergefs.hashing import hex_digest


def load_json(data: bytes | str) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: when it is not JSON, or nested deeper than Python goes.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_check(value: Mapping[str, Any]) -> str:
    """Return what the key `check` of a file has to say (16 digits): a hash of its other keys. See spec/format.md."""
    rest = {key: item for key, item in value.items() if key != "check"}
    return hex_digest(json.dumps(rest, sort_keys=True).encode())[:16]
