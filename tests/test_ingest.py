"""Ingest: every checkpoint comes back byte for byte, once stored it costs nothing again, and its statistics hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    EXPERTS,
    FINEST_BLOCK,
    FLOATS,
    NUMPY,
    Array,
    array,
    contents,
    fine_tuned,
    load_model,
    new_repository,
    pack,
    random_model,
    served,
    tree,
    unpack,
    write_model,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergefs.errors import CheckpointError, NotFoundError, RefNameError
from mergefs.repository import Repository
from mergefs.statistics.sample import from_bfloat16
from mergefs.statistics.tensor import TensorStatistics, load, trim_rank
from tools.synth import make

# ------------------------------------------------------------------------------------------------- real weights


def test_real_slices_are_exported_byte_for_byte(slice_repository: Repository, slices: Path, tmp_path: Path) -> None:
    for name in ("base", *EXPERTS):
        slice_repository.export(name, tmp_path / name)
        assert tree(tmp_path / name) == tree(slices / name)
        recorded = {file.path: file.sha256 for file in slice_repository.manifest(slice_repository.resolve(name)).files}
        assert recorded == tree(slices / name)


def test_what_real_deltas_cost(tmp_path: Path, slices: Path) -> None:
    # With blocks as large as these tensors, so that the records' size does not hide the encoding's.
    with new_repository(tmp_path / "repository", 1 << 18) as repository:
        repository.ingest(slices / "base", "base")
        for name, most in zip(EXPERTS, (0.24, 0.27, 0.40), strict=True):
            report = repository.ingest(slices / name, name, base="base")
            assert report.raw_bytes == sum(path.stat().st_size for path in (slices / name).iterdir())
            assert report.stored_bytes < most * report.raw_bytes


def test_the_base_changes_how_blocks_lie_and_not_what_they_are(tmp_path: Path, slices: Path) -> None:
    with new_repository(tmp_path / "alone") as alone, new_repository(tmp_path / "based") as based:
        for repository in (alone, based):
            repository.ingest(slices / "base", "base")
        for name in EXPERTS:
            plain = alone.ingest(slices / name, name)
            delta = based.ingest(slices / name, name, base="base")
            assert plain.manifest == delta.manifest
            assert delta.stored_bytes < 0.65 * plain.stored_bytes
        # With the blocks stored already, a base given later adds statistics and no block.
        before = alone.stats()
        again = alone.ingest(slices / EXPERTS[0], EXPERTS[0], base="base")
        assert (again.stored_bytes, again.blocks_new) == (0, 0)
        assert alone.stats() == before
        key = alone.resolve(EXPERTS[0])
        with alone.catalog.read() as txn:
            assert load(txn, key, alone.resolve("base"), alone.manifest(key).tensor_by_name)


def test_ingesting_again_stores_nothing(slice_repository: Repository, slices: Path) -> None:
    before = contents(slice_repository.path)
    for name in ("base", *EXPERTS):
        report = slice_repository.ingest(slices / name, name, base=None if name == "base" else "base")
        assert report.manifest == slice_repository.resolve(name)
        assert (report.stored_bytes, report.blocks_new, report.previous) == (0, 0, None)
        assert report.blocks_reused > 0
    assert contents(slice_repository.path) == before


def test_threads_do_not_change_the_result(tmp_path: Path, slices: Path) -> None:
    found = []
    for threads in (1, 2, 7):
        with new_repository(tmp_path / str(threads)) as repository:
            repository.ingest(slices / "base", "base", threads=threads)
            repository.ingest(slices / EXPERTS[2], "x", base="base", threads=threads)
            timed = ("mergefs.json", "mergefs.copy.json", "refs/base.json", "refs/x.json")
            found.append({name: sha for name, sha in contents(repository.path).items() if name not in timed})
    assert found[0] == found[1] == found[2]


# ------------------------------------------------------------------------------------------------ a few rules


def test_equal_blocks_are_stored_once(repository: Repository, tmp_path: Path) -> None:
    values = array(np.random.default_rng(0).normal(size=(64, 64)), "BF16")
    model = {"a": values, "b": values, "c": values}
    report = repository.ingest(write_model(tmp_path / "m", model), "m")
    assert report.blocks_new == 2 + 1  # two blocks and the header
    assert report.stored_bytes < 2 * len(values.data)
    assert served(repository, "m") == tree(tmp_path / "m")


def test_an_unchanged_block_costs_nothing(repository: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    repository.ingest(write_model(tmp_path / "base", base), "base")
    expert = dict(base)
    changed = bytearray(expert["layers.0.attn.weight"].data)
    changed[0] ^= 1
    expert["layers.0.attn.weight"] = Array("BF16", (64, 64), bytes(changed))
    report = repository.ingest(write_model(tmp_path / "x", expert), "x", base="base")
    assert report.blocks_new == 1
    assert served(repository, "x") == tree(tmp_path / "x")


def test_a_ref_moves_and_tells_what_it_named(repository: Repository, tmp_path: Path) -> None:
    first = repository.ingest(write_model(tmp_path / "a", random_model(1)), "m")
    second = repository.ingest(write_model(tmp_path / "b", random_model(2)), "m")
    assert first.previous is None
    assert second.previous == first.manifest
    assert repository.refs() == {"m": second.manifest}


def test_experts_of_experts_are_encoded_against_one_root(repository: Repository, tmp_path: Path) -> None:
    model = random_model(1)
    repository.ingest(write_model(tmp_path / "0", model), "m0")
    for number in range(1, 5):
        model = fine_tuned(model, number)
        repository.ingest(write_model(tmp_path / str(number), model), f"m{number}", base=f"m{number - 1}")
    for number in range(5):
        assert served(repository, f"m{number}") == tree(tmp_path / str(number))


def test_another_shape_or_dtype_stands_alone(repository: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    repository.ingest(write_model(tmp_path / "base", base), "base")
    expert = fine_tuned(base, 2) | {
        "embed.weight": array(np.random.default_rng(3).normal(size=(71, 96)), "BF16"),
        "layers.0.norm": array(base["layers.0.norm"].values, "F32"),
        "positions": array(np.arange(40), "F32"),
        "new": array(np.ones(5), "F16"),
    }
    del expert["scale"]
    repository.ingest(write_model(tmp_path / "x", expert), "x", base="base")
    assert served(repository, "x") == tree(tmp_path / "x")


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_numbers_survive(repository: Repository, tmp_path: Path, dtype: str) -> None:
    width = np.dtype(NUMPY[dtype]).itemsize
    random = np.random.default_rng(0)
    noise = [random.bytes(3000 * width) for _ in range(2)]
    zeros = bytes(3000 * width)
    base = {"w": Array(dtype, (3000,), noise[0]), "z": Array(dtype, (3000,), zeros)}
    expert = {"w": Array(dtype, (3000,), noise[1]), "z": Array(dtype, (3000,), b"\x80" * len(zeros))}
    repository.ingest(write_model(tmp_path / "base", base), "base")
    repository.ingest(write_model(tmp_path / "x", expert), "x", base="base")
    assert served(repository, "base") == tree(tmp_path / "base")
    assert served(repository, "x") == tree(tmp_path / "x")


# ------------------------------------------------------------------------------------------------ odd, but valid


def _odd(name: str) -> bytes:
    random = np.random.default_rng(5)
    one = {"w": array(random.normal(size=(50, 70)), "BF16")}
    return {
        "empty metadata": pack(one, {}),
        "no metadata": pack(one),
        "header only": pack({}),
        "header only with metadata": pack({}, {"format": "pt"}),
        "scalars": pack({"a": array(1.5, "BF16"), "b": array(2, "I64"), "c": array(1, "BOOL")}),
        "empty tensors": pack({"a": array(np.ones((0, 7)), "F16"), **one, "b": array(np.ones((3, 0, 2)), "U8")}),
        "only an empty tensor": pack({"a": array(np.ones(0), "F32")}),
        "non-ASCII names": pack({"größe.重み": one["w"], "\U0001f600": array(1, "U8")}, {"ключ": "значение"}),
        "padded header": pack(one, None, 5000),
        "large header": pack({f"t{i:05d}": array(i, "I16") for i in range(400)}),
        "reverse order": pack(dict(sorted(random_model(1).items(), reverse=True))),
        "many axes": pack({"w": array(random.normal(size=(2, 3, 1, 5, 2, 1, 7, 9)), "F32")}),
        "long rows": pack({"w": array(random.normal(size=(3, 5001)), "BF16")}),
        "every dtype": pack({d: Array(d, (3000,), random.bytes(3000 * np.dtype(NUMPY[d]).itemsize)) for d in NUMPY}),
        "every dtype, small numbers": pack({d: array(random.integers(0, 2, 3000), d) for d in NUMPY}),
    }[name]


@pytest.fixture(scope="module")
def odd_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    repository = new_repository(tmp_path_factory.mktemp("odd") / "repository")
    yield repository
    repository.close()


@pytest.mark.parametrize(
    "name",
    [
        "empty metadata",
        "no metadata",
        "header only",
        "header only with metadata",
        "scalars",
        "empty tensors",
        "only an empty tensor",
        "non-ASCII names",
        "padded header",
        "large header",
        "reverse order",
        "many axes",
        "long rows",
        "every dtype",
        "every dtype, small numbers",
    ],
)
def test_odd_files_round_trip(odd_repository: Repository, tmp_path: Path, name: str) -> None:
    content = _odd(name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    odd_repository.ingest(tmp_path / "model", "odd")
    odd_repository.ingest(tmp_path / "model", "odd-again", base="odd")
    odd_repository.export("odd-again", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == content
    with odd_repository.view("odd") as view:
        for tensor, expected in unpack(content).items():
            assert bytes(view.tensor_bytes(tensor)) == expected.data
            assert view.tensors[tensor].shape == expected.shape
            assert tuple(view.tensor(tensor).shape) == expected.shape
    assert odd_repository.fsck(read_data=True).ok


def test_a_bare_file(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "weights of mine.safetensors").write_bytes(pack(random_model(1)))
    repository.ingest(tmp_path / "weights of mine.safetensors", "m")
    repository.export("m", tmp_path / "out")
    assert tree(tmp_path / "out") == {
        "weights of mine.safetensors": tree(tmp_path)["weights of mine.safetensors"],
    }


def test_shards_and_other_files(repository: Repository, tmp_path: Path) -> None:
    base, expert = make("tiny", 1, tmp_path, shard_size=300_000)
    for folder in (base, expert):
        (folder / "nested" / "deep").mkdir(parents=True)
        (folder / "nested" / "deep" / "Ünïcode 名.txt").write_text("x" * 10_000)
        (folder / "empty").write_bytes(b"")
    repository.ingest(base, "base")
    report = repository.ingest(expert, "x", base="base")
    assert report.stored_bytes < 0.6 * report.raw_bytes
    for name, folder in (("base", base), ("x", expert)):
        repository.export(name, tmp_path / "out" / name)
        assert tree(tmp_path / "out" / name) == tree(folder)
        assert served(repository, name) == tree(folder)


def test_symbolic_links_as_in_the_hub_cache(repository: Repository, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", random_model(1), {"config.json": b"{}", "sub/vocab.txt": b"a b"})
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in plain.rglob("*") if p.is_file())):
        target = snapshot / path.relative_to(plain)
        target.parent.mkdir(parents=True, exist_ok=True)
        (blobs / str(number)).write_bytes(path.read_bytes())
        target.symlink_to(os.path.relpath(blobs / str(number), target.parent))
    links = repository.ingest(snapshot, "links")
    assert repository.ingest(plain, "plain").manifest == links.manifest
    assert served(repository, "links") == tree(plain)


def test_a_file_that_shrinks_meanwhile(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m", random_model(1))
    path = folder / "model.safetensors"
    real = os.pread

    def shrinking(descriptor: int, size: int, offset: int) -> bytes:
        if path.stat().st_size > 20_000 and os.path.realpath(f"/proc/self/fd/{descriptor}") == str(path):
            os.truncate(path, 20_000)
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", shrinking)
    before = repository.stats()
    with pytest.raises(CheckpointError, match="became shorter"):
        repository.ingest(folder, "m")
    assert repository.refs() == {}
    assert repository.gc().freed_bytes >= 0
    assert repository.stats() == before
    assert not list((repository.path / "tmp").iterdir())


def test_a_file_name_that_no_manifest_may_hold(repository: Repository, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_model(1), {"a\\b.txt": b"a backslash is a letter here"})
    with pytest.raises(CheckpointError, match=r"a.*b\.txt"):
        repository.ingest(folder, "m")
    assert repository.refs() == {}
    assert repository.fsck().ok


def test_what_is_refused_changes_nothing(repository: Repository, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_model(1))
    before = contents(repository.path)
    with pytest.raises(RefNameError):
        repository.ingest(folder, "../m")
    with pytest.raises(NotFoundError):
        repository.ingest(folder, "m", base="nobody")
    with pytest.raises(CheckpointError):
        repository.ingest(tmp_path / "nothing", "m")
    assert contents(repository.path) == before
    assert repository.refs() == {}


# -------------------------------------------------------------------------------------------------- properties

_FILES = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="/\\", exclude_categories=("Cc", "Cs")), min_size=1)
    .filter(lambda name: name not in (".", "..") and len(name.encode()) < 100)
    .filter(lambda name: not name.endswith(".safetensors") and name not in (".git", ".cache")),
    st.binary(max_size=9000),
    max_size=2,
)


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, Array]:
    names = draw(st.lists(st.text("abc.é", min_size=1, max_size=6), max_size=4, unique=True))
    made = {}
    for name in names:
        dtype = draw(st.sampled_from(sorted(NUMPY)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40, 130]), max_size=3)))
        elements = int(np.prod(shape, dtype=np.int64))
        if elements > 40_000:
            shape, elements = shape[:1], shape[0]
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        width = np.dtype(NUMPY[dtype]).itemsize
        compressible = draw(st.booleans())
        data = bytes(elements * width) if compressible else random.bytes(elements * width)
        made[name] = Array(dtype, shape, data)
    return made


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Repository]]:
    folder = tmp_path_factory.mktemp("sizes")
    made = [new_repository(folder / str(size), size) for size in (4096, 8192, 20480, 1 << 20)]
    yield made
    for repository in made:
        repository.close()


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_checkpoint_round_trips(
    repositories: list[Repository], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    repository = data.draw(st.sampled_from(repositories))
    base, files = data.draw(_tensors()), data.draw(_FILES)
    expert = dict(base)
    for name, tensor in base.items():
        if tensor.data and data.draw(st.booleans()):
            changed = bytearray(tensor.data)
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
            expert[name] = Array(tensor.dtype, tensor.shape, bytes(changed))
    write_model(folder / "base", base, files)
    write_model(folder / "x", expert, files)
    repository.ingest(folder / "base", "base")
    repository.ingest(folder / "x", "x", base="base")
    for name in ("base", "x"):
        assert served(repository, name) == tree(folder / name)
    with repository.view("x", cache_bytes=0) as view:
        content = (folder / "x" / "model.safetensors").read_bytes()
        start = data.draw(st.integers(0, len(content)))
        size = data.draw(st.integers(0, 3 * FINEST_BLOCK))
        assert view.read("model.safetensors", start, size) == content[start : start + size]


# -------------------------------------------------------------------------------------------------- statistics


def _check(found: TensorStatistics, repository: Repository, base: Array, expert: Array) -> None:
    """Compare a tensor's statistics with what numpy finds."""
    with np.errstate(over="ignore"):
        b, x = base.values.astype(np.float32), expert.values.astype(np.float32)
    delta = x - b
    bits = [np.frombuffer(t.data, np.uint8).reshape(delta.size, -1) for t in (base, expert)]
    manifest = repository.manifest(repository.resolve("base"))
    tensor = next(t for t in manifest.tensors if t.shape == base.shape and t.dtype.name == base.dtype)
    extents = list(tensor.grid(manifest.block_elements).elements())
    assert found.elements == delta.size
    assert len(found.blocks) == len(extents)
    for row, (first, stop) in zip(found.blocks, extents, strict=True):
        d = delta[first:stop].astype(np.float64)
        assert row["energy"] == pytest.approx(d @ d, rel=1e-9, abs=1e-300)
        assert row["inner"] == pytest.approx(d @ b[first:stop].astype(np.float64), rel=1e-6, abs=1e-12)
        assert row["largest"] == np.abs(delta[first:stop]).max()
        if base.dtype == expert.dtype:
            assert row["unchanged"] == np.all(bits[0][first:stop] == bits[1][first:stop], axis=1).sum()
    magnitudes = np.sort(np.abs(delta))[::-1]
    assert found.distribution.counts.sum() == delta.size
    histogram = np.bincount(magnitudes.view(np.uint32) >> 16, minlength=1 << 15)
    assert np.array_equal(histogram[found.distribution.bins], found.distribution.counts)
    for density in [*(i / 100 for i in range(1, 100)), 0.333, 1e-9, 0.9999]:
        k = trim_rank(density, delta.size)
        assert k == max(1, int(density * delta.size))
        threshold = found.distribution.threshold(k)
        if round(density, 2) == density:
            assert threshold == magnitudes[k - 1]
        else:
            # Only some ranks are kept exactly where a bin holds different magnitudes.
            assert threshold in (None, magnitudes[k - 1])
            where = found.distribution.bin_of_rank(k)
            if where is not None:
                assert found.distribution.bins[where[0]] == magnitudes[k - 1].view(np.uint32) >> 16


