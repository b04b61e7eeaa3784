"""What several test modules share: models that are made once, and repositories that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import builders
import pytest
from builders import EXPERTS

from mergefs.repository import Repository

SLICES = Path(__file__).parent / "data" / "minilm-slice"


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
