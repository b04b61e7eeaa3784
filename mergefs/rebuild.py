"""Making the catalog anew from what it is an index of: packs, manifests, and the copies of refs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergefs.backend import LocalBackend, flush_folder
from mergefs.blocks import codecs
from mergefs.blocks.encoding import TIERED
from mergefs.blocks.pack import CHECK_BYTES, NO_BASE, Record, largest_block, pack_name, read_records
from mergefs.blocks.tiers import decode_delta
from mergefs.catalog.environment import Transaction
from mergefs.catalog.leases import living
from mergefs.catalog.tables import Catalog, Location, get_location, put_location
from mergefs.configuration import read_config
from mergefs.errors import CorruptionError, MergefsError, RefNameError, UserError
from mergefs.hashing import Buffer, digest, hex_digest, is_hex_id
from mergefs.manifest import Manifest, decode
from mergefs.refs import REF_COPIES, check_ref_name, decode_ref_copy
from mergefs.store import manifest_name

_NEW = "catalog.new"
_COMBINATIONS = 64
"""So many ways to put a block's tiers together are tried."""


@dataclass(frozen=True)
class RebuildReport:
    """What was found.

    Attributes:
        blocks, packs, manifests, refs: how many are in the new catalog.
        recovered: refs that were made up for models of which there is no copy of a ref.
        lost: sentences about what could not be taken over.
        kept: where the earlier catalog lies now, or None where there was none.
    """

    blocks: int
    packs: int
    manifests: int
    refs: int
    recovered: tuple[str, ...]
    lost: tuple[str, ...]
    kept: str | None


