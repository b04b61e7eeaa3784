"""Methods of other packages, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from mergefs.merge.linear import combine
from mergefs.merge.method import Method

class Halfway(Method):
    name = "halfway"
    parameters = {}
    decides = False
    most = 1

    def coefficients(self, numbers, tensor):
        return (0.5,)

    def merge(self, inputs):
        return combine(inputs, 1.0, (0.5,))

class Other(Halfway):
    name = "another"
"""
PROGRAM = """
import sys
import numpy as np, torch
from safetensors.torch import save_file
from mergefs.recipe import Recipe
from mergefs.repository import Repository
folder = sys.argv[1]
with Repository.init(folder + "/repository") as repository:
    for name, value in (("base", 1.0), ("x", 2.0)):
        save_file({"w": torch.full((4, 4), value)}, folder + f"/{name}.safetensors")
        repository.ingest(folder + f"/{name}.safetensors", name, base="base" if name == "x" else None)
    text = f"merge_method: {sys.argv[2]}\\nbase_model: base\\nmodels:\\n- model: x\\n"
    repository.merge(Recipe.parse(text), "m")
    with repository.view("m") as view:
        print(view.tensor("w").unique().tolist())
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a package that has entry points, as pip would leave it."""
    packages = tmp_path / "packages"
    about = packages / "ours-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[mergefs.methods]\nhalfway = ours:Halfway\nwrong = ours:Other\nbroken = ours:Nothing\n"
    )
    (packages / "ours.py").write_text(MODULE)
    return packages


def run(installed: Path, folder: Path, method: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"}
    command = [sys.executable, "-c", PROGRAM, str(folder), method]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_method_of_another_package_merges(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "halfway")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.5]"


@pytest.mark.parametrize(
    ("method", "message"),
    [("wrong", "is no mergefs method of that name"), ("broken", "cannot be loaded"), ("nowhere", "halfway, wrong")],
)
def test_what_is_no_method_is_refused(installed: Path, tmp_path: Path, method: str, message: str) -> None:
    done = run(installed, tmp_path, method)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
