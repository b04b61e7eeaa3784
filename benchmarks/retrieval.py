"""Held-out tasks of finding docstrings by names, and which of their pairs a merged model gets right."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from tools.encoder import BATCH, Pair, library_pairs, quiet, right, say, similarities

HELD_OUT = 400
TOKENS = 40
DISTRIBUTIONS = {"sklearn": "scikit-learn"}

Right = NDArray[np.bool_]


@dataclass(frozen=True)
class Task:
    """A library's pairs of name and first sentence: those to train on, and those held out."""

    training: list[Pair]
    held_out: list[Pair]


@dataclass(frozen=True)
class Scores:
    """Which pairs a model gets right.

    Attributes:
        right: tasks by held-out pairs, every pool being all that are held out of a task.
        pools: for every seed, tasks by the pairs of a pool of that seed.
    """

    right: Right
    pools: tuple[Right, ...]


def read_tasks(libraries: Sequence[str], file: Path | None) -> dict[str, Task]:
    """Return the libraries' tasks, by a file with a function `pairs` or, without one, as the demonstration does."""
    pairs_of: Callable[[str], list[Pair]] = library_pairs
    if file is not None:
        module = _load(file)
        _compare_versions(str(module.__doc__))
        pairs_of = module.pairs
    tasks = {}
    for library in libraries:
        try:
            with quiet():
                pairs = [(name, sentence) for name, sentence in pairs_of(library)]
        except ImportError as error:
            sys.exit(f"the task of '{library}' needs that library: {error}")
        if len(pairs) < HELD_OUT + BATCH:
            sys.exit(f"'{library}' has {len(pairs)} pairs: too few to train on when {HELD_OUT} are held out")
        tasks[library] = Task(pairs[:-HELD_OUT], pairs[-HELD_OUT:])
    return tasks


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """Return the versions of the libraries that the tasks are made of."""
    return {library: _version(DISTRIBUTIONS.get(library, library)) for library in libraries}


def halves(seeds: int, tasks: int) -> list[NDArray[np.int64]]:
    """Return for every seed a random half of each task's held-out pairs: tasks by pairs."""
    generators = map(np.random.default_rng, range(seeds))
    return [np.stack([g.permutation(HELD_OUT)[: HELD_OUT // 2] for _ in range(tasks)]) for g in generators]


class Judge:
    """Says which held-out pairs a model gets right; models with the same manifest are measured once.

    Args:
        base: the folder of a checkpoint of the model's kind.
        tasks: the tasks.
        pools: for every seed, the pairs of a smaller pool for each task; empty when there are none but the whole ones.
    """

    def __init__(self, base: Path, tasks: dict[str, Task], pools: Sequence[NDArray[np.int64]] = ()) -> None:
        self.model = AutoModel.from_pretrained(base, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.tasks = tasks
        self.pools = pools
        self._known: dict[str, Scores] = {}

    def scores(self, manifest: str, tensors: dict[str, torch.Tensor]) -> Scores:
        """Return what a model gets right."""
        if manifest not in self._known:
            self._known[manifest] = self._measure(tensors)
        return self._known[manifest]

    def _measure(self, tensors: dict[str, torch.Tensor]) -> Scores:
        missing = self.model.load_state_dict(tensors, strict=False).missing_keys
        if lacking := {name for name, _ in self.model.named_parameters()}.intersection(missing):
            sys.exit(f"the model lacks the tensor '{min(lacking)}'")
        near = [similarities(self.model, self.tokenizer, task.held_out, TOKENS) for task in self.tasks.values()]
        whole = np.stack([right(scores).numpy() for scores in near])
        pools = tuple(
            np.stack([right(scores[rows][:, rows]).numpy() for scores, rows in zip(near, pool, strict=True)])
            for pool in self.pools
        )
        return Scores(whole, pools or (whole,))


def _load(file: Path) -> Any:
    """Import a module by its path."""
    spec = importlib.util.spec_from_file_location("pairs", file)
    if spec is None or spec.loader is None or not file.is_file():
        sys.exit(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _version(distribution: str) -> str:
    try:
        return version(distribution).split("+")[0]
    except PackageNotFoundError:
        return "none"


def _compare_versions(text: str) -> None:
    """Warn of libraries that are not those which the text names with their versions: their pairs differ."""
    line = re.search(r"[Vv]ersions\b.*", text)
    for distribution, expected in re.findall(r"([\w-]+) (\d+(?:\.\d+)+)", line.group() if line else ""):
        if (found := _version(distribution)) != expected:
            say(f"warning: {distribution} is {found}, not {expected}: its pairs differ from those that were held out")
