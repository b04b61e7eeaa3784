"""Makes the archives in this folder: small repositories, each written by the code of one commit.

    python tests/data/repositories/make.py ARCHIVE-NAME COMMIT [FEATURE...]

The commit's `mergefs` is taken out of the history into a temporary folder, and makes a repository with everything that
FEATURE names. `expected.json` in the archive says what that code itself then gave out: the SHA-256 of every file of
every ref as it exported them. How each archive was made is in README.md. They are never made anew: what a version wrote
is what the versions after it have to read.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BLOCK_SIZE = "64KiB"
EDIT = """
import sys
from mergefs.repository import Repository
with Repository.open(sys.argv[1]) as repository, repository.edit("linear") as session:
    session.filesystem().pipe_file("notes.txt", b"changed")
    session.commit(as_="edited")
with Repository.open(sys.argv[1]) as repository:
    repository.edit("base").close()
"""


def checkpoint(seed: int | None) -> dict[str, Any]:
    """Return the tensors of the base (None), or of an expert that differs from it in some rows of each."""
    random = np.random.default_rng(20)
    coarse = np.ldexp(np.round(random.normal(0, 1, (256, 128)) * 4), -8)  # few different values: small archives
    tensors: dict[str, Any] = {
        "layers.0.weight": coarse.astype(ml_dtypes.bfloat16),
        "layers.0.norm": np.ones(128, ml_dtypes.bfloat16),
        "layers.1.weight": np.ldexp(np.round(random.normal(0, 1, (48, 32)) * 64), -12).astype(np.float32),
        "noise": random.integers(0, 256, 2048, np.uint8),
        "positions": np.arange(512, dtype=np.int64),
    }
    if seed is not None:
        change = np.random.default_rng(seed)
        for name, rows in {"layers.0.weight": 32, "layers.0.norm": 128, "layers.1.weight": 24}.items():
            values = tensors[name].astype(np.float64)
            values[:rows] += change.normal(0, 3e-4, values[:rows].shape)
            tensors[name] = values.astype(tensors[name].dtype)
    return tensors


NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "int64": "I64"}


def write(folder: Path, tensors: dict[str, Any], config: dict[str, Any], name: str = "model.safetensors") -> Path:
    """Write a checkpoint."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for tensor, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[tensor] = {"dtype": NAMES[str(values.dtype)], "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / ("adapter_config.json" if name.startswith("adapter") else "config.json")).write_text(json.dumps(config))
    return folder


def recipe(method: str, base: str | None = "base", models: tuple[str, ...] = ("x", "y"), **parameters: Any) -> str:
    """Return a recipe's text, JSON being YAML."""
    weights = {name: {"weight": 0.25 + 0.5 * number} for number, name in enumerate(models)}
    if method in ("slerp", "model_stock"):
        weights = {name: {} for name in models}
    value: dict[str, Any] = {
        "merge_method": method,
        "models": [{"model": name, "parameters": own} for name, own in weights.items()],
    }
    if base:
        value["base_model"] = base
    if parameters:
        value["parameters"] = parameters
    return json.dumps(value)


class Made:
    """A repository that the code of one commit makes."""

    def __init__(self, code: Path, folder: Path) -> None:
        self._code = code
        self.folder = folder
        self.repository = folder / "repository"

    def python(self, *arguments: str) -> str:
        """Run Python with that commit's mergefs; return what it printed."""
        environment = {**os.environ, "PYTHONPATH": str(self._code), "PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=self.folder, check=False
        )
        if done.returncode:
            raise SystemExit(f"{arguments}: {done.stderr}")
        return done.stdout

    def run(self, *arguments: str) -> str:
        """Run a command."""
        return self.python("-m", "mergefs", "-R", str(self.repository), *arguments)

    def merge(self, name: str, text: str, *options: str) -> None:
        """Merge by a recipe."""
        path = self.folder / f"{name}.yml"
        path.write_text(text)
        self.run("merge", path.name, "--as", name, *options)

    def exported(self) -> dict[str, dict[str, str]]:
        """Return the SHA-256 of every file of every ref, as that code exports it."""
        found = {}
        for model in json.loads(self.run("ls", "--json"))["models"]:
            name = model.get("ref") or model.get("name")
            self.run("export", name, f"out-{name}")
            files = [path for path in (self.folder / f"out-{name}").rglob("*") if path.is_file()]
            found[name] = {
                path.relative_to(self.folder / f"out-{name}").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(files)
            }
        return found


