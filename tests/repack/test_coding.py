"""The exact tier's coding, chosen for a repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders import array, forget, new_repository, recipe_text, served, tensors_of, tree
from click.testing import CliRunner
from looking import (
    EXPERTS,
    check_whole,
    codings,
    pack_bytes,
    payload,
    tiered,
)

from mergefs.blocks import tiers
from mergefs.blocks.exact import CODINGS
from mergefs.blocks.tiers.layout import MASK
from mergefs.cli import cli
from mergefs.configuration import write_config
from mergefs.errors import BudgetError, CorruptionError, MergefsError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository


@pytest.mark.parametrize("exact", CODINGS)
def test_ingest_writes_the_repositorys_coding(both: dict[str, Path], models: Path, tmp_path: Path, exact: str) -> None:
    assert json.loads((both[exact] / "mergefs.json").read_text())["exact"] == exact
    with Repository.open(both[exact], sync=False) as repository:
        assert repository.exact == exact
        found = tiered(repository).values()
        assert {len(at) for at in found} == {1, 4}
        assert any(payload(repository, at[0])[0] == MASK for at in found if len(at) == 1)
        assert set(codings(repository)) == {exact}
        for name in EXPERTS:
            repository.export(name, tmp_path / exact / name)
            assert tree(tmp_path / exact / name) == tree(models / name)
        check_whole(repository, models)


def test_small_takes_less_and_has_the_same_coarse_tiers(both: dict[str, Path]) -> None:
    with Repository.open(both["fast"]) as fast, Repository.open(both["small"]) as small:
        one, two = tiered(fast), tiered(small)
        assert one.keys() == two.keys()
        for block in one:
            assert [at.record.check for at in one[block][:-1]] == [at.record.check for at in two[block][:-1]]
            if len(one[block]) == 4:
                assert two[block][-1].record.length < one[block][-1].record.length
        assert pack_bytes(small) < pack_bytes(fast)


def test_a_configuration_without_the_key_means_fast_and_another_coding_is_damage(tmp_path: Path) -> None:
    new_repository(tmp_path / "old").close()
    path = tmp_path / "old" / "mergefs.json"
    config = json.loads(path.read_text())
    del config["check"]
    write_config(tmp_path / "old", {key: value for key, value in config.items() if key != "exact"})
    with Repository.open(tmp_path / "old") as repository:
        assert repository.exact == "fast"
        repository.use_exact("small")
        assert repository.exact == "small"
    assert json.loads(path.read_text()).items() >= {**config, "exact": "small"}.items()
    for value in ("tiny", None, ["fast"], 3):
        write_config(tmp_path / "old", {**config, "exact": value})
        with pytest.raises(MergefsError, match=r"mergefs\.json is damaged"):
            Repository.open(tmp_path / "old")


def test_unknown_codings_are_refused(repository: Repository, tmp_path: Path) -> None:
    before = tree(repository.path / "packs")
    for run in (
        lambda: Repository.init(tmp_path / "new", exact="tiny"),
        lambda: repository.repack("tiny"),
        lambda: repository.use_exact("tiny"),
    ):
        with pytest.raises(UserError, match="'tiny'"):
            run()
    assert not (tmp_path / "new").exists()
    assert repository.exact == "fast"
    for arguments in (["init", str(tmp_path / "new")], ["-R", str(repository.path), "repack"]):
        done = CliRunner().invoke(cli, [*arguments, "--exact", "tiny"])
        assert done.exit_code == 2
        assert "'tiny'" in done.output
    assert not (tmp_path / "new").exists()
    assert tree(repository.path / "packs") == before


# ------------------------------------------------------------------------------------------------------------ recode


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fast", "small"),
        ("small", "fast"),
        ("small", "small"),
        ("small", "quick"),
        ("quick", "fast"),
        ("quick", "quick"),
    ],
)
@pytest.mark.parametrize("changed", [70_000, 10_000, 2_000, 1])
def test_recoding_gives_what_encoding_does(old: tiers.Exact, new: tiers.Exact, changed: int) -> None:
    random = np.random.default_rng(changed)
    base = array(random.normal(0, 0.04, 70_000), "BF16")
    values = base.values
    values[-changed:] += 1e-3 + np.abs(random.normal(0, 4e-4, changed))
    expert = array(values, "BF16").data
    before, after = (tiers.encode_always(expert, base.data, exact).tiers for exact in (old, new))
    assert tiers.coding(before[-1]) == old
    assert before[:-1] == after[:-1]
    if new == "quick":
        assert tiers.decode(after[-1:], base.data) == expert
    assert tiers.recode(before, base.data, new) == after[-1]
    with pytest.raises(CorruptionError):
        tiers.recode(before[:-1], base.data, new)


def test_the_coding_is_told_from_the_beginning() -> None:
    base = array(np.random.default_rng(0).normal(size=100_000), "BF16")
    values = base.values
    values[64:3000:640] += 1
    (one,) = tiers.encode_always(array(values, "BF16").data, base.data, "small").tiers
    assert one[0] == MASK
    said = [tiers.coding(one[:size]) for size in range(len(one))]
    start = said.index("small")
    assert said == [None] * start + ["small"] * (len(one) - start)
    assert 5 < start < 200


# ------------------------------------------------------------------------------------------------------------ repack


@pytest.mark.parametrize(
    ("exact", "other"), [("fast", "small"), ("small", "fast"), ("fast", "quick"), ("quick", "fast")]
)
def test_a_merge_under_a_budget(both: dict[str, Path], tmp_path: Path, exact: str, other: str) -> None:
    """After a repack, from one coding to another, budgets hold and exact merges are the same."""
    text = recipe_text("task_arithmetic", ["x", "y"], "base", weight=0.5, dtype="float32")
    shutil.copytree(both[exact], tmp_path / "repository")
    with Repository.open(tmp_path / "repository", sync=False) as repository:
        whole = repository.merge(Recipe.parse(text), "before")
        repository.repack(other)
        forget(repository)
        everything = repository.plan(Recipe.parse(text)).expert_bytes
        after = repository.merge(Recipe.parse(text), "after", budget=str(everything))
        assert after.manifest == whole.manifest
        assert after.read.expert == everything
        for share in (5, 15):
            forget(repository)
            planned = repository.plan(Recipe.parse(text), budget=f"{share}%")
            report = repository.merge(Recipe.parse(text), "tenth", budget=f"{share}%")
            # Small gaps are read through where the budget has room for them.
            assert 0 < planned.expert_bytes <= report.read.expert <= report.budget_bytes
            repository.merge(Recipe.parse(text), "lazy", budget=f"{share}%", lazy=True)
            assert tensors_of(repository, "lazy") == tensors_of(repository, "tenth")
            assert repository.materialize("lazy").manifest == report.manifest
        assert repository.fsck(read_data=True).ok


def test_a_lazy_merge_whose_budget_experts_have_outgrown(both: dict[str, Path], tmp_path: Path) -> None:
    text = recipe_text("task_arithmetic", ["x", "y"], "base", weight=0.5)
    shutil.copytree(both["small"], tmp_path / "repository")
    with Repository.open(tmp_path / "repository", sync=False) as repository:
        everything = repository.plan(Recipe.parse(text)).expert_bytes
        repository.merge(Recipe.parse(text), "lazy", budget=str(everything - 1000), lazy=True)
        expected = served(repository, "lazy")
        repository.repack("fast")
        assert served(repository, "lazy") == expected
        with pytest.raises(BudgetError, match="repacked"):
            repository.materialize("lazy")
        repository.repack("small")
        repository.materialize("lazy")
        assert served(repository, "lazy") == expected
