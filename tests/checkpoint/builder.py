"""Makes safetensors files and checkpoints by hand, sound and broken ones, without the code under test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ITEMSIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEMSIZE |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """Return one tensor's description."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def pack(header: Any, data: bytes = b"") -> bytes:
    """Return a whole file; `header` is bytes, text, or a value to be written as JSON."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8")
    return len(header).to_bytes(8, "little") + header + data


def weights(*names: str) -> bytes:
    """Return a file with a U8 tensor of three bytes for each name."""
    fields = {name: entry("U8", [3], 3 * i, 3 * i + 3) for i, name in enumerate(names)}
    return pack(fields, os.urandom(3 * len(names)))


def sharded(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, Any] | None = None) -> Path:
    """Write shards (file name -> tensor names) and an index that fits them, or has the given map."""
    folder.mkdir(exist_ok=True)
    for shard, names in shards.items():
        (folder / shard).write_bytes(weights(*names))
    if weight_map is None:
        weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 1.5}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