def fill(made: Made, features: set[str]) -> None:
    """Make the repository."""
    made.python("-m", "mergefs", "init", str(made.repository), "--block-size", BLOCK_SIZE)
    config = {"model_type": "test", "torch_dtype": "bfloat16"}
    made.run("ingest", str(write(made.folder / "base", checkpoint(None), config)), "--as", "base")
    for seed, name in enumerate(("x", "y"), start=1):
        folder = str(write(made.folder / name, checkpoint(seed), config))
        made.run("ingest", folder, "--as", name, "--base", "base")
        if name == "x" and "small" in features:
            made.run("repack", "--exact", "small")  # y follows in the same coding
    if "small" in features:
        made.run("repack", "--exact", "fast")
        made.run("ingest", str(write(made.folder / "z", checkpoint(3), config)), "--as", "z", "--base", "base")
        made.run("rm", "z")
        made.run("gc")
    if "quick" in features:
        made.run("repack", "--exact", "quick")
        made.run("ingest", str(write(made.folder / "q", checkpoint(4), config)), "--as", "q", "--base", "base")
    made.run("tag", "x", "a.tag@2")
    made.merge("linear", recipe("linear"))
    made.merge("linear-baseless", recipe("linear", None), "--lazy")
    made.merge("arithmetic", recipe("task_arithmetic"), "--lazy")
    made.merge("ties", recipe("ties", density=0.5))
    made.merge("ties-lazy", recipe("ties", density=0.5), "--lazy")
    made.merge("budget", recipe("task_arithmetic"), "--lazy", "--budget", "60%")
    made.merge("dare", recipe("dare_ties", density=0.5), "--lazy", "--seed", "7")
    made.merge("again", recipe("task_arithmetic", models=("x", "ties")))  # of a merge
    made.merge("again-lazy", recipe("task_arithmetic", models=("x", "ties")), "--lazy")
    if "methods" in features:
        made.merge("slerp", recipe("slerp", models=("base", "x"), t=0.25), "--lazy")
        made.merge("breadcrumbs", recipe("breadcrumbs", density=0.8, gamma=0.05), "--lazy")
        made.merge("della", recipe("della", density=0.5), "--lazy", "--seed", "3")
        made.merge("stock", recipe("model_stock", models=("x", "y")), "--lazy")
    if "adapters" in features:
        random = np.random.default_rng(9)
        prefix = "base_model.model.layers.0"
        factors = {
            f"{prefix}.lora_A.weight": random.normal(0, 0.02, (2, 128)).astype(ml_dtypes.bfloat16),
            f"{prefix}.lora_B.weight": random.normal(0, 0.02, (256, 2)).astype(ml_dtypes.bfloat16),
        }
        lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["0"]}
        folder = write(made.folder / "lora", factors, lora, "adapter_model.safetensors")
        made.run("ingest", str(folder), "--as", "lora", "--base", "base")
        made.merge("with-lora", recipe("task_arithmetic", models=("x", "base+lora")), "--lazy")
    if "edits" in features:
        made.python("-c", EDIT, str(made.repository))


def main(name: str, commit: str, *features: str) -> None:
    """Make an archive."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "code").mkdir()
        tree = subprocess.run(["git", "archive", commit, "mergefs"], stdout=subprocess.PIPE, check=True, cwd=ROOT)
        subprocess.run(["tar", "x", "-C", str(folder / "code")], input=tree.stdout, check=True)
        made = Made(folder / "code", folder)
        fill(made, set(features))
        expected = folder / "expected.json"
        expected.write_text(json.dumps(made.exported(), indent=1, sort_keys=True))
        (made.repository / "catalog" / "lock.mdb").unlink()  # LMDB makes it anew
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(expected, expected.name)
            archive.add(made.repository, "repository", filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(*sys.argv[1:])
