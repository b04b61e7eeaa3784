"""Mending a repository: what is damaged goes aside, what is left of it is kept, and the rest can be taken in again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergefs import fsck
from mergefs.backend import flush_folder
from mergefs.blocks.pack import CHECK_BYTES, NO_BASE, Record, hash_file, pack_name, read_records
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import TABLES, Location, locations, put_location, put_manifest, put_ref, ref_entries
from mergefs.configuration import mend_configuration
from mergefs.errors import CorruptionError, MergefsError
from mergefs.fsck import FsckReport, Problem, Progress
from mergefs.hashing import Buffer, digest, is_hex_id
from mergefs.merge.remembered import TABLE as DERIVATIONS
from mergefs.rebuild import usable_tiers
from mergefs.refs import decode_ref_copy, ref_copy_name
from mergefs.rewriting import Rewrite
from mergefs.store import Store, manifest_name, plan_name

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class RepairReport:
    """What a repair did.

    Attributes:
        found: what was wrong.
        left: what still is: models named there need what is lost.
        blocks_found: lost blocks of which another pack had a copy.
        blocks_dropped: damaged blocks that the catalog does not know any more, so that they can be stored again.
        blocks_moved: sound blocks of damaged packs, which are in new packs now.
        files: damaged files, which lie in the repository's folder `quarantine` now.
    """

    found: tuple[Problem, ...]
    left: tuple[Problem, ...]
    blocks_found: int
    blocks_dropped: int
    blocks_moved: int
    files: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more."""
        return not self.left


def repair(store: Store, *, progress: Progress | None = None) -> RepairReport:
    """Read everything, and mend what can be mended.

    Nothing is deleted: damaged files go to `quarantine`. A block that is lost comes back when a checkpoint that has it
    is ingested again, or a merge that derives it is run again.

    Args:
        store: the repository, open for writing.
        progress: see `fsck.check`.
    """
    found = fsck.check(store, read_data=True, progress=progress)
    if any(problem.kind == "catalog" for problem in found.errors):
        return RepairReport(found.errors, found.errors, 0, 0, 0, ())
    _check_readable(store, found)
    mend_configuration(store.path, sync=store.sync)
    dropped = store.catalog.write(lambda txn: _drop_damaged(store, txn))
    # What such entries were about is known to be missing now.
    mending = _Mending(store, fsck.check(store, read_data=True) if dropped else found)
    mending.run()
    left = fsck.check(store)
    return RepairReport(
        found.errors,
        left.errors,
        mending.found,
        mending.dropped,
        mending.moved,
        tuple(mending.files),
    )


def _check_readable(store: Store, found: FsckReport) -> None:
    """Check that what seems damaged is not only hard to read: it would be put aside, and its blocks forgotten.

    Raises:
        MergefsError: when the disk refuses to read a pack that is there, or did so before.
    """
    for name in (problem.name for problem in found.errors if problem.kind == "pack" and is_hex_id(problem.name)):
        path = store.path / pack_name(bytes.fromhex(name))
        try:
            read_records(path)
            sound = hash_file(path) == name
        except (FileNotFoundError, CorruptionError):
            continue
        except OSError as error:
            raise MergefsError(
                f"{path} cannot be read ({error.strerror}): run this again, or move the file away to go on without it"
            ) from error
        if sound:
            raise MergefsError(f"{path} could be read only the second time, and is sound: run this again")


def _drop_damaged(store: Store, txn: Transaction) -> int:
    """Have the catalog forget entries that are damaged, and know all packs in which it has blocks; return how many
    entries that were."""
    damaged = [(table, key) for table in TABLES for key in txn.damaged(table)]
    for table, key in damaged:
        txn.delete(table, key)
    known = {key for key, _ in txn.items("packs")}
    unknown = {location.pack for location in locations(txn)} - known
    for pack in unknown:
        with suppress(OSError):
            txn.put("packs", pack, b'{"size": %d}' % store.backend.size(pack_name(pack)))
    return len(damaged) + len(unknown)


