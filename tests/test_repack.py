"""The exact tier's coding: chosen for a repository, changed by repack, whoever is looking meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import array, fine_tuned, load_model, new_repository, recipe_text, served, tensors_of, tree, write_model
from click.testing import CliRunner

import mergefs.cli
import mergefs.repack
import mergefs.rewriting
from mergefs.blocks import tiers
from mergefs.blocks.codecs import Encoding
from mergefs.blocks.pack import Record, pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers.layout import MASK
from mergefs.catalog.tables import Location, locations
from mergefs.cli import cli
from mergefs.errors import BudgetError, CorruptionError, MergefsError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository

EXPERTS = ("x", "y", "few")
BLOCK = 1 << 18
TINY_PACK = 40_000
"""Of the exact tiers of about two blocks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two experts with every element changed, and one with few, whose blocks have the exact tier alone."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(3)
    shapes = {"a": (600, 256), "b": (500, 512), "c": (300, 256), "norm": (256,)}
    base = {name: array(random.normal(0, 0.04, shape), "BF16") for name, shape in shapes.items()}
    write_model(folder / "base", base, {"config.json": b"{}"})
    for seed, name in enumerate(("x", "y"), start=4):
        write_model(folder / name, fine_tuned(base, seed, delta=4e-4), {"config.json": b"{}"})
    few = {}
    for name, tensor in base.items():
        values = tensor.values.reshape(tensor.shape)
        values.ravel()[: 3000 if name != "norm" else 0] += random.normal(0, 4e-4, 3000 if name != "norm" else 0)
        few[name] = array(values, "BF16")
    write_model(folder / "few", few, {"config.json": b"{}"})
    return folder


def filled(path: Path, models: Path, exact: str) -> Repository:
    Repository.init(path, BLOCK, exact=exact).close()
    made = Repository.open(path, sync=False)
    for name in ("base", *EXPERTS):
        made.ingest(models / name, name, base=None if name == "base" else "base")
    return made


