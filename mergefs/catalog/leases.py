"""Leases: what live processes are using, so that gc leaves it alone.

A lease names its process exactly (host, boot, process number and that process's start time), so that a lease
whose process is gone from this host is known to be dead and simply ends.
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
from mergefs.errors import MergefsError

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
        alive: whether its process is known to be alive; a process of another host counts as alive.
    """

    id: str
    purpose: str
    pid: int
    host: str
    since: float
    manifests: tuple[str, ...]
    alive: bool


class Lease:
    """A claim on manifests and blocks by this process, from `take` until `release` (or the process's end)."""

    def __init__(self, catalog: Catalog, purpose: str, manifests: Iterable[str] = ()) -> None:
        self.id = secrets.token_hex(LEASE_BYTES)
        self._catalog = catalog
        self._lock = threading.Lock()
        self._released = False
        entry = {
            **_this_process(),
            "purpose": purpose,
            "since": time.time(),
            "manifests": sorted(set(manifests)),
        }
        # Taken in the same transaction that checks that the manifests still exist, so that gc cannot
        # slip in between.
        catalog.write(lambda txn: self._take(txn, entry))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def claim(self, txn: Transaction, blocks: Iterable[bytes]) -> list[bytes]:
        """Protect blocks from gc for as long as the lease lives; return those that are not stored."""
        key = bytes.fromhex(self.id)
        missing = []
        for block in blocks:
            if get_location(txn, block) is None:
                missing.append(block)
            else:
                txn.put("claims", key + block, b"")
        return missing

    def release(self) -> None:
        """End the lease. Does nothing the second time."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._catalog.write(lambda txn: end(txn, self.id))

    def _take(self, txn: Transaction, entry: dict[str, Any]) -> None:
        for manifest in entry["manifests"]:
            if txn.get("manifests", bytes.fromhex(manifest)) is None:
                raise MergefsError(f"manifest {manifest} is not in the repository any more")
        txn.put("leases", bytes.fromhex(self.id), json.dumps(entry).encode())


def leases(txn: Transaction) -> Iterator[LeaseInfo]:
    """Yield every lease, those of dead processes included."""
    here = _this_process()
    for key, value in txn.items("leases"):
        entry = json.loads(value)
        yield LeaseInfo(
            key.hex(),
            entry["purpose"],
            entry["pid"],
            entry["host"],
            entry["since"],
            tuple(entry["manifests"]),
            _is_alive(entry, here),
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
    return len(dead)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "start": _start_time(pid), "boot": _boot(), "host": socket.gethostname()}


def _is_alive(entry: dict[str, Any], here: dict[str, Any]) -> bool:
    if entry["host"] != here["host"]:
        return True
    return bool(entry["boot"] == here["boot"] and _start_time(entry["pid"]) == entry["start"])


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
