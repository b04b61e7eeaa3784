"""The LMDB environment: opening it once a process, growing its map, running transactions, checking what is read."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from mergefs.catalog.pages import FORMAT_TABLE, LAST_KEY, PagesError, check_size
from mergefs.errors import CatalogDamagedError, MergefsError, UserError

T = TypeVar("T")

CHECK_BYTES = 4
"""Of the CRC-32 behind every value."""

MENDING = "'mergefs catalog rebuild' makes the catalog anew from the other files"
_VERSION_KEY = b"version"
_CHECKED = b"\2"
"""What a catalog says whose values have checks; one without the key is of the first version, and has none."""

_MAP_START = 1 << 34  # address space only; the file grows as it is used
_MAP_LIMIT = 1 << 42
_TABLES = 16
_ATTEMPTS = 5
_READERS = 1024


class Environment:
    """One LMDB environment with named tables.

    The map grows by doubling when a transaction finds it full: the transaction is then run again, so it must
    have no effect outside the catalog that cannot be repeated.
    """

    def __init__(self, path: Path, tables: tuple[str, ...], *, readonly: bool, sync: bool = True) -> None:
        self.path = path
        self.readonly = readonly
        self._gate = _Gate()
        self._checks = False
        try:
            check_size(path / "data.mdb")
        except PagesError as error:
            raise CatalogDamagedError(f"the catalog at {path} is damaged: {error}; {MENDING}") from error
        try:
            try:
                self._env = self._opened(sync, lock=True)
            except lmdb.Error:
                if not readonly:
                    raise
                # Readers enter themselves in the lock file; who may not write to it reads without.
                self._env = self._opened(sync, lock=False)
            self._env.reader_check()
            self._tables = self._opened_tables((FORMAT_TABLE, *tables))
            self._check_last()
        except lmdb.Error as error:
            raise MergefsError(f"the catalog at {path} cannot be opened: {error}") from error

    def _check_last(self) -> None:
        """See `Transaction.check_last`.

        LMDB takes a snapshot in two steps, its number and then what it holds. Where others commit twice in between, the
        snapshot is a later one than its number says: that is no damage, and does not last.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self.read() as txn:
                    txn.check_last()
                return
            except CatalogDamagedError:
                if not left:
                    raise

    def _opened_tables(self, names: tuple[str, ...]) -> dict[str, Any]:
        if self.readonly:
            return {name: self._table(name) for name in names}
        # In one transaction, so that its number is noted with the tables that it makes.
        with self._env.begin(write=True, buffers=True) as txn:
            count = txn.stat()["entries"]
            found = {name: self._env.open_db(name.encode(), txn=txn) for name in names}
            if count == 0:
                transaction = Transaction(txn, found, self.path, checks=True)
                transaction.put(FORMAT_TABLE, _VERSION_KEY, _CHECKED)
            else:
                transaction = self._transaction(txn, found)
                transaction.changed = txn.stat()["entries"] != count
            transaction.leave_last()
            return found

    def _table(self, name: str) -> Any:
        try:
            return self._env.open_db(name.encode(), create=False)
        except lmdb.NotFoundError:
            return None  # written before there was this table: it is empty

    def _transaction(self, txn: Any, tables: dict[str, Any]) -> Transaction:
        if not self._checks:  # once a catalog has checks, it keeps them
            table = tables[FORMAT_TABLE]
            self._checks = table is not None and txn.get(_VERSION_KEY, db=table) is not None
        return Transaction(txn, tables, self.path, checks=self._checks)

    @property
    def has_checks(self) -> bool:
        """Whether values have checks; those of a catalog of the first version have none."""
        with self.read():
            return self._checks

    def add_checks(self) -> None:
        """Give every value of a catalog of the first version its check, all at once."""

        def add(transaction: Transaction) -> None:
            if transaction.checks:
                return
            checked = Transaction(transaction._txn, self._tables, self.path, checks=True)
            for table in self._tables:
                for key in [key for key, _ in transaction.items(table)]:
                    checked.put(table, key, transaction.get(table, key) or b"")
            checked.put(FORMAT_TABLE, _VERSION_KEY, _CHECKED)
            checked.leave_last()

        self.write(add)

    def _opened(self, sync: bool, *, lock: bool) -> Any:
        return lmdb.open(
            str(self.path),
            map_size=max(_MAP_START, _data_size(self.path) * 2),
            max_dbs=_TABLES,
            max_readers=_READERS,
            readonly=self.readonly,
            create=not self.readonly,
            sync=sync,
            metasync=sync,
            lock=lock,
            readahead=False,
            mode=0o600,
        )

    def close(self) -> None:
        """Close the environment; nothing may use it afterwards."""
        self._env.close()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Run a read transaction: a snapshot of the catalog. Write transactions do not belong inside it."""
        with self._gate.inside():
            try:
                txn = self._env.begin(write=False, buffers=True)
            except lmdb.MapResizedError:
                txn = None
            except lmdb.Error as error:
                raise self._failed(error) from error
            if txn is not None:
                try:
                    with txn:
                        yield self._transaction(txn, self._tables)
                except lmdb.Error as error:
                    raise self._failed(error) from error
                return
        self._resize(0)
        with self.read() as transaction:
            yield transaction

    def write(self, action: Callable[[Transaction], T]) -> T:
        """Run `action` in a write transaction and commit what it did, durably and all at once.

        When the map is full, it is doubled and `action` runs again.
        """
        while True:
            try:
                with self._gate.inside(), self._env.begin(write=True, buffers=True) as txn:
                    transaction = self._transaction(txn, self._tables)
                    found = action(transaction)
                    transaction.leave_last()
                    return found
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.MapFullError:
                size = self._env.info()["map_size"] * 2
                if size > _MAP_LIMIT:
                    raise MergefsError(f"the catalog at {self.path} has reached its largest size") from None
                self._resize(size)
            except lmdb.ReadonlyError as error:
                raise UserError(
                    f"{self.path.parent} is open for reading only: this needs the right to write to it"
                ) from error
            except lmdb.Error as error:
                raise self._failed(error) from error

    def _failed(self, error: Exception) -> MergefsError:
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return CatalogDamagedError(f"the catalog at {self.path} is damaged: {error}; {MENDING}")
        if isinstance(error, lmdb.PanicError):
            return MergefsError(f"the catalog at {self.path} could not be written: is the disk full, or failing?")
        return MergefsError(f"the catalog at {self.path} failed: {error}")

    def _resize(self, size: int) -> None:
        """Set the map's size (0: adopt what another process set), with no transaction of ours under way."""
        with self._gate.alone():
            self._env.set_mapsize(size)


