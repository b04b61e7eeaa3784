"""Deriving the blocks of a lazy manifest when somebody reads them."""

from __future__ import annotations

from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.errors import UserError
from mergefs.hashing import Buffer
from mergefs.manifest import Manifest
from mergefs.planner import plan as plans
from mergefs.planner.plan import Plan
from mergefs.store import Store, plan_name


class Deriver:
    """Derives blocks of one merged manifest. Safe to use from many threads.

    The models that its plan needs are protected by gc through the manifest itself.

    Args:
        store: the repository.
        manifest: the lazy manifest.
        counter: where the bytes are counted.

    Raises:
        CorruptionError: when the plan or one of its models is missing or damaged.
    """

    def __init__(self, store: Store, manifest: Manifest, counter: ReadCounter) -> None:
        from mergefs.merge.sources import Sources

        assert manifest.lineage.plan is not None
        plan = load_plan(store, manifest.lineage.plan)
        counter.add(Kind.METADATA, len(plan.encoded))
        self._sources = Sources(
            plan,
            store.manifest(plan.base),
            tuple(store.manifest(expert) for expert in plan.experts),
            BlockReader(store.catalog, store.backend, counter),
        )

    def block(self, tensor: str, number: int) -> Buffer:
        """Return the bytes of a block of the merged tensor."""
        from mergefs.merge.derive import derive

        return derive(self._sources, self._sources.base.tensor_by_name[tensor], number)


def load_plan(store: Store, identity: str) -> Plan:
    """Return a stored plan.

    Raises:
        CorruptionError: when it is missing or damaged.
    """
    return plans.decode(store.read_object(plan_name(identity), identity, "plan"))


def merge_plan(manifest: Manifest, name: str, refusal: str) -> str:
    """Return the id of the plan that a merge came from.

    Args:
        manifest: of the merge.
        name: how the user calls it.
        refusal: how the message ends where it is no merge.

    Raises:
        UserError: when it is no merge, or one that was edited since.
    """
    if manifest.lineage.kind == "edit":
        raise UserError(f"'{name}' was edited, and is not what a merge made: {refusal}")
    if manifest.lineage.plan is None:
        raise UserError(f"'{name}' is a checkpoint, not a merge: {refusal}")
    return manifest.lineage.plan
