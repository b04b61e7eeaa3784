"""Tensors of every dtype and many shapes, and how the tests look at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import zarr
from zarr.core.buffer import default_buffer_prototype

BLOCK = 4096
PROTOTYPE = default_buffer_prototype()


FLOATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
WHOLE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (5000,),
    "matrix": (37, 301),
    "wide": (3, 5000),
    "experts": (3, 7, 11, 60),
    "one": (1,),
    "scalar": (),
    "empty": (0,),
    "hollow": (4, 0, 3),
}


def random_bits(shape: tuple[int, ...], kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bit patterns, NaNs of all kinds among them."""
    size = torch.empty(0, dtype=kind).element_size()
    data = np.random.default_rng(seed).integers(0, 256, (*shape, size), np.uint8)
    if kind == torch.bool:
        data &= 1
    return torch.from_numpy(data.reshape(-1)).view(kind).reshape(shape).clone()


def tensors() -> dict[str, torch.Tensor]:
    found = {
        f"all.{name}.{shape}": random_bits(size, kind)
        for name, kind in (FLOATS | WHOLE).items()
        for shape, size in SHAPES.items()
    }
    names = ("a", "a.b", "a.c.d", "a.c.e", "slash/name", "..odd", "model.layers.0.mlp.w", "model.layers.0.mlp.c.0")
    return found | {name: random_bits((70, 60), torch.bfloat16, at) for at, name in enumerate(names)}


TENSORS = tensors()


def numpy_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def array(group: zarr.Group, path: str) -> zarr.Array[Any]:
    found = group[path]
    assert isinstance(found, zarr.Array)
    return found
