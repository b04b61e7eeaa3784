"""Models and repositories of every coding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import array, fine_tuned, write_model
from looking import (
    filled,
)

from mergefs.blocks.exact import CODINGS
from mergefs.repository import Repository


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts with every element changed, and one with few, whose blocks have the exact tier alone."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(3)
    shapes = {"a": (600, 256), "b": (500, 512), "c": (300, 256), "norm": (256,)}
    base = {name: array(random.normal(0, 0.04, shape), "BF16") for name, shape in shapes.items()}
    write_model(folder / "base", base, {"config.json": b"{}"})
    for seed, name in enumerate(("x", "y"), start=4):
        write_model(folder / name, fine_tuned(base, seed, delta=4e-4), {"config.json": b"{}"})
    few = {}
    for name, tensor in base.items():
        values = tensor.values.reshape(tensor.shape)
        values.ravel()[: 3000 if name != "norm" else 0] += random.normal(0, 4e-4, 3000 if name != "norm" else 0)
        few[name] = array(values, "BF16")
    write_model(folder / "few", few, {"config.json": b"{}"})
    return folder


@pytest.fixture(scope="module")
def both(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository of each coding, not to be changed."""
    folder = tmp_path_factory.mktemp("both")
    for exact in CODINGS:
        filled(folder / exact, models, exact).close()
    return {exact: folder / exact for exact in CODINGS}


@pytest.fixture
def repository(both: dict[str, Path], tmp_path: Path) -> Iterator[Repository]:
    """A copy of the `fast` one."""
    shutil.copytree(both["fast"], tmp_path / "repository")
    with Repository.open(tmp_path / "repository", sync=False) as opened:
        yield opened
