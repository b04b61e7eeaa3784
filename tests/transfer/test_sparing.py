"""What moves when most is there already; transfers that are interrupted; refs that several move at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pytest
from builders import Array, array, new_repository, served, tree, write_model

from mergefs.errors import NotFoundError, RefMovedError
from mergefs.repository import Repository
from mergefs.transfer import archive
from mergefs.transfer.archive import Archive, is_url
from mergefs.transfer.placing import S3Placing

TENSORS = 40
BLOCK = 1 << 14
INTERRUPTIONS = 10
BATCH, PACK = 20_000, 100_000
"""Bytes that are read at once, and of a pack, in these tests."""


def matrices(seeds: dict[int, int]) -> dict[str, Array]:
    """Return tensors of four blocks each; some of them of another seed than 0."""
    return {
        f"layers.{n}.weight": array(np.random.default_rng((n, seeds.get(n, 0))).normal(0, 0.02, (256, 128)), "BF16")
        for n in range(TENSORS)
    }


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Repository]:
    """`base`, and `near`, which shares nine of ten blocks with it."""
    with new_repository(tmp_path / "repository", BLOCK) as repository:
        for name, seeds in {"base": {}, "near": dict.fromkeys(range(0, TENSORS, 10), 1)}.items():
            write_model(tmp_path / name, matrices(seeds))
            repository.ingest(tmp_path / name, name)
        yield repository


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transfers work in small pieces, so that there is much to interrupt."""
    monkeypatch.setattr("mergefs.transfer.copy._BATCH", BATCH)
    monkeypatch.setattr("mergefs.blocks.writer.PACK_BYTES", PACK)
    monkeypatch.setattr(archive, "PACK_BYTES", PACK)


def pack_bytes(repository: Repository) -> int:
    """Return how much lies in packs."""
    return sum(size for _, size in repository.backend.list("packs"))


@contextmanager
def read_from(remote: str) -> Iterator[list[int]]:
    """Note the bytes that are read of an archive."""
    found: list[int] = []
    if not is_url(remote):
        yield found
        return
    files = fsspec.url_to_fs(remote)[0]
    cat_file, cat_ranges = files.cat_file, files.cat_ranges

    def one(*arguments: object, **options: object) -> bytes:
        data: bytes = cat_file(*arguments, **options)
        found.append(len(data))
        return data

    def many(*arguments: object, **options: object) -> list[bytes]:
        before = len(found)
        data: list[bytes] = cat_ranges(*arguments, **options)
        found[before:] = map(len, data)  # it may be made of the other
        return data

    files.cat_file, files.cat_ranges = one, many
    try:
        yield found
    finally:
        del files.cat_file, files.cat_ranges


def test_a_model_that_shares_nine_tenths_moves_little(models: Repository, remote: str, tmp_path: Path) -> None:
    base, near = (models.manifest(models.resolve(name)) for name in ("base", "near"))
    blocks = list(near.block_ids())
    shared = sum(block in set(base.block_ids()) for block in blocks)
    assert 0.9 <= shared / len(blocks) < 0.91
    models.push("base", remote)
    pushed = models.push("near", remote)
    assert pushed.blocks_sent == len(blocks) - shared
    assert pushed.bytes_written <= 0.15 * near.raw_bytes
    with new_repository(tmp_path / "elsewhere", BLOCK) as elsewhere:
        elsewhere.pull("base", remote)
        before = pack_bytes(elsewhere)
        with read_from(remote) as read:
            report = elsewhere.pull("near", remote)
        assert report.blocks_sent == len(blocks) - shared
        moved = max(report.bytes_sent, sum(read), pack_bytes(elsewhere) - before)
        print(f"{moved / near.raw_bytes:.1%} of the model's bytes moved")
        assert moved <= 0.15 * near.raw_bytes
        assert served(elsewhere, "near") == served(models, "near")


class StopError(Exception):
    """The test's interruption."""


def _interrupted(transfer: Callable[..., object], whole: int) -> int:
    """Run a transfer that is stopped again and again; return the bytes that travelled in all until it ended."""
    sent_in_all = 0
    for _ in range(INTERRUPTIONS):
        last = 0

        def stop(sent: int, total: int) -> None:
            nonlocal last
            last = sent
            if sent > whole / (INTERRUPTIONS + 1):
                raise StopError

        with pytest.raises(StopError):
            transfer(progress=stop)
        sent_in_all += last
    report = transfer()
    return sent_in_all + int(getattr(report, "bytes_sent", 0))


