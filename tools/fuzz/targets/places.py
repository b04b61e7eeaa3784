"""Names and places: refs, URLs, sizes, Zarr's keys and metadata."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import MergefsError
from mergefs.planner.budget import parse_budget
from mergefs.refs import check_ref_name
from mergefs.repository import Repository
from mergefs.serve import zarr_ingest
from mergefs.serve.filesystem import MergefsFileSystem
from mergefs.units import parse_size
from tools.fuzz.mutate import change_bytes, change_json, either, words
from tools.fuzz.target import Run, Target
from tools.fuzz.targets.objects import scratch


def small_repository() -> Repository:
    """Return a repository with one small model, `m`."""
    folder = scratch()
    model = folder / "model"
    (model / "sub").mkdir(parents=True)
    header = build_header([("a.weight", DTYPES["BF16"], (40, 100)), ("b", DTYPES["F32"], ())])
    (model / "model.safetensors").write_bytes(header + np.random.default_rng(1).bytes(8004))
    (model / "config.json").write_bytes(b'{"torch_dtype": "bfloat16"}')
    (model / "sub" / "note.txt").write_bytes(b"note")
    repository = Repository.init(folder / "repository", 4096)
    repository.sync = False
    repository.ingest(model, "m")
    return repository


def _urls() -> Run:
    repository = small_repository()
    files = MergefsFileSystem(str(repository.path))

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        path = files._strip_protocol(text)
        for call in (files.info, files.ls, files.ukey, files.created):
            call(path)
        if files.info(path)["type"] == "file":
            assert len(files.cat_file(path, 0, 10)) <= 10
            with files.open(path) as file:
                file.seek(1)
                file.read(3)
        else:
            files.find(path)

    return run


_URLS = ["mergefs://m/model.safetensors", "m/config.json", "mergefs://m", "", "m/sub", "m/sub/note.txt"]
_URL_WORDS = (
    "mergefs://",
    "mergefs::",
    "file://",
    "::",
    "/",
    "//",
    "m",
    "sub",
    "model.safetensors",
    "%2e%2e",
    "?",
    "#",
    "*",
    "[",
    "@",
    ":",
)


def _names() -> Run:
    repository = small_repository()
    manifest = repository.resolve("m")

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        for call in (check_ref_name, repository.resolve, parse_size, lambda t: parse_budget(t, 1000)):
            try:
                call(text)
            except MergefsError as error:
                assert str(error)
        assert repository.resolve("m") == manifest

    return run


_NAMES = ["m", "m@2", "0123456789abcdef", "10%", "2GiB", "1.5 MB", "a" * 200, "refs-x.y+z"]


# -- Zarr ----------------------------------------------------------------------------------------------------------


def _keys() -> Run:
    store = small_repository().zarr("m")
    prototype = cpu.buffer_prototype

    def run(data: bytes) -> None:
        key = data.decode("utf-8", "surrogateescape")
        found = store.get_sync(key, prototype=prototype)
        assert (found is None) == (store._size(key) is None)
        assert found is None or len(found) == store._size(key)
        for prefix in (key, key.rpartition("/")[0]):
            list(store._keys(prefix))
            list(store._names(prefix))

    return run


_KEYS = [
    "zarr.json",
    "a/weight/zarr.json",
    "a.weight/zarr.json",
    "a/weight/c/0/0",
    "a/weight/c/1/0",
    "b/c",
    "b/zarr.json",
]


def _group(version: int) -> dict[str, Any]:
    """Return the values of a small group's metadata, by their keys."""
    store = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.create_group(store, zarr_format=version)  # type: ignore[arg-type]
        a = group.create_array("a", shape=(40, 30), chunks=(10, 30), dtype="float32", fill_value=0.5)
        group.create_array("deep/b", shape=(), dtype="int64", compressors=None)
    a[:10] = 1
    found = {key: value.to_bytes() for key, value in store._store_dict.items()}
    documents = {
        key: json.loads(value)
        for key, value in found.items()
        if "zarr" in key or key.endswith((".zarray", ".zgroup", ".zattrs"))
    }
    return {"documents": documents, "chunk": "a/c/0/0" if version == 3 else "a/0.0"}


