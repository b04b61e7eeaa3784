"""The JSON files beside a checkpoint's weights that have to say the same as these: the configuration and the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mergefs.dtypes import DType


def set_dtype(config: dict[str, Any], dtype: DType) -> None:
    """Have a `config.json` name an element type, in the keys for it that it has, or in `torch_dtype`."""
    for key in [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]:
        config[key] = dtype.torch_name


def set_total_size(index: dict[str, Any], size: int) -> None:
    """Have an index name the bytes of all tensors."""
    index["metadata"]["total_size"] = size


def weight_index(shards: Mapping[str, str], size: int) -> bytes:
    """Return an index as transformers writes it.

    Args:
        shards: the shard of every tensor.
        size: the bytes of all tensors.
    """
    return encoded({"metadata": {"total_size": size}, "weight_map": dict(sorted(shards.items()))})


def rewritten(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes | None:
    """Return a JSON file with something changed; None where it is not what transformers would write.

    Args:
        data: the file.
        change: of what it holds.
    """
    try:
        value = json.loads(data)
        change(value)
        return encoded(value)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError):
        return None


def encoded(value: dict[str, Any]) -> bytes:
    """Return the bytes of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
