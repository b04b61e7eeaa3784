"""Statistics: their form in the catalog, the sample, and that bytes and errors are those of the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders import Tensors, array, fine_tuned, new_repository, recipe_text, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numcodecs import zstd
from numpy.typing import NDArray

from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.catalog import tables
from mergefs.catalog.tables import Location
from mergefs.dtypes import DTYPES
from mergefs.errors import CorruptionError
from mergefs.manifest import Tensor
from mergefs.planner.measured import Measurer
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.statistics.measure import coarse_sample
from mergefs.statistics.sample import LEAST_RUN, MOST_SAMPLED, from_bfloat16, positions, run_length, to_bfloat16
from mergefs.statistics.tensor import (
    BLOCK,
    SKETCH_SIZE,
    SKETCHED_FROM,
    TIERS,
    Distribution,
    TensorStatistics,
    load,
    statistics_key,
)

# ----------------------------------------------------------------------------------------------- in the catalog


@st.composite
def statistics(draw: st.DrawFn) -> TensorStatistics:
    def some(kind: str, shape: int | tuple[int, ...]) -> NDArray[np.generic]:
        return draw(arrays.arrays(np.dtype(kind), shape))

    blocks, bins, ranks, sampled = (draw(st.integers(0, 5)) for _ in range(4))
    rows = np.frombuffer(draw(st.binary(min_size=BLOCK.itemsize * blocks, max_size=BLOCK.itemsize * blocks)), BLOCK)
    distribution = Distribution(
        some("<u2", (sampled, TIERS)),
        np.sort(some("<u2", bins)),
        some("<u8", bins),
        some("<u8", bins),
        some("<u8", ranks),
        some("<f4", ranks),
    )
    sketches = some("<u2", (draw(st.sampled_from([0, blocks])), SKETCH_SIZE))
    return TensorStatistics.make(draw(st.integers(0, 2**64 - 1)), rows, sketches, distribution)


def same(one: TensorStatistics, two: TensorStatistics) -> bool:
    """Compare bit by bit: NaNs count."""
    parts = [
        [(array.shape, array.tobytes()) for array in (made.blocks, made.sketches, *vars(made.distribution).values())]
        for made in (one, two)
    ]
    return one.elements == two.elements and parts[0] == parts[1]


def read(value: bytes) -> Distribution | None:
    """Read all of a value; None when an earlier mergefs wrote it."""
    found = TensorStatistics.decode(value)
    return None if found is None else found.distribution


@given(statistics())
@settings(max_examples=150, deadline=None)
def test_what_is_kept_comes_back(made: TensorStatistics) -> None:
    found = TensorStatistics.decode(made.encode())
    assert found is not None
    assert same(found, made)
    assert found.encode() == made.encode()


@given(statistics(), st.data())
@settings(max_examples=150, deadline=None)
def test_truncation_is_named(made: TensorStatistics, data: st.DataObject) -> None:
    value = made.encode()
    short = value[: data.draw(st.integers(0, len(value) - 1))]
    with pytest.raises(CorruptionError, match="statistics of a tensor are damaged"):
        read(short)


@given(statistics(), st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_named_or_read_and_nothing_else(made: TensorStatistics, data: st.DataObject) -> None:
    value = bytearray(made.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptionError):
        read(bytes(value))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_other_bytes_are_damage(value: bytes) -> None:
    for start in (b"", b"mst3"):
        with contextlib.suppress(CorruptionError):
            read(start + value)


def test_counts_that_need_more_memory_than_there_is_are_damage() -> None:
    empty = Distribution(
        *(
            np.empty(shape, kind)
            for shape, kind in zip(((0, TIERS), 0, 0, 0, 0, 0), ("<u2", "<u2", "<u8", "<u8", "<u8", "<f4"), strict=True)
        )
    )
    made = TensorStatistics.make(1, np.empty(0, BLOCK), np.empty((0, SKETCH_SIZE), "<u2"), empty)
    # A frame that says that it holds 2**62 bytes.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(CorruptionError, match="damaged"):
        read(replace(made, packed=frame).encode())


# --------------------------------------------------------------------------------------------------- the sample


@given(st.integers(1, 1 << 24), st.data())
@settings(max_examples=100, deadline=None)
def test_one_of_each_run_is_sampled_whatever_the_blocks(elements: int, data: st.DataObject) -> None:
    whole = positions(elements, 0, elements)
    length = run_length(elements)
    assert length & (length - 1) == 0
    assert length >= LEAST_RUN
    assert -(-elements // length) <= MOST_SAMPLED or length == LEAST_RUN
    # One of every run; of the last, which may be short, at most one.
    runs = whole // length
    assert np.array_equal(runs, np.arange(len(whole)))
    assert elements // length <= len(whole) <= -(-elements // length)
    cuts = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=5))})
    parts = [positions(elements, one, two) + one for one, two in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_the_sample_does_not_keep_to_one_place_of_the_runs() -> None:
    inside = positions(1 << 22, 0, 1 << 22) % LEAST_RUN
    assert abs(np.mean(inside) / (LEAST_RUN / 2) - 1) < 0.15
    assert len(np.unique(inside % 64)) > 60


# ---------------------------------------------------------------------------------------------- against the store

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (300, 512),
    "fused": (3, 70, 400),
    "long": (90_000,),
    "small": (100, 60),
    "scalar": (),
    "empty": (0, 5),
}
BLOCK_SIZE = 1 << 17


def base_model(seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    return {name: array(random.normal(0, 0.04, shape), "BF16") for name, shape in SHAPES.items()}


def partly_tuned(base: Tensors, seed: int) -> Tensors:
    """Change every other 3000 elements."""
    random = np.random.default_rng(seed)
    found = {}
    for name, tensor in base.items():
        values = tensor.values.copy()
        changed = np.arange(values.size) // 3000 % 2 == 1
        values[changed] += random.normal(0, 4e-4, int(changed.sum()))
        found[name] = array(values.reshape(tensor.shape), "BF16")
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases; x, y and part are fine-tuned from the first one; mixed has a tensor of x, one of y, others of its own;
    wide is x in float32."""
    folder = tmp_path_factory.mktemp("models")
    base = base_model(1)
    x, y = (fine_tuned(base, seed, delta=4e-4) for seed in (2, 3))
    mixed = {**fine_tuned(base, 4, delta=4e-4), "a": x["a"], "long": y["long"]}
    made = {
        "base": base,
        "x": x,
        "y": y,
        "part": partly_tuned(base, 5),
        "mixed": mixed,
        "wide": {name: array(tensor.values.reshape(tensor.shape), "F32") for name, tensor in x.items()},
        "other": {**base_model(6), "fused": base["fused"]},
    }
    for name, tensors in made.items():
        write_model(folder / name, tensors)
    return folder


