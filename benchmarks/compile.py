"""Merge tiny models by some methods, exactly and under a budget, so that loops are compiled and kept on the disk.

python -m benchmarks.compile FOLDER METHOD...     FOLDER: for models and a repository; it is to be empty
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.recipes import case
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from tools.synth import make


def compile_loops(folder: Path, methods: list[str]) -> None:
    """Ingest and merge; leaves `folder/repository` with a base and two experts."""
    make("tiny", 2, folder / "models")
    with Repository.init(folder / "repository") as repository:
        repository.ingest(folder / "models" / "base", "base")
        for name in ("expert-0", "expert-1"):
            repository.ingest(folder / "models" / name, name, base="base")
        for method in methods:
            asked = Recipe.parse(json.dumps(case(method, 2).recipe()))
            repository.merge(asked, "merged")
            repository.merge(asked, "merged", budget="10%")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="+")
    options = parser.parse_args()
    compile_loops(options.folder, options.methods)


if __name__ == "__main__":
    main()
