"""A stranger's plans, manifests and packs that do not fit each other: refused where they come in, or when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import merged_models, new_repository
from hostile_archive import Archived

from mergefs.errors import CorruptionError, MergefsError
from mergefs.manifest import Manifest, Tensor
from mergefs.merge.lazy import load_plan
from mergefs.planner.plan import Plan, TensorPlan
from mergefs.rebuild import rebuild
from mergefs.repository import Repository


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archived]:
    """An archive with a base, two experts and a lazy merge of them."""
    folder = tmp_path_factory.mktemp("strangers")
    repository = merged_models(folder)
    for name in ("base", "x", "y", "later"):
        repository.push(name, f"file://{folder}/archive")
    yield Archived(repository, folder / "archive")
    repository.close()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "mine") as made:
        yield made


def first(plan: Plan, change: Callable[[TensorPlan], TensorPlan]) -> Plan:
    """Return a plan with its first tensor changed."""
    return replace(plan, tensors=(change(plan.tensors[0]), *plan.tensors[1:]))


PLANS: dict[str, Callable[[Plan], Plan]] = {
    "a tensor that there is not": lambda p: first(p, lambda t: replace(t, name="nobody")),
    "a tensor of integers": lambda p: first(p, lambda t: replace(t, name="positions", depths=("9", "9"))),
    "too many blocks": lambda p: first(p, lambda t: replace(t, depths=tuple(d + "9" for d in t.depths))),
    "too few blocks": lambda p: first(p, lambda t: replace(t, depths=tuple(d[:-1] for d in t.depths))),
    "a depth beyond the tiers": lambda p: first(p, lambda t: replace(t, depths=tuple("4" * len(d) for d in t.depths))),
    "numbers that there are not": lambda p: first(p, lambda t: replace(t, numbers=7)),
    "no numbers": lambda p: replace(p, numbers=()),
    "a parameter less": lambda p: replace(p, numbers=tuple(replace(n, shared={}) for n in p.numbers)),
    "an unknown method": lambda p: replace(p, method="alchemy"),
    "an expert less": lambda p: replace(p, experts=p.experts[:1]),
    "an unknown dtype": lambda p: replace(p, dtype="F4"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(archive: Archived, mine: Repository, name: str) -> None:
    manifest = archive.manifest("later")
    assert manifest.lineage.plan is not None
    plan = PLANS[name](load_plan(archive.repository, manifest.lineage.plan))
    hostile = replace(manifest, lineage=replace(manifest.lineage, plan=plan.id, experts=plan.experts))
    with archive.offering(hostile, plan) as url, pytest.raises(MergefsError):
        _pull_and_read(mine, hostile, url)


def _pull_and_read(mine: Repository, manifest: Manifest, url: str) -> None:
    mine.pull(manifest.id, url, as_="hostile")
    with mine.view("hostile") as view:
        for path in view.files:
            view.read(path)


def test_models_that_do_not_fit_their_plan(archive: Archived, mine: Repository) -> None:
    """The expert's tensor has another shape than the base's: nothing is computed from it."""
    manifest = archive.manifest("later")
    plan = load_plan(archive.repository, manifest.lineage.plan or "")
    expert = archive.manifest("x")
    tensors = tuple(replace(t, shape=(t.elements,)) if t.name == "layers.0.norm" else t for t in expert.tensors)
    turned = tuple(replace(t, shape=t.shape[::-1]) if t.name == "layers.0.attn.weight" else t for t in expert.tensors)
    for changed, fits in ((tensors, True), (turned, True), (expert.tensors[:-1], False)):
        other = replace(expert, tensors=changed)
        if not fits:
            with pytest.raises(CorruptionError), archive.offering(other) as url:
                mine.pull(other.id, url, as_="other")
            continue
        bent = replace(plan, experts=(other.id, plan.experts[1]))
        hostile = replace(manifest, lineage=replace(manifest.lineage, plan=bent.id, experts=bent.experts))
        with archive.offering(hostile, bent, other) as url:
            mine.pull(hostile.id, url, as_="hostile")
        with mine.view("hostile") as view:
            for path in view.files:
                assert len(view.read(path)) == view.files[path].size


MANIFESTS: dict[str, Callable[[Manifest], Manifest]] = {
    "blocks of a tensor of another dtype": lambda m: _with(
        m, "layers.0.norm", lambda t: replace(t, blocks=_of(m, "scale"))
    ),
    "a block that is longer": lambda m: _with(m, "scale", lambda t: replace(t, blocks=_of(m, "layers.0.norm"))),
    "blocks of another size": lambda m: replace(m, block_elements=m.block_elements * 4),
}


def _of(manifest: Manifest, name: str) -> tuple[str | None, ...]:
    return manifest.tensor_by_name[name].blocks


def _with(manifest: Manifest, name: str, change: Callable[[Tensor], Tensor]) -> Manifest:
    return replace(manifest, tensors=tuple(change(t) if t.name == name else t for t in manifest.tensors))


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(archive: Archived, mine: Repository, name: str) -> None:
    hostile = MANIFESTS[name](archive.manifest("base"))
    with archive.offering(hostile) as url, pytest.raises(CorruptionError):
        mine.pull(hostile.id, url, as_="hostile")
    assert mine.refs() == {}


RECORDS = {
    "a block of 4 GB": {"raw_length": (1 << 32) - 1},
    "a block of 1 GB": {"raw_length": 1 << 30},
    "half an element": {"raw_length": 127},
    "an unknown encoding": {"encoding": 99},
    "an unknown dtype": {"dtype": 0},
    "a tier of none": {"tier": 0, "tiers": 0},
    "a tier beyond the last": {"tier": 3, "tiers": 2},
    "many tiers": {"tier": 0, "tiers": 255},
    "a base for what needs none": {"base": b"\1" * 32, "encoding": 1},
    "no base for what needs one": {"base": bytes(32), "encoding": 3},
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(archive: Archived, mine: Repository, tmp_path: Path, name: str) -> None:
    with archive.with_records(RECORDS[name]) as url, pytest.raises(CorruptionError):
        mine.pull("base", url)
    assert mine.refs() == {}


def test_a_rebuilt_catalog_has_no_such_record(archive: Archived, tmp_path: Path) -> None:
    with archive.with_records({"raw_length": (1 << 30)}) as url:
        folder = tmp_path / "theirs"
        with new_repository(folder):
            pass
        archive.put_packs(folder)
    assert url
    report = rebuild(folder, sync=False)
    assert report.blocks == 0
    assert any("there cannot be" in line for line in report.lost)
