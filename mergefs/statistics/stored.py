"""How many bytes reading an expert's blocks takes, tier by tier: the part of the statistics about the store."""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from mergefs.blocks.encoding import EXACT
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import Location, get_location, get_tiers, read_tiers
from mergefs.manifest import Difference, LowRank, Manifest, Tensor
from mergefs.statistics.tensor import TensorStatistics, statistics_key


def with_stored_bytes(txn: Transaction, statistics: TensorStatistics, tensor: Tensor, twin: Tensor) -> TensorStatistics:
    """Return the statistics with the bytes that the catalog says.

    Args:
        txn: a transaction that sees the blocks of both.
        statistics: of the expert's tensor against the base's.
        tensor, twin: the expert's and the base's.
    """
    found = ((number, block_bytes(txn, tensor, twin, number)) for number in range(len(tensor.blocks)))
    return statistics.with_bytes({number: sizes for number, sizes in found if sizes is not None})


def block_bytes(txn: Transaction, tensor: Tensor, twin: Tensor, number: int) -> tuple[int, ...] | None:
    """Return what reading each tier of an expert's block takes; None where it is the base's.

    What is added to a tensor makes it one tier. An adapter's factors are not in it: they are read for the tensor, not
    for a block (see `factor_bytes`). Such a block counts at least one byte, as that tells it from one that is the
    base's.

    Args:
        txn: a transaction that sees the blocks of both.
        tensor, twin: the expert's and the base's.
        number: of the block.
    """
    block, below = tensor.blocks[number], twin.blocks[number]
    if block is None or below is None:
        return None
    same = block == below and tensor.dtype is twin.dtype
    own = () if same else tier_bytes(txn, get_tiers(txn, bytes.fromhex(block)), bytes.fromhex(below))
    match tensor.added:
        case None:
            return None if same else own
        case LowRank():
            return (max(1, sum(own)),)
        case Difference(difference):
            tiers = get_tiers(txn, bytes.fromhex(difference.blocks[number] or ""))
            added = tier_bytes(txn, tiers, bytes.fromhex(below))
            return (max(1, sum(own) + sum(added)),)


def factor_bytes(txn: Transaction, experts: Iterable[tuple[Manifest, Container[str]]]) -> int:
    """Return what reading all factors of adapters takes; see `factor_tiers`."""
    return sum(sum(tier_bytes(txn, tiers, b"")) for tiers in factor_tiers(txn, experts))


def factor_tiers(txn: Transaction, experts: Iterable[tuple[Manifest, Container[str]]]) -> list[tuple[Location, ...]]:
    """Return where the blocks of all factors of adapters lie, each as often as it is read once.

    Args:
        txn: sees their blocks.
        experts: each with the names of the tensors that are read of it.
    """
    found: dict[object, LowRank] = {}
    for expert, names in experts:
        for tensor in expert.tensors:
            if isinstance(tensor.added, LowRank) and tensor.name in names:
                found[tensor.added.key] = tensor.added
    return [
        get_tiers(txn, bytes.fromhex(block or ""))
        for added in found.values()
        for part in added.tensors
        for block in part.blocks
    ]


def refresh_stored_bytes(txn: Transaction, expert: Manifest, base: Manifest) -> None:
    """Put what the catalog says of the bytes of an expert's blocks into its statistics against a base."""
    for tensor in expert.tensors:
        key = statistics_key(expert.id, base.id, tensor.name)
        value = txn.get("statistics", key)
        found = None if value is None else TensorStatistics.decode(value)
        if found is not None:
            fresh = with_stored_bytes(txn, found, tensor, base.tensor_by_name[tensor.name])
            if not np.array_equal(fresh.blocks["bytes"], found.blocks["bytes"]):
                txn.put("statistics", key, fresh.encode())


def tier_bytes(txn: Transaction, tiers: tuple[Location, ...], below: bytes) -> tuple[int, ...]:
    """Return what reading each tier of an expert's block adds to reading those before, when the base's block `below`
    has been read.

    Where the block is encoded against a block that is not read for the base's sake, that one comes with its first tier.

    Args:
        txn: sees the blocks.
        tiers: where those of the block lie; none for one that is missing, which who reads it will say.
        below: the id of the base's block (32 bytes).
    """
    if not tiers:
        return ()
    lengths = [location.record.length for location in tiers]
    if len(read_tiers(tiers, EXACT)) < len(tiers):
        lengths[-1] -= sum(lengths[:-1])  # it is read in their place
    root = get_location(txn, tiers[0].record.base)
    if root is not None and root.record.block != below:
        own = get_location(txn, below)
        if own is None or own.record.base != root.record.block:
            lengths[0] += root.record.length
    return tuple(lengths)
