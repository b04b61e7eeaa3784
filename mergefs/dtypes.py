"""The element types of safetensors, by the names that its headers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: as in a safetensors header, such as `BF16`.
        itemsize: bytes of one element.
        code: its number in packs and kernels; never reused.
        numpy_name: the numpy (or ml_dtypes) type's name.
        torch_name: the torch type's name.
        is_float: whether merge arithmetic applies to it.
    """

    name: str
    itemsize: int
    code: int
    numpy_name: str
    torch_name: str
    is_float: bool

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype (from ml_dtypes where numpy has none of its own)."""
        import numpy as np

        if self.numpy_name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes

            found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.numpy_name))
            return found
        return np.dtype(self.numpy_name)

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        import torch

        found = getattr(torch, self.torch_name)
        assert isinstance(found, torch.dtype)
        return found


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BOOL", 1, 1, "bool", "bool", False),
        DType("U8", 1, 2, "uint8", "uint8", False),
        DType("I8", 1, 3, "int8", "int8", False),
        DType("F8_E5M2", 1, 4, "float8_e5m2", "float8_e5m2", True),
        DType("F8_E4M3", 1, 5, "float8_e4m3fn", "float8_e4m3fn", True),
        DType("I16", 2, 6, "int16", "int16", False),
        DType("U16", 2, 7, "uint16", "uint16", False),
        DType("F16", 2, 8, "float16", "float16", True),
        DType("BF16", 2, 9, "bfloat16", "bfloat16", True),
        DType("I32", 4, 10, "int32", "int32", False),
        DType("U32", 4, 11, "uint32", "uint32", False),
        DType("F32", 4, 12, "float32", "float32", True),
        DType("I64", 8, 13, "int64", "int64", False),
        DType("U64", 8, 14, "uint64", "uint64", False),
        DType("F64", 8, 15, "float64", "float64", True),
    )
}
"""Every element type that mergefs stores, by its safetensors name."""

BY_CODE: dict[int, DType] = {d.code: d for d in DTYPES.values()}
"""The same, by number."""
