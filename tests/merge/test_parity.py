"""Every method over a grid of parameters, against its float64 definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import EXPERTS, Array, array, load_model, new_repository, tensors_of, write_model
from numpy.typing import NDArray

from benchmarks import definitions
from benchmarks.parity_grid import GRID, Asked
from mergefs.recipe import Recipe
from mergefs.repository import Repository

Model = dict[str, NDArray[np.float64]]
SEED = 7
AT_THRESHOLDS = {"BF16": 0.1, "F32": 0.001}
"""So many elements may lie at a threshold, and are left out: deltas between bf16 numbers are few different numbers."""
TRIMMING = ("ties", "breadcrumbs", "breadcrumbs_ties")
"""These keep all elements at a threshold, which those deltas are exactly."""


class Models:
    """A repository with a base and experts, and their elements.

    Args:
        repository: where they are.
        names: the base's, then the experts'.
        tensors: of each.
    """

    def __init__(self, repository: Repository, names: list[str], tensors: list[dict[str, Array]]) -> None:
        self.repository = repository
        self.names = names
        self.dtype = next(iter(tensors[0].values())).dtype
        self.values: list[Model] = [{n: a.values.reshape(a.shape) for n, a in model.items()} for model in tensors]

    def expected(self, asked: Asked) -> dict[str, definitions.Merged]:
        """Return what a recipe gives by the definitions."""
        base, *experts = self.values
        identities = [self.repository.resolve(name) for name in self.names[1:]]
        found = {}
        for name, mine in base.items():
            drawn = [
                definitions.draw(SEED, identity, 0, name, mine.size).reshape(mine.shape)
                for identity in identities[: len(asked.own) if asked.is_random else 0]
            ]
            parts = [expert[name] for expert in experts[: len(asked.own)]]
            origin = mine if asked.with_base else None
            drawn = drawn or [np.zeros(mine.shape, np.uint64)] * len(parts)
            case = definitions.Case(origin, parts, asked.own, asked.shared, drawn)
            with np.errstate(invalid="ignore", divide="ignore"):
                found[name] = definitions.METHODS[asked.method](case)
        return found


def slices(folder: Path, repository: Repository) -> Models:
    names = ["base", *EXPERTS]
    for name in names:
        repository.ingest(folder / name, name, base=None if name == "base" else "base")
    return Models(repository, names, [load_model(folder / name) for name in names])


def synthetic(folder: Path, repository: Repository, dtype: str) -> Models:
    """A small model with tensors of all sorts: of several blocks, a stack of matrices, a vector, one that no expert
    changes, one with rows that no expert changes, and one that is changed very little."""
    random = np.random.default_rng(5)
    shapes = {
        "wide": (90, 130),
        "tall": (300, 40),
        "stack": (6, 30, 40),
        "norm": (96,),
        "still": (20, 30),
        "near": (64, 64),
    }
    spread = {"wide": 3e-3, "tall": 2e-3, "stack": 1e-3, "norm": 1e-2, "still": 0.0, "near": 1e-4}
    base = {n: random.normal(1.0 if n == "norm" else 0.0, 0.02, s) for n, s in shapes.items()}
    common = {n: random.normal(0, spread[n], s) for n, s in shapes.items()}
    models = [base]
    for number in range(3):
        mine = {
            n: base[n] + 0.6 * common[n] + random.normal(0, spread[n] * (1 + 0.3 * number), s)
            for n, s in shapes.items()
        }
        seen = random.random(len(base["tall"])) < 0.4
        mine["tall"] = np.where(seen[:, None], mine["tall"], base["tall"])
        mine["still"] = base["still"]
        models.append(mine)
    names = ["base", "x", "y", "z"]
    tensors = [{n: array(v, dtype) for n, v in model.items()} for model in models]
    for name, model in zip(names, tensors, strict=True):
        repository.ingest(write_model(folder / name, model), name, base=None if name == "base" else "base")
    return Models(repository, names, tensors)


@pytest.fixture(scope="module", params=["slices", "BF16", "F32"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("parity")
    repository = new_repository(folder / "repository")
    if request.param == "slices":
        yield slices(Path(__file__).parents[1] / "data" / "minilm-slice", repository)
    else:
        yield synthetic(folder, repository, request.param)
    repository.close()


@pytest.mark.parametrize("asked", GRID, ids=lambda asked: asked.name)
def test_it_is_what_the_definition_says(models: Models, asked: Asked) -> None:
    recipe = Recipe.parse(asked.text(models.names[0], models.names[1:], "bfloat16"))
    models.repository.merge(recipe, "merged", seed=SEED)
    found = tensors_of(models.repository, "merged")
    elements = wrong = halfway = at_threshold = 0
    for name, merged in models.expected(asked).items():
        tied = np.broadcast_to(merged.tied, merged.values.shape)
        if models.dtype == "BF16" and asked.method in TRIMMING:
            tied = np.zeros(tied.shape, bool)
        off = np.abs(definitions.rounded(found[name].values) - definitions.rounded(merged.values).ravel())
        # Where base and deltas cancel, the last bit of the operands counts instead of the result's.
        operands = np.abs([model[name].ravel() for model in models.values]).max(axis=0)
        exact = np.abs(found[name].values - merged.values.ravel()) <= 2.0**-22 * operands
        off = np.where(exact, 0, off)[~tied.ravel()]
        assert off.max(initial=0) <= 1, name
        between = definitions.near_halfway(merged.values)[~tied].ravel()
        wrong += int(np.count_nonzero(off * ~between))
        halfway += int(np.count_nonzero(off * between))
        elements += off.size
        at_threshold += int(np.count_nonzero(tied))
    assert wrong <= max(2, 1e-4 * elements)
    assert halfway <= 1e-3 * elements
    assert at_threshold <= AT_THRESHOLDS[models.dtype] * (elements + at_threshold)


MEASURING = [asked for asked in GRID if asked.method in ("sce", "ramplus_tl", "arcee_fusion", "nuslerp")]


@pytest.mark.parametrize("asked", MEASURING, ids=lambda asked: asked.name)
def test_it_is_the_same_lazy(models: Models, asked: Asked) -> None:
    recipe = Recipe.parse(asked.text(models.names[0], models.names[1:], "bfloat16"))
    models.repository.merge(recipe, "eager")
    models.repository.merge(recipe, "lazy", lazy=True)
    assert tensors_of(models.repository, "eager") == tensors_of(models.repository, "lazy")
