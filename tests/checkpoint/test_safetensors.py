"""Headers of safetensors files: what is refused and how it is said, what is odd and works, and agreement with
the safetensors library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mergefs.checkpoint.safetensors import Header, TensorEntry, build_header, read_header
from mergefs.dtypes import DTYPES
from mergefs.errors import CheckpointError

from .builder import ITEMSIZE, entry, pack

BIG = 2**63
W = entry("U8", [2], 0, 2)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that hypothesis may write again and again."""
    return tmp_path_factory.mktemp("scratch") / "m.safetensors"


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Any]:
    """Write bytes to a file and read its header."""

    def write_and_read(content: bytes) -> Header:
        (tmp_path / "m.safetensors").write_bytes(content)
        return read_header(tmp_path / "m.safetensors")

    return write_and_read


def refusal(read: Any, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(content)
    message = str(caught.value)
    assert "m.safetensors" in message
    assert message.isprintable()
    assert len(message) < 1500
    assert not message.endswith(".")
    assert caught.value.__cause__ is None
    return message


def one(**changes: Any) -> bytes:
    """A file with one tensor `w` whose description has been changed; None takes a key away."""
    fields = {k: v for k, v in (W | changes).items() if v is not None}
    return pack({"w": fields}, b"ab")


def raw_one(shape: str, offsets: str, data: bytes = b"ab") -> bytes:
    """The same with shape and offsets as JSON, which need not be what Python would write."""
    return pack(f'{{"w":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}', data)


# ------------------------------------------------------------------------------------------------ whole file


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_shorter_than_the_length(read: Any, content: bytes) -> None:
    assert f"has {len(content)} bytes, too few" in refusal(read, content)


def test_a_truncated_header(read: Any) -> None:
    assert "truncated: its header takes 60 bytes and 22 are there" in refusal(read, pack({"w": W}, b"ab")[:30])


def test_a_header_longer_than_its_file(read: Any) -> None:
    assert "truncated: its header takes 99 bytes and 2 are there" in refusal(read, b"\x63" + bytes(7) + b"{}")


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_limit(read: Any, length: int) -> None:
    assert f"a header of {length} bytes" in refusal(read, length.to_bytes(8, "little") + b"{}")


def test_a_header_longer_than_the_limit_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little") + b"{}")
    os.truncate(path, 100_000_009)
    with pytest.raises(CheckpointError, match="100000000 are the most"):
        read_header(path)


def test_a_git_lfs_pointer(read: Any) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    assert "run `git lfs pull`" in refusal(read, pointer)


def test_data_beyond_the_end_names_the_tensor(read: Any) -> None:
    message = refusal(read, pack({"v": entry("U8", [1], 0, 1), "w": entry("U8", [2], 1, 3)}, b"ab"))
    assert "tensor 'w' ends at byte" in message
    assert "truncated" in message


@pytest.mark.parametrize(("fields", "extra"), [({}, 1), ({"w": W}, 7), ({"w": entry("U8", [0], 0, 0)}, 2)])
def test_trailing_data(read: Any, fields: Any, extra: int) -> None:
    content = pack(fields, bytes(extra + (2 if fields.get("w") == W else 0)))
    assert f"has {extra} bytes behind its last tensor" in refusal(read, content)


@pytest.mark.parametrize("path", ["no such file", "nul\0byte", "lone \udcff surrogate \ud800", "x" * 5000])
def test_a_file_that_cannot_be_opened(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_header(os.path.join(tmp_path, path))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_folder_and_a_fifo_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="fifo is not a regular file"):
        read_header(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="cannot be read: is a directory"):
        read_header(tmp_path)


# ----------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "does not start with '{'"),
        (b" {}", "does not start with '{'"),
        (b"[]", "does not start with '{'"),
        (b"\xef\xbb\xbf{}", "does not start with '{'"),
        (b"{\xff}", "not UTF-8 at byte 1"),
        (b'{"\xed\xa0\x80":1}', "not UTF-8 at byte 2"),
        (b"{", "not JSON"),
        (b"{}\0\0", "not JSON"),
        (b"{} {}", "not JSON"),
        (b'{"a":1,}', "not JSON"),
        (b'{"a\n":1}', "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b'{"w":NaN}', "NaN"),
        (b'{"w":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,0]}}', "-Infinity"),
        (b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
        (b'{"w":' * 200_000 + b"1" + b"}" * 200_000, "nested too deep"),
        (b'{"w":{},"w":{}}', "has the key 'w' twice"),
        (b'{"w":{},"\\u0077":{}}', "has the key 'w' twice"),
        (b'{"__metadata__":{},"__metadata__":{}}', "has the key '__metadata__' twice"),
        (b'{"__metadata__":{"a":"","a":""}}', "__metadata__ has the key 'a' twice"),
        (b'{"w":{"dtype":"U8","dtype":"U8","shape":[0]}}', "tensor 'w' has the key 'dtype' twice"),
    ],
)
def test_a_header_that_is_not_strict_json(read: Any, header: bytes, said: str) -> None:
    assert said in refusal(read, pack(header))


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_nesting_near_the_limit_of_recursion(read: Any, depth: int) -> None:
    shape = "[" * depth + "]" * depth
    message = refusal(read, raw_one(shape, "[0,0]", b""))
    assert "tensor 'w' has the shape" in message or "nested too deep" in message


@pytest.mark.parametrize("value", ["text", None, 1, True, [], [W]])
def test_a_tensor_that_is_no_object(read: Any, value: Any) -> None:
    assert "tensor 'w' is described by" in refusal(read, pack({"w": value}))


@pytest.mark.parametrize(
    "value", [None, [], "text", 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": "\ud800"}, {"\ud800": "a"}]
)
def test_metadata_that_is_no_map_of_strings(read: Any, value: Any) -> None:
    assert "__metadata__" in refusal(read, pack({"__metadata__": value}))


# -------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the tensor name '' is empty"),
        ("a\0b", r"'a\x00b' has control characters"),
        ("a\x1b[31m", r"'a\x1b[31m' has control characters"),
        ("a\x7f", r"'a\x7f' has control characters"),
        ("a\x85", r"'a\x85' has control characters"),
        ("a\ud800", r"'a\ud800' is not valid Unicode"),
    ],
)
def test_names_that_are_refused(read: Any, name: str, said: str) -> None:
    assert said in refusal(read, pack({name: W}, b"ab"))


