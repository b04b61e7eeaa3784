"""Sessions that are mounted, through the kernel: as a file system, and from `edit` to `commit` and `discard`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import builders
import pytest
from operations import Checker

from mergefs.edit.mount import commit, edit
from mergefs.repository import Repository
from mergefs.serve.mount import umount

WEIGHTS = "model.safetensors"
FILES = {"config.json": b'{"a": 1}', "extra/vocab.txt": b"a\nb\n", "big.bin": bytes(range(256)) * 800}

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not (os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3")),
        reason="needs /dev/fuse and fusermount3",
    ),
]


@dataclass
class Mounted:
    """A repository with the model `model`, the folder that it came from, and where it is mounted."""

    repository: Repository
    model: Path
    at: Path

    def edit(self, name: str | None = "model", **options: object) -> str:
        info = edit(self.repository, self.at, name, **options)  # type: ignore[arg-type]
        return info.session


@pytest.fixture
def mounted(repository: Repository, tmp_path: Path) -> Iterator[Mounted]:
    folder = builders.write_model(tmp_path / "model", builders.random_model(1), FILES)
    repository.ingest(folder, "model")
    at = tmp_path / "at"
    at.mkdir()
    yield Mounted(repository, folder, at)
    subprocess.run(["fusermount3", "-uz", at], check=False, capture_output=True)


@pytest.fixture
def at(mounted: Mounted) -> Iterator[Path]:
    """The model `model`, mounted for writing."""
    mounted.edit()
    return mounted.at


def data_start(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def refused(number: int, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert caught.value.errno == number


# -- a file system -----------------------------------------------------------------------------------------


def check(mounted: Mounted, seed: int, operations: int) -> None:
    """Run random operations on a mount, then unmount, resume, commit and serve, comparing after each."""
    weights = (mounted.model / WEIGHTS).read_bytes()
    session = mounted.edit()
    checker = Checker(mounted.at, seed, {**FILES, WEIGHTS: weights}, {WEIGHTS: data_start(weights)})
    try:
        checker.run(operations)
    finally:
        checker.close()
    assert len(checker.done) == 21
    umount(mounted.at)
    mounted.edit(None, resume=session)
    checker.verify()
    expected = {path: builders.sha256(data) for path, data in checker.contents().items()}
    commit(mounted.repository, str(mounted.at), "after")
    assert builders.served(mounted.repository, "after") == expected
    assert mounted.repository.fsck(read_data=True).ok


@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations(mounted: Mounted, seed: int) -> None:
    check(mounted, seed, 1000)


@pytest.mark.slow
def test_a_hundred_thousand_random_operations(mounted: Mounted) -> None:
    check(mounted, 2026, 100_000)
