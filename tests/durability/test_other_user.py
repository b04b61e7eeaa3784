"""A repository that another user may only read: it can be read, exported and mounted, and nothing can be changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from builders import contents, merged_models
from other_user import NOBODY

SCRIPT = Path(__file__).with_name("other_user.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others can enter, unlike pytest's own."""
    with TemporaryDirectory(prefix="mergefs-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads(folder: Path) -> None:
    merged_models(folder).close()
    repository = folder / "repository"
    for path in (repository, *repository.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for name in ("first", "second", "at"):
        (folder / name).mkdir()
        os.chown(folder / name, NOBODY if name != "first" else 0, -1)
    before = contents(repository)
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder, folder / "at"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert contents(repository) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_repository_is_its_owners(folder: Path) -> None:
    """Nobody else gets in until its owner says so."""
    merged_models(folder).close()
    entered = subprocess.run(
        ["cat", folder / "repository" / "mergefs.json"], user=NOBODY, group=NOBODY, extra_groups=[], check=False
    )
    assert entered.returncode != 0