def test_a_long_name_is_cut_in_the_message(read: Any) -> None:
    message = refusal(read, pack({"w" * 1_000_000: entry("F4", [2], 0, 2)}, b"ab"))
    assert "'wwww" in message


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_missing_key(read: Any, key: str) -> None:
    assert f"tensor 'w' lacks the key '{key}'" in refusal(read, one(**{key: None}))


def test_an_unknown_key(read: Any) -> None:
    assert r"tensor 'w' has the unknown key 'str\x1bide'" in refusal(read, one(**{"str\x1bide": 1e300}))


@pytest.mark.parametrize(
    "dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "C64", "bf16", "", 1, ["U8"], {}, True, "\ud800"]
)
def test_an_unknown_dtype_lists_the_known(read: Any, dtype: Any) -> None:
    message = refusal(read, one(dtype=dtype))
    assert f"tensor 'w' has the dtype {dtype!r}, which is not supported" in message
    assert all(name in message for name in DTYPES)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "2",
            "null",
            '"2"',
            "{}",
            "[true]",
            "[2.0]",
            "[2e0]",
            "[1e400]",
            "[-2]",
            "[-0]",
            "[-1,-2]",
            '["2"]',
        ),
        *("[null]", "[[2]]", f"[{BIG}]", f"[0,{2**64}]", "[" + "9" * 5000 + "]", "[1e" + "9" * 5000 + "]"),
    ],
    ids=lambda text: text[:9],
)
def test_a_shape_that_is_none(read: Any, text: str) -> None:
    assert "tensor 'w' has the shape" in refusal(read, raw_one(text, "[0,2]"))


