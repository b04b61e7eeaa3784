"""fsspec's own tests of file systems, run on a repository; and the ways in which others use a file system."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.generic
import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests import abstract

from mergefs.errors import NotARepositoryError, UserError
from mergefs.repository import Repository
from mergefs.serve.async_filesystem import AsyncMergefsFileSystem
from mergefs.serve.filesystem import MergefsFileSystem
from mergefs.serve.view import View

BLOCK = 4096
MODEL = "model"
READ_ONLY = "a manifest never changes: nothing can be put into the folder of a model"


def weights() -> dict[str, torch.Tensor]:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 301)).astype(np.float32))
    return {"a.weight": values.bfloat16(), "b.weight": values, "scalar": torch.tensor(1.5)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The directory of a model, for more files to be put into before it is ingested."""
    (tmp_path / "checkpoint").mkdir()
    safetensors.torch.save_file(weights(), tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    Repository.init(tmp_path / "repo", BLOCK).close()
    with Repository.open(tmp_path / "repo", sync=False) as repository:
        yield repository


def opened(repository: Repository) -> Iterator[MergefsFileSystem]:
    fs = fsspec.filesystem("mergefs", repo=repository.path, skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.fixture
def fs(repository: Repository) -> Iterator[MergefsFileSystem]:
    yield from opened(repository)


@pytest.fixture
def ingested(repository: Repository, checkpoint: Path) -> Path:
    """The directory of a model that the repository has."""
    (checkpoint / "table.csv").write_text("a,b\n1,2\n3,4\n")
    (checkpoint / "notes").mkdir()
    (checkpoint / "notes" / "empty.txt").touch()
    torch.save({"step": 7, "state": torch.arange(5000)}, checkpoint / "training_args.pt")
    repository.ingest(checkpoint, MODEL)
    return checkpoint


class Fixtures(abstract.AbstractFixtures):
    """Folders as the suites make them, made as a checkpoint on the disk and then ingested as a whole."""

    @pytest.fixture
    def fs(self, repository: Repository) -> Iterator[MergefsFileSystem]:
        yield from opened(repository)

    @pytest.fixture
    def fs_path(self) -> str:
        return MODEL

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    def _ingested(self, repository: Repository, checkpoint: Path, make: Callable[..., str]) -> str:
        made = make(LocalFileSystem(auto_mkdir=True), lambda *parts: "/".join(map(str, parts)), str(checkpoint))
        repository.ingest(checkpoint, MODEL)
        return f"{MODEL}/{Path(made).name}"

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, repository: Repository, checkpoint: Path) -> str:
        return self._ingested(repository, checkpoint, self._bulk_operations_scenario_0)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, repository: Repository, checkpoint: Path) -> str:
        return self._ingested(repository, checkpoint, self._glob_edge_cases_files)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, repository: Repository, checkpoint: Path) -> str:
        return self._ingested(repository, checkpoint, self._dir_and_file_with_same_name_prefix)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, repository: Repository, checkpoint: Path) -> str:
        return self._ingested(repository, checkpoint, self._10_files_with_hashed_names)

    @pytest.fixture
    def fs_target(self) -> str:
        pytest.skip(READ_ONLY)


class TestGet(Fixtures, abstract.AbstractGetTests):
    def test_get_directory_recursive(
        self, fs: Any, repository: Repository, checkpoint: Path, local_fs: Any, local_target: str
    ) -> None:
        # The same as fsspec's, which makes the folder through the file system.
        (checkpoint / "src").mkdir()
        (checkpoint / "src" / "file").touch()
        repository.ingest(checkpoint, MODEL)
        for source, again in ((f"{MODEL}/src", ["file", "src/file"]), (f"{MODEL}/src/", ["file"])):
            for expected in (["file"], again):
                fs.get(source, local_target, recursive=True)
                assert [path[len(str(local_target)) + 1 :] for path in local_fs.find(local_target)] == expected
            local_fs.rm(local_target, recursive=True)


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    @pytest.fixture(autouse=True)
    def _skipped(self) -> None:
        pytest.skip(READ_ONLY)


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    @pytest.fixture(autouse=True)
    def _skipped(self) -> None:
        pytest.skip(READ_ONLY)


# -- ranges ------------------------------------------------------------------------------------------------


