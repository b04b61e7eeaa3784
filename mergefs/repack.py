"""Repack: what is stored in another coding, while others read, ingest and collect."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from mergefs.blocks import codecs, tiers
from mergefs.blocks.encoding import TIERED, Encoding
from mergefs.blocks.exact import Exact, check_exact
from mergefs.blocks.pack import NO_BASE, Record, pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import Location, get_manifest, get_tiers, locations
from mergefs.dtypes import BY_CODE
from mergefs.errors import BlocksCollectedError, CorruptionError
from mergefs.hashing import Buffer, digest
from mergefs.pipeline import available_cores, ordered
from mergefs.rewriting import Rewrite, delete_objects, is_spent
from mergefs.statistics.stored import refresh_stored_bytes
from mergefs.store import Store

Progress = Callable[[int, int], None]
"""Called with the blocks done and the blocks in all."""

_HEAD = 4096
"""Bytes of an exact tier that are read to learn its coding: those of a mask of changed runs come first."""


@dataclass(frozen=True)
class RepackReport:
    """What a repack did.

    Attributes:
        exact: the coding of the exact tiers now.
        blocks_repacked: blocks that are encoded otherwise now.
        stored_bytes_before, stored_bytes_after: bytes of all packs.
        seconds: wall time.
    """

    exact: Exact
    blocks_repacked: int
    stored_bytes_before: int
    stored_bytes_after: int
    seconds: float


def repack(
    store: Store, exact: str | None = None, *, threads: int | None = None, progress: Progress | None = None
) -> RepackReport:
    """Write every exact tier that is not in the repository's coding anew; with `quick`, and from it, other blocks too.

    May run while others read, ingest, merge and collect. When it is interrupted, the repository is whole, and another
    run does the rest.

    Args:
        store: the repository.
        exact: the coding that the repository is to have from now on, one of `CODINGS`; by default the one it has.
        threads: how many to work with; all cores by default.
        progress: told how far it is.

    Raises:
        UserError: when there is no such coding, or the repository is open for reading only.
        CorruptionError: when a block is damaged; it is left as it is.
    """
    began = time.monotonic()
    if exact is not None:
        check_exact(exact)
    before = _pack_bytes(store)
    # Models that are removed meanwhile stay until this is done. What no model needs, gc may still take.
    with store.lease("repack", None) as lease:
        if exact is not None:
            store.use_exact(exact)
        coding = store.exact
        blocks = _blocks(store, coding, lease.manifests)
        threads = threads or available_cores()
        recoded = ordered(_Recoder(store, coding), blocks, threads=threads, window=2 * threads + 2)
        with _Replacement(store, lease.id) as replacement:
            for count, found in enumerate(recoded, start=1):
                if found is not None:
                    replacement.add(found)
                if progress:
                    progress(count, len(blocks))
            replacement.commit()
        refresh_statistics(store)
    seconds = time.monotonic() - began
    return RepackReport(coding, replacement.blocks, before, _pack_bytes(store), seconds)


def refresh_statistics(store: Store) -> None:
    """Let the statistics have the bytes that tiers take now; plans that are made until then go by the old ones."""
    with store.catalog.read() as txn:
        pairs = sorted({key[:64] for key, _ in txn.items("statistics")})
    for pair in pairs:
        # What came after the lease was taken may be gone again; and it was written in this coding.
        with suppress(BlocksCollectedError):
            models = [store.manifest(identity.hex()) for identity in (pair[:32], pair[32:])]
            store.catalog.write(partial(refresh_stored_bytes, expert=models[0], base=models[1]))


def _pack_bytes(store: Store) -> int:
    return sum(size for _, size in store.backend.list("packs"))


def _blocks(store: Store, exact: Exact, manifests: Collection[str]) -> list[bytes]:
    """Return every block that may have to be encoded anew: those of old models first, in the manifests' order.

    Args:
        store: the repository.
        exact: the coding that is wanted.
        manifests: the models, under a lease of the caller's.
    """
    with store.catalog.read() as txn:
        places = {
            location.record.block: (location.pack, location.record.offset)
            for location in locations(txn)
            if _may_change(location.record, exact)
        }
        ages = {identity: (get_manifest(txn, identity) or {}).get("time", 0.0) for identity in manifests}
    found: dict[bytes, None] = {}
    # What no manifest names comes last: blocks of an ingest that is under way, and what gc has not taken yet.
    named = (store.manifest(identity).block_ids() for identity in sorted(ages, key=lambda m: (ages[m], m)))
    for block in chain(chain.from_iterable(named), sorted(places, key=places.__getitem__)):
        if block in places:
            found[block] = None
    return list(found)


def _may_change(record: Record, exact: Exact) -> bool:
    if record.encoding in TIERED:
        return True
    if exact == "quick":
        delta = record.encoding == Encoding.ULP_ZSTD and BY_CODE[record.dtype].name == "BF16"
        return delta or record.encoding == Encoding.SHUFFLE_ZSTD
    return record.encoding == Encoding.RAW and BY_CODE[record.dtype].itemsize > 1


@dataclass(frozen=True)
class _Recoded:
    """A block's exact tier in the new coding, or a block without tiers in another encoding.

    Attributes:
        old: where its tiers lie that it was made from.
        record: what is to be said of the new payload, but for its place.
        payload: it.
    """

    old: tuple[Location, ...]
    record: Record
    payload: bytes


class _Recoder:
    """Encodes a block, or its exact tier, anew where it has another coding. Runs on many threads."""

    def __init__(self, store: Store, exact: Exact) -> None:
        self._store = store
        self._exact = exact
        self._reader = BlockReader(store.catalog, store.backend)

    def __call__(self, block: bytes) -> _Recoded | None:
        old = self._store.catalog.tiers(block)
        if old and old[-1].record.encoding in TIERED and self._is_done(old[-1]):
            return None
        try:
            return self._recoded(block)
        except CorruptionError:
            if self._store.catalog.locate(block) is None:
                return None  # gc has taken it, and perhaps its base: nothing needed it
            raise

    def _recoded(self, block: bytes) -> _Recoded | None:
        old, payloads = self._reader.read_payloads(block, Kind.EXPERT)
        record = old[-1].record
        if record.encoding not in TIERED:
            return self._encoded(block, old)
        if tiers.coding(payloads[-1]) == self._exact:
            return None
        base = self._reader.read(record.base, Kind.BASE)
        payload = tiers.recode(payloads, base, self._exact)
        quick = self._exact == "quick"
        if quick and len(payload) <= sum(map(len, payloads[:-1])):
            return None  # it is there to be read in the place of the others
        raw = codecs.decode_tiers([*payloads[:-1], payload], record.raw_length, base)
        if digest(raw) != block:
            raise CorruptionError(f"block {block.hex()} is damaged: its bytes have another hash")
        return _Recoded(old, record._replace(encoding=Encoding.QUICK if quick else Encoding.TIERS), payload)

    def _encoded(self, block: bytes, old: tuple[Location, ...]) -> _Recoded | None:
        """Encode a block without tiers."""
        record = old[0].record
        known: dict[bytes, Buffer] = {}
        base = None
        if record.base != NO_BASE:
            base = known[record.base] = self._reader.read(record.base, Kind.BASE)
        encoded = codecs.encode(self._reader.read(block, Kind.BASE, known), BY_CODE[record.dtype], base, self._exact)
        if encoded.encoding == record.encoding:
            return None
        below = record.base if encoded.encoding.needs_base else NO_BASE
        return _Recoded(old, record._replace(encoding=encoded.encoding, base=below), encoded.payload)

    def _is_done(self, exact: Location) -> bool:
        """Tell from the beginning of an exact tier whether it has the coding already."""
        size = min(exact.record.length, _HEAD)
        try:
            head = self._store.backend.get(pack_name(exact.pack), exact.record.offset, size)
        except FileNotFoundError:
            return False  # gc has just moved it: reading it whole looks it up again
        return tiers.coding(head) == self._exact


class _Replacement:
    """Puts new exact tiers in the place of the old ones, about a pack of them at a time."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._rewrite = Rewrite(store, owner)
        self._waiting: dict[bytes, tuple[Location, ...]] = {}
        self.blocks = 0
        """How many have been replaced."""

    def __enter__(self) -> _Replacement:
        return self

    def __exit__(self, *error: object) -> None:
        self._rewrite.__exit__(None, None, None)

    def add(self, recoded: _Recoded) -> None:
        """Take the next block."""
        self._waiting[recoded.record.block] = recoded.old
        self._rewrite.append(recoded.record, recoded.payload)
        if self._rewrite.full:
            self.commit()

    def commit(self) -> None:
        """Make what was added durable, then switch to it, then remove the packs that nothing lies in any more."""
        if not self._waiting:
            return
        self._rewrite.finish()
        count, spent = self._store.catalog.write(self._switch)
        if spent:
            self._store.catalog.write(lambda txn: delete_objects(self._store, txn, map(pack_name, spent)))
        self.blocks += count
        self._waiting = {}

    def _switch(self, txn: Transaction) -> tuple[int, set[bytes]]:
        """Return how many blocks moved, and the packs that none is located in any more."""
        now = {block: get_tiers(txn, block) for block in self._waiting}
        # gc may have moved tiers to other packs since they were read, or taken the block; and who then stored it again
        # may have encoded it otherwise.
        moving = {block for block, old in self._waiting.items() if _contents(now[block]) == _contents(old)}
        self._rewrite.enter(txn, lambda record: record.block in moving)
        left = {now[block][-1].pack for block in moving}
        spent = {pack for pack in left if is_spent(self._store, txn, pack)}
        for pack in spent:
            txn.delete("packs", pack)
        return len(moving), spent


def _contents(found: tuple[Location, ...]) -> list[tuple[bytes, bytes]]:
    """Return what identifies a block's tiers wherever they lie: their hashes, and what they are encoded against."""
    return [(location.record.check, location.record.base) for location in found]