@pytest.mark.parametrize(
    "shape", [[2**62, 2], [2**32] * 2, [2**61, 4, 0], [0, 2**40, 2**40], [2] * 100_000], ids=lambda s: len(s)
)
def test_a_shape_that_overflows(read: Any, shape: list[int]) -> None:
    assert "tensor 'w' has the shape" in refusal(read, one(shape=shape))
    assert "takes more than 9223372036854775807 bytes" in refusal(read, one(shape=shape))


def test_the_item_size_counts_for_overflow(read: Any) -> None:
    assert "takes more than" in refusal(read, one(dtype="F64", shape=[2**60]))


@pytest.mark.parametrize(
    "text",
    [
        *("2", "null", "{}", "[]", "[0]", "[0,2,2]", "[-2,0]", "[-0,2]", "[0,2.0]", "[0,1e400]", "[false,2]"),
        *("[0,true]", f"[0,{BIG}]", f"[{2**64 - 2},{2**64}]", "[0," + "9" * 5000 + "]"),
    ],
    ids=lambda text: text[:9],
)
def test_offsets_that_are_none(read: Any, text: str) -> None:
    assert "tensor 'w' has the data_offsets" in refusal(read, raw_one("[2]", text))


def test_offsets_the_wrong_way_round(read: Any) -> None:
    assert "tensor 'w' ends at byte 0, before it begins at 2" in refusal(read, one(data_offsets=[2, 0]))


def test_a_length_that_does_not_fit(read: Any) -> None:
    message = refusal(read, one(dtype="BF16"))
    assert "tensor 'w' has 2 bytes by its data_offsets and 4 by its shape and dtype" in message


@pytest.mark.parametrize(
    "other", [entry("U8", [2], 1, 3), entry("U8", [2], 0, 2), entry("U8", [0], 1, 1), entry("U8", [1], 0, 1)]
)
def test_an_overlap_names_both(read: Any, other: Any) -> None:
    message = refusal(read, pack({"w": W, "v": other}, b"abc"))
    assert " overlaps tensor " in message
    assert "'w'" in message
    assert "'v'" in message


@pytest.mark.parametrize("where", [1, 3])
def test_a_gap_names_the_tensor(read: Any, where: int) -> None:
    gap = pack({"w": W, "v": entry("U8", [2], 2 + where, 4 + where)}, bytes(4 + where))
    assert f"tensor 'v' has a gap of {where} bytes before it" in refusal(read, gap)


def test_a_gap_before_the_first_and_an_empty_tensor_beyond(read: Any) -> None:
    assert "tensor 'w' has a gap of 1 bytes" in refusal(read, one(data_offsets=[1, 3]))
    assert "tensor 'v' has a gap" in refusal(read, pack({"w": W, "v": entry("U8", [0], 9, 9)}, b"ab"))


# --------------------------------------------------------------------------------------------- odd but valid


def test_the_header_and_the_offsets_are_those_of_the_file(read: Any) -> None:
    content = pack({"b": entry("BF16", [2, 1], 1, 5), "a": entry("BOOL", [], 0, 1)}, bytes(5))
    header = read(content)
    start = len(content) - 5
    assert header.raw == content[:start]
    assert header.file_size == len(content)
    assert header.metadata is None
    assert header.tensors == (
        TensorEntry("a", DTYPES["BOOL"], (), start, start + 1),
        TensorEntry("b", DTYPES["BF16"], (2, 1), start + 1, start + 5),
    )


@pytest.mark.parametrize(
    ("header", "metadata"),
    [("{}", None), ('{"__metadata__":{}}', {}), ('{"__metadata__":{"\\n":""}} \n\t', {"\n": ""})],
)
def test_a_file_without_tensors(read: Any, header: str, metadata: Any) -> None:
    found = read(pack(header))
    assert found.tensors == ()
    assert found.metadata == metadata
    assert found.raw == pack(header)


def test_empty_tensors_keep_their_order(read: Any) -> None:
    fields = {"z": entry("F32", [0], 0, 0), "a": entry("F64", [3, 0, 5], 0, 0), "w": W}
    fields |= {"y": entry("I8", [0], 2, 2), "b": entry("I8", [2**40, 0], 2, 2), "c": entry("I8", [0], 0, 0)}
    assert [t.name for t in read(pack(fields, b"ab")).tensors] == ["z", "a", "c", "w", "y", "b"]


