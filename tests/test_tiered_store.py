"""Tiered experts through the whole store: ingest, budgets, lazy views, damage, collection."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders import forget

from mergefs.blocks.codecs import Encoding
from mergefs.blocks.pack import MAGIC, pack_name
from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.catalog.tables import Location
from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES
from mergefs.errors import CorruptionError, MergefsError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.statistics.measure import measure_block
from mergefs.statistics.tensor import load

BF16 = DTYPES["BF16"]
SHAPES = {"layers.0.w": (512, 384), "layers.1.w": (700, 256), "norm": (256,)}
EXPERTS = ("x", "y", "z")
RECIPE = """
merge_method: {method}
base_model: base
dtype: float32
models:
  - {{model: x, parameters: {{weight: 0.5}}}}
  - {{model: y, parameters: {{weight: 0.3}}}}
  - {{model: z, parameters: {{weight: -0.2}}}}
"""


def write(path: Path, values: dict[str, np.ndarray]) -> None:
    header = build_header([(name, BF16, values[name].shape) for name in values], {"format": "pt"})
    path.write_bytes(header + b"".join(v.astype(BF16.numpy).tobytes() for v in values.values()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiered")
    random = np.random.default_rng(5)
    base = {name: random.standard_normal(shape).astype(np.float32) * 0.04 for name, shape in SHAPES.items()}
    base = {name: value.astype(BF16.numpy).astype(np.float32) for name, value in base.items()}
    common = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    write(folder / "base.safetensors", base)
    for expert in EXPERTS:
        deltas = {n: 0.5 * common[n] + random.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
        write(folder / f"{expert}.safetensors", {n: base[n] + 4e-4 * deltas[n] for n in SHAPES})
    return folder


@pytest.fixture
def repository(files: Path, tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repository", 1 << 18) as made:
        made.ingest(files / "base.safetensors", "base")
        for expert in EXPERTS:
            made.ingest(files / f"{expert}.safetensors", expert, base="base")
        yield made


def tiered(repository: Repository, name: str) -> list[tuple[Location, ...]]:
    manifest = repository.manifest(repository.resolve(name))
    found = (repository.catalog.tiers(block) for block in manifest.block_ids())
    return [tiers for tiers in found if tiers[0].record.encoding == Encoding.TIERS and len(tiers) > 1]


def values(repository: Repository, name: str) -> np.ndarray:
    with repository.view(name) as view:
        return np.concatenate([view.tensor(n).double().numpy().ravel() for n in SHAPES])


def recipe(method: str = "task_arithmetic") -> Recipe:
    return Recipe.parse(RECIPE.format(method=method))


def test_tiers_of_one_depth_lie_together(repository: Repository) -> None:
    blocks = tiered(repository, "x")
    assert len(blocks) >= 4
    packs = [{tiers[depth].pack for tiers in blocks} for depth in range(4)]
    assert all(len(mine) == 1 for mine in packs)
    assert len(set.union(*packs)) == 4
    for depth in range(4):
        records = [tiers[depth].record for tiers in blocks]
        assert records[0].offset == len(MAGIC)
        for one, two in pairwise(records):
            assert two.offset == one.offset + one.length


def test_experts_come_back_byte_for_byte(repository: Repository, files: Path, tmp_path: Path) -> None:
    for expert in EXPERTS:
        repository.export(expert, tmp_path / expert)
        name = f"{expert}.safetensors"
        assert (tmp_path / expert / name).read_bytes() == (files / name).read_bytes()


def test_the_remaining_errors_in_the_statistics_are_those_measured(repository: Repository) -> None:
    ids = {name: repository.resolve(name) for name in ("base", "x")}
    manifest = repository.manifest(ids["x"])
    base = repository.manifest(ids["base"])
    with repository.catalog.read() as txn:
        statistics = load(txn, ids["x"], ids["base"], SHAPES)
    reader = BlockReader(repository.catalog, repository.backend)
    compared = 0
    for tensor in manifest.tensors:
        for number, block in enumerate(tensor.blocks):
            assert block is not None
            if len(repository.catalog.tiers(bytes.fromhex(block))) < 4:
                continue
            twin = base.tensor_by_name[tensor.name].blocks[number]
            assert twin is not None
            known = reader.read_with_root(bytes.fromhex(twin), Kind.BASE)
            exact, below = (
                np.frombuffer(raw, BF16.numpy).astype(np.float64)
                for raw in (reader.read(bytes.fromhex(block), Kind.EXPERT, known), known[bytes.fromhex(twin)])
            )
            for depth in (1, 2, 3):
                delta, _ = reader.read_coarse(bytes.fromhex(block), depth, Kind.EXPERT, known)
                actual = np.sum((exact - below - delta) ** 2)
                assert statistics[tensor.name].blocks["errors"][number, depth - 1] == pytest.approx(actual, rel=0.01)
                compared += 1
    assert compared >= 12


def test_ingesting_again_against_another_base_keeps_the_errors(repository: Repository, files: Path) -> None:
    ids = {name: repository.resolve(name) for name in ("base", "x", "y")}
    report = repository.ingest(files / "x.safetensors", "x", base="y")
    assert report.stored_bytes == 0
    with repository.catalog.read() as txn:
        first = load(txn, ids["x"], ids["base"], SHAPES)
        second = load(txn, ids["x"], ids["y"], SHAPES)
    for name in SHAPES:
        assert np.allclose(first[name].blocks["errors"], second[name].blocks["errors"], rtol=1e-3, equal_nan=True)
        assert not np.allclose(first[name].blocks["energy"], second[name].blocks["energy"], rtol=1e-3)


@pytest.mark.parametrize("share", [2, 5, 10, 15])
def test_a_budget_is_kept_and_its_error_predicted(repository: Repository, share: int) -> None:
    forget(repository)
    exact = repository.merge(recipe(), "exact")
    base, whole = values(repository, "base"), values(repository, "exact")
    forget(repository)
    planned = repository.plan(recipe(), budget=f"{share}%")
    report = repository.merge(recipe(), "budgeted", budget=f"{share}%")
    assert exact.read.expert > report.read.expert == planned.expert_bytes
    largest = max(tier.record.length for expert in EXPERTS for tiers in tiered(repository, expert) for tier in tiers)
    assert report.budget_bytes == report.expert_raw_bytes * share // 100
    assert 0 <= report.budget_bytes - report.read.expert < largest
    actual = np.linalg.norm(values(repository, "budgeted") - whole) / np.linalg.norm(whole - base)
    assert planned.predicted_error == pytest.approx(actual, rel=0.1)
    repository.merge(recipe(), "lazy", budget=f"{share}%", lazy=True)
    assert np.array_equal(values(repository, "lazy"), values(repository, "budgeted"))
    assert repository.materialize("lazy").manifest == report.manifest


def test_more_bytes_are_never_worse(repository: Repository) -> None:
    repository.merge(recipe(), "exact")
    whole = values(repository, "exact")
    errors = []
    for share in (1, 3, 8, 12, 20, 30):
        repository.merge(recipe(), "budgeted", budget=f"{share}%")
        errors.append(float(np.linalg.norm(values(repository, "budgeted") - whole)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0


def test_a_budget_for_everything_is_no_budget(repository: Repository) -> None:
    for method in ("task_arithmetic", "ties"):
        reports = [repository.merge(recipe(method), "m", budget=budget) for budget in (None, "100%", "40%")]
        assert len({report.manifest for report in reports}) == 1
        assert len({report.plan for report in reports}) == 1


def test_a_base_that_is_itself_a_tiered_expert(repository: Repository) -> None:
    text = (
        "merge_method: task_arithmetic\nbase_model: y\ndtype: float32\nmodels: [{model: x, parameters: {weight: 0.5}}]"
    )
    repository.merge(Recipe.parse(text), "exact")
    y, x = values(repository, "y"), values(repository, "x")
    assert np.allclose(values(repository, "exact"), y + 0.5 * (x - y), atol=1e-7)
    identity = repository.resolve("x")
    with repository.catalog.read() as txn:
        assert not load(txn, identity, repository.resolve("y"), SHAPES)


def test_a_block_that_comes_twice_in_one_expert(repository: Repository, tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    base = (random.standard_normal((300, 256)) * 0.04).astype(BF16.numpy).astype(np.float32)
    for name, delta in (("base", 0.0), ("twin", 4e-4)):
        one = base + delta * np.random.default_rng(9).standard_normal(base.shape).astype(np.float32)
        write(tmp_path / f"{name}.safetensors", {"a": one, "b": one})
        repository.ingest(tmp_path / f"{name}.safetensors", f"{name}2", base="base2" if delta else None)
    ids = [repository.resolve(name) for name in ("twin2", "base2")]
    with repository.catalog.read() as txn:
        statistics = load(txn, *ids, ("a", "b"))
    assert np.isfinite(statistics["a"].blocks["errors"]).all()
    assert np.array_equal(statistics["a"].blocks["errors"], statistics["b"].blocks["errors"])


def test_linear_with_its_base_among_the_models(repository: Repository) -> None:
    text = "merge_method: linear\ndtype: float32\nmodels:\n- {model: base, parameters: {weight: 0.25}}\n"
    text += "- {model: x, parameters: {weight: 0.75}}\n"
    for asked in (text, "base_model: base\n" + text):
        forget(repository)
        report = repository.merge(Recipe.parse(asked), "mixed", budget="5%")
        assert 0 < report.read.expert <= report.budget_bytes
        forget(repository)
        report = repository.merge(Recipe.parse(asked), "mixed")
        base, x = values(repository, "base"), values(repository, "x")
        assert np.allclose(values(repository, "mixed"), 0.25 * base + 0.75 * x, atol=1e-7)
        # The base counts as the base, and the expert as an expert.
        assert report.read.expert == sum(
            tier.record.length
            for tiers in (repository.catalog.tiers(b) for b in {*_tensor_blocks(repository, "x")})
            for tier in tiers
        )


def _tensor_blocks(repository: Repository, name: str) -> Iterator[bytes]:
    for tensor in repository.manifest(repository.resolve(name)).tensors:
        yield from (bytes.fromhex(block) for block in tensor.blocks if block)


def test_an_expert_of_weight_zero_is_not_read(repository: Repository) -> None:
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels:\n- {model: x, parameters: {weight: 0.5}}\n"
    forget(repository)
    alone = repository.merge(Recipe.parse(text), "alone")
    forget(repository)
    both = repository.merge(Recipe.parse(text + "- {model: y, parameters: {weight: 0}}\n"), "both")
    assert both.read.expert == alone.read.expert
    assert np.array_equal(values(repository, "both"), values(repository, "alone"))


def test_a_repository_that_is_only_read(repository: Repository, tmp_path: Path) -> None:
    shutil.copytree(repository.path, tmp_path / "copy")
    expected = values(repository, "x")
    with Repository.open(tmp_path / "copy", readonly=True) as reading:
        assert np.array_equal(values(reading, "x"), expected)
        assert reading.fsck(read_data=True).ok
        assert reading.gc(dry_run=True).blocks_freed == 0
        assert reading.export("x", tmp_path / "out").files == 1
        for write_ in (lambda: reading.merge(recipe(), "m"), lambda: reading.ingest(tmp_path / "out", "again")):
            with pytest.raises(UserError, match="reading only"):
                write_()
        with pytest.raises(MergefsError, match="reading only"):
            Repository.open(tmp_path / "copy")
        assert not list((tmp_path / "copy" / "tmp").iterdir())


def test_sketches_estimate_inner_products() -> None:
    random = np.random.default_rng(1)
    zeros, none = bytes(4 << 16), np.empty(0, np.int64)
    own, crossed = [], []
    for page in range(80):
        a, b = (random.standard_normal(1 << 16).astype(np.float32) for _ in range(2))
        one, two = (measure_block(x.tobytes(), DTYPES["F32"], zeros, DTYPES["F32"], page << 16, none) for x in (a, b))
        assert one.sketch is not None
        assert two.sketch is not None
        own.append(float(one.sketch @ one.sketch) / float(a @ a))
        crossed.append(float(one.sketch @ two.sketch) / float(np.linalg.norm(a) * np.linalg.norm(b)))
    # Standard deviations sqrt(2 / 128) = 0.125 and sqrt(1 / 128) = 0.088, themselves known to 8 %.
    assert np.mean(own) == pytest.approx(1, abs=0.06)
    assert np.mean(crossed) == pytest.approx(0, abs=0.04)
    assert np.std(own) == pytest.approx(0.125, rel=0.3)
    assert np.std(crossed) == pytest.approx(0.088, rel=0.3)


def test_damage_to_a_tier_is_named_and_coarser_ones_still_decode(repository: Repository) -> None:
    location = tiered(repository, "z")[1][2]
    path = repository.path / pack_name(location.pack)
    data = bytearray(path.read_bytes())
    data[location.record.offset + location.record.length // 2] ^= 1
    path.write_bytes(data)
    reader = BlockReader(repository.catalog, repository.backend, ReadCounter())
    block = location.record.block
    reader.read_coarse(block, 2, Kind.EXPERT, {})
    for read in (lambda: reader.read_coarse(block, 3, Kind.EXPERT, {}), lambda: reader.read(block, Kind.EXPERT)):
        with pytest.raises(CorruptionError, match=f"tier 2 of block {block.hex()}"):
            read()
    problems = repository.fsck(read_data=True).errors
    named = [problem for problem in problems if problem.kind == "block"]
    assert [problem.name for problem in named] == [block.hex()]
    assert "tier 2" in named[0].message
    assert named[0].affects == ("z",)


def test_gc_takes_and_moves_tiers_together(repository: Repository) -> None:
    kept = {expert: values(repository, expert) for expert in ("x", "z")}
    repository.tag("again", "z")
    repository.remove(["y", "z"])
    before = {location.record.block for tiers in tiered(repository, "x") for location in tiers}
    report = repository.gc(rewrite_above=0.0)
    assert report.blocks_freed > 0
    assert repository.fsck(read_data=True).ok
    assert {location.record.block for tiers in tiered(repository, "x") for location in tiers} == before
    repository.tag("z", "again")
    for expert, expected in kept.items():
        assert np.array_equal(values(repository, expert), expected)
    with repository.catalog.read() as txn:
        packs = {key for key, _ in txn.items("packs")}
        live = {value[:32] for _, value in txn.items("blocks")}
    assert packs == live
    repository.remove(["x", "again", "z"])
    repository.gc()
    assert repository.stats().blocks == len(set(repository.manifest(repository.resolve("base")).block_ids()))
