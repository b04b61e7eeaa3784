"""What a read budget costs in accuracy of the merged delta: predicted from the catalog, and measured.

    python -m benchmarks.budgets --experts DIR [--json]      DIR holds base/ and the experts' directories

Merges all experts by task_arithmetic and by ties (density 0.5), each with weight 0.4, exactly and under budgets. The
error is the norm of the difference from the exact merge, relative to that of the exact merge's delta; results are
float32, so that rounding to bf16 does not hide it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.experts import METHODS, expert_names, ingest, recipe, state, vector
from mergefs.repository import Repository

BUDGETS = ("1%", "2%", "5%", "10%", "15%", "18%", "20%")


def measure(repository: Repository, method: str, experts: list[str]) -> list[dict[str, object]]:
    """Return a row for each budget."""
    asked = recipe(method, experts)
    base = vector(state(repository, "base"))
    repository.merge(asked, "exact")
    exact = vector(state(repository, "exact")) - base
    rows = []
    for budget in BUDGETS:
        planned = repository.plan(asked, budget=budget, save=False)
        report = repository.merge(asked, "budgeted", budget=budget)
        error = np.linalg.norm(vector(state(repository, "budgeted")) - base - exact) / np.linalg.norm(exact)
        rows.append(
            {
                "method": method,
                "budget": budget,
                "read": report.read.expert / report.expert_raw_bytes,
                "predicted": planned.predicted_error,
                "measured": float(error),
            }
        )
    return rows


def main() -> None:
    """Ingest, merge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experts = expert_names(options.experts)
    with tempfile.TemporaryDirectory() as folder, Repository.init(Path(folder) / "repository") as repository:
        ingest(repository, options.experts, experts)
        rows = [row for method in METHODS for row in measure(repository, method, experts)]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{len(experts)} experts; bytes read as a share of their raw bytes")
    for row in rows:
        print(
            "{method:16} {budget:>4}  read {read:.4f}  predicted {predicted:.3f}  measured {measured:.3f}".format(**row)
        )


if __name__ == "__main__":
    main()
