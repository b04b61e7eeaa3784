"""Zarr data types for bfloat16 and the two float8."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.dtype import DataTypeValidationError, data_type_registry, parse_dtype

from mergefs.dtypes import DTYPES
from mergefs.serve import zarr_dtypes
from mergefs.serve.zarr_dtypes import BFloat16, Float8E4M3, Float8E5M2

KINDS: dict[str, Any] = {
    "bfloat16": BFloat16,
    "float8_e4m3fn": Float8E4M3,
    "float8_e5m2": Float8E5M2,
}
NAMES = list(KINDS)


def native(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name))


def every_value(name: str) -> np.ndarray[Any, Any]:
    """Return every bit pattern of a type."""
    width = native(name).itemsize
    return np.arange(1 << 8 * width).astype(f"u{width}").view(native(name))


@pytest.mark.parametrize("name", NAMES)
def test_name_and_numpy_type_lead_to_each_other(name: str) -> None:
    kind = parse_dtype(name, zarr_format=3)
    assert type(kind) is KINDS[name]
    assert kind == parse_dtype(native(name), zarr_format=3) == KINDS[name].from_json(name, zarr_format=3)
    assert kind.to_native_dtype() == native(name)
    assert kind.to_json(3) == name
    assert kind.item_size == native(name).itemsize


@pytest.mark.parametrize("name", [dtype.numpy_name for dtype in DTYPES.values()])
def test_every_dtype_of_a_checkpoint_has_one(name: str) -> None:
    assert parse_dtype(name, zarr_format=3).to_json(3) == name


def test_registering_again_changes_nothing() -> None:
    before = dict(data_type_registry.contents)
    zarr_dtypes.register()
    assert data_type_registry.contents == before


def test_entry_points_name_the_classes() -> None:
    ours = {e.name: e for e in entry_points(group="zarr.data_type") if e.value.startswith("mergefs.")}
    assert {name: entry.load() for name, entry in ours.items()} == KINDS


@pytest.mark.parametrize("name", NAMES)
def test_other_types_are_refused(name: str) -> None:
    kind = KINDS[name]
    for other in ("float16", "uint8", "V2", "V1", *(native(n) for n in NAMES if n != name)):
        with pytest.raises(DataTypeValidationError):
            kind.from_native_dtype(np.dtype(other))
    for spec in ("float32", {"name": name, "object_codec_id": None}, None, 5):
        with pytest.raises(DataTypeValidationError):
            kind.from_json(spec, zarr_format=3)
    with pytest.raises(DataTypeValidationError):
        kind.from_json({"name": "<V2", "object_codec_id": None}, zarr_format=2)
    with pytest.raises(ValueError, match="v2"):
        kind().to_json(2)


@pytest.mark.parametrize("name", NAMES)
def test_every_fill_value_survives_json(name: str) -> None:
    kind = KINDS[name]()
    for value in every_value(name):
        text = json.dumps(kind.to_json_scalar(value, zarr_format=3), allow_nan=False)
        again = kind.from_json_scalar(json.loads(text), zarr_format=3)
        assert again.dtype == native(name)
        assert again.tobytes() == value.tobytes(), text


NANS = {"bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


@pytest.mark.parametrize("name", NAMES)
def test_special_fill_values(name: str) -> None:
    kind = KINDS[name]()
    width = native(name).itemsize
    usual = NANS[name].to_bytes(width, "little")
    assert kind.from_json_scalar("NaN", zarr_format=3).tobytes() == usual
    assert kind.cast_scalar(float("nan")).tobytes() == usual
    assert kind.from_json_scalar(f"0x{NANS[name]:0{2 * width}x}", zarr_format=3).tobytes() == usual
    assert kind.to_json_scalar(float("nan"), zarr_format=3) == "NaN"
    assert kind.default_scalar().tobytes() == bytes(width)
    assert kind.to_json_scalar(1, zarr_format=3) == 1.0
    for text, value in (("Infinity", np.inf), ("-Infinity", -np.inf)):
        if name == "float8_e4m3fn":
            with pytest.raises(ValueError, match="infinities"):
                kind.from_json_scalar(text, zarr_format=3)
        else:
            assert float(kind.from_json_scalar(text, zarr_format=3)) == value
            assert kind.to_json_scalar(value, zarr_format=3) == text


@pytest.mark.parametrize("bad", ["x", "0x", "0x7", "0x7fc00000", "nan", True, None, [1], "0xzz", "0x-1", "0x+001"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_fill_value_is_refused(name: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        KINDS[name]().from_json_scalar(bad, zarr_format=3)


def test_what_is_no_number_is_not_cast() -> None:
    with pytest.raises(TypeError):
        BFloat16().cast_scalar([1])


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_written_and_read(name: str, endian: Any) -> None:
    store = zarr.storage.MemoryStore()
    values = every_value(name)
    written = zarr.create_array(
        store,
        shape=values.shape,
        chunks=(100,),
        dtype=native(name),
        fill_value=1.5,
        serializer=zarr.codecs.BytesCodec(endian=endian),
        compressors=None,
    )
    assert np.asarray(written[3:5]).astype(np.float32).tolist() == [1.5, 1.5]
    written[:] = values
    read = np.asarray(zarr.open_array(store, mode="r")[:])
    assert read.astype(native(name)).tobytes() == values.tobytes()
    text = json.loads(store._store_dict["zarr.json"].to_bytes())
    assert text["data_type"] == name
    if name == "bfloat16":
        assert text["codecs"] == [{"name": "bytes", "configuration": {"endian": endian}}]
