"""How many bytes reading an expert's blocks takes, tier by tier: the part of the statistics about the store."""

from __future__ import annotations

import numpy as np

from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import Location, get_location, get_tiers
from mergefs.manifest import Manifest, Tensor
from mergefs.statistics.tensor import TensorStatistics, statistics_key


def with_stored_bytes(txn: Transaction, statistics: TensorStatistics, tensor: Tensor, twin: Tensor) -> TensorStatistics:
    """Return the statistics with the bytes that the catalog says.

    Args:
        txn: a transaction that sees the blocks of both.
        statistics: of the expert's tensor against the base's.
        tensor, twin: the expert's and the base's.
    """
    found = {}
    for number, (block, below) in enumerate(zip(tensor.blocks, twin.blocks, strict=True)):
        if block is not None and below is not None and (block != below or tensor.dtype is not twin.dtype):
            found[number] = tier_bytes(txn, get_tiers(txn, bytes.fromhex(block)), bytes.fromhex(below))
    return statistics.with_bytes(found)


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
    """Return what reading each tier of an expert's block takes, when the base's block `below` has been read.

    Where the block is encoded against a block that is not read for the base's sake, that one comes with its first tier.

    Args:
        txn: sees the blocks.
        tiers: where those of the block lie; none for one that is missing, which who reads it will say.
        below: the id of the base's block (32 bytes).
    """
    if not tiers:
        return ()
    lengths = [location.record.length for location in tiers]
    root = get_location(txn, tiers[0].record.base)
    if root is not None and root.record.block != below:
        own = get_location(txn, below)
        if own is None or own.record.base != root.record.block:
            lengths[0] += root.record.length
    return tuple(lengths)
