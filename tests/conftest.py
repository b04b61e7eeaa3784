"""What several test modules share: models that are made once, and repositories that hold them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import builders
import hypothesis
import pytest
from builders import EXPERTS

from mergefs.repository import Repository

SLICES = Path(__file__).parent / "data" / "minilm-slice"


def pytest_configure(config: pytest.Config) -> None:
    """Let examples take their time, and give each test process of several a folder of its own for compiled loops.

    How long an example takes says how busy the machine is, and whether a loop is compiled yet, so it fails nothing.
    Two processes that compile one function for different dtypes at the same time may give both the same file name in
    numba's index. The folder is kept between runs; what the tests start inherits it.
    """
    hypothesis.settings.register_profile("mergefs", deadline=None)
    hypothesis.settings.load_profile("mergefs")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        assert "numba" not in sys.modules
        os.environ["NUMBA_CACHE_DIR"] = str(config.rootpath / ".pytest_cache" / "d" / f"numba-{worker}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what mounts where nothing can be mounted."""
    possible = os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3")
    if item.get_closest_marker("fuse") and not possible:
        pytest.skip("needs /dev/fuse and fusermount3")


@pytest.fixture(scope="session")
def slices() -> Path:
    """The folder of the real slices: base and three experts, bf16."""
    return SLICES


@pytest.fixture(scope="session")
def slice_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository with the real slices. Tests may add models of their own names and take nothing away."""
    repository = builders.new_repository(tmp_path_factory.mktemp("slices") / "repository")
    repository.ingest(SLICES / "base", "base")
    for name in EXPERTS:
        repository.ingest(SLICES / name, name, base="base")
    yield repository
    repository.close()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository with the smallest blocks."""
    made = builders.new_repository(tmp_path / "repository")
    yield made
    made.close()
