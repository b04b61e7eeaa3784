"""mergefs: ingest checkpoints once, merge them under a read budget, serve the result as files and arrays.

repository = mergefs.Repository.init("repo")
repository.ingest("Qwen3-0.6B", "base")
repository.ingest("qwen3-math", "math", base="base")
repository.merge(mergefs.Recipe.load("recipe.yml"), "merged", budget="10%")
with mergefs.open("merged", repo="repo") as model:
    weights = model.state_dict()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergefs.errors import MergefsError as MergefsError
    from mergefs.manifest import Manifest as Manifest
    from mergefs.planner.plan import Plan as Plan
    from mergefs.recipe import Recipe as Recipe
    from mergefs.repository import Repository as Repository
    from mergefs.serve.opening import open as open

__version__ = "0.1.0"

_HOMES = {
    "MergefsError": "mergefs.errors",
    "Manifest": "mergefs.manifest",
    "Plan": "mergefs.planner.plan",
    "Recipe": "mergefs.recipe",
    "Repository": "mergefs.repository",
    "open": "mergefs.serve.opening",
}

__all__ = ["Manifest", "MergefsError", "Plan", "Recipe", "Repository", "__version__", "open"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the command line starts without what it does not need.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mergefs' has no attribute {name!r}")
