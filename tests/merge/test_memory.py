"""Memory: a tensor of 4 GiB in nine models merges in a process that may not have half of that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import recipe_text
from numpy.typing import NDArray

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.recipe import Recipe
from mergefs.repository import Repository

ROWS, COLUMNS = 1 << 19, 1 << 12
STRIPE = 1 << 13
"""Rows that are made at once: 64 MiB."""
EXPERTS = 8
LIMIT = 3 << 29

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
from mergefs.cli import cli
cli.main(sys.argv[2:], standalone_mode=False)
"""


def stripe(number: int) -> NDArray[np.float32]:
    """Return a run of the base's rows, all of them different."""
    return np.random.default_rng(number).standard_normal((STRIPE, COLUMNS), np.float32)


def write(file: Path, number: int, values: NDArray[np.float32]) -> None:
    """Write a run of rows where it belongs."""
    head = build_header([("w", DTYPES["BF16"], (ROWS, COLUMNS))])
    with file.open("r+b") as out:
        out.seek(len(head) + number * values.size * 2)
        out.write(values.astype(ml_dtypes.bfloat16).tobytes())


@pytest.mark.slow
def test_a_tensor_larger_than_memory(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 20 << 30:
        pytest.skip("it takes 20 GiB of disk")
    file = tmp_path / "model.safetensors"
    file.write_bytes(build_header([("w", DTYPES["BF16"], (ROWS, COLUMNS))]))
    stripes = ROWS // STRIPE
    for number in range(stripes):
        write(file, number, stripe(number))
    Repository.init(tmp_path / "repository").close()
    with Repository.open(tmp_path / "repository", sync=False) as repository:
        repository.ingest(file, "base")
        for expert in range(EXPERTS):
            changed = range(expert % 4, stripes, 4)
            for number in changed:
                noise = np.random.default_rng((expert, number)).standard_normal((STRIPE, COLUMNS), np.float32)
                write(file, number, stripe(number) + 0.01 * noise)
            repository.ingest(file, f"e{expert}", base="base")
            for number in changed:
                write(file, number, stripe(number))
        file.unlink()
        recipe = tmp_path / "recipe.yml"
        models = [(f"e{expert}", {"weight": 1.0, "density": 0.5}) for expert in range(EXPERTS)]
        recipe.write_text(recipe_text("ties", models, "base"))
        command = ["--repo", str(tmp_path / "repository"), "merge", str(recipe), "--as", "merged", "--json"]
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(LIMIT), *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        report = json.loads(done.stdout)
        assert report["blocks"]["derived"] == ROWS * COLUMNS * 2 >> 20
        # The same in a process without a limit, and as the method is defined, where two experts meet.
        again = repository.plan(Recipe.load(recipe))
        assert again.plan.id == report["plan"]
        with repository.view("merged") as view:
            head = len(build_header([("w", DTYPES["BF16"], (ROWS, COLUMNS))]))
            size = STRIPE * COLUMNS * 2
            found = np.frombuffer(view.read("model.safetensors", head + 5 * size, 1 << 20), ml_dtypes.bfloat16)
        base = stripe(5).ravel()[: found.size].astype(ml_dtypes.bfloat16).astype(np.float64)
        deltas = []
        for expert in (1, 5):
            noise = np.random.default_rng((expert, 5)).standard_normal((STRIPE, COLUMNS), np.float32)
            values = (stripe(5) + 0.01 * noise).ravel()[: found.size].astype(ml_dtypes.bfloat16)
            deltas.append(values.astype(np.float64) - base)
        # Of each, half of the tensor's elements would be kept, and only a quarter differ: nothing is trimmed.
        # Where they cancel out the elected sign is positive.
        elected = np.where(deltas[0] + deltas[1] >= 0, 1.0, -1.0)
        agrees = [np.sign(delta) == elected for delta in deltas]
        divisor = np.maximum(1, agrees[0].astype(int) + agrees[1])
        merged = (deltas[0] * agrees[0] + deltas[1] * agrees[1]) / divisor
        wanted = (base + merged).astype(np.float32).astype(ml_dtypes.bfloat16)
        assert np.count_nonzero(found != wanted) <= 1e-4 * found.size
