"""Checking a repository: every ref, manifest, block and pack, and with `read_data` every byte."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mergefs.blocks.pack import NO_BASE, Record, hash_file, pack_name, read_records
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.leases import Lease, NoLease
from mergefs.catalog.tables import Location, locations, ref_entries
from mergefs.edit.folders import identities
from mergefs.edit.folders import read as read_session
from mergefs.errors import CorruptionError, MergefsError, NotFoundError
from mergefs.hashing import ID_BYTES
from mergefs.manifest import Manifest
from mergefs.merge.lazy import load_plan
from mergefs.merge.remembered import TABLE as DERIVATIONS
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.plan import Plan
from mergefs.store import REF_COPIES, Store, decode_ref_copy, ref_copy_name

Progress = Callable[[int, int], None]


_LOOKS = 3


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: `ref`, `manifest`, `plan`, `block`, `pack`, `derivation` or `session`.
        name: the ref, or the id.
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
        refs = {name: entry["manifest"] for name, entry in ref_entries(txn)}
        manifests = [key.hex() for key, _ in txn.items("manifests")]
        packs = [key for key, _ in txn.items("packs")]
        found: dict[bytes, list[Location]] = {}
        for location in locations(txn):
            found.setdefault(location.record.block, []).append(location)
        derivations = [(key, block) for key, block in txn.items(DERIVATIONS)]
    checker = _Checker(store, refs, found)
    for key, block in derivations:
        if len(key) != ID_BYTES or block not in found:
            message = "a block is remembered that is not stored" if len(block) == ID_BYTES else "its entry is damaged"
            checker.report("derivation", key.hex(), message + ": the next gc removes it")
    for name, identity in refs.items():
        if identity not in manifests:
            checker.report("ref", name, f"it names manifest {identity}, which is not in the catalog", (name,))
    checker.check_copies()
    for identity in identities(store):
        checker.check_session(identity, manifests)
    checker.check_manifests([m for m in manifests if isinstance(lease, NoLease) or m in lease.manifests])
    for pack in packs:
        checker.check_pack(pack)
    if read_data:
        checker.check_data(progress)
    known = {pack_name(pack) for pack in packs}
    garbage = sum(name not in known for name, _ in store.backend.list("packs"))
    return FsckReport(tuple(checker.problems), len(found), len(packs), len(manifests), garbage, read_data)


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

    def check_session(self, identity: str, manifests: Collection[str]) -> None:
        """Check that a session can be resumed."""
        try:
            session = read_session(self._store, identity)
        except NotFoundError:
            return  # it ended just now
        except MergefsError as error:
            self.report("session", identity, str(error))
            return
        if session.manifest not in manifests:
            self.report("session", identity, f"it changes manifest {session.manifest}, which is not in the catalog")

    def check_copies(self) -> None:
        """Check that the copy of each ref says the same, or what a command that was interrupted was about to do."""
        if not (self._store.path / REF_COPIES).is_dir():
            return  # made before there were copies, and open for reading only
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
