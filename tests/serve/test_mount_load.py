"""Mounts under load: many readers of every kind at once, and a serving process that is killed meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import wait_until

from mergefs.catalog.leases import leases
from mergefs.errors import MountError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.serve.mount import MountInfo, mount, umount
from mergefs.serve.mount_table import is_stale, mounts
from tools.synth import make

READERS = Path(__file__).parent / "readers.py"
CACHE = 24 << 20
"""Less than the model, so that blocks are made again and again."""

MORE = 200 << 20
"""What the serving process may take besides its cache."""

RECIPE = """
merge_method: task_arithmetic
base_model: base
dtype: bfloat16
models:
  - model: expert-0
    parameters: {weight: 0.7}
  - model: expert-1
    parameters: {weight: 0.5}
"""

pytestmark = pytest.mark.fuse


@dataclass(frozen=True)
class Models:
    """A repository, and copies of its models `expert-0` (stored as a delta) and `merged` (lazy) as plain files."""

    repository: Repository
    copies: Path

    def copy(self, name: str) -> Path:
        return self.copies / name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("load")
    make("small", 2, folder, seed=5)
    Repository.init(folder / "repository", 256 << 10).close()
    with Repository.open(folder / "repository", sync=False) as repository:
        repository.ingest(folder / "base", "base")
        for name in ("expert-0", "expert-1"):
            repository.ingest(folder / name, name, base="base")
        repository.merge(Recipe.parse(RECIPE), "merged", lazy=True)
        repository.export("merged", folder / "merged")
        yield Models(repository, folder)


@contextmanager
def mounted(models: Models, name: str, directory: Path, **options: int) -> Iterator[MountInfo]:
    info = mount(models.repository.path, name, directory, cache_size=CACHE, **options)
    try:
        yield info
    finally:
        umount(directory)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def read_in_every_way(models: Models, directory: Path, seconds: float) -> None:
    """Mount both models, and run every kind of reader on both at once."""
    names = ("expert-0", "merged")
    with mounted(models, names[0], directory / "0") as first, mounted(models, names[1], directory / "1") as second:
        readers = [
            subprocess.Popen(
                [sys.executable, READERS, role, str(seconds), str(directory / str(n)), str(models.copy(name))],
                stdout=subprocess.PIPE,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            for n, name in enumerate(names)
            for role in ("transformers", "threads", "processes")
        ]
        try:
            printed = [reader.communicate(timeout=seconds + 240)[0] for reader in readers]
        finally:
            for reader in readers:
                reader.kill()
        assert [reader.returncode for reader in readers] == [0] * len(readers)
        assert all(int(count) > 0 for count in printed)
        for info in (first, second):
            assert peak_bytes(info.pid) <= CACHE + MORE
        figures = [state.cache for state in mounts() if state.pid in (first.pid, second.pid)]
        assert all(cache is not None and cache["bytes"] <= cache["limit"] <= CACHE for cache in figures)


def test_all_kinds_of_readers_at_once(models: Models, tmp_path: Path) -> None:
    read_in_every_way(models, tmp_path, 1)


@pytest.mark.slow
def test_all_kinds_of_readers_at_once_for_a_minute(models: Models, tmp_path: Path) -> None:
    read_in_every_way(models, tmp_path, 60)


def test_a_killed_process_leaves_errors_and_nothing_that_hangs(models: Models, tmp_path: Path) -> None:
    """Readers get an error, the place can be mounted at again, and gc finds no lease in its way."""
    repository, directory = models.repository, tmp_path / "at"
    weights = directory / "model.safetensors"
    expected = (models.copy("expert-0") / "model.safetensors").read_bytes()
    info = mount(repository.path, "expert-0", directory, cache_size=CACHE)
    ended: list[int | None] = []
    reading = threading.Barrier(9)

    def read(place: int) -> None:
        file = os.open(weights, os.O_RDONLY)
        reading.wait()
        try:
            while True:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                for at in range(place * len(expected) // 8, len(expected), 1 << 20):
                    data = os.pread(file, 1 << 20, at)
                    assert data == expected[at : at + len(data)]
        except OSError as error:
            ended.append(error.errno)
        with contextlib.suppress(OSError):
            os.close(file)

    threads = [threading.Thread(target=read, args=(place,), daemon=True) for place in range(8)]
    for thread in threads:
        thread.start()
    reading.wait()
    time.sleep(0.3)
    os.kill(info.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert set(ended) <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
    assert len(ended) == 8
    assert is_stale(directory)
    (state,) = [state for state in mounts() if state.directory == directory]
    assert (state.state, state.pid, state.bytes_served) == ("stale", info.pid, None)

    # Readers may get their errors before the process has let go of its lock.
    with repository.catalog.read() as txn:
        wait_until(lambda: not any(lease.alive for lease in leases(txn)))
    freed = repository.gc()
    assert freed.leases_ended >= 1
    assert freed.manifests_freed == 0
    again = mount(repository.path, "expert-0", directory, cache_size=CACHE)
    assert again.cleared
    assert weights.read_bytes() == expected
    os.kill(again.pid, signal.SIGKILL)
    while not is_stale(directory):
        time.sleep(0.01)
    assert umount(directory)
    assert not os.path.ismount(directory)
    with pytest.raises(MountError):
        umount(directory)
    repository.gc()
    assert repository.fsck().ok
    for name in ("expert-0", "merged"):
        with repository.view(name) as view:
            assert view.read("model.safetensors") == (models.copy(name) / "model.safetensors").read_bytes()
