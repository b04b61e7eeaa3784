"""From version 1 to 2: coarse tiers become streams of bits, refs get copies, the catalog its checks, statistics of
earlier forms go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import numpy as np

from mergefs.blocks import tiers
from mergefs.blocks.codecs import Encoding
from mergefs.blocks.pack import CHECK_BYTES, pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.blocks.tiers.layout import COARSE_TIERS
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import Location, get_tiers, locations, ref_entries
from mergefs.errors import CorruptionError, MergefsError
from mergefs.hashing import digest
from mergefs.migration.step import Done, Progress
from mergefs.migration.trits import HEAD, has_trits, rewritten
from mergefs.refs import REF_COPIES, decode_ref_copy, ref_copy_name
from mergefs.repack import refresh_statistics
from mergefs.rewriting import Rewrite, delete_objects, is_spent
from mergefs.statistics.tensor import TensorStatistics
from mergefs.store import Store


def from_1(store: Store, progress: Progress | None = None) -> Done:
    """Do what version 2 needs, but for the number."""
    copied = store.catalog.write(partial(_copy_refs, store))
    dropped = store.catalog.write(_drop_statistics)
    blocks, damaged = _rewrite_tiers(store, progress)
    if blocks:
        refresh_statistics(store)
    store.catalog.add_checks()
    return Done(blocks, dropped, copied, damaged)


def _copy_refs(store: Store, txn: Transaction) -> int:
    """Write the copies of refs that are missing; return how many."""
    (store.path / REF_COPIES).mkdir(mode=0o700, exist_ok=True)
    copied = 0
    for name, entry in list(ref_entries(txn)):
        try:
            known = decode_ref_copy(store.backend.get(ref_copy_name(name)))["manifest"]
        except (FileNotFoundError, CorruptionError):
            known = None
        if known != entry["manifest"]:
            store.copy_ref(txn, name)
            copied += 1
    return copied


def _drop_statistics(txn: Transaction) -> int:
    """Remove statistics of earlier forms; return how many there were."""
    old = [key for key, value in txn.items("statistics") if not _is_of_now(value)]
    for key in old:
        txn.delete("statistics", key)
    return len(old)


def _is_of_now(value: bytes) -> bool:
    """Tell whether statistics are in the form of now: under one magic, arrays have had other types and orders."""
    try:
        found = TensorStatistics.decode(value)
        if found is None:
            return False
        known = found.distribution
    except CorruptionError:
        return False
    ascending = bool((np.diff(known.bins.astype(np.int64)) > 0).all())
    counted = int(known.counts.sum(dtype=np.uint64)) <= found.elements
    return ascending and counted and bool((known.inexact <= known.counts).all())


def _rewrite_tiers(store: Store, progress: Progress | None) -> tuple[int, tuple[str, ...]]:
    """Write coarse tiers of trits anew; return how many blocks, and those that are damaged."""
    with store.catalog.read() as txn:
        found = [
            location
            for location in locations(txn)
            if location.record.encoding == Encoding.TIERS and location.record.tier == 1
        ]
    wanted = [location.record.block for location in found if _has_trits(store, location)]
    damaged = []
    moved = 0
    reader = BlockReader(store.catalog, store.backend)
    with Rewrite(store, f"{os.getpid()}-migrate") as rewrite:
        waiting: list[bytes] = []
        for count, block in enumerate(wanted, start=1):
            try:
                payloads = _rewritten(store, reader, block)
            except (MergefsError, OSError):
                damaged.append(block.hex())
                continue
            for location, payload in payloads:
                rewrite.append(location.record, payload)
            waiting.append(block)
            if rewrite.full or count == len(wanted):
                moved += _switch(store, rewrite, waiting)
                waiting = []
            if progress:
                progress(count, len(wanted))
        if waiting:
            moved += _switch(store, rewrite, waiting)
    return moved, tuple(damaged)


def _has_trits(store: Store, location: Location) -> bool:
    record = location.record
    try:
        head = store.backend.get(pack_name(location.pack), record.offset, min(record.length, HEAD))
    except OSError:
        return False  # fsck says so
    return has_trits(memoryview(head), record.tier)


def _rewritten(store: Store, reader: BlockReader, block: bytes) -> list[tuple[Location, bytes]]:
    """Return a block's coarse tiers in the form of now, each with the place of the one that it is made from.

    Raises:
        CorruptionError: when what is stored, or what it was made into, is not the block.
        OSError: when a pack cannot be read.
    """
    found = store.catalog.tiers(block)
    old = list(_payloads(store, found))
    try:
        new = [rewritten(payload, tier) for tier, payload in enumerate(old[:COARSE_TIERS])]
    except (ValueError, RuntimeError) as error:
        raise CorruptionError(f"block {block.hex()} is damaged: {error}") from error
    base = reader.read(found[0].record.base, Kind.BASE)
    if digest(tiers.decode([*new, *old[COARSE_TIERS:]], base)) != block:
        raise CorruptionError(f"block {block.hex()} is damaged: its bytes have another hash")
    return list(zip(found, new, strict=False))


def _payloads(store: Store, found: tuple[Location, ...]) -> Iterator[bytes]:
    for location in found:
        record = location.record
        payload = store.backend.get(pack_name(location.pack), record.offset, record.length)
        if digest(payload)[:CHECK_BYTES] != record.check:
            raise CorruptionError(f"block {record.block.hex()} is damaged: a payload has another hash")
        yield payload


def _switch(store: Store, rewrite: Rewrite, blocks: list[bytes]) -> int:
    """Make new payloads durable, then switch to them, then remove the packs that nothing lies in any more."""
    rewrite.finish()

    def enter(txn: Transaction) -> set[bytes]:
        left = {location.pack for block in blocks for location in get_tiers(txn, block)[:COARSE_TIERS]}
        rewrite.enter(txn)
        spent = {pack for pack in left if is_spent(store, txn, pack)}
        for pack in spent:
            txn.delete("packs", pack)
        return spent

    spent = store.catalog.write(enter)
    store.catalog.write(lambda txn: delete_objects(store, txn, map(pack_name, spent)))
    return len(blocks)
