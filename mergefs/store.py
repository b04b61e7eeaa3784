"""The keeping floor: a repository's folder, its manifests, refs and leases."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mergefs import manifest as manifests
from mergefs.again import ATTEMPTS, again_if_collected
from mergefs.backend import LocalBackend, flush_folder
from mergefs.blocks.checking import chosen_checking
from mergefs.blocks.exact import Exact, check_exact
from mergefs.blocks.pack import NO_BASE
from mergefs.catalog.environment import Transaction
from mergefs.catalog.leases import Lease, NoLease, leases
from mergefs.catalog.tables import Catalog, get_location, get_manifest, put_manifest, put_ref, ref_entries
from mergefs.configuration import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_EXACT,
    LARGEST_BLOCK_SIZE,
    VERSION,
    new_config,
    read_config,
    write_config,
)
from mergefs.errors import (
    BlocksCollectedError,
    CatalogDamagedError,
    CatalogMissingError,
    CorruptionError,
    DestinationError,
    NotFoundError,
    RefMovedError,
    UserError,
)
from mergefs.hashing import hex_digest, is_hex_prefix
from mergefs.json_input import load_json
from mergefs.manifest import Manifest
from mergefs.refs import REF_COPIES, check_ref_name, encode_ref_copy, may_be_ref, ref_copy_name

_FOLDERS = ("packs", "manifests", "plans", REF_COPIES, "tmp")
_ABANDONED_AFTER = 3600.0
"""Seconds after which a temporary file that no lease names is taken for left behind."""


class Store:
    """An open repository folder.

    Args:
        path: the folder.
        readonly: open the catalog for reading only.
        sync: flush to the disk what must survive a power cut; False is for tests and throw-away repositories.
        oldest: the lowest version that is opened; only a migration opens one of an earlier version.
        check_blocks: how many of the blocks that merges take deltas of are compared with their ids: `always`, `sampled`
            or `never`; by default what MERGEFS_CHECK_BLOCKS says, or else `sampled`. What is given out as bytes always
            is.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        readonly: bool = False,
        sync: bool = True,
        check_blocks: str | None = None,
        oldest: int = VERSION,
    ) -> None:
        self.path = Path(path).absolute()
        self.check_blocks = chosen_checking(check_blocks)
        self.config = read_config(self.path, oldest=oldest)
        self.block_elements: int = self.config["block_elements"]
        self.sync = sync
        self.readonly = readonly
        self.backend = LocalBackend(self.path, sync=sync)
        # LMDB would make an empty one, and gc take everything for garbage.
        if not _size(self.path / "catalog" / "data.mdb"):
            raise CatalogMissingError(
                f"{self.path} has no catalog: 'mergefs catalog rebuild' makes it anew from the other files"
            )
        self.catalog = Catalog(self.path / "catalog", readonly=readonly, sync=sync)
        self._load_manifest = lru_cache(maxsize=64)(self._read_manifest)
        if not readonly:
            self._sweep_temporary()

    @classmethod
    def init(
        cls,
        path: str | Path,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        exact: str = DEFAULT_EXACT,
        sync: bool = True,
    ) -> Self:
        """Make a new repository in a folder that is empty or does not exist yet, and open it.

        Args:
            path: the folder.
            block_size: bytes of a block of 2-byte elements, a multiple of 4 KiB; blocks of other dtypes hold
                as many elements.
            exact: the coding of experts' exact tiers, `fast`, `small` or `quick`.
            sync: see `Store`.

        Raises:
            DestinationError: when the folder holds anything, or cannot be made.
            UserError: when the block size is out of range, or there is no such coding.
        """
        if str(path) == "":
            raise UserError("the repository's folder is an empty text: name a folder")
        folder = Path(path).absolute()
        if block_size % 4096 or not 4096 <= block_size <= LARGEST_BLOCK_SIZE:
            raise UserError(f"a block size of {block_size} bytes: it must be a multiple of 4 KiB up to 256 MiB")
        coding = check_exact(exact)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise DestinationError(f"{folder} is not empty: name a new folder for the repository")
            for name in _FOLDERS:
                (folder / name).mkdir(mode=0o700)
        except OSError as error:
            raise DestinationError(f"{folder} cannot be made into a repository: {error.strerror or error}") from error
        Catalog.create(folder / "catalog", sync=sync).close()
        for made in (folder / "catalog", folder, folder.parent) if sync else ():
            flush_folder(made)
        # Written last: a folder without it is not a repository.
        write_config(folder, new_config(block_size, coding), sync=sync)
        return cls(folder, sync=sync)

    @classmethod
    def open(
        cls, path: str | Path, *, readonly: bool = False, sync: bool = True, check_blocks: str | None = None
    ) -> Self:
        """Open a repository; see `Store` for what can be said.

        Raises:
            NotARepositoryError: when the folder is not one.
            FormatVersionError: when it was made by a newer mergefs, or is to be migrated.
        """
        return cls(path, readonly=readonly, sync=sync, check_blocks=check_blocks)

    def close(self) -> None:
        """Close the catalog; the object is not usable afterwards."""
        self.catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- configuration -------------------------------------------------------------------------------------

    @property
    def exact(self) -> Exact:
        """The coding that experts' exact tiers are written in, as the configuration says now."""
        return check_exact(read_config(self.path)["exact"])

    def use_exact(self, exact: str) -> None:
        """Have experts' exact tiers written in another coding from now on.

        What is stored stays as it is, and is read whichever coding it has; see `mergefs.repack`. So does what an
        ingest writes that has begun before.

        Raises:
            UserError: when there is no such coding.
        """
        config = {**read_config(self.path), "exact": check_exact(exact)}
        write_config(self.path, config, sync=self.sync)

    def set_version(self, version: int) -> None:
        """Raise the repository's version, once everything in it is as that one has it."""
        self.config = {**read_config(self.path, oldest=1), "version": version}
        write_config(self.path, self.config, sync=self.sync)

    # -- manifests -----------------------------------------------------------------------------------------

    def manifest(self, identity: str) -> Manifest:
        """Return the manifest with this id.

        Raises:
            BlocksCollectedError: when it was collected, so that whoever looked it up may do so again.
            CorruptionError: when its file is missing or damaged.
        """
        return self._load_manifest(identity)

    def resolve_plan(self, text: str) -> str:
        """Return the id of the stored plan that `text` names: an id, or at least its first eight digits.

        Raises:
            NotFoundError: when there is no such plan, or several begin so.
        """
        found = []
        if is_hex_prefix(text):
            names = (name.rpartition("/")[2].partition(".")[0] for name, _ in self.backend.list("plans"))
            found = [name for name in names if name.startswith(text)]
        if len(found) != 1:
            what = "several plans begin so" if found else "'mergefs plan' stores one until the next gc"
            raise NotFoundError(f"'{text}' is not the id of a stored plan: {what}")
        return found[0]

    def manifest_ids(self) -> list[str]:
        """Return the ids of all manifests."""
        with self.catalog.read() as txn:
            return [key.hex() for key, _ in txn.items("manifests")]

    def manifest_entry(self, identity: str) -> dict[str, Any]:
        """Return what the catalog says of a manifest: `time`, `raw_bytes`, an ingest's `base`, and `merge` with the
        figures of that run."""
        with self.catalog.read() as txn:
            return get_manifest(txn, identity) or {}

    def manifest_time(self, identity: str) -> float:
        """Return when a manifest was first committed, in seconds since 1970 (0 when nobody knows)."""
        return float(self.manifest_entry(identity).get("time", 0.0))

    def publish(
        self,
        manifest: Manifest,
        name: str,
        entry: dict[str, Any],
        *,
        extra: Publication = (),
        plan: tuple[str, bytes] | None = None,
        expecting: str | None = None,
    ) -> str | None:
        """Make a manifest durable, then visible under a name, in one catalog transaction.

        Args:
            manifest: all its blocks are stored, and protected by a lease of the caller's.
            name: the ref to point at it.
            entry: what the catalog is to say of it besides its time.
            extra: further puts for the same transaction.
            plan: id and canonical form of the plan that it came from.
            expecting: the id of the manifest that the ref has to name until now, "" for a ref that there is not; any
                when None.

        Returns:
            The id of the manifest that the ref named before, or None.

        Raises:
            RefMovedError: when the ref names neither what was expected nor this manifest.
        """
        check_ref_name(name)
        objects = [(manifest_name(manifest.id), manifest.encoded)]
        if plan is not None:
            objects.append((plan_name(plan[0]), plan[1]))
        self._put_all(objects)

        def commit(txn: Transaction) -> str | None:
            if expecting is not None:
                _check_unmoved(txn, name, {expecting, manifest.id})
            # Once more inside the transaction, where gc cannot be: it may have taken equal objects for dead.
            self._put_all(objects)
            _check_whole(txn, manifest)
            put_manifest(txn, manifest.id, entry)
            for table, key, value in extra:
                txn.put(table, key, value)
            previous = put_ref(txn, name, manifest.id)
            self.copy_ref(txn, name)
            return previous

        return self.catalog.write(commit)

    def keep(self, manifest: Manifest, lease: Lease | NoLease, entry: dict[str, Any], extra: Publication = ()) -> None:
        """Make a manifest durable without a name, for as long as the lease lives or others need it.

        Args:
            manifest: all its blocks are stored, and protected by the lease.
            lease: of the caller; protects it from now on.
            entry, extra: see `publish`; what is in the catalog already stays as it is.

        Raises:
            UserError: when it is not here and the repository is open for reading only.
        """
        if isinstance(lease, NoLease):
            if manifest.id not in self.manifest_ids():
                raise UserError(f"{self.path} is open for reading only: fitting these models needs the right to write")
            return

        def commit(txn: Transaction) -> None:
            self._put_all([(manifest_name(manifest.id), manifest.encoded)])
            _check_whole(txn, manifest)
            if get_manifest(txn, manifest.id) is None:
                put_manifest(txn, manifest.id, entry)
            for table, key, value in extra:
                if txn.get(table, key) is None:
                    txn.put(table, key, value)
            lease.protect(txn, manifest.id)

        self.catalog.write(commit)

    def read_object(self, name: str, identity: str, what: str) -> bytes:
        """Return a manifest's or plan's bytes, checked against its id.

        Args:
            name: of the object.
            identity: its id.
            what: how messages call it.

        Raises:
            CorruptionError: when it is missing or damaged.
        """
        try:
            data = self.backend.get(name)
        except FileNotFoundError:
            raise CorruptionError(f"{what} {identity} is missing from the repository") from None
        if hex_digest(data) != identity:
            raise CorruptionError(f"{what} {identity} is damaged: its bytes have another hash")
        return data

    def known_sha256(self, manifest: str, path: str) -> str | None:
        """Return a derived file's SHA-256 where somebody has computed it, or None."""
        with self.catalog.read() as txn:
            value = txn.get("checksums", _checksum_key(manifest, path))
        return None if value is None else value.hex()

    def remember_sha256(self, manifest: str, path: str, sha256: str) -> None:
        """Keep a derived file's SHA-256 for the next who asks."""
        key = _checksum_key(manifest, path)
        self.catalog.write(lambda txn: txn.put("checksums", key, bytes.fromhex(sha256)))

    # -- refs ----------------------------------------------------------------------------------------------

    def refs(self) -> dict[str, str]:
        """Return the refs: name to manifest id."""
        return self.catalog.refs()

    def resolve(self, name: str) -> str:
        """Return the id of the manifest that a ref, an id or an id's prefix (8 digits or more) names.

        Raises:
            NotFoundError: when there is none, or the prefix fits several.
        """
        found = self.catalog.ref(name) if may_be_ref(name) else None
        if found is not None:
            return found
        if is_hex_prefix(name):
            fits = [identity for identity in self.manifest_ids() if identity.startswith(name)]
            if len(fits) == 1:
                return fits[0]
            if fits:
                raise NotFoundError(f"'{name}' is the beginning of {len(fits)} manifests' ids: give more digits")
        raise NotFoundError(f"'{name}' is neither a ref nor a manifest of this repository: 'mergefs ls' shows them")

    def has(self, name: str) -> bool:
        """Tell whether a name can be resolved."""
        try:
            self.resolve(name)
        except NotFoundError:
            return False
        return True

    @again_if_collected
    def tag(self, name: str, target: str) -> str:
        """Point a ref at the manifest that `target` names and return the manifest's id.

        Raises:
            RefNameError: when the name is malformed.
            NotFoundError: when there is no such manifest.
        """
        check_ref_name(name)
        identity = self.resolve(target)

        def point(txn: Transaction) -> None:
            if get_manifest(txn, identity) is None:
                raise BlocksCollectedError(f"manifest {identity} was collected just now")
            put_ref(txn, name, identity)
            self.copy_ref(txn, name)

        self.catalog.write(point)
        return identity

    def remove(self, names: Iterable[str]) -> dict[str, str]:
        """Remove refs, all or none, and return what they named. Blocks go with the next gc.

        Raises:
            NotFoundError: when one of them does not exist; then none is removed.
        """
        wanted = list(dict.fromkeys(names))

        def delete(txn: Transaction) -> dict[str, str]:
            gone = {}
            for name in wanted:
                value = txn.get("refs", name.encode()) if may_be_ref(name) else None
                if value is None:
                    raise NotFoundError(f"there is no ref '{name}': 'mergefs ls' shows them")
                gone[name] = str(load_json(value)["manifest"])
            for name in wanted:
                txn.delete("refs", name.encode())
            return gone

        found = self.catalog.write(delete)

        def forget(txn: Transaction) -> None:
            for name in wanted:
                self.copy_ref(txn, name)

        self.catalog.write(forget)  # a copy without its ref is no damage; a ref without its copy is
        return found

    def copy_ref(self, txn: Transaction, name: str) -> None:
        """Write what a transaction says of a ref to a file, from which a lost catalog's refs come back.

        It is written before the transaction is durable: after a crash in between, a rebuilt catalog has the ref as a
        command was about to leave it, with a manifest that is whole.
        """
        value = txn.get("refs", name.encode())
        if value is None:
            self.backend.delete(ref_copy_name(name))
            return
        entry = load_json(value)
        about = get_manifest(txn, entry["manifest"]) or {}
        self.backend.replace(ref_copy_name(name), encode_ref_copy({**entry, "about": about}))

    # -- leases --------------------------------------------------------------------------------------------

    def lease(self, purpose: str, manifests: Iterable[str] | None = ()) -> Lease:
        """Claim manifests (None: all that there are) for this process until the lease is released or the process ends.

        Raises:
            BlocksCollectedError: when there is not one of them any more.
            UserError: when the repository is open for reading only.
        """
        if self.readonly:
            raise UserError(f"{self.path} is open for reading only: this needs the right to write to it")
        return Lease(self.catalog, purpose, manifests)

    def lookup(self, purpose: str, name: str) -> tuple[str, Lease | NoLease]:
        """Return the id of the manifest that a name is for, and a claim on it (see `reading`).

        Others may move names and collect meanwhile.

        Raises:
            NotFoundError: see `resolve`.
            BlocksCollectedError: when it was moved and collected again and again.
        """
        for _ in range(ATTEMPTS - 1):
            identity = self.resolve(name)
            with suppress(BlocksCollectedError):
                return identity, self.reading(purpose, [identity])
        identity = self.resolve(name)
        return identity, self.reading(purpose, [identity])

    def reading(self, purpose: str, manifests: Iterable[str] | None = ()) -> Lease | NoLease:
        """Claim manifests for reading: a lease, or nothing where the repository is open for reading only.

        Who cannot write cannot tell others what he reads; a gc by somebody who can may then take it away.
        """
        return NoLease() if self.readonly else self.lease(purpose, manifests)

    # -- inside --------------------------------------------------------------------------------------------

    def _put_all(self, objects: list[tuple[str, bytes]]) -> None:
        for name, data in objects:
            self.backend.put(name, data)

    def _read_manifest(self, identity: str) -> Manifest:
        try:
            return manifests.decode(self.read_object(manifest_name(identity), identity, "manifest"))
        except CorruptionError:
            with self.catalog.read() as txn:
                entered = get_manifest(txn, identity) is not None
                wanted = entered or any(entry["manifest"] == identity for _, entry in ref_entries(txn))
            if wanted or self.backend.exists(manifest_name(identity)):
                raise
            raise BlocksCollectedError(f"manifest {identity} is not in the repository any more") from None

    def _sweep_temporary(self) -> None:
        """Remove what dead processes left half-written."""
        files = [file for file in (self.path / "tmp").iterdir() if file.is_file()]
        if not files:
            return
        try:
            with self.catalog.read() as txn:
                alive = {lease.id for lease in leases(txn) if lease.alive}
        except CatalogDamagedError:
            return  # a repair opens it too
        for file in files:
            owner = file.name.partition("-")[0]
            # Small files are named by process, whose number may be another container's: those are only old or not.
            running = owner in alive or (owner.isdecimal() and time.time() - _changed(file) < _ABANDONED_AFTER)
            if not running:
                file.unlink(missing_ok=True)


