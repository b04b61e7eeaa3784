"""What methods measure of whole tensors: exactly, once, within a budget, and gone with the models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from builders import array, new_repository, tensors_of, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mergefs.catalog.facts import facts_key, get_facts
from mergefs.errors import BudgetError, RecipeError
from mergefs.merge.passes import Part
from mergefs.merge.ranks import Ranks
from mergefs.recipe import Recipe
from mergefs.repository import Repository

SHAPES = {"w": (120, 90), "still": (40, 50), "norm": (64,)}
RECIPES = {
    "sce": ("select_topk: 0.3", "xyz"),
    "ramplus_tl": ("epsilon: 1.0e-3", "xyz"),
    "arcee_fusion": ("", "x"),
    "nuslerp": ("nuslerp_flatten: false, nuslerp_row_wise: true, weight: 1", "xy"),
}


def recipe(method: str, experts: str | None = None, parameters: str | None = None) -> Recipe:
    given_parameters, names = RECIPES[method]
    models = "".join(f"- model: {name}\n" for name in experts or names)
    return Recipe.parse(
        f"merge_method: {method}\nbase_model: base\nparameters: {{{parameters or given_parameters}}}\nmodels:\n{models}"
    )


@pytest.fixture
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("measured")
    random = np.random.default_rng(1)
    base = {name: random.normal(0, 0.02, shape) for name, shape in SHAPES.items()}
    made = new_repository(folder / "repository")
    for model in ("base", "x", "y", "z"):
        values = {
            name: base[name] + (0 if model == "base" or name == "still" else random.normal(0, 2e-3, shape))
            for name, shape in SHAPES.items()
        }
        write_model(folder / model, {name: array(value, "BF16") for name, value in values.items()})
        made.ingest(folder / model, model, base=None if model == "base" else "base")
    yield made
    made.close()


class Scores:
    """Passes over made-up scores, in blocks of seven."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values
        self.passes = 0

    def each(self, work):  # type: ignore[no-untyped-def]
        self.passes += 1
        for start in range(0, len(self.values), 7):
            block = self.values[start : start + 7]
            yield work(Part(block, block[None], (0,), start))


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=60), st.data())
@settings(deadline=None, max_examples=60)
def test_ranks_are_those_of_sorting(values: list[float], data: st.DataObject) -> None:
    scores = Scores(np.array(values, np.float32))
    ranks = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    found = Ranks(scores, lambda part: part.base)  # type: ignore[arg-type]
    assert found.smallest(ranks) == [float(np.sort(scores.values)[rank]) for rank in ranks]
    assert found.nonzero == np.count_nonzero(scores.values)
    assert scores.passes == 2


@pytest.mark.parametrize("method", RECIPES)
def test_a_tensor_is_measured_once_and_that_is_kept(filled: Repository, method: str) -> None:
    first, second = (filled.merge(recipe(method), "m") for _ in range(2))
    assert first.manifest == second.manifest
    assert second.read.expert < first.read.expert
    planned = filled.plan(recipe(method), budget="10%")
    assert planned.expert_bytes <= planned.budget_bytes


@pytest.mark.parametrize("method", RECIPES)
def test_a_budget_before_that_is_refused(filled: Repository, method: str) -> None:
    with pytest.raises(BudgetError, match="merge once without a budget"):
        filled.plan(recipe(method), budget="1%")


def test_a_budget_with_room_for_it_is_used(filled: Repository) -> None:
    report = filled.merge(recipe("sce"), "m", budget="2MiB")
    assert report.predicted_error == 0.0
    assert report.manifest == filled.merge(recipe("sce"), "n").manifest


@pytest.mark.parametrize("method", RECIPES)
def test_under_a_budget_the_result_comes_near_the_exact_one(filled: Repository, method: str) -> None:
    filled.merge(recipe(method), "exact")
    filled.merge(recipe(method), "rough", budget="50%")
    exact, rough, base = (tensors_of(filled, name)["w"].values for name in ("exact", "rough", "base"))
    assert np.linalg.norm(rough - exact) < 0.7 * np.linalg.norm(exact - base)


def test_unchanged_tensors_are_not_read_for_it(filled: Repository) -> None:
    plan = filled.plan(recipe("sce")).plan
    assert set(plan.tensor_by_name) == {"w", "norm"}
    models = (plan.base, *plan.experts)
    with filled.catalog.read() as txn:
        assert get_facts(txn, facts_key(models, "w", "sce 0.3")) is not None
        assert get_facts(txn, facts_key(models, "still", "sce 0.3")) is None


def test_columns_that_the_catalog_has_lost_are_measured_again(filled: Repository) -> None:
    filled.merge(recipe("nuslerp"), "eager")
    filled.merge(recipe("nuslerp"), "lazy", lazy=True)
    filled.catalog.write(lambda txn: [txn.delete("facts", key) for key, _ in list(txn.items("facts"))])
    assert tensors_of(filled, "lazy") == tensors_of(filled, "eager")


def test_what_was_measured_goes_with_its_models(filled: Repository) -> None:
    filled.merge(recipe("sce"), "m")
    filled.merge(recipe("arcee_fusion"), "n")
    for name in ("m", "z"):
        filled.remove(name)
    filled.gc()
    with filled.catalog.read() as txn:
        assert len(list(txn.items("facts"))) == 2  # those of arcee_fusion: of x alone


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("nuslerp", "nuslerp_flatten: false, weight: 1"),
        ("nuslerp", "nuslerp_flatten: false, nuslerp_row_wise: true, weight: 1"),
        ("arcee_fusion", ""),
    ],
)
def test_rows_that_fit_no_block_are_refused(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory, method: str, parameters: str
) -> None:
    folder = tmp_path_factory.mktemp("long")
    for model, value in (("base", 0.0), ("x", 1.0), ("y", 2.0)):
        write_model(folder / model, {"w": array(np.full((3, 3000), value), "BF16")})
        repository.ingest(folder / model, model, base=None if model == "base" else "base")
    with pytest.raises(RecipeError, match=r"tensor 'w': .*block"):
        repository.plan(recipe(method, parameters=parameters))
