"""The repository through fsspec."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.core import url_to_fs

import mergefs.serve.filesystem as module
from mergefs.catalog.leases import leases
from mergefs.errors import NotARepositoryError
from mergefs.repository import Repository
from mergefs.serve.filesystem import MergefsFileSystem

BLOCK = 4096


def checkpoint(folder: Path, seed: int) -> Path:
    (folder / "sub" / "deep").mkdir(parents=True)
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.normal(size=(50, 301)).astype(np.float32))
    weights = {"a.weight": values.bfloat16(), "b.weight": values, "scalar": torch.tensor(seed)}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "sub" / "deep" / "x.txt").write_text("one\ntwo\nthree")
    (folder / "sub" / "y.txt").touch()
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    Repository.init(tmp_path / "repo", BLOCK).close()
    with Repository.open(tmp_path / "repo", sync=False) as repository:
        repository.ingest(checkpoint(tmp_path / "one", 1), "one")
        repository.ingest(checkpoint(tmp_path / "two", 2), "demo@2")
        yield repository


@pytest.fixture
def fs(repository: Repository) -> Iterator[MergefsFileSystem]:
    fs = fsspec.filesystem("mergefs", repo=repository.path, skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.fixture
def weights(tmp_path: Path, repository: Repository) -> bytes:
    return (tmp_path / "one" / "model.safetensors").read_bytes()


def test_it_is_found_by_its_protocol(repository: Repository, weights: bytes) -> None:
    with fsspec.open("mergefs://one/model.safetensors", repo=str(repository.path)) as file:
        assert file.read() == weights
    with fsspec.open("mergefs://demo@2/config.json", "rt", repo=repository.path) as file:
        assert json.load(file) == {"seed": 2}
    fs, path = url_to_fs("mergefs://one/sub/y.txt", repo=repository.path)
    assert isinstance(fs, MergefsFileSystem)
    assert path == "one/sub/y.txt"
    assert fs.unstrip_protocol(path) == "mergefs://one/sub/y.txt"


def test_the_repository_is_that_of_the_surroundings(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MERGEFS_REPO", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotARepositoryError):
        fsspec.filesystem("mergefs")
    monkeypatch.chdir(repository.path / "packs")
    assert fsspec.filesystem("mergefs").repo == repository.path
    with Repository.init(tmp_path / "other"):
        monkeypatch.setenv("MERGEFS_REPO", str(tmp_path / "other"))
        assert fsspec.filesystem("mergefs").repo == tmp_path / "other"
        assert fsspec.filesystem("mergefs").ls("") == []
        assert fsspec.filesystem("mergefs", repo=repository.path).repo == repository.path
    monkeypatch.delenv("MERGEFS_REPO")
    monkeypatch.chdir(tmp_path)
    assert fsspec.filesystem("mergefs", repo="repo").repo == repository.path


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARepositoryError):
        fsspec.filesystem("mergefs", repo=tmp_path).ls("")


def test_the_root_lists_the_refs(fs: MergefsFileSystem, repository: Repository) -> None:
    assert sorted(fs.ls("", detail=False)) == ["demo@2", "one"]
    assert sorted(fs.ls("mergefs://", detail=False)) == ["demo@2", "one"]
    entries = {entry["name"]: entry for entry in fs.ls("/")}
    assert {entry["type"] for entry in entries.values()} == {"directory"}
    assert entries["one"]["manifest"] == repository.resolve("one")
    assert fs.info("")["type"] == "directory"


def test_folders_are_listed(fs: MergefsFileSystem) -> None:
    assert sorted(fs.ls("one", detail=False)) == ["one/config.json", "one/model.safetensors", "one/sub"]
    assert sorted(fs.ls("mergefs://one/sub/", detail=False)) == ["one/sub/deep", "one/sub/y.txt"]
    for entry in [*fs.ls("one"), *fs.ls("one/sub")]:
        assert fs.info(entry["name"]) == entry
    assert fs.ls("one/sub/y.txt") == [fs.info("one/sub/y.txt")]


def test_info_has_size_and_sum(fs: MergefsFileSystem, repository: Repository, weights: bytes) -> None:
    info = fs.info("one/model.safetensors")
    assert (info["size"], info["type"]) == (len(weights), "file")
    assert info["sha256"] == hashlib.sha256(weights).hexdigest()
    assert info["manifest"] == repository.resolve("one")
    assert fs.size("one/sub/y.txt") == 0
    assert fs.du("one") == sum(fs.size(path) for path in fs.find("one"))


def test_models_are_named_by_hash_too(fs: MergefsFileSystem, repository: Repository) -> None:
    identity = repository.resolve("one")
    for name in (identity, identity[:8], identity[:20]):
        assert fs.ls(name, detail=False) == [path.replace("one", name) for path in fs.ls("one", detail=False)]
        assert fs.cat_file(f"{name}/config.json") == b'{"seed": 1}'
    with pytest.raises(FileNotFoundError):
        fs.info(identity[:7])


@pytest.mark.parametrize("path", ["none", "none/config.json", "one/none", "one/config.json/x", "one/su", "0" * 64])
def test_what_is_not_there_is_not_found(fs: MergefsFileSystem, path: str) -> None:
    for look in (fs.info, fs.ls, fs.cat_file, fs.open, fs.created, fs.ukey):
        with pytest.raises(FileNotFoundError) as raised:
            look(path)
        assert raised.value.errno == errno.ENOENT
    assert not fs.exists(path)
    assert not fs.isfile(path)
    assert not fs.isdir(path)


def test_a_folder_is_no_file(fs: MergefsFileSystem) -> None:
    assert fs.isdir("one/sub")
    assert fs.isdir("one")
    assert fs.isdir("")
    assert fs.isfile("one/sub/y.txt")
    for path in ("one", "one/sub", ""):
        with pytest.raises(IsADirectoryError):
            fs.open(path)
        with pytest.raises(IsADirectoryError):
            fs.cat_file(path)


def test_glob_find_and_walk(fs: MergefsFileSystem) -> None:
    assert sorted(fs.glob("*/config.json")) == ["demo@2/config.json", "one/config.json"]
    assert fs.glob("mergefs://one/**/*.txt") == ["one/sub/deep/x.txt", "one/sub/y.txt"]
    assert len(fs.find("")) == 8
    walked = [(root, sorted(folders), sorted(files)) for root, folders, files in fs.walk("one")]
    assert walked == [
        ("one", ["sub"], ["config.json", "model.safetensors"]),
        ("one/sub", ["deep"], ["y.txt"]),
        ("one/sub/deep", [], ["x.txt"]),
    ]


SLICES = [(None, None), (0, 8), (5, None), (None, 100), (-10, None), (None, -10), (-20, -10), (9000, 20000)]
SLICES += [(10**9, None), (0, 10**9), (10, 10), (20, 10), (-(10**9), 3)]


@pytest.mark.parametrize(("start", "end"), SLICES)
def test_ranges_are_those_of_slices(fs: MergefsFileSystem, weights: bytes, start: int | None, end: int | None) -> None:
    assert fs.cat_file("one/model.safetensors", start, end) == weights[start:end]


def test_an_open_file_is_an_ordinary_one(fs: MergefsFileSystem, weights: bytes) -> None:
    with fs.open("one/model.safetensors") as file:
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.read(10) == weights[:10]
        assert file.seek(-5, 2) == len(weights) - 5
        assert file.read() == weights[-5:]
        assert file.read() == b""
        file.seek(BLOCK - 3)
        buffer = bytearray(7)
        assert file.readinto(buffer) == 7
        assert buffer == weights[BLOCK - 3 : BLOCK + 4]
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
    with fs.open("one/sub/deep/x.txt", "r") as text:
        assert text.readlines() == ["one\n", "two\n", "three"]
    with fs.open("one/sub/y.txt") as empty:
        assert empty.read() == b""


@pytest.mark.parametrize("cache_type", ["none", "readahead", "bytes", "all", "mmap", "blockcache"])
def test_caches_of_fsspec_work(fs: MergefsFileSystem, weights: bytes, cache_type: str) -> None:
    with fs.open("one/model.safetensors", cache_type=cache_type, block_size=1000) as file:
        file.seek(4000)
        assert file.read(3000) == weights[4000:7000]


def test_safetensors_reads_what_it_serves(fs: MergefsFileSystem, tmp_path: Path) -> None:
    found = safetensors.torch.load(fs.cat_file("one/model.safetensors"))
    expected = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_files_are_fetched(fs: MergefsFileSystem, tmp_path: Path) -> None:
    fs.get("one/", str(tmp_path / "got"), recursive=True)
    for path in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        assert (tmp_path / "got" / path.relative_to(tmp_path / "one")).read_bytes() == path.read_bytes()


def test_many_threads_read_one_model(fs: MergefsFileSystem, weights: bytes) -> None:
    def read(start: int) -> bool:
        return fs.cat_file("one/model.safetensors", start, start + 5000) == weights[start : start + 5000]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(0, len(weights), 500)))


def test_an_open_file_stays_when_its_ref_moves(fs: MergefsFileSystem, repository: Repository) -> None:
    with fs.open("one/config.json") as file:
        before = fs.ukey("one/config.json"), fs.checksum("one"), fs.ukey("")
        copy = pickle.dumps(file)
        repository.tag("one", "demo@2")
        assert file.read() == b'{"seed": 1}'
        assert pickle.loads(copy).read() == b'{"seed": 1}'
        assert fs.cat_file("one/config.json") == b'{"seed": 2}'
        after = fs.ukey("one/config.json"), fs.checksum("one"), fs.ukey("")
        assert all(old != new for old, new in zip(before, after, strict=True))
    assert fs.ukey("one/config.json") == fs.ukey("demo@2/config.json")


def test_pickles_name_their_repository(
    fs: MergefsFileSystem, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.path)
    found = pickle.dumps(fsspec.filesystem("mergefs"))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(found).repo == repository.path
    assert pickle.loads(found).fsid == fs.fsid


def test_times_are_the_commits(fs: MergefsFileSystem) -> None:
    for path in ("", "one", "one/sub", "one/config.json"):
        assert fs.created(path) == fs.modified(path)
        assert timedelta(0) <= datetime.now(UTC) - fs.created(path) < timedelta(minutes=5)


CHANGES: dict[str, Callable[[MergefsFileSystem], object]] = {
    "open": lambda fs: fs.open("one/new", "wb"),
    "append": lambda fs: fs.open("one/config.json", "ab"),
    "text": lambda fs: fs.open("one/config.json", "w"),
    "exclusive": lambda fs: fs.open("one/new", "xb"),
    "pipe": lambda fs: fs.pipe("one/new", b"x"),
    "write_text": lambda fs: fs.write_text("one/new", "x"),
    "put": lambda fs: fs.put(__file__, "one/new"),
    "upload": lambda fs: fs.upload(__file__, "one/new"),
    "touch": lambda fs: fs.touch("one/new"),
    "mkdir": lambda fs: fs.mkdir("one/new"),
    "makedirs": lambda fs: fs.makedirs("one/new/er", exist_ok=True),
    "rmdir": lambda fs: fs.rmdir("one/sub"),
    "rm": lambda fs: fs.rm("one", recursive=True),
    "rm_file": lambda fs: fs.rm_file("one/config.json"),
    "delete": lambda fs: fs.delete("one/config.json"),
    "cp": lambda fs: fs.cp("one/config.json", "one/new"),
    "mv": lambda fs: fs.mv("one/config.json", "one/new"),
    "rename": lambda fs: fs.rename("one", "three"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_refused(fs: MergefsFileSystem, name: str) -> None:
    with pytest.raises(OSError, match="read only") as raised:
        CHANGES[name](fs)
    assert raised.value.errno == errno.EROFS


def held(repository: Repository) -> list[str]:
    """Return the manifests that this file system has leased."""
    with repository.catalog.read() as txn:
        return sorted(m for lease in leases(txn) if lease.purpose == "fsspec" for m in lease.manifests)


def test_models_are_leased_while_they_are_read(fs: MergefsFileSystem, repository: Repository) -> None:
    fs.info("one/config.json")
    fs.find("")
    assert held(repository) == []
    file = fs.open("one/config.json")
    fs.cat_file("demo@2/config.json")
    assert held(repository) == sorted(repository.refs().values())
    fs.close()
    assert held(repository) == [repository.resolve("one")]
    assert file.read() == b'{"seed": 1}'
    file.close()
    file.close()
    fs.close()
    assert held(repository) == []
    assert fs.cat_file("one/config.json") == b'{"seed": 1}'


def test_a_file_that_is_forgotten_gives_its_model_back(fs: MergefsFileSystem, repository: Repository) -> None:
    fs.open("one/config.json").read()
    gc.collect()
    fs.close()
    assert held(repository) == []
    with pytest.raises(KeyError):
        fs.open("one/config.json", cache_type="no such cache")
    fs.close()
    assert held(repository) == []


def test_idle_models_are_few(
    fs: MergefsFileSystem, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_VIEWS", 2)
    for seed in range(3, 7):
        repository.ingest(checkpoint(tmp_path / str(seed), seed), f"m{seed}")
    with fs.open("one/config.json"):
        for seed in range(3, 7):
            fs.cat_file(f"m{seed}/config.json")
        kept = [repository.resolve(name) for name in ("one", "m5", "m6")]
        assert held(repository) == sorted(kept)
