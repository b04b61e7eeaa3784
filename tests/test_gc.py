"""gc frees exactly what nothing needs, whoever is looking at the repository meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import array, contents, fine_tuned, new_repository, random_model, recipe_text, served, tree, write_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mergefs.blocks.pack import NO_BASE, Record, read_records
from mergefs.catalog.leases import leases
from mergefs.errors import BudgetError, NotFoundError
from mergefs.gc import GcReport
from mergefs.recipe import Recipe
from mergefs.repository import Repository


def recipe(method: str, models: Iterable[str], base: str | None = "base", **parameters: Any) -> Recipe:
    return Recipe.parse(recipe_text(method, models, base, **{"weight": 0.5, **parameters}))


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Repository:
    """A base, three experts, one merge of two of them and one of all."""
    base = random_model(1)
    repository.ingest(write_model(tmp_path / "base", base), "base")
    for seed, name in enumerate("xyz", start=2):
        repository.ingest(write_model(tmp_path / name, fine_tuned(base, seed)), name, base="base")
    repository.merge(recipe("ties", "xy", density=0.5), "xy")
    repository.merge(recipe("task_arithmetic", "xyz"), "xyz")
    return repository


def records(repository: Repository) -> dict[bytes, Record]:
    """Return every block's record, from the packs alone."""
    return {r.block: r for path in (repository.path / "packs").rglob("*.pack") for r in read_records(path)}


def needed(repository: Repository, manifests: Iterable[str]) -> set[bytes]:
    """Return the blocks that some models need, from their manifests and the packs' records."""
    where = records(repository)
    wanted = {block for identity in manifests for block in repository.manifest(identity).block_ids()}
    while more := {where[block].base for block in wanted} - {NO_BASE} - wanted:
        wanted |= more
    return wanted


def test_exactly_what_nothing_else_needs_is_freed(models: Repository) -> None:
    kept = {name: served(models, name) for name in ("base", "x", "z", "xyz")}
    before = records(models)
    gone = models.remove(["y", "xy"])
    expected = needed(models, models.refs().values())
    dead = set(before) - expected
    assert dead
    on_disk = sum(size for prefix in ("packs", "manifests", "plans") for _, size in models.backend.list(prefix))
    planned = models.gc(dry_run=True)
    report = models.gc(rewrite_above=0)
    assert report.blocks_freed == planned.blocks_freed == len(dead)
    assert report.manifests_freed == 2
    assert set(records(models)) == expected
    assert report.live_bytes == sum(before[block].length for block in expected)
    after = sum(size for prefix in ("packs", "manifests", "plans") for _, size in models.backend.list(prefix))
    assert on_disk - after <= report.freed_bytes <= on_disk - after + 1000
    assert models.stats().stored_bytes == after
    assert {name: served(models, name) for name in models.refs()} == kept
    assert models.fsck(read_data=True).ok
    for identity in gone.values():
        with pytest.raises(NotFoundError):
            models.resolve(identity)
    again = models.gc()
    assert (again.freed_bytes, again.blocks_freed, again.packs_rewritten) == (0, 0, 0)


def test_kept_deltas_keep_what_they_are_encoded_against(models: Repository) -> None:
    kept = {name: served(models, name) for name in ("x", "xyz")}
    models.remove(["base", "y", "z", "xy"])
    models.gc(rewrite_above=0)
    assert {name: served(models, name) for name in models.refs()} == kept
    roots = {record.base for record in records(models).values()} - {NO_BASE}
    assert roots
    assert roots <= set(records(models))
    assert models.fsck(read_data=True).ok


def test_everything_goes(models: Repository) -> None:
    models.remove(models.refs())
    report = models.gc()
    assert report.live_bytes == 0
    assert models.stats().blocks == models.stats().packs == models.stats().manifests == 0
    assert set(contents(models.path)) == {"mergefs.json", "mergefs.copy.json"}
    with models.catalog.read() as txn:
        for table in ("blocks", "packs", "manifests", "statistics", "thresholds", "checksums", "claims", "leases"):
            assert txn.count(table) == 0, table


