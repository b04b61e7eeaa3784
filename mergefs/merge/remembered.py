"""Derived blocks are remembered by what they were derived from.

The key of a block is the hash of everything that its bytes are a function of; the catalog has the ids of blocks by such
keys. A later merge of which a block depends on the same things takes it as it is stored. See spec/catalog.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergefs import canonical
from mergefs.canonical import Json
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import get_location, get_tiers
from mergefs.hashing import digest
from mergefs.manifest import Manifest, Tensor
from mergefs.merge import registry
from mergefs.merge.derive import output_dtype, stored_block
from mergefs.planner.plan import EXACT, Plan, TensorPlan
from mergefs.store import Store

VERSION = 1
"""Of keys: raised when `derive` gives other bytes for the same plan, so that older blocks are not taken."""

TABLE = "derivations"


@dataclass(frozen=True)
class Forecast:
    """What a plan's blocks will be.

    Attributes:
        shared: the base's or an expert's.
        remembered: derived by an earlier merge.
        derived: still to be derived.
    """

    shared: int
    remembered: int
    derived: int


class Derivations:
    """The keys of a plan's blocks.

    Args:
        plan: what is to be merged.
        base: the base's manifest.
        experts: the experts' manifests, in the plan's order.
    """

    def __init__(self, plan: Plan, base: Manifest, experts: tuple[Manifest, ...]) -> None:
        self._plan = plan
        self._base = base
        self._experts = experts
        self._method = registry.method(plan.method)

    def key(self, txn: Transaction, tensor: Tensor, number: int) -> bytes:
        """Return the key (32 bytes) of a block that has to be computed.

        Args:
            txn: sees the experts' blocks.
            tensor: the base's tensor.
            number: of the block.
        """
        plan = self._plan
        planned = plan.tensor_by_name.get(tensor.name) or TensorPlan(tensor.name, ())
        experts = planned.planned(number)
        value: dict[str, Json] = {
            "version": VERSION,
            "method": plan.method,
            "method version": self._method.version,
            "dtype": output_dtype(plan, tensor).name,
            "base": [tensor.blocks[number], tensor.dtype.name],
            "experts": [self._read(txn, tensor, planned, expert, number) for expert in experts],
            "numbers": self._method.depends_on(plan.numbers_of(planned), planned, experts) if planned.depths else [],
        }
        if self._method.placed:
            first, _ = tensor.grid(self._base.block_elements).extent(number)
            value["place"] = [tensor.name, list(tensor.shape), first]
            value["seed"] = plan.seed
            value["models"] = list(plan.experts)
        return digest(canonical.encode(value))

    def find(self, txn: Transaction, key: bytes) -> str | None:
        """Return the id of the block with this key, where it is remembered and still stored."""
        block = txn.get(TABLE, key)
        return None if block is None or get_location(txn, block) is None else block.hex()

    def _read(self, txn: Transaction, tensor: Tensor, planned: TensorPlan, expert: int, number: int) -> Json:
        """Return what says all about an expert's delta."""
        twin = self._experts[expert].tensor_by_name[tensor.name]
        block = twin.blocks[number]
        depth = planned.depth(expert, number)
        if depth == EXACT:
            return [block, twin.dtype.name]
        # What some of the tiers give depends on how the block was encoded, and against what.
        tiers = get_tiers(txn, bytes.fromhex(block or ""))[:depth]
        return [block, twin.dtype.name, *(f"{t.record.base.hex()} {t.record.check.hex()}" for t in tiers)]


def forecast(store: Store, plan: Plan, base: Manifest, experts: tuple[Manifest, ...]) -> Forecast:
    """Return what a run of the plan would do now, from the catalog alone."""
    derivations = Derivations(plan, base, experts)
    shared = remembered = derived = 0
    with store.catalog.read() as txn:
        for tensor in base.tensors:
            for number in range(len(tensor.blocks)):
                if stored_block(plan, experts, tensor, number) is not None:
                    shared += 1
                elif derivations.find(txn, derivations.key(txn, tensor, number)) is not None:
                    remembered += 1
                else:
                    derived += 1
    return Forecast(shared, remembered, derived)


def forget_dead(txn: Transaction, live: set[bytes]) -> int:
    """Remove what is remembered of blocks that are not live; return how many there were."""
    dead = [key for key, block in txn.items(TABLE) if block not in live]
    for key in dead:
        txn.delete(TABLE, key)
    return len(dead)
