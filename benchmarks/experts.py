"""Experts in a repository, and the merges of all of them that the benchmarks of budgets and of quality measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mergefs.recipe import Recipe
from mergefs.repository import Repository

METHODS = {"task_arithmetic": ("", ""), "ties": (", density: 0.5", "parameters: {normalize: false}\n")}


def recipe(method: str, experts: list[str]) -> Recipe:
    """Return the recipe that merges the experts with weight 0.4; float32, so that rounding hides no error."""
    of_model, of_recipe = METHODS[method]
    models = "".join(f"- {{model: {name}, parameters: {{weight: 0.4{of_model}}}}}\n" for name in experts)
    return Recipe.parse(f"merge_method: {method}\nbase_model: base\ndtype: float32\n{of_recipe}models:\n{models}")


def expert_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints that lie beside `base`."""
    return sorted({path.parent.name for path in folder.glob("*/*.safetensors")} - {"base"})


def ingest(repository: Repository, folder: Path, experts: list[str]) -> None:
    """Take in the base and the experts."""
    repository.ingest(folder / "base", "base")
    for name in experts:
        repository.ingest(folder / name, name, base="base")


def state(repository: Repository, name: str) -> dict[str, torch.Tensor]:
    """Return a model's tensors."""
    with repository.view(name) as view:
        return view.state_dict()


def vector(tensors: dict[str, torch.Tensor]) -> NDArray[np.float64]:
    """Return all of a model's values as one vector."""
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])