def rebuild(path: str | Path, *, sync: bool = True) -> RebuildReport:
    """Make a repository's catalog anew. The earlier one is kept beside it, whatever state it is in.

    Statistics and remembered derivations are not in any other file: they are measured again when somebody needs them,
    or come back when a checkpoint is ingested again.

    Args:
        path: the repository's folder.
        sync: see `Store`.

    Raises:
        NotARepositoryError, FormatVersionError: see `Store.open`.
        UserError: when a process is using the repository.
    """
    folder = Path(path).absolute()
    # What is rebuilt may still be migrated.
    largest = largest_block(read_config(folder, oldest=1)["block_elements"])
    catalog = folder / "catalog"
    if living(catalog):
        raise UserError(f"{folder} is in use: end what uses it (mounts too) before its catalog is rebuilt")
    shutil.rmtree(folder / _NEW, ignore_errors=True)
    builder = _Builder(folder, largest, sync=sync)
    report = builder.build()
    if sync:
        flush_folder(folder / _NEW)
        flush_folder(folder)
    # A crash between the two leaves a repository without a catalog, which does not open until this is run again.
    kept = None
    if catalog.exists():
        kept = _unused(folder, f"catalog.before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
        os.rename(catalog, folder / kept)
    os.rename(folder / _NEW, catalog)
    if sync:
        flush_folder(folder)
    return RebuildReport(**{**vars(report), "kept": kept})


def _unused(folder: Path, name: str) -> str:
    """Return the name, with a number behind it where something has it: two rebuilds may begin in one second."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(found for found in names if not (folder / found).exists())


def usable_tiers(backend: LocalBackend, found: Iterable[Location], base: Buffer | None) -> tuple[Location, ...] | None:
    """Return places of a block's tiers that together are the block, or None.

    Args:
        backend: what holds the packs.
        found: all places where tiers of the block were found, those first that are to be preferred.
        base: the bytes of the block that they are encoded against, or None.
    """
    kinds: dict[tuple[Any, ...], dict[int, list[Location]]] = {}
    for location in found:
        record = location.record
        encoding = codecs.Encoding.TIERS if record.encoding in TIERED else record.encoding
        key = (record.base, encoding, record.dtype, record.raw_length, record.tiers)
        kinds.setdefault(key, {}).setdefault(record.tier, []).append(location)
    for (_, _, _, _, tiers), by_tier in kinds.items():
        if sorted(by_tier) != list(range(tiers)):
            continue
        for chosen in itertools.islice(itertools.product(*(by_tier[t] for t in range(tiers))), _COMBINATIONS):
            if _decodes(backend, chosen, base):
                return chosen
    return None


def _decodes(backend: LocalBackend, tiers: tuple[Location, ...], base: Buffer | None) -> bool:
    record = tiers[0].record
    payloads = []
    for location in tiers:
        mine = location.record
        try:
            payload = backend.get(pack_name(location.pack), mine.offset, mine.length)
        except OSError:
            return False
        if digest(payload)[:CHECK_BYTES] != mine.check:
            return False
        payloads.append(payload)
    try:
        if record.encoding in TIERED:
            raw = None if base is None else codecs.decode_tiers(payloads, record.raw_length, base)
            if base is not None and len(payloads) > 1:
                decode_delta(payloads[:-1], base)  # an exact tier that is read alone says nothing of the others
        else:
            raw = codecs.decode(record.encoding, payloads[0], record.raw_length, record.dtype, base)
    except CorruptionError:
        return False
    return raw is not None and digest(raw) == record.block


class _Builder:
    def __init__(self, folder: Path, largest: int, *, sync: bool) -> None:
        self._folder = folder
        self._largest = largest
        self._sync = sync
        self._backend = LocalBackend(folder, sync=sync)
        self._lost: list[str] = []

    def build(self) -> RebuildReport:
        """Fill a new catalog."""
        packs = dict(self._packs())
        manifests = dict(self._manifests())
        copies = dict(self._copies())
        about = {entry["manifest"]: entry.pop("about", {}) for entry in copies.values()}
        chosen = self._chosen(packs)
        recovered = []
        if not (self._folder / REF_COPIES).is_dir():
            for identity, manifest in manifests.items():
                if manifest.lineage.kind != "fitted":
                    recovered.append(f"recovered-{identity[:12]}")
                    copies[recovered[-1]] = {"manifest": identity, "time": time.time(), "previous": None}
        refs = {}
        for name, entry in copies.items():
            if entry["manifest"] in manifests:
                refs[name] = entry
            else:
                self._lost.append(f"ref '{name}': the file of its manifest {entry['manifest']} is missing or damaged")

        def fill(txn: Transaction) -> None:
            for pack in packs:
                size = self._backend.size(pack_name(pack))
                txn.put("packs", pack, json.dumps({"size": size}).encode())
            for tiers in chosen.values():
                for location in tiers:
                    put_location(txn, location.pack, location.record)
            for identity, manifest in manifests.items():
                changed = (self._folder / manifest_name(identity)).stat().st_mtime
                entry = {"time": changed, "raw_bytes": manifest.raw_bytes, **about.get(identity, {})}
                txn.put("manifests", bytes.fromhex(identity), json.dumps(entry).encode())
                found = [(get_location(txn, block), size) for block, size in set(manifest.block_sizes())]
                missing = sum(location is None for location, _ in found)
                if missing:
                    self._lost.append(f"manifest {identity}: {missing} of its blocks are in no pack")
                others = sum(location is not None and location.record.raw_length != size for location, size in found)
                if others:
                    self._lost.append(f"manifest {identity}: {others} of its blocks have another length")
            for name, entry in refs.items():
                txn.put("refs", name.encode(), json.dumps(entry).encode())

        catalog = Catalog.create(self._folder / _NEW, sync=self._sync)
        try:
            catalog.write(fill)
        finally:
            catalog.close()
        return RebuildReport(
            len(chosen), len(packs), len(manifests), len(refs), tuple(recovered), tuple(self._lost), None
        )

    def _packs(self) -> Iterator[tuple[bytes, list[Record]]]:
        for name, _ in self._backend.list("packs"):
            identity = Path(name).stem
            if not is_hex_id(identity):
                continue
            try:
                records = read_records(self._folder / name)
                if any(not codecs.is_sound(r) or r.raw_length > self._largest for r in records):
                    raise CorruptionError("a record is of a block that there cannot be")
                yield bytes.fromhex(identity), records
            except MergefsError as error:
                self._lost.append(f"pack {identity}: {error}")
            except OSError as error:
                raise _unreadable(name, error) from error

    def _chosen(self, packs: dict[bytes, list[Record]]) -> dict[bytes, tuple[Location, ...]]:
        """Return the places of each block's tiers; of those that are there once, the bytes are not looked at."""
        found: dict[bytes, list[Location]] = {}
        for pack, records in packs.items():
            for record in records:
                found.setdefault(record.block, []).append(Location(pack, record))
        chosen: dict[bytes, tuple[Location, ...]] = {}
        several = []
        for block, places in found.items():
            places.sort(key=lambda location: location.record.tier)
            if [location.record.tier for location in places] == list(range(places[0].record.tiers)):
                chosen[block] = tuple(places)
            else:
                several.append(block)
        # What stands on no other block first: the others need its bytes.
        for block in sorted(several, key=lambda block: found[block][0].record.base != NO_BASE):
            base = self._read(found[block][0].record.base, chosen)
            tiers = usable_tiers(self._backend, found[block], base)
            if tiers is None:
                self._lost.append(f"block {block.hex()}: no whole set of its tiers decodes")
            else:
                chosen[block] = tiers
        return chosen

    def _read(self, block: bytes, chosen: dict[bytes, tuple[Location, ...]]) -> Buffer | None:
        """Return the bytes of a block that needs no other one."""
        if block not in chosen:
            return None
        (location, *_) = chosen[block]
        record = location.record
        try:
            payload = self._backend.get(pack_name(location.pack), record.offset, record.length)
            return codecs.decode(record.encoding, payload, record.raw_length, record.dtype)
        except (OSError, CorruptionError):
            return None

    def _manifests(self) -> Iterator[tuple[str, Manifest]]:
        for name, _ in self._backend.list("manifests"):
            identity = Path(name).stem
            if not is_hex_id(identity):
                continue
            try:
                data = self._backend.get(name)
                if hex_digest(data) != identity:
                    raise CorruptionError("its bytes have another hash")
                yield identity, decode(data)
            except MergefsError as error:
                self._lost.append(f"manifest {identity}: {error}")
            except OSError as error:
                raise _unreadable(name, error) from error

    def _copies(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted((self._folder / REF_COPIES).glob("*.json")):
            name = path.name.removesuffix(".json")
            try:
                check_ref_name(name)
                yield name, decode_ref_copy(path.read_bytes())
            except (CorruptionError, RefNameError) as error:
                self._lost.append(f"ref '{name}': {error}")
            except OSError as error:
                raise _unreadable(f"{REF_COPIES}/{path.name}", error) from error


def _unreadable(name: str, error: OSError) -> MergefsError:
    """Return an error about a file that is there: without it, a catalog would forget what may be sound."""
    return MergefsError(
        f"{name} cannot be read ({error.strerror}): run this again, or move the file away to go on without it"
    )
