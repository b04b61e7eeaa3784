"""Merges by mergekit, in a virtual environment of its own and offline, as its users run it on a CPU.

The options are those that give mergekit its best run here. `--no-write-model-card` and `--quiet` leave out what no
merge needs. The tokenizer is copied (mergekit's default), as mergefs keeps it too. Left at their defaults: `-j`, as
torch takes all cores by itself; `--async-write`, as the whole model is one shard here and written at the end either
way; `--lazy-unpickle`, which concerns .bin files only; `--low-cpu-memory`, which needs an accelerator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.journal import say
from benchmarks.measure import Machine, StepFailedError, files, fsync, run
from benchmarks.recipes import Case

VERSIONS = {"mergekit": "0.1.5", "torch": "2.13.0"}
OPTIONS = ("--no-write-model-card", "--quiet", "--random-seed", "0")
PROGRAMS = """
import mergekit.merge, mergekit.scripts.run_yaml, torch, transformers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM
"""
ASK = "from importlib.metadata import version; print(version('mergekit'), version('torch'))"


class Mergekit:
    """mergekit in a virtual environment.

    Args:
        environment: the folder of the virtual environment; it is made when it is not there.
        models: the folder that holds the base and the experts.
        work: a folder for recipes and results.
        machine: prepared before every run.

    Raises:
        SystemExit: when the environment cannot be made, or holds another version of mergekit.
    """

    def __init__(self, environment: Path, models: Path, work: Path, machine: Machine) -> None:
        self._bin = environment.absolute() / "bin"
        self._models = models
        self._work = work
        self._machine = machine
        if not (self._bin / "python").exists():
            _make(environment)
        asked = subprocess.run([self._bin / "python", "-c", ASK], capture_output=True, text=True, check=False)
        found = dict(zip(VERSIONS, asked.stdout.split(), strict=False))
        if found.get("mergekit") != VERSIONS["mergekit"]:
            raise SystemExit(f"{environment} holds mergekit {found.get('mergekit')}, not {VERSIONS['mergekit']}")
        self.versions = found

    @property
    def output(self) -> Path:
        """The folder of the last result."""
        return self._work / "mergekit-output"

    def merge(self, case: Case) -> dict[str, Any]:
        """Merge; return what the process took, and `flush_seconds`: how long the result took to reach the disk then.

        Where mergekit fails (it may lack memory), `failed` says so instead.
        """
        self.discard()
        recipe = case.write(self._work / "mergekit.yaml", lambda name: str(self._models / name))
        environment = offline()
        self._machine.prepare([self._bin / "python", "-c", PROGRAMS])
        command: Sequence[str | Path] = [self._bin / "mergekit-yaml", recipe, self.output, *OPTIONS]
        try:
            measured = run(command, f"mergekit {case.name}", self._work, environment, reports=False)
        except StepFailedError as error:
            say(str(error))
            return {"failed": str(error)}
        began = time.perf_counter()
        for file in files(self.output):
            fsync(file)
        value = asdict(measured) | {"flush_seconds": time.perf_counter() - began}
        value.pop("report")
        return value

    def discard(self) -> None:
        """Remove the last result."""
        shutil.rmtree(self.output, ignore_errors=True)


def offline() -> dict[str, str]:
    """Return the environment of a process that is to look for nothing on the network, and may keep compiled Python."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _make(environment: Path) -> None:
    say(f"Making a virtual environment with {VERSIONS} in {environment} ...")
    wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
    for command in (
        [sys.executable, "-m", "venv", environment],
        [environment.absolute() / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted],
    ):
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise SystemExit(f"{environment} could not be made: remove it, or name one that holds mergekit by --venv")