def filled(path: Path, models: Path, *names: str, block_size: int = BLOCK_SIZE) -> Repository:
    """Make a repository of the base and some experts against it."""
    made = new_repository(path, block_size)
    made.ingest(models / "base", "base")
    for name in names:
        made.ingest(models / name, name, base="base")
    return made


@pytest.fixture
def repository(models: Path, tmp_path: Path) -> Iterator[Repository]:
    with filled(tmp_path / "repository", models, "x", "y", "part") as made:
        yield made


def kept(repository: Repository, expert: str, base: str) -> dict[str, TensorStatistics]:
    with repository.catalog.read() as txn:
        return load(txn, repository.resolve(expert), repository.resolve(base), SHAPES)


def values_of(raw: bytes, tensor: Tensor) -> NDArray[np.float32]:
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    return np.frombuffer(raw, kinds[tensor.dtype.name]).astype(np.float32)


def check(repository: Repository, expert: str, base: str) -> int:
    """Check bytes, errors and sample of the statistics against what the reader gives; return the coarse tiers seen."""
    manifest, below = (repository.manifest(repository.resolve(name)) for name in (expert, base))
    every = kept(repository, expert, base)
    assert every.keys() == SHAPES.keys() - {"empty"}
    seen = 0
    for name, found in every.items():
        tensor, twin = manifest.tensor_by_name[name], below.tensor_by_name[name]
        assert found.elements == tensor.elements
        exact_column: list[NDArray[np.float32]] = []
        coarse_columns: list[NDArray[np.float32]] = []
        for number, (first, stop) in enumerate(tensor.grid(repository.block_elements).elements()):
            block, own = (bytes.fromhex(t.blocks[number] or "") for t in (tensor, twin))
            sample = positions(tensor.elements, first, stop)
            row = found.blocks[number]
            if block == own and tensor.dtype is twin.dtype:
                assert not row["bytes"].any()
                assert row["energy"] == 0
                assert row["unchanged"] == stop - first
                exact_column.append(np.zeros(len(sample), np.float32))
                coarse_columns.append(np.zeros((len(sample), TIERS - 1), np.float32))
                continue
            tiers = repository.catalog.tiers(block)
            base_reader = BlockReader(repository.catalog, repository.backend)
            known = base_reader.read_with_root(own, Kind.BASE)
            counter = ReadCounter()
            reader = BlockReader(repository.catalog, repository.backend, counter)
            raw = reader.read(block, Kind.EXPERT, known)
            base_values = values_of(bytes(known[own]), twin)
            delta = values_of(bytes(raw), tensor) - base_values
            # The bytes are what reading takes, tier by tier.
            sizes = row["bytes"].astype(np.int64)
            assert counter.totals.expert == sizes.sum()
            assert np.count_nonzero(sizes) == len(tiers)
            assert row["energy"] == pytest.approx(float(np.sum(delta.astype(np.float64) ** 2)), rel=1e-6)
            assert row["largest"] == np.abs(delta).max()
            coarse = np.repeat(delta[sample][:, None], TIERS - 1, axis=1)
            for depth in range(1, TIERS):
                if depth >= len(tiers):
                    assert np.isnan(row["errors"][depth - 1])
                    continue
                counter = ReadCounter()
                reader = BlockReader(repository.catalog, repository.backend, counter)
                rough, root = reader.read_coarse(block, depth, Kind.EXPERT, known)
                assert counter.totals.expert == sizes[:depth].sum()
                rough = rough + (values_of(bytes(root), tensor) - base_values)
                left = float(np.sum((delta.astype(np.float64) - rough) ** 2))
                assert row["errors"][depth - 1] == pytest.approx(left, rel=0.01)
                coarse[:, depth - 1] = rough[sample]
                seen += 1
            exact_column.append(delta[sample])
            coarse_columns.append(coarse)
        kept_sample = found.distribution.sample
        if tensor.elements < SKETCHED_FROM:
            assert len(kept_sample) == len(found.sketches) == 0
            continue
        assert len(kept_sample) == len(positions(tensor.elements, 0, tensor.elements))
        assert np.array_equal(kept_sample[:, -1], to_bfloat16(np.concatenate(exact_column)))
        assert np.array_equal(kept_sample[:, :-1], to_bfloat16(np.concatenate(coarse_columns)))
    return seen