def test_a_dry_run_changes_nothing(models: Repository) -> None:
    models.remove(["y", "xy"])
    (models.path / "packs" / "ab").mkdir(exist_ok=True)
    (models.path / "packs" / "ab" / ("ab" * 32 + ".pack")).write_bytes(b"an orphan")
    before, stats = contents(models.path), models.stats()
    dry = models.gc(dry_run=True)
    assert dry.dry_run
    assert dry.freed_bytes > 0
    assert contents(models.path) == before
    assert models.stats() == stats
    wet = models.gc()
    assert (wet.freed_bytes, wet.blocks_freed, wet.live_bytes, wet.packs_removed, wet.packs_rewritten) == (
        dry.freed_bytes,
        dry.blocks_freed,
        dry.live_bytes,
        dry.packs_removed,
        dry.packs_rewritten,
    )


def test_mostly_dead_packs_are_rewritten(repository: Repository, tmp_path: Path) -> None:
    """One pack of ten blocks; another model keeps some of them alive."""
    random = np.random.default_rng(0)
    blocks = {f"t{i}": array(random.normal(size=2048), "BF16") for i in range(10)}
    repository.ingest(write_model(tmp_path / "all", blocks), "all")
    for count, rewritten in ((6, 0), (2, 1)):
        few = {name: blocks[name] for name in list(blocks)[:count]}
        repository.ingest(write_model(tmp_path / str(count), few), str(count) + "-of-them")
        repository.remove([name for name in repository.refs() if not name.startswith(str(count))])
        before = {path.name for path in (repository.path / "packs").rglob("*.pack")}
        report = repository.gc()
        assert report.packs_rewritten == rewritten
        assert (report.waste_bytes > 0) is (rewritten == 0)
        assert served(repository, f"{count}-of-them") == tree(tmp_path / str(count))
        assert repository.fsck(read_data=True).ok
        if rewritten:
            after = {path.name for path in (repository.path / "packs").rglob("*.pack")}
            assert len(after - before) == 1
            assert set(records(repository)) == needed(repository, repository.refs().values())


def test_a_lazy_merge_keeps_what_it_is_derived_from(models: Repository) -> None:
    models.merge(recipe("ties", "xz", density=0.4), "lazy", lazy=True)
    models.merge(recipe("ties", "xz", density=0.4), "eager")
    expected = served(models, "eager")
    models.remove([name for name in models.refs() if name != "lazy"])
    models.gc(rewrite_above=0)
    assert served(models, "lazy") == expected
    models.materialize("lazy")
    report = models.gc(rewrite_above=0)
    assert report.manifests_freed >= 4
    assert served(models, "lazy") == expected
    assert models.fsck(read_data=True).ok


def test_a_plan_lasts_until_the_next_collection(models: Repository) -> None:
    planned = models.plan(recipe("ties", "yz", density=0.3))
    path = next((models.path / "plans").rglob(f"{planned.plan.id}.json"))
    models.gc()
    assert not path.exists()
    assert len(list((models.path / "plans").rglob("*.json"))) == 2  # of the two merges


# ------------------------------------------------------------------------------------------------------- leases

HOLDER = """
import sys
from mergefs.repository import Repository
from builders import served, sha256
repository = Repository.open(sys.argv[1])
view = repository.view(sys.argv[2], cache_bytes=0)
print("ready", flush=True)
for line in sys.stdin:
    print(" ".join(f"{sha256(view.read(path))}" for path in sorted(view.files)), flush=True)
"""