@pytest.mark.parametrize("name", ["модель.вес", "重み", "🙂", "a b", ".", "../x", "a\\b", "\u202e", "w" * 100_000])
def test_odd_names(read: Any, name: str) -> None:
    assert read(pack({name: W}, b"ab")).tensors[0].name == name
    assert read(pack(json.dumps({name: W}, ensure_ascii=False), b"ab")).tensors[0].name == name


@pytest.mark.parametrize("padding", range(9))
def test_padding_is_free(read: Any, padding: int) -> None:
    content = pack(json.dumps({"w": W}) + " " * padding, b"ab")
    assert read(content).raw == content[:-2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(read: Any, dtype: str) -> None:
    size = 3 * ITEMSIZE[dtype]
    (tensor,) = read(pack({"w": entry(dtype, [3], 0, size)}, bytes(size))).tensors
    assert tensor.dtype is DTYPES[dtype]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(pack({"w": W}, b"ab"))
    (tmp_path / "m.safetensors").symlink_to("blob")
    assert len(read_header(str(tmp_path / "m.safetensors")).tensors) == 1


def test_a_large_header_is_read_quickly(scratch: Path) -> None:
    names = [f"model.layers.{i}.experts.{j}.weight" for i in range(100) for j in range(100)]
    scratch.write_bytes(build_header([(name, DTYPES["U8"], ()) for name in names], None) + bytes(10_000))
    assert [t.name for t in read_header(scratch).tensors] == names


# ------------------------------------------------------------------------------------------------- building


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("", "U8", ())], "is empty"),
        ([("a\n", "U8", ())], "has control characters"),
        ([("a\ud800", "U8", ())], "is not valid Unicode"),
        ([("w", "U8", ()), ("w", "U8", ())], "tensor 'w' has a name that is taken"),
        ([("__metadata__", "U8", ())], "tensor '__metadata__' has a name that is taken"),
        ([("w", "U8", (-1,))], "tensor 'w' has the shape"),
        ([("w", "U8", (True,))], "tensor 'w' has the shape"),
        ([("w", "U16", (2**62,))], "tensor 'w' has the shape"),
        ([("v", "U8", (2**62,)), ("w", "U8", (2**62,))], "tensor 'w' ends beyond"),
        ([("w" * 99_999_950, "U8", ())], "split the tensors"),
    ],
    ids=range(10),
)
def test_what_cannot_be_built(tensors: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_header([(name, DTYPES[dtype], shape) for name, dtype, shape in tensors], None)
    assert said in str(caught.value)


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": "\ud800"}])
def test_metadata_that_cannot_be_built(metadata: Any) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        build_header([], metadata)


def test_building_is_deterministic_and_aligned() -> None:
    tensors = [("w", DTYPES["F32"], (2, 2)), ("s", DTYPES["U8"], ())]
    built = build_header(tensors, {"b": "1", "a": "2"})
    assert built == build_header(tensors, {"a": "2", "b": "1"})
    assert built == (
        b"\x90" + bytes(7) + b'{"__metadata__":{"a":"2","b":"1"},'
        b'"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
        b'"s":{"dtype":"U8","shape":[],"data_offsets":[16,17]}} '
    )


# ----------------------------------------------------------------------------------------------- properties

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
METADATA = st.none() | st.dictionaries(TEXTS, TEXTS, max_size=3)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=8), METADATA)
def test_what_is_built_reads_back(scratch: Path, tensors: Any, metadata: Any) -> None:
    given_tensors = [(name, DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()]
    raw = build_header(given_tensors, metadata)
    assert len(raw) % 8 == 0
    size = sum(ITEMSIZE[d.name] * prod(shape) for _, d, shape in given_tensors)
    scratch.write_bytes(raw + bytes(size))
    found = read_header(scratch)
    assert (found.raw, found.metadata, found.file_size) == (raw, metadata, len(raw) + size)
    # Empty tensors go before the tensor that starts where they lie: only those may move.
    assert sorted((t.name, t.dtype.name, t.shape) for t in found.tensors) == sorted(
        (name, d.name, shape) for name, d, shape in given_tensors
    )
    assert [t.name for t in found.tensors if 0 not in t.shape] == [n for n, _, s in given_tensors if 0 not in s]
    assert {name for name, _ in safetensors.deserialize(scratch.read_bytes())} == set(tensors)


ARRAYS = st.tuples(st.sampled_from("?bBhHiIqQefd"), SHAPES).map(lambda t: np.ones(t[1], t[0]))


@settings(deadline=None)
@given(st.dictionaries(NAMES, ARRAYS, max_size=6), METADATA)
def test_files_of_the_library_read_as_it_reads_them(scratch: Path, arrays: Any, metadata: Any) -> None:
    # Without tensors, version 0.8 of the library writes metadata that is not JSON.
    content = safetensors.numpy.save(arrays, metadata if arrays else None)
    scratch.write_bytes(content)
    found = read_header(scratch)
    theirs = dict(safetensors.deserialize(content))
    assert {t.name for t in found.tensors} == theirs.keys()
    for t in found.tensors:
        assert t.dtype.name == theirs[t.name]["dtype"]
        assert list(t.shape) == theirs[t.name]["shape"]
        assert content[t.start : t.stop] == bytes(theirs[t.name]["data"]) == arrays[t.name].tobytes()
    assert found.metadata == (metadata if arrays else None)


SOUND = pack(
    {
        "__metadata__": {"format": "pt"},
        "w": entry("BF16", [2, 3], 0, 12),
        "v.bias": entry("F32", [], 12, 16),
        "empty": entry("I64", [0, 4], 16, 16),
    },
    bytes(16),
)
PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"0",
    b"1e9",
    b"null",
    b"\\u",
    b"\\ud800",
    b"\xff",
    b" ",
]
EDITS = st.lists(
    st.tuples(st.integers(0, len(SOUND)), st.integers(0, 12), st.binary(max_size=3) | st.sampled_from(PIECES)),
    min_size=1,
    max_size=4,
)


