"""Zarr v3 data types for the element types of checkpoints that Zarr has none for.

Their names are those that other readers of Zarr know them by. `bfloat16` and `float8_e5m2` are in the
zarr-extensions registry. The safetensors type F8_E4M3 is the finite kind, without infinities and with NaN at
0x7f; the registry's `float8_e4m3` is the other kind, with infinities, and it has no entry for the finite one.
So ours is called `float8_e4m3fn`, as in ml_dtypes and TensorStore and in the pattern of the registry's
`float8_e4m3fnuz`.

Importing this module registers them. As a plugin it is declared under `zarr.data_type`, but zarr-python 3.1
collects these entry points and never loads them: to read such an array elsewhere, import this module first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, SupportsFloat, TypeAlias, overload

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import DTypeJSON, HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeSpec_V2

_NAMED = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}

Native: TypeAlias = np.dtype[np.generic]


@dataclass(frozen=True, kw_only=True)
class _SmallFloat(ZDType[Native, np.generic], HasItemSize):
    """A float that fill values write as numbers, `NaN`, `Infinity`, `-Infinity`, or their bits (`0x7fc0`)."""

    _native: ClassVar[Native]

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self._native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Native) -> Self:
        """Return the data type of a numpy dtype.

        Raises:
            DataTypeValidationError: when it is another one's.
        """
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._native}")

    def to_native_dtype(self) -> Native:
        """Return the numpy dtype."""
        return self._native

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> NoReturn:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")

    @overload
    def to_json(self, zarr_format: Literal[2]) -> DTypeSpec_V2: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: ZarrFormat) -> DTypeSpec_V2 | str:
        """Return the name.

        Raises:
            ValueError: for Zarr v2, which has no such type.
        """
        if zarr_format != 3:
            raise ValueError(f"Zarr v2 has no {self._zarr_v3_name}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, SupportsFloat)

    def cast_scalar(self, data: object) -> np.generic:
        """Round a number to this type.

        Raises:
            TypeError: when it is no number.
        """
        if not isinstance(data, SupportsFloat):
            raise TypeError(f"{data!r} is not a number")
        return self._scalar(data if isinstance(data, self._native.type) else float(data))

    def default_scalar(self) -> np.generic:
        """Return zero."""
        return self._scalar(0.0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Read a fill value.

        Raises:
            TypeError: when it is no number, no name of one and no bits of this type's width.
            ValueError: when it is an infinity and this type has none.
        """
        if isinstance(data, str):
            if data.startswith("0x") and len(data) == 2 + 2 * self.item_size:
                return self._from_bits(int(data, 16))
            if data not in _NAMED:
                raise TypeError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
            value = self._scalar(float(_NAMED[data]))
            if data != "NaN" and np.isnan(float(value)):
                raise ValueError(f"{self._zarr_v3_name} has no infinities")
            return value
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise TypeError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
        return self._scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """Write a fill value, a NaN other than the usual one by its bits.

        Raises:
            TypeError: when it is no number.
        """
        scalar = self.cast_scalar(data)
        value = float(scalar)
        if np.isnan(value):
            bits = self._bits(scalar)
            return "NaN" if bits == self._nan_bits else f"0x{bits:0{2 * self.item_size}x}"
        if np.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value

    _nan_bits: ClassVar[int]

    def _scalar(self, value: Any) -> np.generic:
        with np.errstate(over="ignore", invalid="ignore"):
            scalar: np.generic = self._native.type(value)
        # The sign that ml_dtypes gives a NaN follows the float that it came from; the usual one has none.
        if not isinstance(value, np.generic) and np.isnan(value):
            return self._from_bits(self._nan_bits)
        return scalar

    def _bits(self, scalar: np.generic) -> int:
        return int.from_bytes(scalar.tobytes(), "little")

    def _from_bits(self, bits: int) -> np.generic:
        found: np.generic = np.frombuffer(bits.to_bytes(self.item_size, "little"), self._native)[0]
        return found


@dataclass(frozen=True, kw_only=True)
class BFloat16(_SmallFloat, HasEndianness):
    """The upper half of a float32."""

    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _native: ClassVar[Native] = np.dtype(ml_dtypes.bfloat16)
    _nan_bits: ClassVar[int] = 0x7FC0
    dtype_cls: ClassVar[Any] = type(_native)

    @classmethod
    def from_native_dtype(cls, dtype: Native) -> Self:
        """Return the data type of a numpy dtype.

        Raises:
            DataTypeValidationError: when it is another one's.
        """
        if cls._check_native_dtype(dtype):
            return cls(endianness="big" if dtype.byteorder == ">" else "little")
        raise DataTypeValidationError(f"{dtype} is not {cls._native}")

    def to_native_dtype(self) -> Native:
        """Return the numpy dtype, in the byte order of this type."""
        return self._native.newbyteorder(">") if self.endianness == "big" else self._native


@dataclass(frozen=True, kw_only=True)
class Float8E4M3(_SmallFloat):
    """Four bits of exponent, three of mantissa, no infinities: the F8_E4M3 of safetensors."""

    _zarr_v3_name: ClassVar[Literal["float8_e4m3fn"]] = "float8_e4m3fn"
    _native: ClassVar[Native] = np.dtype(ml_dtypes.float8_e4m3fn)
    _nan_bits: ClassVar[int] = 0x7F
    dtype_cls: ClassVar[Any] = type(_native)


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_SmallFloat):
    """Five bits of exponent, two of mantissa, with infinities: the F8_E5M2 of safetensors."""

    _zarr_v3_name: ClassVar[Literal["float8_e5m2"]] = "float8_e5m2"
    _native: ClassVar[Native] = np.dtype(ml_dtypes.float8_e5m2)
    _nan_bits: ClassVar[int] = 0x7E
    dtype_cls: ClassVar[Any] = type(_native)


def register() -> None:
    """Make the data types known to zarr. Does nothing the second time."""
    for kind in (BFloat16, Float8E4M3, Float8E5M2):
        data_type_registry.register(kind._zarr_v3_name, kind)


register()
