"""The LMDB environment: opening it once a process, growing its map, running transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from mergefs.errors import MergefsError

T = TypeVar("T")

_MAP_START = 1 << 34  # address space only; the file grows as it is used
_MAP_LIMIT = 1 << 42
_TABLES = 16
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
        try:
            try:
                self._env = self._opened(sync, lock=True)
            except lmdb.Error:
                if not readonly:
                    raise
                # Readers enter themselves in the lock file; who may not write to it reads without.
                self._env = self._opened(sync, lock=False)
            self._env.reader_check()
            self._tables = {name: self._table(name) for name in tables}
        except lmdb.Error as error:
            raise MergefsError(f"the catalog at {path} cannot be opened: {error}") from error

    def _table(self, name: str) -> Any:
        try:
            return self._env.open_db(name.encode(), create=not self.readonly)
        except lmdb.NotFoundError:
            return None  # written before there was this table, and open for reading only: it is empty

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
                txn = self._env.begin(write=False, buffers=False)
            except lmdb.MapResizedError:
                txn = None
            if txn is not None:
                with txn:
                    yield Transaction(txn, self._tables, self.path)
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
                with self._gate.inside(), self._env.begin(write=True, buffers=False) as txn:
                    return action(Transaction(txn, self._tables, self.path))
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.MapFullError:
                size = self._env.info()["map_size"] * 2
                if size > _MAP_LIMIT:
                    raise MergefsError(f"the catalog at {self.path} has reached its largest size") from None
                self._resize(size)
            except lmdb.ReadonlyError as error:
                raise MergefsError(f"the catalog at {self.path} is read-only") from error
            except lmdb.Error as error:
                raise MergefsError(f"the catalog at {self.path} failed: {error}") from error

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
    """Access to the tables inside one transaction."""

    def __init__(self, txn: Any, tables: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        """Of the environment."""
        self._txn = txn
        self._tables = tables

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of `key`, or None."""
        found = self._tables[table]
        value = None if found is None else self._txn.get(key, db=found)
        return None if value is None else bytes(value)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set `key`."""
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        """Remove `key`; tell whether it was there."""
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
        """Yield the pairs whose key begins with `prefix`, in the order of their keys."""
        found = self._tables[table]
        if found is None:
            return
        with self._txn.cursor(db=found) as cursor:
            if not cursor.set_range(prefix):
                return
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield bytes(key), bytes(value)


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