def test_statistics_are_those_of_what_is_stored(repository: Repository) -> None:
    for expert in ("x", "y", "part"):
        assert check(repository, expert, "base") >= 12


def test_blocks_with_unchanged_runs_have_coarse_tiers_and_a_sample(repository: Repository) -> None:
    found = kept(repository, "part", "base")["a"]
    assert found.blocks["unchanged"].sum() > 0.4 * found.elements
    assert found.blocks["unchanged"].all()
    assert np.count_nonzero(found.blocks["bytes"][:, 3]) > 0
    exact = from_bfloat16(found.distribution.sample[:, -1])
    assert 0 < np.count_nonzero(exact) < len(exact)


@pytest.mark.parametrize("exact", ["small", "fast"])
def test_repack_renews_the_bytes(repository: Repository, models: Path, exact: str) -> None:
    repository.ingest(models / "mixed", "mixed", base="base")
    repository.ingest(models / "x", "x", base="y")
    before = kept(repository, "x", "base")["a"].blocks["bytes"].copy()
    repository.repack("small")
    assert not np.array_equal(kept(repository, "x", "base")["a"].blocks["bytes"], before)
    if exact == "fast":
        repository.repack("fast")
        assert np.array_equal(kept(repository, "x", "base")["a"].blocks["bytes"], before)
    repository.gc(rewrite_above=0.0)
    for expert in ("x", "y", "part", "mixed"):
        assert check(repository, expert, "base") > 0
    assert check(repository, "x", "y") > 0


def test_blocks_of_other_experts_are_measured_where_they_lie(repository: Repository, models: Path) -> None:
    report = repository.ingest(models / "mixed", "mixed", base="base")
    assert report.blocks_reused > 0
    check(repository, "mixed", "base")
    mine, its = kept(repository, "mixed", "base")["a"], kept(repository, "x", "base")["a"]
    assert same(mine, its)


def test_blocks_encoded_against_another_models(models: Path, tmp_path: Path) -> None:
    """Against an expert: what is encoded against its base is measured from the expert all the same."""
    with filled(tmp_path / "one", models, "y") as repository:
        repository.ingest(models / "x", "x", base="y")
        assert check(repository, "x", "y") >= 12
        # Stored already, then measured against the base that it is encoded against.
        report = repository.ingest(models / "x", "x", base="base")
        assert report.blocks_new == 0
        assert check(repository, "x", "base") >= 12
    with filled(tmp_path / "two", models, "x") as repository:
        # Encoded against blocks that nobody reads for the other base's sake: they come with the first tier.
        repository.ingest(models / "other", "other")
        repository.ingest(models / "mixed", "mixed", base="other")
        assert check(repository, "mixed", "other") > 0
        root = repository.catalog.locate(_first_block(repository, "base", "a"))
        assert root is not None
        row = kept(repository, "mixed", "other")["a"].blocks[0]
        lengths = [at.record.length for at in _tiers(repository, "mixed", "a")]
        assert row["bytes"].tolist() == [lengths[0] + root.record.length, *lengths[1:]]


