"""The catalog: what is where, what it is called, and who is using it. Tables and keys are in spec/catalog.md.

The catalog is an index: packs, manifests and plans are the truth, and everything but refs and leases can be
rebuilt from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from mergefs.blocks.encoding import Encoding
from mergefs.blocks.pack import NO_BASE, Record
from mergefs.catalog.environment import Environment, Transaction, shared
from mergefs.errors import BlocksCollectedError, CorruptionError
from mergefs.hashing import digest

TABLES = (
    "blocks",
    "packs",
    "refs",
    "manifests",
    "statistics",
    "thresholds",
    "products",
    "derivations",
    "facts",
    "checksums",
    "leases",
    "claims",
)

WHOLE_BLOCK_TIER = 0


class Location(NamedTuple):
    """A record and the pack (32 bytes) that it is in."""

    pack: bytes
    record: Record


class Catalog:
    """The tables of one repository."""

    def __init__(self, path: Path, *, readonly: bool = False, sync: bool = True) -> None:
        self.path = path.resolve()
        self._environment = shared.acquire(
            self.path, lambda: Environment(self.path, TABLES, readonly=readonly, sync=sync), readonly=readonly
        )
        self.read = self._environment.read
        self.write = self._environment.write
        self.add_checks = self._environment.add_checks

    @classmethod
    def create(cls, path: Path, *, sync: bool = True) -> Self:
        """Make an empty catalog in a new folder."""
        path.mkdir(mode=0o700)
        return cls(path, sync=sync)

    @property
    def readonly(self) -> bool:
        """Whether nothing can be entered."""
        return self._environment.readonly

    @property
    def has_checks(self) -> bool:
        """Whether values have checks; those of a catalog of the first version have none."""
        return self._environment.has_checks

    def close(self) -> None:
        """Give the environment back."""
        shared.release(self.path)

    # -- blocks --------------------------------------------------------------------------------------------

    def locate(self, block: bytes) -> Location | None:
        """Return where a block lies, or None."""
        with self.read() as txn:
            return get_location(txn, block)

    def locate_all(self, blocks: Iterable[bytes]) -> dict[bytes, Location]:
        """Return where each of `blocks` lies; those that are not stored are left out."""
        with self.read() as txn:
            found = ((block, get_location(txn, block)) for block in blocks)
            return {block: location for block, location in found if location is not None}

    def tiers(self, block: bytes) -> tuple[Location, ...]:
        """Return where each tier of a block lies, in order; () when the block is not stored whole."""
        with self.read() as txn:
            return get_tiers(txn, block)

    # -- refs ----------------------------------------------------------------------------------------------

    def refs(self) -> dict[str, str]:
        """Return every ref's name and its manifest's id, by name."""
        with self.read() as txn:
            return {name: entry["manifest"] for name, entry in ref_entries(txn)}

    def ref(self, name: str) -> str | None:
        """Return the id of the manifest that a ref names, or None."""
        with self.read() as txn:
            value = txn.get("refs", name.encode())
        return None if value is None else str(json.loads(value)["manifest"])


def get_location(txn: Transaction, block: bytes) -> Location | None:
    """Return where a block lies, as seen by a transaction."""
    value = txn.get("blocks", block + bytes([WHOLE_BLOCK_TIER]))
    return None if value is None else _location(block, value)


def get_tiers(txn: Transaction, block: bytes) -> tuple[Location, ...]:
    """Return where each tier of a block lies, in order; () when the block is not stored whole."""
    found = tuple(_location(block, value) for _, value in txn.items("blocks", block))
    whole = found and [location.record.tier for location in found] == list(range(found[0].record.tiers))
    return found if whole else ()


def read_tiers(tiers: tuple[Location, ...], depth: int) -> tuple[Location, ...]:
    """Return those of a block's tiers that are read to decode it to a depth, its exact bytes where that is `EXACT`."""
    if depth >= len(tiers) and tiers and tiers[-1].record.encoding == Encoding.QUICK:
        return tiers[-1:]
    return tiers[:depth]


