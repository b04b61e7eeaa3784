"""Deriving the blocks of a lazy manifest when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from mergefs.blocks.checking import EVERY
from mergefs.blocks.reader import BlockReader, Kind, ReadCounter
from mergefs.errors import CorruptionError, UserError
from mergefs.hashing import Buffer
from mergefs.manifest import Manifest
from mergefs.planner import plan as plans
from mergefs.planner.plan import Plan
from mergefs.store import Store, plan_name

if TYPE_CHECKING:
    from mergefs.merge.encoding import EncodedBlock
    from mergefs.merge.remembered import Derivations


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
        self.plan = plan.id
        self._store = store
        self._reader = BlockReader(store.catalog, store.backend, counter, check=EVERY[store.check_blocks])
        self._sources = Sources(
            plan,
            store.manifest(plan.base),
            tuple(store.manifest(expert) for expert in plan.experts),
            self._reader,
        )

        for tensor in manifest.tensors:
            below = self._sources.base.tensor_by_name.get(tensor.name)
            if None in tensor.blocks and (below is None or below.shape != tensor.shape):
                raise CorruptionError(f"tensor '{tensor.name}' of manifest {manifest.id} is not of its plan")

    def block(self, tensor: str, number: int) -> Buffer:
        """Return the bytes of a block of the merged tensor."""
        from mergefs.merge.derive import derive

        return derive(self._sources, self._sources.base.tensor_by_name[tensor], number)

    def remembered(self, tensor: str, number: int) -> Buffer | None:
        """Return the bytes of a block of the merged tensor where an earlier merge derived and stored it.

        Raises:
            CorruptionError: when it is damaged, or was collected just now.
        """
        with self._store.catalog.read() as txn:
            below = self._sources.base.tensor_by_name[tensor]
            block = self._derivations.find(txn, self._derivations.key(txn, below, number))
        return None if block is None else self._reader.read(bytes.fromhex(block), Kind.BASE)

    def encoded(self, tensor: str, number: int, known: Callable[[bytes], bool]) -> tuple[Buffer, bytes, EncodedBlock]:
        """Derive a block of the merged tensor and encode it for a pack.

        Args:
            tensor, number: which block.
            known: tells whether a block is stored.

        Returns:
            The block's bytes, the key under which it is remembered, and what is to be stored.
        """
        from mergefs.merge.derive import derive
        from mergefs.merge.encoding import encode_derived

        sources = self._sources
        below = sources.base.tensor_by_name[tensor]
        with self._store.catalog.read() as txn:
            key = self._derivations.key(txn, below, number)
        base = sources.base_block(below, number)
        raw = derive(sources, below, number, base)
        return raw, key, encode_derived(sources.plan, below, base, raw, known, self._store.exact)

    def expect(self, tensor: str, number: int) -> None:
        """Have what a block of the merged tensor is derived from brought from the disk meanwhile."""
        sources = self._sources
        below = sources.base.tensor_by_name[tensor]
        if (block := below.blocks[number]) is not None:
            self._reader.expect_whole(bytes.fromhex(block))
        planned = sources.plan.tensor_by_name.get(tensor)
        for expert in planned.planned(number) if planned else ():
            assert planned is not None
            twin = sources.experts[expert].tensor_by_name[tensor]
            if twin.added is None and (block := twin.blocks[number]) is not None:
                self._reader.expect_whole(bytes.fromhex(block), planned.depth(expert, number))

    @cached_property
    def _derivations(self) -> Derivations:
        from mergefs.merge.remembered import Derivations

        return Derivations(self._sources.plan, self._sources.base, self._sources.experts)


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
