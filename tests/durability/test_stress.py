"""Processes that use one repository at once see nothing wrong, and lose nothing that was reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.stress.__main__ import stress


def test_processes_hold_together_for_seconds(tmp_path: Path) -> None:
    assert stress(tmp_path, processes=3, seconds=8, seed=0).violations == []


@pytest.mark.slow
def test_processes_hold_together_for_a_minute(tmp_path: Path) -> None:
    assert stress(tmp_path, processes=8, seconds=60, seed=1).violations == []