def put_location(txn: Transaction, pack: bytes, record: Record) -> None:
    """Enter a record of a pack; its block's id gives way to the pack's in the value."""
    txn.put("blocks", record.block + bytes([record.tier]), pack + record.pack()[32:])


def holds(txn: Transaction, pack: bytes, record: Record) -> bool:
    """Tell whether the payload that a record of a pack is of is the one that is used."""
    value = txn.get("blocks", record.block + bytes([record.tier]))
    return value is not None and value == pack + record.pack()[32:]


def locations(txn: Transaction) -> Iterator[Location]:
    """Yield every location in the catalog, in the order of block ids."""
    for key, value in txn.items("blocks"):
        yield _location(key[:32], value)


def _location(block: bytes, value: bytes) -> Location:
    return Location(value[:32], Record.unpack(block + value[32:]))


def put_packs(txn: Transaction, packs: Iterable[tuple[bytes, int, Sequence[Record]]]) -> None:
    """Enter packs (id, size, records) that together hold whole blocks, and those blocks that are not stored already.

    A block that is stored keeps its locations, all of them: its tiers belong together.

    Raises:
        BlocksCollectedError: when a block would stand on one that is not there, or that stands on another one itself,
            as somebody has stored it so meanwhile.
    """
    entering = list(packs)
    stored = {record.block for _, _, records in entering for record in records if get_location(txn, record.block)}
    for pack, size, records in entering:
        txn.put("packs", pack, json.dumps({"size": size}).encode())
        for record in records:
            if record.block not in stored:
                put_location(txn, pack, record)
    for base in {record.base for _, _, records in entering for record in records if record.block not in stored}:
        location = None if base == NO_BASE else get_location(txn, base)
        if base != NO_BASE and (location is None or location.record.base != NO_BASE):
            raise BlocksCollectedError(f"block {base.hex()} was stored otherwise before others could stand on it")


def closure(txn: Transaction, blocks: Iterable[bytes]) -> set[bytes]:
    """Return `blocks` together with every block that they are encoded against."""
    live: set[bytes] = set()
    pending = list(blocks)
    while pending:
        block = pending.pop()
        if block in live:
            continue
        live.add(block)
        location = get_location(txn, block)
        if location is not None and location.record.base != NO_BASE:
            pending.append(location.record.base)
    return live


# -- refs and manifests ------------------------------------------------------------------------------------


def ref_entries(txn: Transaction) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every ref's name and entry ({manifest, time, previous})."""
    for key, value in txn.items("refs"):
        yield key.decode(), json.loads(value)


def put_ref(txn: Transaction, name: str, manifest: str) -> str | None:
    """Point a ref at a manifest; return the id of the one it named before, or None."""
    old = txn.get("refs", name.encode())
    previous = None if old is None else str(json.loads(old)["manifest"])
    if previous != manifest:
        entry = {"manifest": manifest, "time": time.time(), "previous": previous}
        txn.put("refs", name.encode(), json.dumps(entry).encode())
    return previous


def put_manifest(txn: Transaction, manifest: str, entry: dict[str, Any]) -> None:
    """Enter a manifest, keeping what an earlier entry of the same manifest said and this one does not."""
    key = bytes.fromhex(manifest)
    old = txn.get("manifests", key)
    known: dict[str, Any] = {"time": time.time()} if old is None else json.loads(old)
    known.update(entry)
    txn.put("manifests", key, json.dumps(known).encode())


def get_manifest(txn: Transaction, manifest: str) -> dict[str, Any] | None:
    """Return a manifest's entry, or None."""
    value = txn.get("manifests", bytes.fromhex(manifest))
    if value is None:
        return None
    entry = json.loads(value)
    if not isinstance(entry, dict):
        raise CorruptionError(f"the catalog's entry for manifest {manifest} is damaged")
    return entry


def name_key(name: str) -> bytes:
    """Return the 16 bytes that stand for a tensor's name in keys."""
    return digest(name.encode())[:16]