class _Mending:
    def __init__(self, store: Store, report: FsckReport) -> None:
        self._store = store
        self._problems = report.errors
        self.found = self.dropped = self.moved = 0
        self.files: list[str] = []

    def run(self) -> None:
        """Mend."""
        for kind, name_of in (("manifest", manifest_name), ("plan", plan_name)):
            for name in self._names(kind):
                self._set_aside(name_of(name))
        bad = {bytes.fromhex(name) for name in self._names("block")}
        packs = [bytes.fromhex(name) for name in self._names("pack")]
        if bad or packs:
            self._mend_blocks(bad, packs)
        self._store.catalog.write(self._mend_entries)

    def _names(self, kind: str) -> list[str]:
        return [problem.name for problem in self._problems if problem.kind == kind and is_hex_id(problem.name)]

    def _mend_blocks(self, bad: set[bytes], packs: list[bytes]) -> None:
        copies = self._copies(bad, set(packs))
        # Blocks that stand on others can be judged when these are mended.
        roots = {block for block in bad if self._base_of(block, copies) == NO_BASE}
        lost = self._settle(roots, copies, frozenset())
        self._settle(bad - roots, copies, lost)
        with Rewrite(self._store, f"{os.getpid()}-repair") as rewrite:
            for pack in packs:
                self._rescue(pack, rewrite)
            rewrite.finish()
            self._store.catalog.write(lambda txn: self._enter_rescued(txn, rewrite, packs))
        for pack in packs:
            self._set_aside(pack_name(pack))

    def _copies(self, bad: set[bytes], packs: set[bytes]) -> dict[bytes, list[Location]]:
        """Return all places of tiers of bad blocks in packs that are sound."""
        found: dict[bytes, list[Location]] = {}
        for name, _ in self._store.backend.list("packs"):
            stem = Path(name).stem
            if not is_hex_id(stem) or bytes.fromhex(stem) in packs:
                continue
            try:
                records = read_records(self._store.path / name)
            except (MergefsError, OSError):
                continue
            for record in records:
                if record.block in bad:
                    found.setdefault(record.block, []).append(Location(bytes.fromhex(stem), record))
        return found

    def _base_of(self, block: bytes, copies: dict[bytes, list[Location]]) -> bytes:
        location = self._store.catalog.locate(block)
        places = [location] if location is not None else copies.get(block, [])
        return places[0].record.base if places else NO_BASE

    def _settle(self, blocks: set[bytes], copies: dict[bytes, list[Location]], gone: Set[bytes]) -> frozenset[bytes]:
        """Give bad blocks the places of their copies; have the catalog forget those that have none, and return them.

        Blocks that are sound themselves and stand on one that is gone stay: they are whole when that comes back.
        """
        reader = BlockReader(self._store.catalog, self._store.backend)
        kept: dict[bytes, tuple[Location, ...]] = {}
        lost = set()
        for block in blocks:
            base_id = self._base_of(block, copies)
            if base_id in gone and self._is_sound(block):
                continue
            base: Buffer | None = None
            with suppress(MergefsError):
                reader.read(block, Kind.METADATA)
                continue
            with suppress(MergefsError):
                base = None if base_id == NO_BASE else reader.read(base_id, Kind.METADATA)
            tiers = usable_tiers(self._store.backend, copies.get(block, []), base)
            if tiers is None:
                lost.add(block)
            else:
                kept[block] = tiers
        self._store.catalog.write(lambda txn: self._enter(txn, lost, kept))
        self.found += len(kept)
        self.dropped += len(lost)
        return frozenset(lost)

    def _is_sound(self, block: bytes) -> bool:
        """Tell whether all payloads of a block are what was written."""
        places = self._store.catalog.tiers(block)
        return bool(places) and all(self._payload(place.pack, place.record) is not None for place in places)

    def _payload(self, pack: bytes, record: Record) -> bytes | None:
        try:
            payload = self._store.backend.get(pack_name(pack), record.offset, record.length)
        except OSError:
            return None
        return payload if digest(payload)[:CHECK_BYTES] == record.check else None

    def _enter(self, txn: Transaction, lost: set[bytes], kept: dict[bytes, tuple[Location, ...]]) -> None:
        for block in (*lost, *kept):
            for key in [key for key, _ in txn.items("blocks", block)]:
                txn.delete("blocks", key)
        for location in (location for tiers in kept.values() for location in tiers):
            put_location(txn, location.pack, location.record)
            size = self._store.backend.size(pack_name(location.pack))
            txn.put("packs", location.pack, b'{"size": %d}' % size)

    def _rescue(self, pack: bytes, rewrite: Rewrite) -> None:
        """Copy the payloads of a damaged pack that are sound."""
        with self._store.catalog.read() as txn:
            mine = [location.record for location in locations(txn) if location.pack == pack]
        for record in sorted(mine, key=lambda record: record.offset):
            payload = self._payload(pack, record)
            if payload is not None:
                rewrite.append(record, payload)
                self.moved += record.tier == 0

    def _enter_rescued(self, txn: Transaction, rewrite: Rewrite, packs: Iterable[bytes]) -> None:
        rewrite.enter(txn)
        for pack in packs:
            txn.delete("packs", pack)

    def _mend_entries(self, txn: Transaction) -> None:
        """Have damaged refs name what the catalog or else their copy says, where that is there; forget derivations of
        blocks that are not."""
        entries = dict(ref_entries(txn))
        for name in (problem.name for problem in self._problems if problem.kind == "ref"):
            for identity in (str(entries.get(name, {}).get("manifest")), self._copied(name)):
                try:
                    manifest = self._store.manifest(identity)
                except CorruptionError:
                    continue
                put_manifest(txn, identity, {"raw_bytes": manifest.raw_bytes})
                put_ref(txn, name, identity)
                self._store.copy_ref(txn, name)
                break
        stored = {location.record.block for location in locations(txn)}
        for key in [key for key, block in txn.items(DERIVATIONS) if block not in stored]:
            txn.delete(DERIVATIONS, key)

    def _copied(self, name: str) -> str:
        """Return what the copy of a ref names; nothing when it is damaged."""
        try:
            return str(decode_ref_copy(self._store.backend.get(ref_copy_name(name)))["manifest"])
        except (FileNotFoundError, CorruptionError):
            return ""

    def _set_aside(self, name: str) -> None:
        """Move a damaged file to the quarantine, where nobody looks for it."""
        folder = self._store.path / QUARANTINE
        folder.mkdir(mode=0o700, exist_ok=True)
        path = self._store.path / name
        try:
            os.rename(path, folder / Path(name).name)
        except FileNotFoundError:
            return
        self.files.append(f"{QUARANTINE}/{Path(name).name}")
        if self._store.sync:
            flush_folder(path.parent)
            flush_folder(folder)