def _zarr() -> Run:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    content = _chunk()

    def run(data: bytes) -> None:
        try:
            value = json.loads(data)
            documents = dict(value["documents"])
            place = str(value["chunk"])
            values = {str(k): json.dumps(v).encode() for k, v in documents.items()}
        except (ValueError, TypeError, KeyError, RecursionError, UnicodeEncodeError):
            return
        store = MemoryStore()
        for key, encoded in {**values, place: content}.items():
            store._store_dict[key] = cpu.Buffer.from_bytes(encoded)
        group = zarr_ingest._open(store)
        for array in zarr_ingest._arrays(group, "it"):
            build_header([(array.name, array.dtype, array.shape)])
            slabs = array.slabs
            for number in {0, len(slabs) - 1} if len(slabs) else ():
                array.read(number)

    return run


def _chunk() -> bytes:
    """Return a compressed chunk of the small group."""
    store = MemoryStore()
    array = zarr.create_group(store).create_array("a", shape=(10, 30), chunks=(10, 30), dtype="float32")
    array[:] = 1
    return bytes(store._store_dict["a/c/0/0"].to_bytes())


_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "transpose", "configuration": {"order": [1,
    0]}},
    {"name": "gzip", "configuration": {"level": 1}}, {"name": "crc32c"}, {"name": "vlen-utf8"},
    {"name": "numcodecs.pickle"},
    {"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1], "codecs": [{"name": "bytes"}],
    "index_codecs": [{"name": "bytes"}]}},
    {"id": "pickle"}, {"id": "json2"}, {"id": "msgpack2"}, {"id": "lz4"}, {"id": "blosc"}, {"id": "shuffle",
    "elementsize": 0}, {"id": "delta", "dtype": "<f4"},
    {"id": "mergefs_ulp", "dtype": "BF16"}, {"id": "mergefs_tiers"}, {"id": "vlen-array", "dtype": "<f4"},
]  # fmt: skip


def _zarr_mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    try:
        value = json.loads(data)
        documents = value["documents"]
        key = rng.choice(sorted(documents))
        if rng.randrange(3) == 0 and isinstance(documents[key], dict):
            for name in ("codecs", "filters", "compressor", "compressors"):
                if name in documents[key]:
                    made = rng.choice(_CODECS)
                    documents[key][name] = made if name == "compressor" else [made, *(documents[key][name] or [])]
            if rng.randrange(3) == 0:
                documents[key]["dtype"] = rng.choice(
                    ("|O", "<f4", "<M8[s]", "|S5", "<U9", [["a", "<f4"]], "|V7", "<f16", "object")
                )
            if rng.randrange(3) == 0:
                documents[key]["shape"] = rng.choice(([1 << 40], [1 << 62, 4], [0, 9], [-1, 2], [10**9, 10**9], []))
        else:
            documents[key] = json.loads(change_json(rng, json.dumps(documents[key]).encode(), ()))
        return json.dumps(value).encode()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return change_json(rng, data, kept)


def _zarr_seeds() -> list[bytes]:
    return [json.dumps(_group(version)).encode() for version in (3, 2)]


_REFUSED = (MergefsError, FileNotFoundError, NotADirectoryError)


def _texts(values: Sequence[str]) -> Callable[[], list[bytes]]:
    return lambda: [value.encode() for value in values]


TARGETS = (
    Target("fsspec-url", _texts(_URLS), _urls, either(words(*_URL_WORDS), change_bytes), 30, _REFUSED),
    Target("names", _texts(_NAMES), _names, either(words("%", "GiB", "@", "f" * 63), change_bytes), 40, ()),
    Target("zarr-key", _texts(_KEYS), _keys, either(words("/c/", "zarr.json", "a/weight", "c"), change_bytes), 30),
    Target("zarr-metadata", _zarr_seeds, _zarr, _zarr_mutate, 2, basic=300 << 20),
)