def test_statistics_of_real_deltas(slice_repository: Repository, slices: Path) -> None:
    base_id = slice_repository.resolve("base")
    base = load_model(slices / "base")
    for name in EXPERTS:
        identity = slice_repository.resolve(name)
        with slice_repository.catalog.read() as txn:
            found = load(txn, identity, base_id, base)
        expert = load_model(slices / name)
        assert found.keys() == base.keys()
        for tensor in ("embeddings.word_embeddings.weight", "encoder.layer.3.attention.self.query.weight"):
            _check(found[tensor], slice_repository, base[tensor], expert[tensor])


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_statistics_of_every_float_dtype(repository: Repository, tmp_path: Path, dtype: str) -> None:
    base = random_model(1, dtype, scale=1.0)
    expert = fine_tuned(base, 2, delta=0.05)
    base_id = repository.ingest(write_model(tmp_path / "base", base), "base").manifest
    identity = repository.ingest(write_model(tmp_path / "x", expert), "x", base="base").manifest
    with repository.catalog.read() as txn:
        found = load(txn, identity, base_id, base)
    assert found.keys() == {name for name in base if base[name].dtype == dtype}
    for name in ("embed.weight", "layers.0.experts", "layers.0.norm"):
        _check(found[name], repository, base[name], expert[name])


