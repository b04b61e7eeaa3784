"""Storing blocks: each once, in packs that become known to the catalog as soon as they are durable."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from mergefs.backend import Backend
from mergefs.blocks.codecs import Encoded
from mergefs.blocks.pack import NO_BASE, PackWriter, pack_name
from mergefs.catalog.environment import Transaction
from mergefs.catalog.leases import Lease
from mergefs.catalog.tables import Catalog, put_packs
from mergefs.errors import BlocksCollectedError

PACK_BYTES = 128 << 20
"""Packs are closed when those that are open together have reached this size."""

_WHOLE = -1
"""Stands for the pack of blocks that have no tiers."""

_CLAIM_BATCH = 256


class BlockWriter:
    """Adds blocks to a repository under a lease. `known` may be called from any thread, the rest from one.

    Args:
        catalog, backend: of the repository.
        temporary: the folder for packs that are being written.
        lease: protects what has been stored and is not referenced yet.
        sync: whether packs are flushed to the disk.
    """

    def __init__(self, catalog: Catalog, backend: Backend, temporary: Path, lease: Lease, *, sync: bool = True) -> None:
        self._catalog = catalog
        self._backend = backend
        self._temporary = temporary
        self._lease = lease
        self._sync = sync
        self._open: dict[int, PackWriter] = {}
        self._packs = 0
        self._new: set[bytes] = set()
        self._reused: set[bytes] = set()
        self._unclaimed: list[bytes] = []
        self._noted: list[tuple[str, bytes, bytes]] = []
        self._lock = threading.Lock()
        self.stored_bytes = 0
        """Bytes of the packs closed so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pack in self._open.values():
            pack.__exit__(kind, error, trace)

    @property
    def new_blocks(self) -> int:
        """Blocks that were not in the repository before."""
        return len(self._new)

    @property
    def reused_blocks(self) -> int:
        """Different blocks that were there already."""
        return len(self._reused)

    def known(self, block: bytes) -> bool:
        """Tell whether a block is stored, or was added here."""
        with self._lock:
            if block in self._new or block in self._reused:
                return True
        return self._catalog.locate(block) is not None

    def add(self, block: bytes, encoded: Encoded, *, raw_length: int, dtype: int, base: bytes = NO_BASE) -> None:
        """Store a block, unless it was added here already."""
        with self._lock:
            if block in self._new:
                return
            self._new.add(block)
        tiers = len(encoded.payloads)
        for tier, payload in enumerate(encoded.payloads):
            self._pack(depth_of(tier, tiers)).append(
                block,
                payload,
                raw_length=raw_length,
                encoding=encoded.encoding_of(tier),
                dtype=dtype,
                base=base if encoded.encoding.needs_base else NO_BASE,
                tier=tier,
                tiers=tiers,
            )
        if sum(pack.size for pack in self._open.values()) >= PACK_BYTES:
            self._close_packs()

    def reuse(self, block: bytes) -> None:
        """Note that a stored block is needed, and protect it.

        Raises:
            BlocksCollectedError: when it is gone after all.
        """
        with self._lock:
            if block in self._new or block in self._reused:
                return
            self._reused.add(block)
        self._unclaimed.append(block)
        if len(self._unclaimed) >= _CLAIM_BATCH:
            self._claim()

    def note(self, table: str, key: bytes, value: bytes) -> None:
        """Have something entered in the catalog together with the blocks that were added so far."""
        self._noted.append((table, key, value))

    def share(self, block: bytes) -> None:
        """Note that a stored block is needed that the lease's manifests protect already."""
        with self._lock:
            self._reused.add(block)

    def flush(self) -> None:
        """Make everything added so far durable and known to the catalog."""
        self._claim()
        self._close_packs()

    def _claim(self) -> None:
        if not self._unclaimed:
            return
        missing = self._catalog.write(lambda txn: self._lease.claim(txn, self._unclaimed))
        self._unclaimed = []
        if missing:
            raise BlocksCollectedError(f"{len(missing)} blocks were collected while they were being reused")

    def _pack(self, depth: int) -> PackWriter:
        if depth not in self._open:
            self._open[depth] = PackWriter(self._temporary / f"{self._lease.id}-{self._packs}", sync=self._sync)
            self._packs += 1
        return self._open[depth]

    def _close_packs(self) -> None:
        """Enter the open packs in one transaction: a block is known with all its tiers or not at all."""
        packs, self._open = [self._open[depth] for depth in sorted(self._open)], {}
        if not packs and not self._noted:
            return
        with ExitStack() as stack:
            for pack in packs:
                stack.push(pack)
            finished = [(bytes.fromhex(pack.finish()), pack) for pack in packs]
        self.stored_bytes += sum(pack.size for pack in packs)
        self._catalog.write(lambda txn: self._register(txn, finished))
        self._noted = []

    def _register(self, txn: Transaction, finished: list[tuple[bytes, PackWriter]]) -> None:
        for identity, pack in finished:
            adopt(self._backend, identity, pack.path)
        put_packs(txn, ((identity, pack.size, pack.records) for identity, pack in finished))
        self._lease.claim(txn, {record.block for _, pack in finished for record in pack.records})
        for table, key, value in self._noted:
            txn.put(table, key, value)


def depth_of(tier: int, tiers: int) -> int:
    """Return which of the packs that are open together a payload belongs in.

    Tiers of one depth lie together, and apart from blocks that are read whole or not at all.
    """
    return tier if tiers > 1 else _WHOLE


def adopt(backend: Backend, pack: bytes, path: Path) -> None:
    """Give the file of a finished pack its name, inside the transaction that enters it.

    gc looks for packs that nobody knows inside a transaction too, and so can never take it for an orphan. A second run
    (after the map grew) finds it moved, unless gc came in between, to which it was an orphan then.

    Raises:
        BlocksCollectedError: in that case.
    """
    if path.exists():
        backend.adopt(pack_name(pack), path)
    elif not backend.exists(pack_name(pack)):
        raise BlocksCollectedError(f"pack {pack.hex()} was collected before it was entered")