def test_experts_that_were_stored_alone_or_are_of_another_dtype(models: Path, tmp_path: Path) -> None:
    with filled(tmp_path / "repository", models) as repository:
        repository.ingest(models / "x", "x")
        assert kept(repository, "x", "base") == {}
        report = repository.ingest(models / "x", "x", base="base")
        assert report.blocks_new == 0
        repository.ingest(models / "wide", "wide", base="base")
        for expert in ("x", "wide"):
            assert check(repository, expert, "base") == 0
        exact = [kept(repository, expert, "base")["a"].distribution.sample[:, -1] for expert in ("x", "wide")]
        assert np.array_equal(*exact)


def test_the_sample_is_of_the_same_elements_whatever_the_block_size(models: Path, tmp_path: Path) -> None:
    found = []
    for size in (4096, 1 << 15, 1 << 20):
        with filled(tmp_path / str(size), models, "x", "part", block_size=size) as repository:
            found.append(
                {
                    (expert, name): made.distribution.sample[:, -1]
                    for expert in ("x", "part")
                    for name, made in kept(repository, expert, "base").items()
                }
            )
    for key, sample in found[0].items():
        assert all(np.array_equal(sample, other[key]) for other in found[1:])


def test_a_repository_that_is_only_read_is_planned_for(models: Path, tmp_path: Path) -> None:
    """Of tensors without elements there are no statistics, and none are needed."""
    recipe = Recipe.parse(recipe_text("ties", ["x", "y"], "base", weight=0.5, density=0.5))
    filled(tmp_path / "repository", models, "x", "y").close()
    with Repository.open(tmp_path / "repository", readonly=True) as reading:
        found = reading.plan(recipe, budget="10%", save=False)
        assert found.candidates.unknown == ()
    with Repository.open(tmp_path / "repository") as writing:
        assert writing.plan(recipe, budget="10%").plan.id == found.plan.id
        assert "empty" not in kept(writing, "x", "base")


def test_what_was_measured_late_is_what_ingest_measured(repository: Repository, models: Path) -> None:
    """Statistics that the catalog lost are measured again when a plan needs them."""
    ids = [repository.resolve(name) for name in ("x", "base")]
    before = kept(repository, "x", "base")

    def forget(kind: bytes | None) -> None:
        for name in before:
            key = statistics_key(*ids, name)
            if kind is None:
                repository.catalog.write(lambda txn, key=key: txn.delete("statistics", key))
            else:
                repository.catalog.write(lambda txn, key=key: txn.put("statistics", key, kind))

    for earlier in (None, bytes(zstd.compress(b"mst1" + bytes(40), 1)), bytes(zstd.compress(b"mst2" + bytes(90), 1))):
        forget(earlier)
        assert kept(repository, "x", "base") == {}
        _measure(repository, "x", "base")
        check(repository, "x", "base")
        after = kept(repository, "x", "base")
        for name, made in before.items():
            assert np.allclose(
                from_bfloat16(after[name].distribution.sample), from_bfloat16(made.distribution.sample), rtol=0.01
            )
            assert np.array_equal(after[name].blocks["bytes"], made.blocks["bytes"])


def test_elements_that_are_not_finite_leave_no_trace_in_the_sample() -> None:
    sampled = np.ones((2, 3), np.float32)
    root = np.array([1, 2], ml_dtypes.bfloat16).tobytes()
    base = np.array([1, np.inf], ml_dtypes.bfloat16).tobytes()
    kind = DTYPES["BF16"]
    found = coarse_sample(sampled, root, kind, base, kind, np.array([0, 1]))
    assert found is not None
    assert found.tolist() == [[1, 1, 1], [0, 0, 0]]


def _measure(repository: Repository, expert: str, base: str) -> None:
    ids = [repository.resolve(name) for name in (expert, base)]
    measurer = Measurer(repository, ids[1], (ids[0],), ReadCounter())
    for name in SHAPES.keys() - {"empty"}:
        measurer.statistics(0, name)


def _first_block(repository: Repository, name: str, tensor: str) -> bytes:
    return bytes.fromhex(repository.manifest(repository.resolve(name)).tensor_by_name[tensor].blocks[0] or "")


def _tiers(repository: Repository, name: str, tensor: str) -> tuple[Location, ...]:
    return repository.catalog.tiers(_first_block(repository, name, tensor))


def test_a_repository_from_before_a_table_opens_for_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tuple(table for table in tables.TABLES if table != "products")
    with monkeypatch.context() as patch:
        patch.setattr(tables, "TABLES", older)
        Repository.init(tmp_path / "older").close()
    with Repository.open(tmp_path / "older", readonly=True) as opened, opened.catalog.read() as txn:
        assert txn.get("products", bytes(112)) is None
        assert list(txn.items("products")) == []
        assert txn.count("products") == 0
    with Repository.open(tmp_path / "older") as opened:
        opened.catalog.write(lambda txn: txn.put("products", bytes(112), bytes(8)))
