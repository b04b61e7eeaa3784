"""Importance: files of weights, their means over blocks, and what they do to a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import array, fine_tuned, new_repository, recipe_text, write_model
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

from mergefs.cli import cli
from mergefs.dtypes import DTYPES
from mergefs.errors import ImportanceError
from mergefs.manifest import Tensor
from mergefs.planner.importance import block_weights, load_importance
from mergefs.planner.resolve import Planned
from mergefs.recipe import Recipe
from mergefs.repository import Repository

Floats = NDArray[np.float64]

# ------------------------------------------------------------------------------------------------------ the files


def test_json_and_safetensors_say_the_same(tmp_path: Path) -> None:
    given_weights: dict[str, Any] = {"a": 2.0, "b": [1.0, 0.5, 0.0], "c": [3.0], "d": 0}
    (tmp_path / "w.json").write_text(json.dumps(given_weights))
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in given_weights.items()}
    tensors["b"] = tensors["b"].bfloat16()
    tensors["d"] = torch.tensor(0, dtype=torch.int32)
    save_file(tensors, tmp_path / "w.safetensors")
    one, two = (load_importance(tmp_path / name) for name in ("w.json", "w.safetensors"))
    assert one.keys() == two.keys() == given_weights.keys()
    for name, value in given_weights.items():
        for found in (one[name], two[name]):
            assert found.dtype == np.float64
            assert found.tolist() == (value if isinstance(value, list) else [value])


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "is not JSON"),
    "half of it": ('{"w": 1', "is not JSON"),
    "no UTF-8": (b'{"\xff": 1}', "is not JSON"),
    "nested without end": ("[" * 100_000, "is not JSON"),
    "a list": ("[1, 2]", "is not an object"),
    "a number": ("3", "is not an object"),
    "a tensor twice": ('{"w": 1, "w": 2}', "names 'w' twice"),
    "negative": ('{"w": -0.5}', "'w' has a weight that is negative or not finite"),
    "one row negative": ('{"w": [1, 1, -1]}', "'w' has a weight that is negative or not finite"),
    "NaN": ('{"w": [1, NaN]}', "'w' has a weight that is negative or not finite"),
    "infinite": ('{"w": Infinity}', "'w' has a weight that is negative or not finite"),
    "an endless integer": ('{"w": 1' + "0" * 400 + "}", "'w' has a weight that is negative or not finite"),
    "huge": ('{"w": 1e200}', "'w' has a weight beyond 1e+30"),
    "text": ('{"w": "much"}', "'w' is neither a number nor a list of numbers"),
    "a number as text": ('{"w": "2.0"}', "'w' is neither a number nor a list of numbers"),
    "numbers as text": ('{"w": ["1", "2"]}', "'w' is neither a number nor a list of numbers"),
    "a flag": ('{"w": true}', "'w' is neither a number nor a list of numbers"),
    "flags": ('{"w": [true, 1]}', "'w' is neither a number nor a list of numbers"),
    "null": ('{"w": null}', "'w' is neither a number nor a list of numbers"),
    "an object": ('{"w": {"rows": [1]}}', "'w' is neither a number nor a list of numbers"),
    "an empty list": ('{"w": []}', "'w' has shape [0] instead of one axis"),
    "a matrix": ('{"w": [[1, 2], [3, 4]]}', "'w' has shape [2, 2] instead of one axis"),
    "a ragged list": ('{"w": [[1], [2, 3]]}', "'w' is neither a number nor a list of numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    path = tmp_path / "w.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ImportanceError) as caught:
        load_importance(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("nothing.json", "nothing.safetensors", "folder.json", "folder.safetensors"):
        with pytest.raises(ImportanceError, match="cannot be read") as caught:
            load_importance(tmp_path / name)
        assert "None" not in str(caught.value)
    (tmp_path / "text.safetensors").write_text('{"w": 1}')
    with pytest.raises(ImportanceError, match="is not a safetensors file"):
        load_importance(tmp_path / "text.safetensors")
    save_file({"w": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(ImportanceError, match="shape"):
        load_importance(tmp_path / "w.safetensors")


# ------------------------------------------------------------------------------------------------- means over blocks


def tensor(name: str, shape: tuple[int, ...], block_elements: int) -> Tensor:
    """Return a tensor of which only the shape matters."""
    made = Tensor(name, DTYPES["BF16"], shape, ())
    return Tensor(name, made.dtype, shape, ("0" * 64,) * len(made.grid(block_elements)))


def means(shape: tuple[int, ...], weights: Floats, block_elements: int) -> list[float]:
    """Return the mean over each block's elements, one by one."""
    elements = prod(shape)
    each = [float(weights[e * len(weights) // elements if len(weights) > 1 else 0]) for e in range(elements)]
    blocks = tensor("w", shape, block_elements).grid(block_elements).elements()
    return [float(np.mean(each[first:stop])) for first, stop in blocks]


weight_values = st.sampled_from([0.0, 1.0, 1e-20, 1e20]) | st.floats(0, 1e30)


@given(
    st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.tuples(st.integers(1, 60)),
    st.integers(1, 40),
    st.booleans(),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_a_blocks_weight_is_the_mean_over_its_elements(
    shape: tuple[int, ...], block_elements: int, by_row: bool, data: st.DataObject
) -> None:
    rows = shape[0] if shape and by_row else 1
    weights = np.array(data.draw(st.lists(weight_values, min_size=max(1, rows), max_size=max(1, rows))))
    (found,) = block_weights((tensor("w", shape, block_elements),), block_elements, {"w": weights})
    assert found == pytest.approx(means(shape, weights, block_elements), rel=1e-12, abs=0)


def test_blocks_cut_inside_rows_and_blocks_of_several_rows() -> None:
    weights = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    cases: list[tuple[tuple[int, ...], int, list[float]]] = [
        ((5, 4), 2, [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]),
        ((5, 3), 2, [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]),
        ((5, 4), 8, [1.5, 6, 16]),
        ((5, 2, 2), 4, [1, 2, 4, 8, 16]),
        ((5, 2, 2), 2, [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]),
        ((5,), 2, [1.5, 6, 16]),
        ((5, 0), 4, []),
    ]
    for shape, block_elements, expected in cases:
        (found,) = block_weights((tensor("w", shape, block_elements),), block_elements, {"w": weights})
        assert found.tolist() == expected, shape


def test_a_small_weight_behind_a_huge_one_is_kept() -> None:
    (found,) = block_weights((tensor("w", (2, 4), 2),), 2, {"w": np.array([1e20, 1e-10])})
    assert found.tolist() == [1e20, 1e20, 1e-10, 1e-10]


def test_tensors_that_are_not_named_have_weight_one() -> None:
    tensors = (tensor("a", (4,), 2), tensor("scalar", (), 2), tensor("empty", (0, 3), 2))
    for given_weights in (None, {}, {"a": np.array([3.0])}, {"scalar": np.array([3.0]), "empty": np.array([3.0])}):
        a, scalar, empty = block_weights(tensors, 2, given_weights)
        assert a.tolist() == ([3.0, 3.0] if given_weights and "a" in given_weights else [1.0, 1.0])
        assert scalar.tolist() == ([3.0] if given_weights and "scalar" in given_weights else [1.0])
        assert empty.tolist() == []


def test_weights_that_do_not_fit_the_tensors() -> None:
    tensors = (tensor("a", (4, 2), 4), tensor("scalar", (), 2))
    with pytest.raises(ImportanceError, match="names 'b', which is no float tensor of the base"):
        block_weights(tensors, 4, {"b": np.ones(1)})
    with pytest.raises(ImportanceError, match="has 3 weights for 'a', which has 4 rows"):
        block_weights(tensors, 4, {"a": np.ones(3)})
    with pytest.raises(ImportanceError, match="has 2 weights for 'scalar', which has 1 rows"):
        block_weights(tensors, 4, {"scalar": np.ones(2)})


# ------------------------------------------------------------------------------------------------------- in a plan

TENSORS = ("layers.0.a", "layers.0.b", "layers.1.a", "norm")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two experts of one base, in blocks of 128 rows, which are large enough for coarse tiers."""
    folder = tmp_path_factory.mktemp("importance")
    random = np.random.default_rng(7)
    base = {name: array(random.normal(0, 0.04, (512, 512)), "BF16") for name in TENSORS[:3]}
    base["norm"] = array(random.normal(0, 0.04, 512), "BF16")
    base["positions"] = array(np.arange(9), "I64")
    with new_repository(folder / "repository", 1 << 17) as made:
        made.ingest(write_model(folder / "base", base), "base")
        for seed, name in enumerate("xy"):
            made.ingest(write_model(folder / name, fine_tuned(base, seed + 2, delta=4e-4)), name, base="base")
        yield made


RECIPES = {
    "task_arithmetic": recipe_text("task_arithmetic", [("x", {"weight": 0.6}), ("y", {"weight": 0.4})], "base"),
    "ties": recipe_text("ties", ["x", "y"], "base", weight=0.5, density=0.5),
}


def read_of(planned: Planned) -> dict[str, int]:
    """Return the bytes read of each tensor."""
    found = planned.candidates
    cost = found.cost_at(planned.depth)
    return {t.name: int(cost[found.of_tensor(number)].sum()) for number, t in enumerate(found.tensors)}


def planned(repository: Repository, importance: dict[str, Any] | None, method: str = "ties", **aim: Any) -> Planned:
    weights = None if importance is None else {k: np.atleast_1d(np.array(v, float)) for k, v in importance.items()}
    return repository.plan(Recipe.parse(RECIPES[method]), save=False, importance=weights, **aim)


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("planner", ["tiers", "blocks"])
def test_what_does_not_matter_is_not_read_under_a_small_budget(
    repository: Repository, method: str, planner: str
) -> None:
    nothing = {"layers.0.b": 0.0, "norm": 0.0}
    for share in (1, 3, 5, 8, 11):
        read = read_of(planned(repository, nothing, method, budget=f"{share}%", planner=planner))
        assert read["layers.0.b"] == read["norm"] == 0
        assert sum(read.values()) > 0 or planner == "blocks"
    assert read_of(planned(repository, None, method, budget="10%"))["layers.0.b"] > 0


@pytest.mark.parametrize("method", RECIPES)
def test_rows_that_matter_are_read_deeper(repository: Repository, method: str) -> None:
    rows = np.ones(512)
    rows[:128] = 100.0
    found = planned(repository, {"layers.1.a": rows}, method, budget="10%")
    number = TENSORS.index("layers.1.a")
    depth = found.candidates.grid(number, found.depth)
    assert depth.shape == (2, 4)
    assert depth[:, 0].min() > depth[:, 1:].max() > 0


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("aim", [{"budget": "7%"}, {"max_error": 0.3}], ids=str)
def test_only_ratios_of_weights_matter(repository: Repository, method: str, aim: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    weights = {name: random.uniform(0, 3, 512) for name in TENSORS}
    plans = [
        planned(repository, {name: factor * value for name, value in weights.items()}, method, **aim)
        for factor in (1.0, 2.0, 0.5)
    ]
    assert len({found.plan.id for found in plans}) == 1
    assert plans[0].predicted_error == pytest.approx(plans[1].predicted_error)
    everywhere = [
        planned(repository, dict.fromkeys(TENSORS, 5.0), method, **aim),
        planned(repository, None, method, **aim),
    ]
    assert everywhere[0].plan.id == everywhere[1].plan.id


# --------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def run(repository: Repository, tmp_path: Path) -> Callable[..., Result]:
    (tmp_path / "recipe.yml").write_text(RECIPES["ties"])

    def invoke(command: str, *arguments: object) -> Result:
        at = ["-R", str(repository.path), command, str(tmp_path / "recipe.yml"), *map(str, arguments)]
        return CliRunner().invoke(cli, at)

    return invoke


def test_the_command_line_takes_the_file(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"layers.0.b": 0, "layers.1.a": [1.0] * 256 + [2.0] * 256}))
    done = run("plan", "--budget", "5%", "--importance", path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"] != json.loads(run("plan", "--budget", "5%", "--json").stdout)["plan"]
    done = run("merge", "--as", "m", "--budget", "5%", "--importance", path, "--report", "--json")
    report = json.loads(done.stdout)["report"]
    assert report["actual_error"] == pytest.approx(report["predicted_error"], rel=0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"positions": 1}', "'positions', which is no float tensor"),
        ('{"norm": [1, 2]}', "512 rows"),
        ("{", "not JSON"),
    ],
)
def test_the_command_line_refuses_what_does_not_fit(
    run: Callable[..., Result], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "w.json").write_text(content)
    for command in (("plan",), ("explain",), ("merge", "--as", "refused")):
        for budget in ((), ("--budget", "5%")):
            done = run(command[0], *command[1:], *budget, "--importance", tmp_path / "w.json")
            assert isinstance(done.exception, ImportanceError)
            assert done.exception.exit_code == 2
            assert message in str(done.exception)
