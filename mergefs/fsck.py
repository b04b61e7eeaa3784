"""Checking a repository: every ref, manifest, block and pack, and with `read_data` every byte."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from mergefs.blocks.pack import NO_BASE, Record, hash_file, pack_name, read_records
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.environment import MENDING, Transaction
from mergefs.catalog.leases import Lease, NoLease
from mergefs.catalog.pages import PagesError, check_pages
from mergefs.catalog.tables import TABLES, Location, locations, ref_entries
from mergefs.configuration import CONFIG, configuration_damage
from mergefs.edit.folders import SESSIONS, damaged_files, identities
from mergefs.edit.folders import read as read_session
from mergefs.errors import CorruptionError, MergefsError, NotFoundError
from mergefs.hashing import ID_BYTES, is_hex_id
from mergefs.locks import is_locked
from mergefs.manifest import Manifest
from mergefs.merge.lazy import load_plan
from mergefs.merge.remembered import TABLE as DERIVATIONS
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.plan import Plan
from mergefs.refs import REF_COPIES, decode_ref_copy, ref_copy_name
from mergefs.store import Store

Progress = Callable[[int, int], None]

_BY_MANIFEST = ("manifests", "statistics", "thresholds", "products", "checksums")
"""Tables whose keys begin with the id of the manifest that they are about."""

_LOOKS = 3
"""How often the copy of a ref is compared with the catalog before it is reported."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: `ref`, `manifest`, `plan`, `block`, `pack`, `derivation`, `session`, `configuration`, `entry` (of the
            catalog) or `catalog`.
        name: the ref, or the id; of an entry its table and its key.
        message: what is wrong.
        affects: the refs whose models need it.
    """

    kind: str
    name: str
    message: str
    affects: tuple[str, ...] = ()


@dataclass(frozen=True)
class FsckReport:
    """What a check found.

    Attributes:
        errors: what is wrong; empty when all is well.
        blocks, packs, manifests: how many were checked.
        garbage_packs: pack files that the catalog does not know; gc removes them.
        read_data: whether all bytes were read.
    """

    errors: tuple[Problem, ...]
    blocks: int
    packs: int
    manifests: int
    garbage_packs: int
    read_data: bool

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.errors


def check(store: Store, *, read_data: bool = False, progress: Progress | None = None) -> FsckReport:
    """Check a repository without changing it.

    Args:
        store: the repository.
        read_data: also read and decode every block and compare it with its id, and hash every pack.
        progress: told the blocks checked and the blocks in all (with `read_data`).
    """
    # From here on gc may move blocks to other packs, and take those that no manifest needs; nothing else. What comes
    # after the lease is left for the next time.
    with store.reading("fsck", None) as lease:
        return _check(store, lease, read_data=read_data, progress=progress)


def _check(store: Store, lease: Lease | NoLease, *, read_data: bool, progress: Progress | None) -> FsckReport:
    with store.catalog.read() as txn:
        # First, as LMDB may end the process over a bad page; inside, so that no page is used again meanwhile.
        damage = catalog_damage(store.path)
        if damage is not None:
            return FsckReport((damage,), 0, 0, 0, 0, read_data)
        entries = _damaged_entries(txn)
        txn.skips_damaged = True
        refs = {name: entry["manifest"] for name, entry in ref_entries(txn)}
        manifests = [key.hex() for key, _ in txn.items("manifests")]
        packs = [key for key, _ in txn.items("packs")]
        found: dict[bytes, list[Location]] = {}
        for location in locations(txn):
            found.setdefault(location.record.block, []).append(location)
        derivations = [(key, block) for key, block in txn.items(DERIVATIONS)]
    checker = _Checker(store, refs, found)
    for table, key in entries:
        checker.report_entry(table, key)
    for key, block in derivations:
        if len(key) != ID_BYTES or block not in found:
            message = "a block is remembered that is not stored" if len(block) == ID_BYTES else "its entry is damaged"
            checker.report("derivation", key.hex(), message + ": the next gc removes it")
    for name, identity in refs.items():
        if identity not in manifests:
            checker.report("ref", name, f"it names manifest {identity}, which is not in the catalog", (name,))
    checker.check_configuration()
    checker.check_copies()
    for identity in identities(store):
        checker.check_session(identity, manifests, read_data=read_data)
    checker.check_manifests([m for m in manifests if isinstance(lease, NoLease) or m in lease.manifests])
    for pack in packs:
        checker.check_pack(pack)
    checker.check_located(packs)
    if read_data:
        checker.check_plans()
        checker.check_data(progress)
    known = {pack_name(pack) for pack in packs}
    garbage = sum(name not in known for name, _ in store.backend.list("packs"))
    return FsckReport(tuple(checker.problems), len(found), len(packs), len(manifests), garbage, read_data)


def catalog_damage(path: Path) -> Problem | None:
    """Return what is wrong with the pages of a repository's catalog, which is looked at without LMDB.

    Args:
        path: of the repository, which need not be open.
    """
    try:
        check_pages(path / "catalog" / "data.mdb")
        return None
    except PagesError as error:
        message = str(error)
    except OSError as error:
        message = f"it cannot be read: {error.strerror}"
    known = tuple(sorted(file.name.removesuffix(".json") for file in (path / REF_COPIES).glob("*.json")))
    return Problem("catalog", "data.mdb", f"{message}; {MENDING}", known)


def _damaged_entries(txn: Transaction) -> list[tuple[str, bytes]]:
    return [(table, key) for table in TABLES for key in txn.damaged(table)]


class _Checker:
    def __init__(self, store: Store, refs: dict[str, str], found: dict[bytes, list[Location]]) -> None:
        self._store = store
        self._refs = refs
        self._found = found
        self._in_pack: dict[bytes, list[Record]] = {}
        for locations_of_block in found.values():
            for location in locations_of_block:
                self._in_pack.setdefault(location.pack, []).append(location.record)
        self._refs_of: dict[str, list[str]] = {}
        for name, identity in refs.items():
            self._refs_of.setdefault(identity, []).append(name)
        self._users: dict[bytes, set[str]] = {}
        self._bad: set[bytes] = set()
        self.problems: list[Problem] = []

    def report(self, kind: str, name: str, message: str, affects: tuple[str, ...] = ()) -> None:
        """Note a problem; one that is met several times is one, which affects all."""
        for place, known in enumerate(self.problems):
            if (known.kind, known.name) == (kind, name):
                everything = tuple(sorted({*known.affects, *affects}))
                self.problems[place] = replace(known, affects=everything)
                return
        self.problems.append(Problem(kind, name, message, affects))

    def report_entry(self, table: str, key: bytes) -> None:
        """Note that an entry of the catalog is not what was written."""
        if table == "refs":
            name = key.decode(errors="replace")
            self.report("ref", name, "the catalog's entry is damaged", (name,))
            return
        affects = self._refs_of.get(key[:ID_BYTES].hex(), []) if table in _BY_MANIFEST else []
        self.report("entry", f"{table} {key.hex()}", "it is not what was written", tuple(sorted(affects)))

    def check_session(self, identity: str, manifests: Collection[str], *, read_data: bool) -> None:
        """Check that a session can be resumed."""
        try:
            session = read_session(self._store, identity)
        except NotFoundError:
            return  # it ended just now
        except MergefsError as error:
            self.report("session", identity, str(error))
            return
        if session.in_use:
            return  # its process changes it
        damage = damaged_files(self._store.path / SESSIONS / identity, read_data=read_data)
        if damage:
            if not is_locked(self._store.path / SESSIONS / identity / "lock"):
                self.report("session", identity, ", ".join(damage))
        elif session.manifest not in manifests:
            self.report("session", identity, f"it changes manifest {session.manifest}, which is not in the catalog")

    def check_configuration(self) -> None:
        """Check the repository's configuration and its copy."""
        damage = configuration_damage(self._store.path)
        if damage is not None:
            self.report("configuration", CONFIG, damage)

    def check_copies(self) -> None:
        """Check that the copy of each ref says the same, or what a command that was interrupted was about to do."""
        for name, identity in self._refs.items():
            # A ref that is moved meanwhile may be back by the time it is looked at again; not every time.
            for _ in range(_LOOKS):
                message = self._check_copy(name, identity)
                if message is None or self._store.catalog.ref(name) != identity:
                    break
            else:
                self.report("ref", name, str(message), (name,))

    def _check_copy(self, name: str, identity: str) -> str | None:
        """Return what is wrong with the copy of a ref, or None."""
        try:
            entry = decode_ref_copy(self._store.backend.get(ref_copy_name(name)))
        except FileNotFoundError:
            return "its copy is missing"
        except CorruptionError as error:
            return str(error)
        differs = identity not in (entry["manifest"], entry["previous"])
        return "the catalog and the ref's copy disagree about it" if differs else None

    def check_manifests(self, identities: list[str]) -> None:
        """Check that manifests are whole and that everything they need is in the catalog."""
        needing: dict[bytes, str] = {}
        for identity in identities:
            refs = tuple(self._refs_of.get(identity, ()))
            manifest = self._manifest(identity, refs)
            if manifest is None:
                continue
            self._use(manifest, identity, refs, needing)
            if manifest.lineage.plan is None:
                continue
            plan = self._plan(manifest.lineage.plan, refs)
            for other in (plan.base, *plan.experts) if plan is not None and manifest.is_lazy else ():
                source = self._manifest(other, refs)
                if source is not None:
                    self._use(source, other, refs, needing)
        for block, identity in needing.items():
            self._check_block(block, identity)

    def _manifest(self, identity: str, refs: tuple[str, ...]) -> Manifest | None:
        try:
            return self._store._read_manifest(identity)
        except MergefsError as error:
            self.report("manifest", identity, str(error), refs)
            return None

    def _plan(self, identity: str, refs: tuple[str, ...]) -> Plan | None:
        try:
            return load_plan(self._store, identity)
        except MergefsError as error:
            self.report("plan", identity, str(error), refs)
            return None

    def _use(self, manifest: Manifest, identity: str, refs: tuple[str, ...], needing: dict[bytes, str]) -> None:
        """Note whose blocks a manifest's are, and those that they stand on."""
        for block in manifest.block_ids():
            needing.setdefault(block, identity)
            self._users.setdefault(block, set()).update(refs)
            tiers = self._found.get(block)
            if tiers is not None and tiers[0].record.base != NO_BASE:
                self._users.setdefault(tiers[0].record.base, set()).update(refs)

    def _check_block(self, block: bytes, identity: str) -> None:
        refs = tuple(sorted(self._users[block]))
        tiers = self._found.get(block)
        if tiers is None:
            self._bad_block(block, f"it is missing, and manifest {identity[:12]} needs it", refs)
            return
        record = tiers[0].record
        if [location.record.tier for location in tiers] != list(range(record.tiers)):
            self._bad_block(block, f"it has {len(tiers)} of {record.tiers} tiers", refs)
        if record.base != NO_BASE and record.base not in self._found:
            self._bad_block(block, f"block {record.base.hex()}, its base, is missing", refs)

    def check_pack(self, pack: bytes) -> None:
        """Check that a pack's table is whole and agrees with the catalog."""
        path = self._store.path / pack_name(pack)
        mine = self._in_pack.get(pack, [])
        affects = tuple(sorted(set().union(*(self._users.get(r.block, set()) for r in mine))))
        try:
            records = set(read_records(path))
        except (MergefsError, OSError) as error:
            if self._is_collected(pack):
                return
            message = str(error) if isinstance(error, MergefsError) else "its file is missing or unreadable"
            self.report("pack", pack.hex(), message, affects)
            return
        for record in mine:
            if record not in records:
                self._bad_block(record.block, f"the catalog and pack {pack.hex()[:12]} disagree about it", affects)

    def check_located(self, packs: Collection[bytes]) -> None:
        """Check that the packs in which blocks lie are those that the catalog knows."""
        for pack in self._in_pack.keys() - set(packs):
            affects = tuple(sorted(set().union(*(self._users.get(r.block, set()) for r in self._in_pack[pack]))))
            self.report(
                "entry", f"packs {pack.hex()}", "the catalog has blocks in a pack that it does not know", affects
            )

    def check_plans(self) -> None:
        """Check the plans that no model names."""
        for name, _ in self._store.backend.list("plans"):
            identity = Path(name).stem
            if is_hex_id(identity):
                self._plan(identity, ())

    def check_data(self, progress: Progress | None) -> None:
        """Read every block."""
        firsts = (tiers[0] for tiers in self._found.values())
        items = sorted(firsts, key=lambda loc: (loc.pack, loc.record.offset))
        threads = available_cores()
        reader = BlockReader(self._store.catalog, self._store.backend)
        checked = ordered(lambda loc: _try(reader, loc), items, threads=threads, window=4 * threads)
        for count, (location, message) in enumerate(checked, start=1):
            if message is not None and not self._is_gone(location.record.block):
                users = self._users.get(location.record.block, set())
                self._bad_block(location.record.block, message, tuple(sorted(users)))
            if progress:
                progress(count, len(items))
        for pack in self._in_pack:
            self._check_pack_bytes(pack)

    def _check_pack_bytes(self, pack: bytes) -> None:
        if any(p.kind == "pack" and p.name == pack.hex() for p in self.problems):
            return
        mine = self._in_pack.get(pack, [])
        affects = tuple(sorted(set().union(*(self._users.get(r.block, set()) for r in mine))))
        try:
            identity = hash_file(self._store.path / pack_name(pack))
        except OSError as error:
            if self._is_collected(pack):
                return
            self.report("pack", pack.hex(), f"its file cannot be read: {error.strerror}", affects)
            return
        if identity != pack.hex():
            self.report("pack", pack.hex(), "its bytes have another hash", affects)

    def _is_collected(self, pack: bytes) -> bool:
        """Tell whether gc has replaced a pack since the check began."""
        with self._store.catalog.read() as txn:
            return txn.get("packs", pack) is None

    def _is_gone(self, block: bytes) -> bool:
        """Tell whether gc has taken a block since the check began that no manifest needs."""
        return block not in self._users and self._store.catalog.locate(block) is None

    def _bad_block(self, block: bytes, message: str, refs: tuple[str, ...]) -> None:
        if block not in self._bad:
            self._bad.add(block)
            self.report("block", block.hex(), message, refs)


def _try(reader: BlockReader, location: Location) -> tuple[Location, str | None]:
    try:
        reader.check(location.record.block, Kind.METADATA)
    except MergefsError as error:
        return location, str(error)
    return location, None
