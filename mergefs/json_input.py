"""JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def load_json(data: bytes | str) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: when it is not JSON, or nested deeper than Python goes.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