def test_many_ranges_decode_each_block_once(
    fs: MergefsFileSystem, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    make = View._make

    def counted(self: View, part: Any) -> Any:
        made.append((part.tensor and part.tensor.name, part.number, part.start))
        return make(self, part)

    monkeypatch.setattr(View, "_make", counted)
    monkeypatch.setattr("mergefs.serve.filesystem.SMALL_BYTES", 0)
    path = f"{MODEL}/model.safetensors"
    content = (ingested / "model.safetensors").read_bytes()
    random = np.random.default_rng(1)
    starts = random.integers(0, len(content), 300).tolist()
    ends = [start + int(size) for start, size in zip(starts, random.integers(0, 3 * BLOCK, 300), strict=True)]
    assert fs.cat_ranges([path] * 300, starts, ends) == [content[a:b] for a, b in zip(starts, ends, strict=True)]
    assert len(made) == len(set(made))
    fs.close()
    made.clear()
    assert fs.cat_file(path) == content
    assert len(made) == len(set(made)) > 20


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_ranges_are_those_of_slices(
    fs: MergefsFileSystem, ingested: Path, limit: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergefs.serve.filesystem.CACHE_BYTES_PER_VIEW", limit)
    monkeypatch.setattr("mergefs.serve.filesystem.SMALL_BYTES", small)
    content = (ingested / "model.safetensors").read_bytes()
    path = f"mergefs://{MODEL}/model.safetensors"
    slices = [(None, None), (0, 0), (5, None), (None, -5), (-9, None), (10**9, None), (90, 10), (4000, 9000)]
    starts, ends = [list(column) for column in zip(*slices, strict=True)]
    found = fs.cat_ranges([path] * len(slices), starts, ends)
    assert found == [content[a:b] for a, b in slices]
    assert [fs.cat_file(path, a, b) for a, b in slices] == found
    with fs.open(path, block_size=5000) as file:
        assert b"".join(iter(lambda: file.read(3333), b"")) == content
    assert all(type(part) is bytes for part in found)
    assert fs.cat_ranges([path, f"{MODEL}/table.csv"], 1, 4, max_gap=0) == [content[1:4], b",b\n"]
    assert fs.cat_ranges([], [], []) == []
    assert fs.cat_ranges([path, f"{MODEL}/notes/empty.txt"], 0, 10)[1] == b""


def test_ranges_that_cannot_be_read(fs: MergefsFileSystem, ingested: Path, repository: Repository) -> None:
    paths = [f"{MODEL}/none", f"{MODEL}/table.csv", f"{MODEL}/notes"]
    missing, table, folder = fs.cat_ranges(paths, 0, 3)
    assert isinstance(missing, FileNotFoundError)
    assert table == b"a,b"
    assert isinstance(folder, IsADirectoryError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 3, on_error="raise")
    with pytest.raises(TypeError):
        fs.cat_ranges(f"{MODEL}/table.csv", 0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        fs.cat_ranges(paths, [0], [3, 3, 3])
    for pack in (repository.path / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    found = fs.cat_ranges([f"{MODEL}/model.safetensors"] * 2, [0, 0], [10, None])
    assert (type(found[0]), isinstance(found[1], Exception)) == (bytes, True)


# -- who calls it ------------------------------------------------------------------------------------------


def test_chained_urls_name_the_repository(repository: Repository, ingested: Path, tmp_path: Path) -> None:
    content = (ingested / "table.csv").read_bytes()
    for url in (
        f"mergefs://{MODEL}/table.csv::file://{repository.path}",
        f"mergefs://{MODEL}/*.csv::{repository.path}",
    ):
        (file,) = fsspec.open_files(url)
        with file as opened:
            assert opened.read() == content
    fs, path = fsspec.url_to_fs(f"mergefs::file://{repository.path}")
    assert (fs.repo, path) == (repository.path, "")
    assert fs.ls("", detail=False) == [MODEL]
    assert fs is not fsspec.filesystem("mergefs", repo=repository.path)
    assert fs.fsid == fsspec.filesystem("mergefs", repo=repository.path).fsid
    assert pickle.loads(pickle.dumps(fs)).cat_file(f"{MODEL}/table.csv") == content
    with pytest.raises(UserError, match="memory"):
        fsspec.url_to_fs(f"mergefs://{MODEL}::memory://repo")
    with pytest.raises(NotARepositoryError):
        fsspec.url_to_fs(f"mergefs://{MODEL}::file://{tmp_path}")[0].ls("")


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_what_is_cached_by_fsspec(repository: Repository, ingested: Path, tmp_path: Path, cache: str) -> None:
    options = {"mergefs": {"repo": str(repository.path)}, cache: {"cache_storage": str(tmp_path / "cache")}}
    with fsspec.open(f"{cache}::mergefs://{MODEL}/model.safetensors", **options) as file:
        assert file.read() == (ingested / "model.safetensors").read_bytes()


def test_other_libraries_read_its_files(fs: MergefsFileSystem, ingested: Path) -> None:
    with fs.open(f"{MODEL}/training_args.pt", block_size=100) as file:
        found = torch.load(file)
    assert found["step"] == 7
    assert torch.equal(found["state"], torch.arange(5000))
    with fs.open(f"{MODEL}/model.safetensors") as file:
        loaded = safetensors.torch.load(file.read())
        file.seek(0)
        header = file.read(int.from_bytes(file.read(8), "little"))
    assert header.startswith(b"{")
    assert all(torch.equal(loaded[name], value) for name, value in weights().items())
    with fs.open(f"{MODEL}/model.safetensors") as file:
        assert len(np.frombuffer(file.read(), np.uint8)) == fs.size(f"{MODEL}/model.safetensors")


def test_pandas_reads_its_urls(repository: Repository, ingested: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(f"mergefs://{MODEL}/table.csv", storage_options={"repo": str(repository.path)})
    assert table.to_dict("list") == {"a": [1, 3], "b": [2, 4]}


def test_it_is_copied_into_any_other_file_system(fs: MergefsFileSystem, ingested: Path) -> None:
    fsspec.generic.set_generic_fs("mergefs", repo=str(fs.repo))
    fsspec.generic.set_generic_fs("memory")
    memory = fsspec.filesystem("memory")
    generic = fsspec.generic.GenericFileSystem(default_method="generic")
    try:
        fsspec.generic.rsync(f"mergefs://{MODEL}", "memory://copied", fs=generic)
        for path in ("model.safetensors", "notes/empty.txt", "table.csv"):
            assert memory.cat_file(f"/copied/{path}") == (ingested / path).read_bytes()
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


# -- in an event loop --------------------------------------------------------------------------------------


def test_coroutines_give_the_same(repository: Repository, ingested: Path) -> None:
    content = (ingested / "model.safetensors").read_bytes()
    path = f"{MODEL}/model.safetensors"

    async def check() -> None:
        fs = AsyncMergefsFileSystem(repository.path)
        assert sorted(await fs._ls(MODEL, detail=False)) == sorted(fs.sync_fs.ls(MODEL, detail=False))
        assert (await fs._info(path))["size"] == len(content)
        assert await fs._cat_file(path, 10, 90) == content[10:90]
        assert await fs._cat_ranges([path, path], [0, 5], [5, None]) == [content[:5], content[5:]]
        assert (await fs._cat([path, f"{MODEL}/table.csv"]))[path] == content
        assert await fs._glob(f"{MODEL}/*.csv") == [f"{MODEL}/table.csv"]
        assert len(await fs._find(MODEL)) == 4
        assert [entry[0] async for entry in fs._walk(MODEL)] == [MODEL, f"{MODEL}/notes"]
        assert not await fs._exists("none")
        assert await fs._checksum(path) == fs.sync_fs.checksum(path)
        many = await asyncio.gather(*(fs._cat_file(path, at, at + 3000) for at in range(0, len(content), 3000)))
        assert b"".join(many) == content
        async with await fs.open_async(path) as file:
            assert await file.read(8) == content[:8]
            file.seek(-8, 2)
            assert await file.read() == content[-8:]
        with pytest.raises(OSError, match="read only"):
            await fs._pipe_file(f"{MODEL}/new", b"x")
        with pytest.raises(OSError, match="read only"):
            await fs.open_async(path, "wb")
        with pytest.raises(ValueError):
            await fs.open_async(path, "r")
        with pytest.raises(FileNotFoundError):
            await fs._cat_file(f"{MODEL}/none")

    asyncio.run(check())


def test_the_asynchronous_one_works_without_a_loop_and_as_a_pickle(repository: Repository, ingested: Path) -> None:
    fs = AsyncMergefsFileSystem(repository.path, asynchronous=False)
    assert fs.async_impl
    for again in (fs, pickle.loads(pickle.dumps(fs))):
        assert again.cat_file(f"{MODEL}/table.csv") == (ingested / "table.csv").read_bytes()
        assert again.protocol == "mergefs"
