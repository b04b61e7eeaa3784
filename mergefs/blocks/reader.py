"""The one place where blocks are read from packs: counted, limited by the budget, checked against their ids."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from mergefs.backend import Backend
from mergefs.blocks import codecs
from mergefs.blocks.pack import CHECK_BYTES, NO_BASE, Record
from mergefs.catalog.tables import Catalog, Location
from mergefs.errors import BudgetExceededError, CorruptionError
from mergefs.hashing import Buffer, digest


class Kind(enum.Enum):
    """What a read is for."""

    EXPERT = "expert"
    BASE = "base"
    METADATA = "metadata"


@dataclass(frozen=True)
class ReadTotals:
    """Bytes read from storage, by kind."""

    expert: int
    base: int
    metadata: int


class ReadCounter:
    """Counts physical bytes by kind and refuses an expert read that would pass the limit.

    Args:
        expert_limit: the most expert bytes that may be read, or None.
    """

    def __init__(self, expert_limit: int | None = None) -> None:
        self._limit = expert_limit
        self._bytes = dict.fromkeys(Kind, 0)
        self._lock = threading.Lock()

    def limit_expert(self, limit: int) -> None:
        """Set the most expert bytes that may be read, those read already included."""
        with self._lock:
            self._limit = limit

    def add(self, kind: Kind, size: int) -> None:
        """Count a read that is about to happen.

        Raises:
            BudgetExceededError: when it would pass the expert limit; it is then not counted.
        """
        with self._lock:
            total = self._bytes[kind] + size
            if kind is Kind.EXPERT and self._limit is not None and total > self._limit:
                raise BudgetExceededError(
                    f"reading {size} more expert bytes would pass the budget of {self._limit} bytes"
                )
            self._bytes[kind] = total

    @property
    def totals(self) -> ReadTotals:
        """What has been read so far."""
        with self._lock:
            return ReadTotals(self._bytes[Kind.EXPERT], self._bytes[Kind.BASE], self._bytes[Kind.METADATA])


class BlockReader:
    """Reads and decodes blocks by id. Safe to use from many threads.

    Args:
        catalog: where the blocks lie.
        backend: what holds the packs.
        counter: where bytes are counted.
    """

    def __init__(self, catalog: Catalog, backend: Backend, counter: ReadCounter | None = None) -> None:
        self._catalog = catalog
        self._backend = backend
        self.counter = counter or ReadCounter()

    def read(self, block: bytes, kind: Kind, known: Mapping[bytes, Buffer] | None = None) -> Buffer:
        """Return a block's bytes, checked against its id.

        Args:
            block: the id (32 bytes).
            kind: what to count the bytes as; blocks that are read only to decode this one count the same.
            known: bytes of blocks that the caller has already, by id.

        Raises:
            CorruptionError: when the block is missing, damaged, or not what its id says.
            BudgetExceededError: see `ReadCounter.add`.
        """
        record, payload = self._payload(block, kind)
        base: Buffer | None = None
        if record.base != NO_BASE:
            base = known.get(record.base) if known else None
            if base is None:
                base = self._base(record, kind)
        try:
            raw = codecs.decode(record.encoding, payload, record.raw_length, record.dtype, base)
        except CorruptionError as error:
            raise CorruptionError(f"block {block.hex()} is damaged: {error}") from error
        if digest(raw) != block:
            raise CorruptionError(f"block {block.hex()} is damaged: its bytes have another hash")
        return raw

    def read_with_root(self, block: bytes, kind: Kind) -> dict[bytes, Buffer]:
        """Return the bytes of a block, and of the one that it is encoded against where there is one, by id.

        What is encoded against either can then be decoded without reading more; see `known` of `read`. The block
        that everything there is encoded against comes first.

        Raises:
            CorruptionError, BudgetExceededError: see `read`.
        """
        known: dict[bytes, Buffer] = {}
        location = self._catalog.locate(block)
        if location is not None and location.record.base != NO_BASE:
            known[location.record.base] = self.read(location.record.base, kind)
        known[block] = self.read(block, kind, known)
        return known

    def _base(self, record: Record, kind: Kind) -> Buffer:
        location = self._catalog.locate(record.base)
        if location is not None and location.record.base != NO_BASE:
            raise CorruptionError(
                f"block {record.base.hex()} is encoded against another block, and so is {record.block.hex()}"
            )
        return self.read(record.base, kind)

    def _payload(self, block: bytes, kind: Kind) -> tuple[Record, bytes]:
        previous: Location | None = None
        while True:
            location = self._catalog.locate(block)
            if location is None:
                raise CorruptionError(f"block {block.hex()} is not in the repository")
            record = location.record
            try:
                self.counter.add(kind, record.length)
                payload = self._backend.get(pack_name(location.pack), record.offset, record.length)
            except FileNotFoundError:
                # gc may have moved the block to another pack since we looked; then it has another location.
                if location == previous:
                    raise CorruptionError(f"pack {location.pack.hex()} with block {block.hex()} is missing") from None
                previous = location
                continue
            if len(payload) != record.length or digest(payload)[:CHECK_BYTES] != record.check:
                raise CorruptionError(
                    f"block {block.hex()} is damaged: its payload in pack {location.pack.hex()} is not what was written"
                )
            return record, payload


def pack_name(pack: bytes) -> str:
    """Return the object name of a pack."""
    text = pack.hex()
    return f"packs/{text[:2]}/{text}.pack"
