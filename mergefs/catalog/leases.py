"""Leases: what live processes are using, so that gc leaves it alone.

Every lease has a file in `catalog/leases` that its process keeps locked (flock). The kernel drops the lock when the
process ends, however it ends and in whatever container it ran, so that a lease whose file can be locked is dead.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import Catalog, get_location
from mergefs.errors import BlocksCollectedError
from mergefs.locks import is_locked, take

LEASE_BYTES = 8


@dataclass(frozen=True)
class LeaseInfo:
    """A lease as the catalog has it.

    Attributes:
        id: hexadecimal.
        purpose: such as `ingest`, `view`, `mount`.
        pid, host: the process that holds it.
        since: when it was taken, in seconds since 1970.
        manifests: the ids of the manifests that it protects.
        alive: whether its process holds the lock on the lease's file.
    """

    id: str
    purpose: str
    pid: int
    host: str
    since: float
    manifests: tuple[str, ...]
    alive: bool


class Lease:
    """A claim on manifests and blocks by this process, until `release` (or the process's end).

    Args:
        catalog: of the repository.
        purpose: for people.
        manifests: the ids of those that are claimed; None for all that there are.

    Attributes:
        manifests: those that were claimed at the beginning.

    Raises:
        BlocksCollectedError: when there is not one of them any more.
    """

    def __init__(self, catalog: Catalog, purpose: str, manifests: Iterable[str] | None = ()) -> None:
        self.id = secrets.token_hex(LEASE_BYTES)
        self.manifests: frozenset[str] = frozenset()
        self._catalog = catalog
        self._lock = threading.Lock()
        self._released = False
        entry = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "purpose": purpose,
            "since": time.time(),
        }
        self._file = _lock(catalog.path, self.id)
        # Taken in the same transaction that checks that the manifests still exist, so that gc cannot
        # slip in between.
        try:
            self.manifests = catalog.write(lambda txn: self._take(txn, entry, manifests))
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def claim(self, txn: Transaction, blocks: Iterable[bytes]) -> list[bytes]:
        """Protect blocks from gc for as long as the lease lives; return those that are not stored.

        Raises:
            BlocksCollectedError: when the lease is gone, and with it the protection of what was claimed before.
        """
        key = bytes.fromhex(self.id)
        if txn.get("leases", key) is None:
            raise BlocksCollectedError(f"lease {self.id} was ended by somebody else")
        missing = []
        for block in blocks:
            if get_location(txn, block) is None:
                missing.append(block)
            else:
                txn.put("claims", key + block, b"")
        return missing

    def protect(self, txn: Transaction, manifest: str) -> None:
        """Claim one more manifest, which the same transaction enters or finds.

        Raises:
            BlocksCollectedError: see `claim`.
        """
        key = bytes.fromhex(self.id)
        value = txn.get("leases", key)
        if value is None:
            raise BlocksCollectedError(f"lease {self.id} was ended by somebody else")
        entry = json.loads(value)
        entry["manifests"] = sorted({*entry["manifests"], manifest})
        txn.put("leases", key, json.dumps(entry).encode())

    def release(self) -> None:
        """End the lease. Does nothing the second time."""
        with self._lock:
            if self._released:
                return
            self._released = True
        try:
            self._catalog.write(lambda txn: end(txn, self.id))
        finally:
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._file)
        _path(self._catalog.path, self.id).unlink(missing_ok=True)

    def _take(self, txn: Transaction, entry: dict[str, Any], manifests: Iterable[str] | None) -> frozenset[str]:
        if manifests is None:
            # With an entry that is damaged gc takes nothing, and fsck still has to look at the others.
            damaged = set(txn.damaged("manifests"))
            manifests = [key.hex() for key in txn.keys("manifests") if key not in damaged]
        claimed = frozenset(manifests)
        for manifest in claimed:
            if txn.get("manifests", bytes.fromhex(manifest)) is None:
                raise BlocksCollectedError(f"manifest {manifest} is not in the repository any more")
        value = {**entry, "manifests": sorted(claimed)}
        txn.put("leases", bytes.fromhex(self.id), json.dumps(value).encode())
        return claimed


class NoLease:
    """What a repository gives that is open for reading only: protects nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def release(self) -> None:
        """Do nothing."""


def leases(txn: Transaction) -> Iterator[LeaseInfo]:
    """Yield every lease, those of dead processes included."""
    for key, value in txn.items("leases"):
        entry = json.loads(value)
        yield LeaseInfo(
            key.hex(),
            entry["purpose"],
            entry["pid"],
            entry["host"],
            entry["since"],
            tuple(entry["manifests"]),
            is_locked(_path(txn.folder, key.hex())),
        )


def claims(txn: Transaction, lease: str) -> Iterator[bytes]:
    """Yield the blocks that a lease protects."""
    prefix = bytes.fromhex(lease)
    for key, _ in txn.items("claims", prefix):
        yield key[len(prefix) :]


def end(txn: Transaction, lease: str) -> None:
    """Remove a lease and its claims."""
    prefix = bytes.fromhex(lease)
    for key in [key for key, _ in txn.items("claims", prefix)]:
        txn.delete("claims", key)
    txn.delete("leases", prefix)


def end_dead(txn: Transaction) -> int:
    """Remove the leases of processes that are gone; return how many there were."""
    dead = [lease.id for lease in leases(txn) if not lease.alive]
    for lease in dead:
        end(txn, lease)
        _path(txn.folder, lease).unlink(missing_ok=True)
    return len(dead)


def living(catalog: Path) -> bool:
    """Tell whether a process holds a lease, without a look at the catalog's tables."""
    return any(is_locked(path) for path in (catalog / "leases").glob("*"))


def _path(catalog: Path, lease: str) -> Path:
    return catalog / "leases" / lease


def _lock(catalog: Path, lease: str) -> int:
    """Make a lease's file and lock it; return the descriptor that holds the lock."""
    path = _path(catalog, lease)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not take(descriptor):
        raise AssertionError("somebody else has locked a file that was just made")
    return descriptor