@pytest.mark.usefixtures("small_packs")
def test_a_pull_that_is_interrupted_ten_times(models: Repository, remote: str, tmp_path: Path) -> None:
    models.push("near", remote)
    whole = pack_bytes(models)
    with new_repository(tmp_path / "elsewhere", BLOCK) as elsewhere:

        def pull(**options: object) -> object:
            assert not elsewhere.refs()  # it comes last
            return elsewhere.pull("near", remote, **options)

        travelled = _interrupted(pull, whole // 2)
        assert served(elsewhere, "near") == served(models, "near")
        assert elsewhere.fsck(read_data=True).ok
        assert travelled < 2 * whole, "what had arrived was sent again"


@pytest.mark.usefixtures("small_packs")
def test_a_push_that_is_interrupted_ten_times(models: Repository, remote: str, tmp_path: Path) -> None:
    with new_repository(tmp_path / "elsewhere", BLOCK) as elsewhere:

        def push(**options: object) -> object:
            with pytest.raises(NotFoundError):
                elsewhere.pull("near", remote)
            return models.push("near", remote, **options)

        whole = pack_bytes(models)
        assert _interrupted(push, whole // 2) < 2 * whole
        elsewhere.pull("near", remote)
        assert served(elsewhere, "near") == served(models, "near")
        assert elsewhere.fsck(read_data=True).ok


PULL = f"""
import sys
import mergefs.blocks.writer, mergefs.transfer.copy
mergefs.transfer.copy._BATCH, mergefs.blocks.writer.PACK_BYTES = {BATCH}, {PACK}
from mergefs.cli import main
sys.argv = ["mergefs", "-R", sys.argv[1], "pull", "near", sys.argv[2]]
main()
"""


@pytest.mark.slow
def test_a_pull_whose_process_is_killed_ten_times(models: Repository, s3: str, s3_server: str, tmp_path: Path) -> None:
    models.push("near", s3)
    new_repository(tmp_path / "elsewhere", BLOCK).close()
    path = tmp_path / "elsewhere"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "FSSPEC_S3_ENDPOINT_URL": s3_server,
        "FSSPEC_S3_KEY": "test",
        "FSSPEC_S3_SECRET": "test",
    }
    killed = 0
    while killed < INTERRUPTIONS:
        before = len(tree(path / "packs"))
        process = subprocess.Popen([sys.executable, "-c", PULL, str(path), s3], env=environment)
        while process.poll() is None and len(tree(path / "packs")) == before:
            time.sleep(0.001)
        if process.poll() is not None:
            break  # it was faster
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed += 1
        with Repository.open(path, sync=False) as elsewhere:
            assert elsewhere.fsck(read_data=True).ok
    assert killed > 3
    subprocess.run([sys.executable, "-c", PULL, str(path), s3], env=environment, check=True)
    with Repository.open(path, sync=False) as elsewhere:
        assert served(elsewhere, "near") == served(models, "near")
        assert elsewhere.fsck(read_data=True).ok
    print(f"killed {killed} times")


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_one_of_many_sets_a_ref(kind: str, models: Repository, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"file://{tmp_path}/archive" if kind == "file" else request.getfixturevalue("s3")
    manifests = [models.manifest(models.resolve(name)) for name in ("base", "near")]
    archives = [Archive(url, models.block_elements) for _ in range(6)]
    for name in ("one", "two", "three"):
        barrier = threading.Barrier(len(archives))

        def move(number: int, name: str = name, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                archives[number].set_ref(name, manifests[number % 2], replace=False)
            except RefMovedError:
                return False
            return True

        with ThreadPoolExecutor(len(archives)) as pool:
            won = list(pool.map(move, range(len(archives))))
        winner = archives[0].ref(name)
        assert won == [manifests[number % 2].id == winner for number in range(len(archives))]
        archives[1].set_ref(name, manifests[0], replace=True)
        archives[2].set_ref(name, manifests[1], replace=True)
        assert archives[3].ref(name) == manifests[1].id


def test_a_ref_on_s3_is_written_only_as_it_was_seen(s3: str) -> None:
    files, root = fsspec.url_to_fs(s3)
    placing = S3Placing(files)
    path = f"{root}/refs/x.json"
    with placing.slot(path) as first, placing.slot(path) as second:
        assert first.write(b"1", new=True)
        assert not second.write(b"2", new=True)
    with placing.slot(path) as first, placing.slot(path) as second:
        assert not first.write(b"3", new=True)
        assert second.write(b"4", new=False)
        assert not first.write(b"5", new=False)
    with placing.slot(path) as first:
        files.rm_file(path)
        assert not first.write(b"6", new=False)
    with placing.slot(path) as first:
        assert first.write(b"7", new=True)
    assert files.cat_file(path) == b"7"
