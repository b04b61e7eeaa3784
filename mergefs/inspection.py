"""Looking at a repository: statistics, one model, its lineage, and what differs between two models."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mergefs.catalog.tables import locations
from mergefs.errors import MergefsError
from mergefs.manifest import TensorData
from mergefs.merge.lazy import load_plan
from mergefs.store import Store


@dataclass(frozen=True)
class StatsReport:
    """How much a repository holds.

    Attributes:
        raw_bytes: bytes of all models' files, each model counted once.
        stored_bytes: bytes of packs, manifests and plans on disk.
        refs, manifests, blocks, packs: how many there are.
    """

    raw_bytes: int
    stored_bytes: int
    refs: int
    manifests: int
    blocks: int
    packs: int


def stats(store: Store) -> StatsReport:
    """Return how much a repository holds."""
    with store.catalog.read() as txn:
        identities = [key.hex() for key, _ in txn.items("manifests")]
        counts = {table: txn.count(table) for table in ("refs", "packs")}
        blocks = len({location.record.block for location in locations(txn)})
    stored = sum(size for prefix in ("packs", "manifests", "plans") for _, size in store.backend.list(prefix))
    raw = sum(store.manifest(identity).raw_bytes for identity in identities)
    return StatsReport(raw, stored, counts["refs"], len(identities), blocks, counts["packs"])


def show(store: Store, name: str) -> dict[str, Any]:
    """Return a model's description: manifest, refs, files, tensors and lineage."""
    identity = store.resolve(name)
    manifest = store.manifest(identity)
    return {
        "manifest": identity,
        "refs": sorted(ref for ref, target in store.refs().items() if target == identity),
        "time": store.manifest_time(identity),
        "raw_bytes": manifest.raw_bytes,
        "lazy": manifest.is_lazy,
        "files": [
            {"path": f.path, "size": f.size, "sha256": f.sha256 or store.known_sha256(identity, f.path)}
            for f in manifest.files
        ],
        "tensors": [
            {"name": t.name, "dtype": t.dtype.name, "shape": list(t.shape), "blocks": len(t.blocks)}
            for t in manifest.tensors
        ],
        "lineage": lineage(store, identity),
    }


def lineage(store: Store, name: str) -> dict[str, Any]:
    """Return where a model came from: for a merge its plan, recipe, base, experts, budget and bytes read, the earlier
    result that it refines, and the later ones that refine it, oldest first."""
    identity = store.resolve(name)
    origin = store.manifest(identity).lineage
    entry = store.manifest_entry(identity)
    found: dict[str, Any] = {
        "manifest": identity,
        "kind": origin.kind,
        "time": entry.get("time"),
        "base": _named(store, origin.base or entry.get("base")),
    }
    if origin.parent is not None:
        found["parent"] = _named(store, origin.parent)
    if origin.sources:
        found["sources"] = [_named(store, source) for source in origin.sources]
    if origin.plan is None:
        return found
    found["plan"] = origin.plan
    # Who asks wants to hear of the models themselves, not of what they were fitted to.
    if origin.models:
        found["base"] = _named(store, origin.models[0])
    found["experts"] = [_named(store, expert) for expert in origin.models[1:] or origin.experts]
    figures = entry.get("merge", {})
    found["budget_bytes"] = figures.get("budget_bytes")
    found["expert_raw_bytes"] = figures.get("expert_raw_bytes")
    found["read"] = figures.get("read")
    found["refines"] = _named(store, figures.get("refines"))
    found["refined_as"] = [_named(store, later) for later in _refinements(store, identity)]
    try:
        plan = load_plan(store, origin.plan)
    except MergefsError as error:
        return {**found, "recipe": None, "missing": str(error)}
    return {**found, "method": plan.method, "seed": plan.seed, "recipe": plan.recipe}


def diff(store: Store, first: str, second: str) -> dict[str, Any]:
    """Return which files, tensors and blocks differ between two models."""
    a, b = (store.manifest(store.resolve(name)) for name in (first, second))
    tensors: list[dict[str, Any]] = []
    same = 0
    for name in sorted({*a.tensor_by_name, *b.tensor_by_name}):
        x, y = a.tensor_by_name.get(name), b.tensor_by_name.get(name)
        if x is None or y is None:
            tensors.append({"name": name, "only_in": second if x is None else first})
        elif x.shape != y.shape or x.dtype is not y.dtype:
            tensors.append(
                {
                    "name": name,
                    "shapes": [list(x.shape), list(y.shape)],
                    "dtypes": [x.dtype.name, y.dtype.name],
                }
            )
        else:
            differing = [i for i, (p, q) in enumerate(zip(x.blocks, y.blocks, strict=True)) if p != q or p is None]
            same += len(x.blocks) - len(differing)
            if differing:
                tensors.append({"name": name, "blocks": len(x.blocks), "differing_blocks": differing})
    files: list[dict[str, Any]] = []
    differing_names = {t["name"] for t in tensors}
    for path in sorted({*a.file_by_path, *b.file_by_path}):
        p, q = a.file_by_path.get(path), b.file_by_path.get(path)
        if p is None or q is None:
            files.append({"path": path, "only_in": second if p is None else first})
        elif p.segments != q.segments or any(
            isinstance(segment, TensorData) and segment.tensor in differing_names for segment in p.segments
        ):
            files.append({"path": path, "sizes": [p.size, q.size]})
    return {"first": a.id, "second": b.id, "files": files, "tensors": tensors, "equal_blocks": same}


def _refinements(store: Store, identity: str) -> list[str]:
    """Return the ids of the results that refine a merge, oldest first."""
    entries = ((store.manifest_entry(other), other) for other in store.manifest_ids())
    later = [(e.get("time", 0.0), other) for e, other in entries if e.get("merge", {}).get("refines") == identity]
    return [other for _, other in sorted(later)]


def _named(store: Store, identity: str | None) -> dict[str, Any] | None:
    if identity is None:
        return None
    names = sorted(name for name, target in store.refs().items() if target == identity)
    return {"manifest": identity, "refs": names}


def ago(seconds: float | None) -> str:
    """Return a moment as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "unknown"