def check_strictness(scratch: Path, content: bytes) -> None:
    """Check that a file is refused in a sentence, or else that the library accepts it too."""
    scratch.write_bytes(content)
    message = None
    try:
        read_header(scratch)
    except CheckpointError as error:
        message = str(error)
    if message is None:
        safetensors.deserialize(content)
    else:
        assert "m.safetensors" in message
        assert message.isprintable()


@settings(deadline=None, max_examples=600)
@given(EDITS, st.booleans())
def test_mutations_are_read_or_refused_and_never_laxer_than_the_library(
    scratch: Path, edits: Any, keep_length: bool
) -> None:
    content = SOUND
    for at, count, piece in edits:
        content = content[:at] + piece + content[at + count :]
    if keep_length:
        # The length fits again, so that the edits reach the JSON parser and the checks behind it.
        content = (len(content) - 24).to_bytes(8, "little", signed=True) + content[8:]
    check_strictness(scratch, content)


ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([BIG, 0, 2, 4]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
ODD_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "BF16", "F4"]) | ODD_VALUES,
        "shape": st.lists(st.integers(0, 3), max_size=2) | ODD_VALUES,
        "data_offsets": st.lists(st.integers(0, 4), min_size=2, max_size=2) | ODD_VALUES,
        "x": ODD_VALUES,
    },
)


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from(["__metadata__", "", "a", "b"]), ODD_ENTRIES | ODD_VALUES),
    st.binary(max_size=4),
)
def test_odd_json_is_read_or_refused_and_never_laxer_than_the_library(scratch: Path, fields: Any, data: bytes) -> None:
    check_strictness(scratch, pack(fields, data))


def test_importing_needs_the_standard_library_only() -> None:
    code = "import sys, mergefs.checkpoint.directory; print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "safetensors", "zarr", "ml_dtypes"} & set(done.stdout.split())