class _Gate:
    """Many may be inside, or one alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._condition:
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._inside == 0)
            yield


class Transaction:
    """Access to the tables inside one transaction.

    Behind every value lies the CRC-32 of its table's name, its key and itself, which is compared when it is read. A
    catalog of the first version has none.
    """

    def __init__(self, txn: Any, tables: dict[str, Any], folder: Path, *, checks: bool) -> None:
        self.folder = folder
        """Of the environment."""
        self.checks = checks
        """Whether values have checks."""
        self.changed = False
        """Whether something was put or deleted."""
        self.skips_damaged = False
        """Whether entries that are damaged count as missing, for who checks or mends."""
        self._txn = txn
        self._tables = tables

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of `key`, or None.

        Raises:
            CatalogDamagedError: when it is not what was put.
        """
        found = self._tables[table]
        value = None if found is None else self._txn.get(key, db=found)
        try:
            return None if value is None else self._checked(table, key, value)
        except CatalogDamagedError:
            if self.skips_damaged:
                return None
            raise

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set `key`."""
        self.changed = True
        self._txn.put(key, value + _check(table, key, value) if self.checks else value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        """Remove `key`; tell whether it was there."""
        self.changed = True
        return bool(self._txn.delete(key, db=self._tables[table]))

    def count(self, table: str) -> int:
        """Return the number of keys."""
        found = self._tables[table]
        return 0 if found is None else int(self._txn.stat(found)["entries"])

    def size(self, table: str) -> int:
        """Return the bytes of the pages that a table is in."""
        found = self._tables[table]
        if found is None:
            return 0
        stat = self._txn.stat(found)
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def items(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the pairs whose key begins with `prefix`, in the order of their keys.

        Raises:
            CatalogDamagedError: see `get`.
        """
        for key, value in self._pairs(table, prefix):
            try:
                content = self._checked(table, key, value)
            except CatalogDamagedError:
                if self.skips_damaged:
                    continue
                raise
            yield key, content

    def keys(self, table: str, prefix: bytes = b"") -> Iterator[bytes]:
        """Yield the keys that begin with `prefix` in their order, whether or not their values are damaged."""
        return (key for key, _ in self._pairs(table, prefix))

    def damaged(self, table: str) -> Iterator[bytes]:
        """Yield the keys whose values are not what was put."""
        for key, value in self._pairs(table, b""):
            try:
                self._checked(table, key, value)
            except CatalogDamagedError:
                yield key

    def check_last(self) -> None:
        """Check that this is the state that the latest transaction left.

        Raises:
            CatalogDamagedError: when LMDB takes an earlier one for the latest.
        """
        last = self.get(FORMAT_TABLE, LAST_KEY) if self.checks else None
        if last is not None and int.from_bytes(last, "little") != self._txn.id():
            raise CatalogDamagedError(f"the catalog at {self.folder} is not in its latest state; {MENDING}")

    def leave_last(self) -> None:
        """Note the number of this transaction where it changes something; see `check_last`."""
        if self.checks and self.changed:
            self.put(FORMAT_TABLE, LAST_KEY, int(self._txn.id()).to_bytes(8, "little"))

    def _pairs(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
        found = self._tables[table]
        if found is None:
            return
        with self._txn.cursor(db=found) as cursor:
            if not cursor.set_range(prefix):
                return
            for key, value in cursor:
                own = bytes(key)
                if not own.startswith(prefix):
                    return
                yield own, value

    def _checked(self, table: str, key: bytes, value: Any) -> bytes:
        if not self.checks:
            return bytes(value)
        content = bytes(value[:-CHECK_BYTES])
        if value[-CHECK_BYTES:] != _check(table, key, content):
            raise CatalogDamagedError(
                f"the catalog's entry {key.hex()} in its table {table} is damaged: 'mergefs fsck --repair' mends it"
            )
        return content


def _check(table: str, key: bytes, value: bytes) -> bytes:
    return zlib.crc32(value, zlib.crc32(key, zlib.crc32(table.encode()))).to_bytes(CHECK_BYTES, "little")


def _data_size(path: Path) -> int:
    try:
        return (path / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0


class _Shared:
    """LMDB forbids opening one environment twice in a process, so equal paths share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[Environment, int]] = {}

    def acquire(self, path: Path, make: Callable[[], Environment], *, readonly: bool) -> Environment:
        with self._lock:
            found = self._open.get(path)
            environment, users = found if found else (make(), 0)
            if environment.readonly and not readonly:
                raise MergefsError(f"the catalog at {path} is open for reading only in this process: close it first")
            self._open[path] = (environment, users + 1)
            return environment

    def release(self, path: Path) -> None:
        with self._lock:
            environment, users = self._open[path]
            if users > 1:
                self._open[path] = (environment, users - 1)
            else:
                del self._open[path]
                environment.close()


shared = _Shared()
"""The environments that are open in this process."""
