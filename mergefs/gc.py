"""Collecting what nothing needs: mark from refs, sessions and live leases, sweep blocks, packs, manifests and plans."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mergefs.blocks.pack import Record, pack_name
from mergefs.catalog.environment import Transaction
from mergefs.catalog.facts import facts_of
from mergefs.catalog.leases import claims, end_dead, leases
from mergefs.catalog.tables import Location, closure, get_manifest, locations, ref_entries
from mergefs.edit.folders import remove_unfinished, sessions
from mergefs.errors import CorruptionError
from mergefs.hashing import is_hex_id
from mergefs.merge.remembered import forget_dead
from mergefs.rewriting import Rewrite, delete_objects
from mergefs.store import Store, manifest_name, plan_name

REWRITE_ABOVE = 0.5
"""A pack is rewritten when more than this share of its payload bytes is dead."""


@dataclass(frozen=True)
class GcReport:
    """What a collection did, or would do.

    Attributes:
        freed_bytes: by which packs, manifests and plans on disk became smaller.
        live_bytes: payload bytes of the blocks that are needed.
        waste_bytes: payload bytes of dead blocks in packs that were not worth rewriting yet.
        blocks_freed: blocks that nothing needs any more.
        manifests_freed: manifests that nothing names any more.
        packs_removed, packs_rewritten: packs without a needed block, and packs that were mostly dead.
        leases_ended: leases of processes that are gone.
        sessions: sessions, each of which keeps the model that it changes.
        dry_run: whether nothing was changed.
    """

    freed_bytes: int
    live_bytes: int
    waste_bytes: int
    blocks_freed: int
    manifests_freed: int
    packs_removed: int
    packs_rewritten: int
    leases_ended: int
    sessions: int
    dry_run: bool


def collect(store: Store, *, dry_run: bool = False, rewrite_above: float = REWRITE_ABOVE) -> GcReport:
    """Free what neither a ref, nor a session, nor a live lease needs.

    May run while others ingest, merge, read and mount: everything that decides runs in one catalog
    transaction, and readers that meet a pack that is gone look its blocks up again.

    Args:
        store: the repository.
        dry_run: only say what would be freed.
        rewrite_above: the dead share of a pack's payload from which it is rewritten; 0 rewrites every pack
            that holds a dead block.

    Raises:
        CorruptionError: when a manifest that is needed, or a session, cannot be read; nothing is freed then.
    """
    if dry_run:
        with store.catalog.read() as txn:
            return _Collection(store, txn, rewrite_above, dry_run=True).run()
    remove_unfinished(store)
    first = _pass(store, math.inf)
    if not first.waste_bytes:
        return first
    # Rewriting needs room, which the first pass may just have made.
    try:
        second = _pass(store, rewrite_above)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return first
    return replace(
        second,
        freed_bytes=first.freed_bytes + second.freed_bytes,
        blocks_freed=first.blocks_freed + second.blocks_freed,
        manifests_freed=first.manifests_freed + second.manifests_freed,
        packs_removed=first.packs_removed + second.packs_removed,
        leases_ended=first.leases_ended + second.leases_ended,
    )


def _pass(store: Store, rewrite_above: float) -> GcReport:
    """Collect once, rewriting the packs whose dead share is above a bound."""
    swept: list[_Collection] = []

    def sweep(txn: Transaction) -> GcReport:
        swept[:] = [_Collection(store, txn, rewrite_above, dry_run=False)]
        return swept[0].run()

    report = store.catalog.write(sweep)
    store.catalog.write(lambda txn: _delete(store, txn, swept[0]))
    return report


def _delete(store: Store, txn: Transaction, collection: _Collection) -> None:
    manifests = {key.hex() for key, _ in txn.items("manifests")}
    published = {manifest_name(identity) for identity in manifests}
    for identity in manifests - collection.live_manifests:
        plan = store.manifest(identity).lineage.plan
        if plan is not None:
            published.add(plan_name(plan))
    delete_objects(store, txn, collection.doomed, published)


class _Collection:
    def __init__(self, store: Store, txn: Transaction, rewrite_above: float, *, dry_run: bool) -> None:
        self._store = store
        self._txn = txn
        self._rewrite_above = rewrite_above
        self._dry_run = dry_run
        self.doomed: list[str] = []
        """Objects to delete after the commit."""
        self.live_manifests: set[str] = set()
        self.sessions = 0

    def run(self) -> GcReport:
        ended = sum(not lease.alive for lease in leases(self._txn))
        if not self._dry_run:
            end_dead(self._txn)
        manifests, plans = self._live_manifests()
        self.live_manifests = manifests
        blocks = self._live_blocks(manifests)
        live_bytes, dead, packs = self._split(blocks)
        removed, rewritten, waste, freed = self._sweep_packs(packs)
        if not self._dry_run:
            for location in dead:
                self._txn.delete("blocks", location.record.block + bytes([location.record.tier]))
            forget_dead(self._txn, blocks)
        gone = self._sweep_manifests(manifests)
        freed += self._sweep_objects(manifests, plans)
        return GcReport(
            freed,
            live_bytes,
            waste,
            len({location.record.block for location in dead}),
            gone,
            removed,
            rewritten,
            ended,
            self.sessions,
            self._dry_run,
        )

    def _live_manifests(self) -> tuple[set[str], set[str]]:
        """Return the ids of the manifests and plans that are needed."""
        pending = [entry["manifest"] for _, entry in ref_entries(self._txn)]
        pending += [m for lease in leases(self._txn) if lease.alive for m in lease.manifests]
        changed = [session.manifest for session in sessions(self._store)]
        self.sessions = len(changed)
        pending += changed
        live: set[str] = set()
        plans: set[str] = set()
        self._reach(pending, live, plans)
        # Fitted models last as long as those for whose sake they were made.
        entries = {key.hex(): get_manifest(self._txn, key.hex()) or {} for key, _ in self._txn.items("manifests")}
        kept = [m for m, entry in entries.items() if "kept_for" in entry and live.issuperset(entry["kept_for"])]
        self._reach(kept, live, plans)
        return live, plans

    def _reach(self, pending: list[str], live: set[str], plans: set[str]) -> None:
        """Add manifests and what they need to those that are live."""
        while pending:
            identity = pending.pop()
            if identity in live:
                continue
            live.add(identity)
            manifest = self._store.manifest(identity)
            if manifest.lineage.plan is not None:
                plans.add(manifest.lineage.plan)
            if manifest.is_lazy:
                # Its blocks are still to be derived, from these.
                pending += [
                    *([manifest.lineage.base] if manifest.lineage.base else []),
                    *manifest.lineage.experts,
                ]

    def _live_blocks(self, manifests: Iterable[str]) -> set[bytes]:
        wanted: set[bytes] = set()
        for identity in manifests:
            wanted.update(self._store.manifest(identity).block_ids())
        for lease in leases(self._txn):
            if lease.alive:
                wanted.update(claims(self._txn, lease.id))
        return closure(self._txn, wanted)

    def _split(self, live: set[bytes]) -> tuple[int, list[Location], dict[bytes, tuple[list[Record], int]]]:
        """Return live payload bytes, the dead locations, and for each pack its live records and dead bytes."""
        live_bytes = 0
        dead: list[Location] = []
        packs: dict[bytes, tuple[list[Record], int]] = {key: ([], 0) for key, _ in self._txn.items("packs")}
        for location in locations(self._txn):
            if location.record.block in live:
                live_bytes += location.record.length
                packs.setdefault(location.pack, ([], 0))[0].append(location.record)
            else:
                dead.append(location)
        return live_bytes, dead, packs

    def _sweep_packs(self, packs: dict[bytes, tuple[list[Record], int]]) -> tuple[int, int, int, int]:
        """Remove dead packs and rewrite mostly dead ones; return (removed, rewritten, waste, freed bytes)."""
        removed = waste = freed = 0
        rewrite: list[tuple[bytes, list[Record]]] = []
        for pack, (records, _) in packs.items():
            try:
                size = self._store.backend.size(pack_name(pack))
            except FileNotFoundError:
                size = 0
            live = sum(record.length for record in records)
            overhead = 8 + 56 + 100 * len(records)
            dead = max(0, size - live - overhead)
            if not records:
                removed += 1
                freed += size
                self._drop_pack(pack)
            elif dead > self._rewrite_above * (size - overhead) and dead > 100:
                rewrite.append((pack, records))
                freed += size - live - overhead
            else:
                waste += dead
        if rewrite and not self._dry_run:
            self._rewrite(rewrite)
        return removed, len(rewrite), waste, freed

    def _rewrite(self, packs: list[tuple[bytes, list[Record]]]) -> None:
        """Copy the live payloads of some packs into new ones, pack after pack in the order of their offsets."""
        with Rewrite(self._store, f"{os.getpid()}-gc") as rewrite:
            for pack, records in packs:
                for record in sorted(records, key=lambda r: r.offset):
                    payload = self._store.backend.get(pack_name(pack), record.offset, record.length)
                    if len(payload) != record.length:
                        raise CorruptionError(f"pack {pack.hex()} is cut short: 'mergefs fsck' shows what it affects")
                    rewrite.append(record, payload)
                    if rewrite.full:
                        rewrite.finish()
                        rewrite.enter(self._txn)
                self._drop_pack(pack)
            rewrite.finish()
            rewrite.enter(self._txn)

    def _drop_pack(self, pack: bytes) -> None:
        self.doomed.append(pack_name(pack))
        if not self._dry_run:
            self._txn.delete("packs", pack)

    def _sweep_manifests(self, live: set[str]) -> int:
        """Remove dead manifests and their statistics from the catalog; return how many there were."""
        dead = [key for key in self._txn.keys("manifests") if key.hex() not in live]
        if self._dry_run:
            return len(dead)
        for key in dead:
            self._txn.delete("manifests", key)
            for entry in list(self._txn.keys("checksums", key)):
                self._txn.delete("checksums", entry)
        gone = set(dead)
        for table in ("statistics", "thresholds") if gone else ():
            for entry in list(self._txn.keys(table)):
                if not gone.isdisjoint((entry[:32], entry[32:64])):  # the expert's and the base's
                    self._txn.delete(table, entry)
        for entry in list(self._txn.keys("products")) if gone else ():
            if not gone.isdisjoint((entry[:32], entry[32:64], entry[64:96])):
                self._txn.delete("products", entry)
        for entry in list(facts_of(self._txn, gone)) if gone else ():
            self._txn.delete("facts", entry)
        return len(dead)

    def _sweep_objects(self, manifests: set[str], plans: set[str]) -> int:
        """Doom the files of dead manifests and plans, and packs that the catalog does not know; return bytes."""
        backend = self._store.backend
        known_packs = {pack_name(key) for key, _ in self._txn.items("packs")} | set(self.doomed)
        keep = {manifest_name(m) for m in manifests} | {plan_name(p) for p in plans} | known_packs
        freed = 0
        for prefix in ("packs", "manifests", "plans"):
            for name, size in backend.list(prefix):
                if name not in keep and is_hex_id(Path(name).stem):
                    self.doomed.append(name)
                    freed += size
        return freed