def _holder(repository: Repository, name: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(repository.path), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _asks(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().split()


def _alive(repository: Repository) -> int:
    with repository.catalog.read() as txn:
        return sum(lease.alive for lease in leases(txn))


def test_a_live_process_keeps_what_it_reads_and_a_dead_one_does_not(models: Repository) -> None:
    expected = [digest for _, digest in sorted(served(models, "xy").items())]
    process = _holder(models, "xy")
    try:
        models.remove(["xy", "x", "y"])
        report = models.gc(rewrite_above=0)
        assert report.leases_ended == 0
        assert report.manifests_freed == 2  # x and y: an eager merge does not need them
        assert _asks(process) == expected
        assert models.fsck(read_data=True).ok
    finally:
        os.kill(process.pid, signal.SIGKILL)
    # A zombie's lease has ended too: gc need not wait for its parent. The kernel lets go of its lock a little
    # after the signal, when the last of its threads is gone.
    deadline = time.monotonic() + 10
    while _alive(models):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report = models.gc(rewrite_above=0)
    process.communicate()
    assert report.leases_ended == 1
    assert report.manifests_freed == 1
    assert report.blocks_freed > 0
    assert set(records(models)) == needed(models, models.refs().values())


def test_a_view_in_this_process_is_protected_until_it_is_closed(models: Repository) -> None:
    expected = served(models, "z")
    with models.view("z", cache_bytes=0) as view:
        models.remove(["z", "xyz"])
        models.gc(rewrite_above=0)
        assert {path: len(view.read(path)) for path in view.files}
        assert served(models, view.manifest_id) == expected
    assert models.gc(rewrite_above=0).manifests_freed == 1


def test_a_reader_finds_blocks_that_moved(models: Repository) -> None:
    """A view that is open while packs are rewritten looks its blocks up again."""
    with models.view("x", cache_bytes=0) as view:
        first = view.read("model.safetensors", 0, 5000)
        models.remove(["y", "z", "xy", "xyz"])
        assert models.gc(rewrite_above=0).packs_removed > 0
        assert view.read("model.safetensors", 0, 5000) == first


def test_claims_protect_what_no_manifest_names_yet(models: Repository) -> None:
    wanted = list(needed(models, [models.resolve("y")]))
    with models.lease("test") as lease:
        assert models.catalog.write(lambda txn: lease.claim(txn, [*wanted, bytes(32)])) == [bytes(32)]
        models.remove(models.refs())
        models.gc(rewrite_above=0)
        assert set(records(models)) >= set(wanted)
    models.gc(rewrite_above=0)
    assert not records(models)


def test_leases_end_with_their_work(models: Repository) -> None:
    with models.catalog.read() as txn:
        assert list(leases(txn)) == []
        assert txn.count("claims") == 0


def test_ingest_and_merge_while_another_process_collects(models: Repository, tmp_path: Path) -> None:
    """What gc takes for dead, an ingest may be about to use again: it then stores it anew."""
    code = (
        "import sys; from mergefs.repository import Repository; repository = Repository.open(sys.argv[1], sync=False)\n"
        "print('ready', flush=True)\n"
        "while True: repository.gc(rewrite_above=0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(models.path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for turn in range(15):
            models.remove(["x", "z"])
            models.ingest(tmp_path / "x", "x", base="base")
            models.ingest(tmp_path / "z", "z", base="base")
            models.merge(recipe("ties", "xz", density=0.3 + turn / 100), "again", lazy=turn % 2 == 1)
            assert served(models, "x") == tree(tmp_path / "x")
            assert served(models, "again")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert models.fsck(read_data=True).ok
    models.gc(rewrite_above=0)
    assert set(records(models)) >= needed(models, models.refs().values())


# ----------------------------------------------------------------------------------------------- any order of all


class AnyOrder(RuleBasedStateMachine):
    """Ingest, merge, tag, remove and collect in any order, against a dict of what each ref has to serve."""

    refs = Bundle("refs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.repository = new_repository(self.folder / "repository")
        self.expected: dict[str, dict[str, str]] = {}
        self.lazy: set[str] = set()
        self.count = 0

    def teardown(self) -> None:
        self.repository.close()
        shutil.rmtree(self.folder)

    def _name(self) -> str:
        self.count += 1
        return f"m{self.count}"

    def _model(self, seed: int) -> Path:
        random = np.random.default_rng(7)
        base = {"a": array(random.normal(size=5000), "BF16"), "b": array(random.normal(size=(3, 10)), "F32")}
        model = fine_tuned(base, seed, only=("", "a", "b")[seed % 3]) if seed else base
        return write_model(self.folder / f"seed-{seed}", model, {"config.json": b"{}"})

    @initialize(target=refs)
    def first(self) -> str:
        self.repository.ingest(self._model(0), "base")
        self.expected["base"] = tree(self.folder / "seed-0")
        return "base"

    @rule(target=refs, seed=st.integers(0, 5), base=refs)
    def ingest(self, seed: int, base: str) -> str:
        name = self._name()
        known = base in self.expected and base not in self.lazy
        folder = self._model(seed)
        self.repository.ingest(folder, name, base=base if known else None)
        self.expected[name] = tree(folder)
        return name

    @rule(
        target=refs,
        base=refs,
        first=refs,
        second=refs,
        lazy=st.booleans(),
        method=st.sampled_from(["linear", "ties", "dare_ties"]),
        density=st.sampled_from([0.3, 0.5]),
        budget=st.sampled_from([None, "40%", "100%"]),
    )
    def merge(self, base: str, first: str, second: str, lazy: bool, method: str, density: float, budget: Any) -> Any:
        if not {base, first, second} <= self.expected.keys() - self.lazy:
            return multiple()
        ids = [self.repository.resolve(name) for name in (base, first, second)]
        if ids[0] in ids[1:]:
            return multiple()
        name = self._name()
        given = {} if method == "linear" else {"density": density}
        try:
            made = recipe(method, [first, second], base, **given)
            report = self.repository.merge(made, name, lazy=lazy, budget=budget)
        except BudgetError:
            # Without statistics, or without a base, there is no choosing among blocks.
            return multiple()
        if report.budget_bytes is not None:
            assert report.read.expert <= report.budget_bytes
        self.expected[name] = served(self.repository, name)
        if self.repository.manifest(report.manifest).is_lazy:
            self.lazy.add(name)
        return name

    @rule(ref=refs)
    def materialize(self, ref: str) -> None:
        if ref in self.lazy:
            self.repository.materialize(ref)
            self.lazy.discard(ref)

    @rule(target=refs, ref=refs)
    def tag(self, ref: str) -> Any:
        if ref not in self.expected:
            return multiple()
        name = self._name()
        self.repository.tag(name, ref)
        self.expected[name] = self.expected[ref]
        if ref in self.lazy:
            self.lazy.add(name)
        return name

    @rule(ref=consumes(refs))
    def remove(self, ref: str) -> None:
        if ref in self.expected:
            self.repository.remove([ref])
            del self.expected[ref]
            self.lazy.discard(ref)

    @rule(rewrite_above=st.sampled_from([0.0, 0.5]))
    def collect(self, rewrite_above: float) -> None:
        dry = self.repository.gc(dry_run=True, rewrite_above=rewrite_above)
        report: GcReport = self.repository.gc(rewrite_above=rewrite_above)
        assert (dry.blocks_freed, dry.freed_bytes) == (report.blocks_freed, report.freed_bytes)
        live = set(self.repository.refs().values())
        for name in self.lazy:
            origin = self.repository.manifest(self.repository.resolve(name)).lineage
            live |= {origin.base, *origin.experts} - {None}
        assert set(self.repository.manifest_ids()) == live
        wanted = needed(self.repository, live)
        stored = set(records(self.repository))
        assert wanted <= stored
        if rewrite_above == 0:
            # Packs with less dead than a record's size are left alone.
            extra = sum(records(self.repository)[block].length for block in stored - wanted)
            assert extra <= 100 * self.repository.stats().packs

    @rule()
    def check(self) -> None:
        report = self.repository.fsck(read_data=True)
        assert report.ok, report.errors

    @invariant()
    def refs_serve_what_they_did(self) -> None:
        assert self.repository.refs().keys() == self.expected.keys()
        for name, files in self.expected.items():
            assert served(self.repository, name) == files


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=30, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
