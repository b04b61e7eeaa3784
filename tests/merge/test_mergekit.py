"""The parity table with mergekit itself, where MERGEFS_MERGEKIT names a Python that has mergekit 0.1.5."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.parity import WITHIN, measure

PYTHON = os.environ.get("MERGEFS_MERGEKIT")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MERGEFS_MERGEKIT names no Python with mergekit 0.1.5")
def test_float32_recipes_come_out_alike_or_the_definition_is_ours(tmp_path: Path) -> None:
    rows = [row for row in measure(Path(PYTHON or ""), tmp_path) if row.dtype == "float32"]
    assert rows
    for row in rows:
        assert row.mergefs >= 0.9999, row
        if row.within is None:
            assert row.expected is not None or row.note.startswith("mergekit: ValueError"), row
        elif row.within < WITHIN:
            assert row.mergekit is not None
            assert row.mergefs > row.mergekit, row
            assert "unexplained" not in row.note, row
        if row.expected is not None and row.recipe.startswith("dare"):
            assert abs(row.expected[0] - row.expected[1]) < 0.02, row
