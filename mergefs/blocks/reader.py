"""The one place where blocks are read from packs: counted, limited by the budget, checked against their ids."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mergefs.backend import Backend
from mergefs.blocks import codecs
from mergefs.blocks.checking import Sampler
from mergefs.blocks.encoding import EXACT, TIERED, Encoding
from mergefs.blocks.joined import JoinedReads
from mergefs.blocks.pack import CHECK_BYTES, NO_BASE, Record, pack_name
from mergefs.blocks.tiers.scratch import ALONE
from mergefs.catalog.tables import Catalog, Location, read_tiers
from mergefs.errors import BudgetExceededError, CorruptionError
from mergefs.hashing import Buffer, digest

if TYPE_CHECKING:
    from mergefs.blocks.tiers.delta import Delta
    from mergefs.blocks.tiers.exact_fast import ClassOrder


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
    def expert_left(self) -> int | None:
        """How many more expert bytes may be read; None without a limit."""
        with self._lock:
            return None if self._limit is None else self._limit - self._bytes[Kind.EXPERT]

    @property
    def totals(self) -> ReadTotals:
        """What has been read so far."""
        with self._lock:
            return ReadTotals(self._bytes[Kind.EXPERT], self._bytes[Kind.BASE], self._bytes[Kind.METADATA])


@dataclass(frozen=True)
class Depths:
    """A block at all depths.

    Attributes:
        raw: its bytes.
        errors: the squared error of its delta that remains after each tier; () for a block without coarse tiers.
        sampled: float32[sample, coarse tiers]: deltas of sampled elements after each coarse tier, or None.
        root: the bytes of the block that it is encoded against, from which deltas are taken, or None.
    """

    raw: Buffer
    errors: tuple[float, ...]
    sampled: NDArray[np.float32] | None
    root: Buffer | None


class BlockReader:
    """Reads and decodes blocks by id. Safe to use from many threads.

    Args:
        catalog: where the blocks lie.
        backend: what holds the packs.
        counter: where bytes are counted.
        joined: payloads of experts that are expected to be read, for several at once; bytes read through in between
            count like the payloads.
        check: of how many blocks of which only the delta is made one is compared with its id all the same, see
            `blocks.checking`; 0 for none.
        located: where the tiers of blocks lie that are expected, if it has been looked up: each is taken out once.
    """

    def __init__(
        self,
        catalog: Catalog,
        backend: Backend,
        counter: ReadCounter | None = None,
        joined: JoinedReads | None = None,
        check: int = 0,
        located: dict[bytes, tuple[Location, ...]] | None = None,
    ) -> None:
        self.catalog = catalog
        self._backend = backend
        self.counter = counter or ReadCounter()
        self._joined = joined
        self._sampler = Sampler(check)
        self._located = located or {}

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
        locations, payloads = self.read_payloads(block, kind, EXACT)
        record = locations[0].record
        return self._with_base(record, payloads, kind, known)[0]

    def check(self, block: bytes, kind: Kind) -> None:
        """Read all that is stored of a block, also what its bytes are not decoded from.

        Raises: see `read`.
        """
        locations, payloads = self.read_payloads(block, kind)
        record = locations[0].record
        _, base = self._with_base(record, payloads, kind, None)
        if base is not None and len(payloads) > 1:
            self._delta(record, payloads[:-1], base).write(0, np.empty(record.raw_length // 2, np.float32))

    def expect(self, block: bytes) -> None:
        """Note that a block will be read soon, so that its payload may be fetched meanwhile; see `Backend.expect`."""
        location = self.catalog.locate(block)
        if location is not None:
            self._backend.expect(pack_name(location.pack), location.record.offset, location.record.length)

    def expect_whole(self, block: bytes, depth: int | None = None) -> None:
        """Note that all that a block is decoded from will be read soon; see `expect`.

        Args:
            block: the id (32 bytes).
            depth: to which it will be read; exactly, with its base, when None. Otherwise its base is not expected.
        """
        tiers = self.catalog.tiers(block)
        for location in read_tiers(tiers, EXACT if depth is None else depth):
            self._backend.expect(pack_name(location.pack), location.record.offset, location.record.length)
        if depth is None and tiers and tiers[0].record.base != NO_BASE:
            self.expect(tiers[0].record.base)

    def read_with_depths(
        self, block: bytes, kind: Kind, known: Mapping[bytes, Buffer] | None, sample: NDArray[np.int64]
    ) -> Depths:
        """Return a block's bytes, and what its coarse tiers give.

        Args:
            block, kind, known: see `read`.
            sample: places of elements whose coarse deltas are wanted.

        Raises: see `read`.
        """
        from mergefs.blocks import tiers

        locations, payloads = self.read_payloads(block, kind)
        record = locations[0].record
        base = self._base(record, kind, known)
        raw = self._decoded(record, payloads, base)
        if base is None or record.encoding not in TIERED or len(payloads) == 1:
            return Depths(raw, (), None, base)
        exact = tiers.decode_delta(payloads, base)
        errors, sampled = [], np.empty((len(sample), len(payloads) - 1), np.float32)
        for depth in range(1, len(payloads)):
            delta = tiers.decode_delta(payloads[:depth], base)
            sampled[:, depth - 1] = delta[sample]
            rest = exact.astype(np.float64) - delta
            errors.append(float(rest @ rest))
        return Depths(raw, (*errors, 0.0), sampled, base)

    def _with_base(
        self, record: Record, payloads: list[Buffer], kind: Kind, known: Mapping[bytes, Buffer] | None
    ) -> tuple[Buffer, Buffer | None]:
        """Return a block's bytes, which are checked, and those of the block that it is encoded against, which are only
        where the former are wrong: to say which of both is damaged."""
        base = self._base(record, kind, known, check=False)
        try:
            return self._decoded(record, payloads, base), base
        except CorruptionError:
            with suppress(BudgetExceededError):
                self._base(record, kind, known)
            raise

    def _decoded(self, record: Record, payloads: list[Buffer], base: Buffer | None, *, check: bool = True) -> Buffer:
        name = record.block.hex()
        try:
            if record.encoding in TIERED and base is not None:
                raw = codecs.decode_tiers(payloads, record.raw_length, base)
            else:
                raw = codecs.decode(record.encoding, payloads[0], record.raw_length, record.dtype, base)
        except CorruptionError as error:
            raise CorruptionError(f"block {name} is damaged: {error}") from error
        # What is stored as it is was compared with its id when it was read.
        if check and record.encoding != Encoding.RAW and digest(raw) != record.block:
            raise CorruptionError(f"block {name} is damaged: its bytes have another hash")
        return raw

    def read_with_root(self, block: bytes, kind: Kind) -> dict[bytes, Buffer]:
        """Return the bytes of a block, and of the one that it is encoded against where there is one, by id.

        What is encoded against either can then be decoded without reading more; see `known` of `read`. The block
        that everything there is encoded against comes first.

        Raises:
            CorruptionError, BudgetExceededError: see `read`.
        """
        known: dict[bytes, Buffer] = {}
        location = self.catalog.locate(block)
        if location is not None and location.record.base != NO_BASE:
            known[location.record.base] = self.read(location.record.base, kind)
        known[block] = self.read(block, kind, known)
        return known

    def read_coarse(
        self, block: bytes, depth: int, kind: Kind, known: Mapping[bytes, Buffer]
    ) -> tuple[NDArray[np.float32], Buffer]:
        """Return a coarse delta of a block, float32[n], and the bytes of the block that it is from; see `open_coarse`.

        Raises: see `open_coarse` and `Delta.write`.
        """
        delta, base = self.open_coarse(block, depth, kind, known)
        out = np.empty(len(base) // 2, np.float32)
        delta.write(0, out)
        return out, base

    def open_coarse(
        self, block: bytes, depth: int, kind: Kind, known: Mapping[bytes, Buffer], slot: int = ALONE
    ) -> tuple[Delta, Buffer]:
        """Read the first tiers of a block.

        Args:
            block, kind, known: see `read`.
            depth: how many tiers to read; fewer than the block has.
            slot: see `tiers.open_delta`.

        Returns:
            The delta from the block that it is encoded against, and that block's bytes.

        Raises:
            CorruptionError: when a tier is missing or damaged, or the block has no tiers.
            BudgetExceededError: see `ReadCounter.add`.
        """
        locations, payloads = self.read_payloads(block, kind, depth)
        record = locations[0].record
        if record.encoding not in TIERED or not depth < record.tiers:
            raise CorruptionError(f"block {block.hex()} has no {depth} coarse tiers: the plan is for other packs")
        base = self._base(record, kind, known)
        if base is None:
            raise CorruptionError(f"block {block.hex()} has tiers and no base block")
        return self._delta(record, payloads, base, slot=slot), base

    def open_exact(
        self,
        block: bytes,
        kind: Kind,
        known: Mapping[bytes, Buffer],
        base: Buffer,
        order: ClassOrder | None = None,
        slot: int = ALONE,
    ) -> Delta | Buffer:
        """Return a block's exact delta from `base` where it has tiers that were encoded against that; otherwise its
        bytes.

        For a delta the block's bytes are not made, but of those blocks that are to be compared with their ids. Every
        payload is checked, and the base is by who read it.

        Args:
            block, kind, known: see `read`.
            base: one of the values of `known`.
            order: that of `base`, where several blocks are decoded against it; see `tiers.class_order`.
            slot: see `tiers.open_delta`.

        Raises: see `read`.
        """
        locations, payloads = self.read_payloads(block, kind, EXACT)
        record = locations[0].record
        if record.encoding in TIERED and known.get(record.base) is base:
            if self._sampler.is_due():
                self._decoded(record, payloads, base)
            return self._delta(record, payloads, base, order, slot)
        return self._decoded(record, payloads, self._base(record, kind, known))

    def _delta(
        self, record: Record, payloads: list[Buffer], base: Buffer, order: ClassOrder | None = None, slot: int = ALONE
    ) -> Delta:
        from mergefs.blocks import tiers

        if len(base) != record.raw_length:
            raise CorruptionError(
                f"block {record.block.hex()} is damaged: it has {record.raw_length} bytes and its base {len(base)}"
            )
        return tiers.open_delta(payloads, base, order, slot, name=f"block {record.block.hex()}")

    def _base(
        self, record: Record, kind: Kind, known: Mapping[bytes, Buffer] | None, *, check: bool = True
    ) -> Buffer | None:
        """Return the bytes of the block that a block is encoded against; None where it is encoded alone.

        Args:
            check: whether what is read, and the bytes, are checked. Who checks the block that is decoded with them can
                do without: with other bytes it would be another block.
        """
        if record.base == NO_BASE:
            return None
        if known is not None and record.base in known:
            return known[record.base]
        location = self.catalog.locate(record.base)
        if location is not None and location.record.base != NO_BASE:
            raise CorruptionError(
                f"block {record.base.hex()} is encoded against another block, and so is {record.block.hex()}"
            )
        locations, payloads = self.read_payloads(record.base, kind, check=check)
        return self._decoded(locations[0].record, payloads, None, check=check)

    def read_payloads(
        self, block: bytes, kind: Kind, depth: int | None = None, *, check: bool = True
    ) -> tuple[tuple[Location, ...], list[Buffer]]:
        """Return where all of a block's tiers lie, and the payloads that are read for a depth (all when None).

        Args:
            block, kind: see `read`.
            depth: see above.
            check: whether the payloads are checked.

        Raises:
            CorruptionError: when the block is missing, or a payload is not what was written.
            BudgetExceededError: see `ReadCounter.add`.
        """
        locations = self._located.pop(block, None) or self.catalog.tiers(block)
        payloads: list[Buffer] = []
        moved: Location | None = None
        while True:
            if not locations:
                raise CorruptionError(f"block {block.hex()} is not in the repository")
            wanted = locations if depth is None else read_tiers(locations, depth)
            try:
                for location in wanted[len(payloads) :]:
                    payloads.append(self._payload(location, kind, check=check))
            except FileNotFoundError:
                # gc may have moved the tier to another pack since we looked; then it has another location.
                lost = wanted[len(payloads)]
                if lost == moved:
                    raise CorruptionError(f"pack {lost.pack.hex()} with block {block.hex()} is missing") from None
                moved = lost
                locations = self.catalog.tiers(block)
                continue
            return locations, payloads

    def _payload(self, location: Location, kind: Kind, *, check: bool) -> Buffer:
        record = location.record
        payload: Buffer | None = None
        if self._joined is not None:
            payload = self._joined.take(location, partial(self.counter.add, kind))
        if payload is None:
            self.counter.add(kind, record.length)
            payload = self._backend.get(pack_name(location.pack), record.offset, record.length)
        if not check and len(payload) == record.length:
            return payload
        found = digest(payload)
        if len(payload) != record.length or found[:CHECK_BYTES] != record.check:
            which = f"tier {record.tier} of block" if record.tiers > 1 else "block"
            raise CorruptionError(
                f"{which} {record.block.hex()} is damaged: its payload in pack {location.pack.hex()} is not what"
                " was written"
            )
        if record.encoding == Encoding.RAW and found != record.block:
            raise CorruptionError(f"block {record.block.hex()} is damaged: its bytes have another hash")
        return payload