@pytest.fixture(scope="module")
def both(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository of each coding, not to be changed."""
    folder = tmp_path_factory.mktemp("both")
    for exact in ("fast", "small"):
        filled(folder / exact, models, exact).close()
    return {exact: folder / exact for exact in ("fast", "small")}


@pytest.fixture
def repository(both: dict[str, Path], tmp_path: Path) -> Iterator[Repository]:
    """A copy of the `fast` one."""
    shutil.copytree(both["fast"], tmp_path / "repository")
    with Repository.open(tmp_path / "repository", sync=False) as opened:
        yield opened


def tiered(repository: Repository) -> dict[bytes, tuple[Location, ...]]:
    """Return the tiers of every block that has any."""
    with repository.catalog.read() as txn:
        blocks = {at.record.block for at in locations(txn) if at.record.encoding == Encoding.TIERS}
    return {block: repository.catalog.tiers(block) for block in blocks}


def checks(repository: Repository) -> dict[bytes, list[bytes]]:
    """Return the hashes of the payloads of every block that has tiers."""
    return {block: [at.record.check for at in found] for block, found in tiered(repository).items()}


def payload(repository: Repository, at: Location) -> bytes:
    return repository.backend.get(pack_name(at.pack), at.record.offset, at.record.length)


def codings(repository: Repository) -> dict[str, int]:
    """Return how many blocks have their exact tier in each coding."""
    found = [tiers.coding(payload(repository, at[-1])) for at in tiered(repository).values()]
    return {str(name): found.count(name) for name in set(found)}


def coarse(repository: Repository) -> dict[tuple[bytes, int], bytes]:
    """Return the delta of every block at every depth below all of its tiers."""
    reader = BlockReader(repository.catalog, repository.backend)
    return {
        (block, depth): reader.read_coarse(block, depth, Kind.EXPERT, {})[0].tobytes()
        for block, at in tiered(repository).items()
        for depth in range(len(at))
    }


def pack_bytes(repository: Repository) -> int:
    return sum(size for _, size in repository.backend.list("packs"))


def check_whole(repository: Repository, models: Path) -> None:
    """Check that every model is served byte for byte and that nothing is damaged, lost or left behind."""
    for name in ("base", *EXPERTS):
        assert served(repository, name) == tree(models / name)
    report = repository.fsck(read_data=True)
    assert report.ok, report.errors
    assert report.garbage_packs == 0
    assert not list((repository.path / "tmp").iterdir())
    with repository.catalog.read() as txn:
        assert {key for key, _ in txn.items("packs")} == {at.pack for at in locations(txn)}
        assert txn.count("leases") == 0


def in_tiny_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergefs.rewriting, "PACK_BYTES", TINY_PACK)


class StopError(Exception):
    """What a progress callback raises."""


def interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise StopError


# ------------------------------------------------------------------------------------------------ the configuration


@pytest.mark.parametrize("exact", ["fast", "small"])
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
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "exact"}))
    with Repository.open(tmp_path / "old") as repository:
        assert repository.exact == "fast"
        repository.use_exact("small")
        assert repository.exact == "small"
    assert json.loads(path.read_text()) == {**config, "exact": "small"}
    for value in ("tiny", None, ["fast"], 3):
        path.write_text(json.dumps({**config, "exact": value}))
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


@pytest.mark.parametrize(("old", "new"), [("fast", "small"), ("small", "fast"), ("small", "small")])
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


def test_there_and_back(repository: Repository, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiny_packs(monkeypatch)
    before, deltas, places = pack_bytes(repository), coarse(repository), tiered(repository)
    original = checks(repository)
    report = repository.repack("small")
    assert (report.exact, report.blocks_repacked) == ("small", len(places))
    assert (report.stored_bytes_before, report.stored_bytes_after) == (before, pack_bytes(repository))
    assert report.stored_bytes_after < before
    assert codings(repository) == {"small": len(places)}
    assert repository.exact == "small"
    assert coarse(repository) == deltas
    for block, at in tiered(repository).items():
        assert at[:-1] == places[block][:-1]
        assert at[-1].pack != places[block][-1].pack
    check_whole(repository, models)
    for name in EXPERTS:
        repository.export(name, tmp_path / name)
        assert tree(tmp_path / name) == tree(models / name)
    # What was replaced lay in a pack with blocks of other encodings: gc's to rewrite, when it is worth it.
    assert repository.gc(rewrite_above=0).waste_bytes == 0
    check_whole(repository, models)
    back = repository.repack("fast")
    assert back.blocks_repacked == len(places)
    assert codings(repository) == {"fast": len(places)}
    repository.gc(rewrite_above=0)
    check_whole(repository, models)
    assert checks(repository) == original


def test_repacking_equals_ingesting_with_the_coding(repository: Repository, both: dict[str, Path]) -> None:
    repository.repack("small")
    with Repository.open(both["small"]) as small:
        assert checks(repository) == checks(small)


def test_a_second_run_finds_nothing_to_do(repository: Repository) -> None:
    repository.repack("small")
    packs = tree(repository.path / "packs")
    for exact in ("small", None):
        report = repository.repack(exact)
        assert (report.exact, report.blocks_repacked) == ("small", 0)
        assert report.stored_bytes_before == report.stored_bytes_after
    assert tree(repository.path / "packs") == packs


def test_exact_tiers_lie_in_the_order_of_the_manifests(repository: Repository, models: Path, tmp_path: Path) -> None:
    """Whatever order they lay in: these were brought by a model with its tensors the other way round."""
    repository.remove(["x"])
    repository.gc()
    tensors = load_model(models / "x")
    write_model(tmp_path / "turned", dict(reversed(tensors.items())))
    repository.ingest(tmp_path / "turned", "turned", base="base")
    repository.ingest(models / "x", "x", base="base")
    repository.remove(["turned"])
    repository.gc()

    def places(name: str) -> list[Location]:
        ids = repository.manifest(repository.resolve(name)).block_ids()
        return [at[-1] for at in map(repository.catalog.tiers, ids) if len(at) == 4]

    before = [at.record.offset for at in places("x")]
    assert before != sorted(before)
    repository.repack("small")
    for name in ("x", "y"):
        found = places(name)
        assert len(found) >= 3
        assert len({at.pack for at in found}) == 1
        for one, two in pairwise(found):
            assert two.record.offset == one.record.offset + one.record.length


@pytest.mark.parametrize("exact", ["fast", "small"])
def test_a_merge_under_a_budget(both: dict[str, Path], tmp_path: Path, exact: str) -> None:
    """After a repack, from either coding to the other, budgets hold and exact merges are the same."""
    text = recipe_text("task_arithmetic", ["x", "y"], "base", weight=0.5, dtype="float32")
    shutil.copytree(both[exact], tmp_path / "repository")
    with Repository.open(tmp_path / "repository", sync=False) as repository:
        whole = repository.merge(Recipe.parse(text), "before")
        repository.repack("small" if exact == "fast" else "fast")
        assert repository.merge(Recipe.parse(text), "after").manifest == whole.manifest
        for share in (5, 15):
            planned = repository.plan(Recipe.parse(text), budget=f"{share}%")
            report = repository.merge(Recipe.parse(text), "tenth", budget=f"{share}%")
            assert 0 < report.read.expert == planned.expert_bytes <= report.budget_bytes
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


def test_an_interrupted_repack_is_continued(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tiny_packs(monkeypatch)
    total = len(tiered(repository))
    with pytest.raises(StopError):
        repository.repack("small", progress=interrupt)
    done = codings(repository)
    assert done["fast"] + done["small"] == total
    assert done["small"] > 0
    assert repository.exact == "small"
    check_whole(repository, models)
    assert repository.repack().blocks_repacked == done["fast"]
    assert codings(repository) == {"small": total}
    check_whole(repository, models)


def test_a_killed_repack_is_continued(repository: Repository, models: Path) -> None:
    """Killed inside the transaction that switches a batch, after its packs have their names."""
    code = (
        "import os, sys, mergefs.repack as r, mergefs.rewriting as w\n"
        "from mergefs.repository import Repository\n"
        f"w.PACK_BYTES = {TINY_PACK}\n"
        "turns = []\n"
        "old = r.is_spent\n"
        "def spent(*args):\n"
        "    turns.append(1)\n"
        "    return os._exit(9) if len(turns) == int(sys.argv[2]) else old(*args)\n"
        "r.is_spent = spent\n"
        "Repository.open(sys.argv[1]).repack('small', threads=1)\n"
    )
    total = len(tiered(repository))
    for turn in (1, 3):
        ran = subprocess.run([sys.executable, "-c", code, str(repository.path), str(turn)], check=False)
        assert ran.returncode == 9
        repository.gc()
        assert 0 < codings(repository)["fast"] <= total
        for name in EXPERTS:
            assert served(repository, name) == tree(models / name)
    assert codings(repository)["small"] > 0
    repository.repack()
    repository.gc(rewrite_above=0)
    assert codings(repository) == {"small": total}
    # The temporary files of the killed are swept when the repository is opened.
    with Repository.open(repository.path, sync=False):
        check_whole(repository, models)


# ---------------------------------------------------------------------------------------------------- others meanwhile


def test_a_view_kept_open_over_a_repack(repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_tiny_packs(monkeypatch)
    content = (models / "x" / "model.safetensors").read_bytes()
    with repository.view("x", cache_bytes=0) as view:
        first = view.read("model.safetensors", 0, 5000)
        for exact in ("small", "fast"):
            repository.repack(exact)
            assert view.read("model.safetensors", 0, 5000) == first
            assert view.read("model.safetensors") == content


def test_readers_that_looked_a_block_up_before(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packs that a reader was told of are gone when it reads."""
    reader = BlockReader(repository.catalog, repository.backend)
    places = tiered(repository)
    expected = {block: bytes(reader.read(block, Kind.EXPERT)) for block in places}
    repository.repack("small")
    repository.gc(rewrite_above=0)
    fresh = repository.catalog.tiers
    stale = dict(places)
    monkeypatch.setattr(repository.catalog, "tiers", lambda block: stale.pop(block, None) or fresh(block))
    for block in places:
        assert bytes(reader.read(block, Kind.EXPERT)) == expected[block]
    assert not stale


def test_readers_ingests_and_collections_at_the_same_time(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tiny_packs(monkeypatch)
    code = (
        "import sys; from mergefs.repository import Repository; repository = Repository.open(sys.argv[1], sync=False)\n"
        "print('ready', flush=True)\n"
        "while True: repository.gc(rewrite_above=0)"
    )
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                assert served(repository, "y") == tree(models / "y")
        except BaseException as error:
            failures.append(error)

    collector = subprocess.Popen([sys.executable, "-c", code, str(repository.path)], stdout=subprocess.PIPE)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert collector.stdout is not None
        assert collector.stdout.readline() == b"ready\n"
        for turn in range(4):
            repository.remove(["x", "few"])
            repository.ingest(models / "x", "x", base="base")
            repository.repack(("small", "fast")[turn % 2])
            repository.ingest(models / "few", "few", base="base")
            assert served(repository, "x") == tree(models / "x")
        assert collector.poll() is None
    finally:
        stop.set()
        thread.join()
        collector.kill()
        collector.communicate()
    assert not failures
    repository.repack("small")
    repository.gc(rewrite_above=0)
    assert set(codings(repository)) == {"small"}
    check_whole(repository, models)


def test_an_ingest_that_began_before_makes_a_mixed_repository(repository: Repository, models: Path) -> None:
    repository.remove(["x"])
    repository.gc()
    repository.repack("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "exact", "fast")
        repository.ingest(models / "x", "x", base="base")
    mixed = codings(repository)
    assert set(mixed) == {"fast", "small"}
    check_whole(repository, models)
    assert repository.repack().blocks_repacked == mixed["fast"]
    assert set(codings(repository)) == {"small"}


def _meanwhile(monkeypatch: pytest.MonkeyPatch, where: str, action: Callable[[], object]) -> None:
    """Have something happen once, just before a function begins or a method returns that repack uses."""
    owner, name = {
        "before reading": (mergefs.repack, "ordered"),
        "before switching": (mergefs.rewriting.Rewrite, "finish"),
    }[where]
    original, turns = getattr(owner, name), []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not turns:
            turns.append(1)
            action()
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("where", ["before reading", "before switching"])
def test_blocks_that_gc_takes_in_between(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A model that is not in the catalog any more when repack begins: nothing protects its blocks."""
    gone = set(repository.manifest(repository.resolve("x")).block_ids())
    kept = set(repository.manifest(repository.resolve("y")).block_ids())
    identity = repository.remove(["x"])["x"]
    repository.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(identity)))
    places = tiered(repository)
    _meanwhile(monkeypatch, where, lambda: repository.gc(rewrite_above=0))
    report = repository.repack("small")
    assert places.keys() & (gone - kept)
    assert report.blocks_repacked == len(places) - len(places.keys() & (gone - kept))
    repository.ingest(models / "x", "x", base="base")
    repository.gc(rewrite_above=0)
    check_whole(repository, models)


def test_packs_that_were_not_entered_are_removed(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        assert list((repository.path / "tmp").iterdir())
        raise StopError

    places = tiered(repository)
    _meanwhile(monkeypatch, "before switching", stop)
    with pytest.raises(StopError):
        repository.repack("small")
    assert not list((repository.path / "tmp").iterdir())
    assert tiered(repository) == places


def test_tiers_that_gc_moves_in_between(repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.repack("small")  # which puts the exact tiers of all experts in one pack
    identity = repository.remove(["x"])["x"]
    repository.catalog.write(lambda txn: txn.delete("manifests", bytes.fromhex(identity)))
    places = tiered(repository)

    def collect() -> None:
        assert repository.gc(rewrite_above=0).packs_rewritten
        assert any(at[-1].pack != places[block][-1].pack for block, at in tiered(repository).items())

    _meanwhile(monkeypatch, "before switching", collect)
    repository.repack("fast")
    assert set(codings(repository)) == {"fast"}
    repository.ingest(models / "x", "x", base="base")
    repository.gc(rewrite_above=0)
    check_whole(repository, models)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_damaged_block_is_left_as_it_is(repository: Repository) -> None:
    at = next(at for at in tiered(repository).values() if len(at) == 4)[-1]
    path = repository.path / pack_name(at.pack)
    data = bytearray(path.read_bytes())
    data[at.record.offset + at.record.length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=at.record.block.hex()):
        repository.repack("small")
    assert repository.catalog.tiers(at.record.block)[-1] == at
    assert not list((repository.path / "tmp").iterdir())


def test_what_does_not_decode_to_its_id_is_not_switched_to(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, places = tiers.recode, tiered(repository)

    def wrong(payloads: Sequence[bytes], base: bytes, exact: tiers.Exact) -> bytes:
        if len(payloads) > 1:
            return original(payloads, base, exact)
        changed = np.frombuffer(tiers.decode(payloads, base), np.uint16).copy()
        changed[0] ^= 1
        (payload,) = tiers.encode_always(changed.tobytes(), base, exact).tiers
        return payload

    monkeypatch.setattr(tiers, "recode", wrong)
    with pytest.raises(CorruptionError, match="another hash"):
        repository.repack("small")
    assert tiered(repository) == places


def test_a_repository_that_is_only_read(both: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(both["fast"], tmp_path / "copy")
    with Repository.open(tmp_path / "copy", readonly=True) as repository:
        for exact in ("small", None):
            with pytest.raises(UserError, match="reading only"):
                repository.repack(exact)
        assert repository.exact == "fast"


def test_the_command_line_refuses_what_it_may_not_write_to(
    both: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(both["fast"], tmp_path / "copy")
    before = tree(tmp_path / "copy" / "packs")
    monkeypatch.setattr("mergefs.cli.common.os.access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    monkeypatch.setattr(sys, "argv", ["mergefs", "-R", str(tmp_path / "copy"), "repack", "--exact", "small"])
    with pytest.raises(SystemExit) as caught:
        mergefs.cli.main()
    assert caught.value.code == 2
    assert "reading only" in capfd.readouterr().err
    assert tree(tmp_path / "copy" / "packs") == before


def test_the_command_line(repository: Repository) -> None:
    run = ["-R", str(repository.path), "repack"]
    done = CliRunner().invoke(cli, [*run, "--exact", "small", "--threads", "1", "--json"])
    assert done.exit_code == 0
    value = json.loads(done.output)
    assert value.keys() == {"exact", "blocks_repacked", "stored_bytes_before", "stored_bytes_after", "seconds"}
    assert value["exact"] == "small"
    assert value["stored_bytes_after"] < value["stored_bytes_before"]
    assert CliRunner().invoke(cli, run).output == "every block is 'small' already\n"
    assert f"{value['blocks_repacked']} blocks" in CliRunner().invoke(cli, [*run, "--exact", "fast"]).output


def test_a_record_keeps_all_but_its_place(repository: Repository) -> None:
    before = tiered(repository)
    repository.repack("small")
    for block, at in tiered(repository).items():
        one, two = before[block][-1].record, at[-1].record
        assert Record(block, two.base, one.check, one.offset, one.length, *_shape(two)) == one


def _shape(record: Record) -> tuple[int, int, int, int, int]:
    return record.raw_length, record.encoding, record.dtype, record.tier, record.tiers
