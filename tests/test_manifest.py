"""Manifests: canonical form, ids, and everything that is refused; with the test vectors of the specification."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergefs import canonical, manifest
from mergefs.blocks.geometry import grid
from mergefs.errors import CorruptionError, FormatVersionError, MergefsError
from mergefs.manifest import Manifest, safe_path
from mergefs.planner import plan as plans
from mergefs.planner.plan import Numbers, Plan, TensorPlan
from mergefs.repository import Repository

VECTORS = Path(__file__).parent.parent / "spec" / "vectors"


def vectors(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ canonical JSON


@pytest.mark.parametrize("case", vectors("canonical")["canonical"], ids=lambda case: case["canonical"][:30])
def test_canonical_vectors(case: dict[str, Any]) -> None:
    assert canonical.encode(case["value"]) == case["canonical"].encode("utf-8")
    assert canonical.decode(case["canonical"].encode("utf-8")) == case["value"]
    assert blake3.blake3(case["canonical"].encode("utf-8")).hexdigest() == case["id"]


@pytest.mark.parametrize("text", vectors("canonical")["refused"])
def test_texts_that_are_not_canonical(text: str) -> None:
    with pytest.raises(CorruptionError, match="canonical"):
        canonical.decode(text.encode("utf-8"))


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b'"\xc3"', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"), b"[" * 100_000, b"9" * 5000]
)
def test_bytes_that_are_not_canonical(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        canonical.decode(data)


def test_keys_are_in_the_order_of_utf16_code_units() -> None:
    # U+1F600 is beyond U+FB33, but its first code unit, D83D, comes before it.
    assert canonical.encode({"\ufb33": 1, "\U0001f600": 2, "z": 3}) == '{"z":3,"\U0001f600":2,"\ufb33":1}'.encode()


@pytest.mark.parametrize(
    "value", [1.5, float("nan"), 2**53, -(2**53), {1: 2}, {None: 1}, "\ud800", {"\udfff": 1}, b"x", {1, 2}, [object()]]
)
def test_values_without_a_canonical_form(value: Any) -> None:
    with pytest.raises(MergefsError):
        canonical.encode(value)


_TEXT = st.text(st.characters(exclude_categories=("Cs",)))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
    max_leaves=20,
)


@given(_JSON)
def test_canonical_form_is_one_to_one(value: Any) -> None:
    encoded = canonical.encode(value)
    assert canonical.decode(encoded) == value
    assert json.loads(encoded) == value


# ----------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("case", vectors("geometry"), ids=lambda case: f"{case['shape']}-{case['block_elements']}")
def test_geometry_vectors(case: dict[str, Any]) -> None:
    found = grid(case["shape"], case["block_elements"])
    assert list(found.block_shape) == case["block_shape"]
    assert [list(extent) for extent in found.elements()] == case["extents"]
    assert len(found) == len(case["extents"])


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(1, 200))
@settings(max_examples=200)
def test_blocks_tile_a_tensor_and_are_chunks_of_a_grid(shape: list[int], block_elements: int) -> None:
    found = grid(shape, block_elements)
    extents = list(found.elements())
    elements = int(np.prod(shape, dtype=np.int64))
    assert len(extents) == len(found)
    assert [found.extent(number) for number in range(len(found))] == extents
    at = 0
    for first, stop in extents:
        assert first == at
        assert 0 < stop - first <= block_elements
        at = stop
    assert at == elements
    # In row-major order, the elements of each chunk of the regular grid are exactly one block.
    numbers = np.arange(elements).reshape(shape)
    for number, coordinates in enumerate(np.ndindex(*found.counts) if elements else ()):
        assert found.index(coordinates) == number
        window = tuple(slice(c * b, (c + 1) * b) for c, b in zip(coordinates, found.block_shape, strict=True))
        assert numbers[window].ravel().tolist() == list(range(*extents[number]))
    with pytest.raises(IndexError):
        found.index(found.counts or (0,))


# ---------------------------------------------------------------------------------------------------- manifests


@pytest.mark.parametrize("case", vectors("manifest"), ids=lambda case: case["name"])
def test_manifest_vectors(case: dict[str, Any]) -> None:
    data = case["canonical"].encode("utf-8")
    read = manifest.decode(data)
    assert read.encoded == data
    assert read.id == case["id"] == blake3.blake3(data).hexdigest()
    assert json.loads(data) == case["manifest"]
    assert canonical.encode(case["manifest"]) == data


def test_manifests_of_a_repository_round_trip(slice_repository: Repository) -> None:
    for identity in slice_repository.manifest_ids():
        read = slice_repository.manifest(identity)
        assert read.id == identity
        assert manifest.decode(read.encoded) == read


def checkpoint() -> dict[str, Any]:
    return copy.deepcopy(vectors("manifest")[0]["manifest"])


def merge() -> dict[str, Any]:
    return copy.deepcopy(vectors("manifest")[1]["manifest"])


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = path

    def change(target: Any) -> None:
        for key in keys:
            target = target[key]
        target[last] = value

    return change


def _drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last = path

    def change(target: Any) -> None:
        for key in keys:
            target = target[key]
        del target[last]

    return change


ID = "0123456789abcdef" * 4

MALFORMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no format": _drop("format"),
    "another format": _set("format", "mergefs-plan"),
    "no version": _drop("version"),
    "version as a flag": _set("version", True),
    "an unknown key": _set("more", 1),
    "no files": _drop("files"),
    "files as text": _set("files", "model.safetensors"),
    "no blocks a side": _set("block_elements", 0),
    "block size as text": _set("block_elements", "4096"),
    "block size as a flag": _set("block_elements", True),
    "another block size": _set("block_elements", 1),
    "an absolute path": _set("files", 0, "path", "/etc/passwd"),
    "a path upwards": _set("files", 0, "path", "../x"),
    "a path upwards inside": _set("files", 0, "path", "a/../../x"),
    "an empty path": _set("files", 0, "path", ""),
    "a path with a control character": _set("files", 0, "path", "a\nb"),
    "a long path": _set("files", 0, "path", "a" * 256),
    "a path that is a number": _set("files", 0, "path", 5),
    "a path that is a list": _set("files", 0, "path", ["a"]),
    "files out of order": lambda value: value["files"].reverse(),
    "a file twice": lambda value: value["files"].append(value["files"][-1]),
    "a wrong file size": _set("files", 0, "size", 1),
    "a negative size": _set("files", 0, "size", -1),
    "a size that is a flag": _set("files", 0, "segments", 0, "size", True),
    "a short SHA-256": _set("files", 0, "sha256", "ab"),
    "an unknown key in a file": _set("files", 0, "mode", 420),
    "an unknown segment": _set("files", 0, "segments", 0, {"zeros": 5}),
    "a blob without a size": _drop("files", 0, "segments", 0, "size"),
    "a blob of no bytes": _set("files", 0, "segments", 0, "size", 0),
    "an id in capitals": _set("files", 0, "segments", 0, "blob", ID.upper()),
    "a segment of no tensor": _set("files", 1, "segments", 1, "tensor", "nobody"),
    "a segment of a number": _set("files", 1, "segments", 1, "tensor", 5),
    "a tensor in two files": lambda value: value["files"][1]["segments"].append(value["files"][1]["segments"][1]),
    "a tensor in no file": lambda value: value["files"][1]["segments"].pop(),
    "a tensor twice": lambda value: value["tensors"].append(value["tensors"][0]),
    "an unknown dtype": _set("tensors", 0, "dtype", "F4"),
    "a dtype that is a list": _set("tensors", 0, "dtype", ["BF16"]),
    "a negative axis": _set("tensors", 0, "shape", 0, -1),
    "an axis that is a flag": _set("tensors", 0, "shape", 0, True),
    "another shape": _set("tensors", 0, "shape", [1]),
    "too few blocks": lambda value: value["tensors"][0]["blocks"].pop(),
    "too many blocks": lambda value: value["tensors"][0]["blocks"].append(ID),
    "a block that is no id": _set("tensors", 0, "blocks", 0, "xyz"),
    "a lazy checkpoint": _set("tensors", 0, "blocks", 0, None),
    "an unknown key in a tensor": _set("tensors", 0, "offset", 0),
    "no lineage": _drop("lineage"),
    "an unknown key in the lineage": _set("lineage", "by", "me"),
    "no kind": _drop("lineage", "kind"),
    "a checkpoint with a plan": _set("lineage", "plan", ID),
    "a merge without a plan": _set("lineage", {"kind": "merge", "base": None, "experts": []}),
    "a merge with a plan that is no id": _set("lineage", {"kind": "merge", "plan": "x", "base": None, "experts": []}),
    "an edit without a parent": _set("lineage", {"kind": "edit"}),
    "an edit of what is no id": _set("lineage", {"kind": "edit", "parent": "x"}),
    "an edit with half a plan": _set("lineage", {"kind": "edit", "parent": ID, "plan": ID}),
    "an edit with a plan for nothing": _set(
        "lineage", {"kind": "edit", "parent": ID, "plan": ID, "base": None, "experts": []}
    ),
    "a merge with a parent": _set("lineage", {"kind": "merge", "parent": ID, "plan": ID, "base": None, "experts": []}),
    "an unknown kind": _set("lineage", {"kind": "dream", "plan": ID, "base": None, "experts": []}),
    "a kind that is a number": _set("lineage", {"kind": 5, "plan": ID, "base": None, "experts": []}),
    "a tensor named by a number": lambda value: (
        value["tensors"][0].update(name=5),
        value["files"][1]["segments"][1].update(tensor=5),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifests(name: str) -> None:
    value = checkpoint()
    MALFORMED[name](value)
    with pytest.raises(MergefsError):
        manifest.decode(canonical.encode(value))


@pytest.mark.parametrize("value", [[], "text", 5, None, True, {}])
def test_what_is_no_manifest_at_all(value: Any) -> None:
    with pytest.raises(CorruptionError):
        manifest.decode(canonical.encode(value))


def test_a_newer_version_is_said_to_be_newer() -> None:
    value = checkpoint()
    value["version"] = 2
    with pytest.raises(FormatVersionError, match="version 2"):
        manifest.decode(canonical.encode(value))


_PATHS: list[tuple[Any, ...]] = []


def _paths(value: Any, here: tuple[Any, ...] = ()) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _PATHS.append((*here, key))
        _paths(item, (*here, key))


_paths(merge())


@given(st.sampled_from(_PATHS), _JSON | st.sampled_from([ID, "BF16", "I64", [2, 3], [], {}]))
@settings(max_examples=400)
def test_whatever_is_accepted_means_exactly_what_it_says(path: tuple[Any, ...], new: Any) -> None:
    value = merge()
    target: Any = value
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = new
    data = canonical.encode(value)
    try:
        read = manifest.decode(data)
    except MergefsError:
        return
    assert read.encoded == data
    assert all(safe_path(file.path) for file in read.files)


@pytest.mark.parametrize("path", ["a", "a/b/c.txt", "ü/名", "...", "a..b", ".gitignore", "a b", "x" * 255])
def test_safe_paths(path: str) -> None:
    assert safe_path(path)


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "./a", "../a", "a\\b", "a\0b", "a\x7f", "ü" * 128]
)
def test_unsafe_paths(path: str) -> None:
    assert not safe_path(path)


# -------------------------------------------------------------------------------------------------------- plans


def example_plan() -> Plan:
    return Plan(
        "ties",
        ID,
        (ID, ID[::-1]),
        False,
        (
            Numbers(({"weight": 0.1, "density": 1.0}, {"weight": -1e-17, "density": 1 / 3}), {"normalize": True}),
            Numbers(({"weight": 2.0}, {"weight": 1e300}), {"lambda": 0.7}),
        ),
        "F32",
        2**53 - 1,
        None,
        (TensorPlan("größe", ("01", "10"), (5e-324, float("inf")), 1, (1.0, 0.1, -0.0), (float("inf"), 0.3)),),
        "merge_method: ties\n",
    )


def test_plans_round_trip_to_the_last_bit() -> None:
    made = example_plan()
    read = plans.decode(made.encoded)
    assert read == made
    assert read.id == made.id
    assert read.tensor_by_name["größe"].planned(0) == (1,)


@pytest.mark.parametrize(
    "change",
    [
        _drop("format"),
        _set("format", "mergefs-manifest"),
        _drop("numbers"),
        _set("numbers", ["x"]),
        _set("numbers", [{"experts": [{"weight": "x"}], "shared": {}}]),
        _set("tensors", [{}]),
        _set("numbers", [{"experts": [{}], "shared": []}]),
        _set("version", 2),
    ],
)
def test_malformed_plans(change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(example_plan().encoded)
    change(value)
    with pytest.raises(MergefsError):
        plans.decode(canonical.encode(value))


def test_equal_manifests_have_equal_ids() -> None:
    data = canonical.encode(merge())
    one, two = manifest.decode(data), manifest.decode(data)
    assert isinstance(one, Manifest)
    assert one == two
    assert one.id == two.id
    assert one.is_lazy
    assert one.raw_bytes == sum(file.size for file in one.files)