def test_statistics_of_an_expert_in_another_dtype(repository: Repository, tmp_path: Path) -> None:
    base = random_model(1)
    expert = fine_tuned(base, 2, dtype="F32")
    base_id = repository.ingest(write_model(tmp_path / "base", base), "base").manifest
    identity = repository.ingest(write_model(tmp_path / "x", expert), "x", base="base").manifest
    with repository.catalog.read() as txn:
        found = load(txn, identity, base_id, base)
    _check(found["embed.weight"], repository, base["embed.weight"], expert["embed.weight"])


def test_sketches_estimate_inner_products(repository: Repository, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    base = {"w": array(random.normal(0, 0.02, (512, 256)), "F32")}
    common = random.normal(0, 1e-3, (512, 256))
    experts = {
        n: {"w": array(base["w"].values.reshape(512, 256) + common + random.normal(0, 1e-3, (512, 256)), "F32")}
        for n in "xy"
    }
    base_id = repository.ingest(write_model(tmp_path / "base", base), "base").manifest
    found: dict[str, Any] = {}
    for name, model in experts.items():
        identity = repository.ingest(write_model(tmp_path / name, model), name, base="base").manifest
        with repository.catalog.read() as txn:
            found[name] = load(txn, identity, base_id, base)["w"]
    x, y = (experts[n]["w"].values - base["w"].values for n in "xy")
    blocks = len(found["x"].blocks)
    parts = [np.split(d, blocks) for d in (x, y)]
    exact = np.array([a @ b for a, b in zip(*parts, strict=True)])
    norms = np.array([np.linalg.norm(a) * np.linalg.norm(b) for a, b in zip(*parts, strict=True)])
    estimated = (from_bfloat16(found["x"].sketches) * from_bfloat16(found["y"].sketches)).sum(axis=1)
    errors = (estimated - exact) / norms
    bound = (2 / 128) ** 0.5
    assert np.abs(errors).max() < 5 * bound
    assert errors.std() < 1.5 * bound
    assert abs(errors.mean()) < 5 * bound / blocks**0.5