def _check_whole(txn: Transaction, manifest: Manifest) -> None:
    """Check that everything a manifest needs is still there.

    Raises:
        BlocksCollectedError: when it is not: leases should have prevented that.
        CorruptionError: when a block is of another length than the manifest says, as a stranger's may be.
    """
    for block, size in set(manifest.block_sizes()):
        location = get_location(txn, block)
        base = location.record.base if location else NO_BASE
        if location is None or (base != NO_BASE and get_location(txn, base) is None):
            raise BlocksCollectedError(f"block {block.hex()} was collected before the model was published")
        if location.record.raw_length != size:
            raise CorruptionError(
                f"block {block.hex()} has {location.record.raw_length} bytes, and manifest {manifest.id} says {size}"
            )
    if manifest.is_lazy:
        for identity in (manifest.lineage.base, *manifest.lineage.experts):
            if identity is not None and get_manifest(txn, identity) is None:
                raise BlocksCollectedError(f"model {identity} was collected before its merge was published")


def _check_unmoved(txn: Transaction, name: str, allowed: set[str]) -> None:
    value = txn.get("refs", name.encode())
    now = "" if value is None else str(load_json(value)["manifest"])
    if now not in allowed:
        what = f"names {now[:12]} now" if now else "was removed meanwhile"
        raise RefMovedError(f"'{name}' {what}: begin again, or give the result another name")


Publication = Sequence[tuple[str, bytes, bytes]]
"""Puts for a transaction: table, key, value."""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def manifest_name(identity: str) -> str:
    """Return the object name of a manifest."""
    return f"manifests/{identity[:2]}/{identity}.json"


def plan_name(identity: str) -> str:
    """Return the object name of a plan."""
    return f"plans/{identity[:2]}/{identity}.json"


def _checksum_key(manifest: str, path: str) -> bytes:
    return bytes.fromhex(manifest) + hashlib.sha256(path.encode()).digest()
