"""One run over a plan: derives block after block and publishes the result, or publishes it lazy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Self

from mergefs.blocks import codecs
from mergefs.blocks.checking import EVERY
from mergefs.blocks.joined import LONGEST, JoinedReads
from mergefs.blocks.reader import BlockReader, ReadCounter, ReadTotals
from mergefs.blocks.writer import BlockWriter
from mergefs.catalog.leases import Lease
from mergefs.catalog.tables import Location, get_tiers, read_tiers
from mergefs.dtypes import DTYPES
from mergefs.errors import UserError
from mergefs.hashing import digest
from mergefs.manifest import Blob, Manifest, Tensor
from mergefs.merge.derive import derive, output_dtype, stored_block
from mergefs.merge.encoding import EncodedBlock, encode_derived
from mergefs.merge.expert import FACTOR_SHARE, FactorCache
from mergefs.merge.output import Output
from mergefs.merge.remembered import TABLE, Derivations
from mergefs.merge.sources import Sources
from mergefs.pipeline import available_cores, ordered
from mergefs.planner.plan import Plan
from mergefs.planner.resolve import Planned
from mergefs.statistics.stored import block_bytes, factor_tiers, tier_bytes
from mergefs.statistics.tensor import TIERS
from mergefs.store import Store

Progress = Callable[[int, int], None]

DEFAULT_MEMORY = 1 << 30
_READING_SHARE = 8
"""What is read ahead may take this part of the memory."""

MOST_LOCATED = 1 << 15
"""Blocks of experts of which it is kept where they lie, some two kilobytes each; others are looked up once more."""


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of the merged tensors.

    Attributes:
        shared: that were stored before the merge: the base's, an expert's, or by chance another one.
        derived: that the merge added.
        lazy: that will be derived when they are read.
        remembered: that an earlier merge derived from the same, and that were not derived again.
    """

    shared: int
    derived: int
    lazy: int
    remembered: int = 0


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        plan, manifest: their ids.
        ref: the result's name.
        previous: the id of the manifest that the ref named before, or None.
        budget_bytes: the budget, or None.
        expert_raw_bytes: what a naive merge would have read of the experts.
        predicted_error: of the merged delta, relative to its norm; 0 when everything is read, None where unknown.
        read: physical bytes read.
        written_bytes: bytes added to the repository's packs and manifests.
        blocks: what became of the tensors' blocks.
        seconds: wall time, planning included.
        notes: sentences about what was fitted so that the models could be merged.
    """

    plan: str
    manifest: str
    ref: str
    previous: str | None
    budget_bytes: int | None
    expert_raw_bytes: int
    predicted_error: float | None
    read: ReadTotals
    written_bytes: int
    blocks: BlockCounts
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figures:
    """What a run reports and did not find out itself.

    Attributes:
        name: the ref for the result.
        began: when the work began, by the monotonic clock.
        budget_bytes, expert_raw_bytes, predicted_error: see `MergeReport`.
        entry: what else the catalog is to say of the result.
        notes: see `MergeReport`.
        expecting: see `Store.publish`.
    """

    name: str
    began: float
    budget_bytes: int | None
    expert_raw_bytes: int
    predicted_error: float | None
    entry: dict[str, object]
    notes: tuple[str, ...] = ()
    expecting: str | None = None

    @classmethod
    def of(cls, planned: Planned, name: str, began: float, entry: dict[str, object]) -> Self:
        """From a plan that was just made."""
        return cls(
            name, began, planned.budget_bytes, planned.expert_raw_bytes, planned.predicted_error, entry, planned.notes
        )


@dataclass(frozen=True)
class _Job:
    """A block to be derived.

    Attributes:
        tensor: the base's.
        number: of the block.
        key: under which it will be remembered.
    """

    tensor: Tensor
    number: int
    key: bytes


@dataclass(frozen=True)
class _Done:
    job: _Job
    size: int
    stored: EncodedBlock


class Run:
    """One run of the engine over one plan."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        lease: Lease,
        counter: ReadCounter,
        threads: int | None,
        max_memory: int,
        factors: FactorCache | None = None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._lease = lease
        self._counter = counter
        self._base = store.manifest(plan.base)
        self._reader = BlockReader(store.catalog, store.backend, counter)
        self._experts = tuple(store.manifest(expert) for expert in plan.experts)
        self._factors = factors or FactorCache.of(self._base, self._experts, max_memory // FACTOR_SHARE)
        max_memory = max(max_memory // 2, max_memory - self._factors.limit)
        self._exact = store.exact
        self._threads = _threads_within(max_memory, threads or available_cores(), len(self._experts), store)
        self._derived: set[tuple[str, int]] = set()
        # Each expert has a run under way in each of its packs, and one more that is not used up.
        self._longest = min(LONGEST, max_memory // (_READING_SHARE * 2 * TIERS * max(1, len(self._experts))))

    def lazy(self, figures: Figures) -> MergeReport:
        """Publish the manifest with its derived blocks left open."""
        blocks: dict[str, tuple[str | None, ...]] = {}
        shared = open_blocks = 0
        for tensor in self._base.tensors:
            mine = tuple(self._stored(tensor, number) for number in range(len(tensor.blocks)))
            blocks[tensor.name] = mine
            open_blocks += mine.count(None)
            shared += len(mine) - mine.count(None)
        counts = BlockCounts(shared, 0, open_blocks)
        with self._writer() as writer:
            manifest = self._output(writer).manifest(blocks)
            writer.flush()
            return self._publish(manifest, writer, counts, figures)

    def eager(self, figures: Figures, progress: Progress | None) -> MergeReport:
        """Derive and store every block, then publish; blocks that are remembered are not derived again.

        When the user interrupts it, what has been derived is stored and remembered, and nothing is published.
        """
        with self._writer() as writer:
            try:
                return self._eager(writer, figures, progress)
            except KeyboardInterrupt:
                writer.flush()
                raise

    def _eager(self, writer: BlockWriter, figures: Figures, progress: Progress | None) -> MergeReport:
        blocks: dict[str, list[str | None]] = {t.name: list(t.blocks) for t in self._base.tensors}
        jobs, remembered = self._open_jobs(writer, blocks)
        derived = 0
        output = self._output(writer)
        sources = self._sources(jobs)
        results = ordered(
            lambda job: self._derive(writer, sources, job),
            self._expected(jobs),
            threads=self._threads,
            window=2 * self._threads + 2,
        )
        for count, done in enumerate(results, start=1):
            derived += self._keep(writer, done)
            blocks[done.job.tensor.name][done.job.number] = done.stored.block.hex()
            if progress:
                progress(count, len(jobs))
        manifest = output.manifest({tensor: tuple(ids) for tensor, ids in blocks.items()})
        writer.flush()
        shared = sum(len(ids) for ids in blocks.values()) - derived - remembered
        return self._publish(manifest, writer, BlockCounts(shared, derived, 0, remembered), figures)

    def _expected(self, jobs: list[_Job]) -> Iterator[_Job]:
        """Yield the jobs, having their base blocks fetched while those before are worked on."""
        for job in jobs:
            block = job.tensor.blocks[job.number]
            if block is not None:
                self._reader.expect(bytes.fromhex(block))
            yield job

    def is_derived(self, tensor: Tensor, number: int) -> bool:
        """Tell whether `eager` derived a block, rather than taking one that was stored."""
        return (tensor.name, number) in self._derived

    def _open_jobs(self, writer: BlockWriter, blocks: dict[str, list[str | None]]) -> tuple[list[_Job], int]:
        """Enter the blocks that are stored, and return the others and how many of the stored ones were remembered."""
        jobs: list[_Job] = []
        taken: list[tuple[Tensor, int, str]] = []
        remembered = 0
        derivations = Derivations(self._plan, self._base, self._experts)
        with self._store.catalog.read() as txn:
            for tensor in self._base.tensors:
                for number, below in enumerate(tensor.blocks):
                    known = self._stored(tensor, number)
                    if known is None:
                        key = derivations.key(txn, tensor, number)
                        known = derivations.find(txn, key)
                        remembered += known is not None
                        if known is None:
                            jobs.append(_Job(tensor, number, key))
                    if known is not None and known != below:
                        taken.append((tensor, number, known))
        for tensor, number, known in taken:
            writer.reuse(bytes.fromhex(known))
            blocks[tensor.name][number] = known
        self._derived = {(job.tensor.name, job.number) for job in jobs}
        return jobs, remembered

    def _size(self, job: _Job) -> int:
        """Return the bytes of a block of the result."""
        first, stop = job.tensor.grid(self._base.block_elements).extent(job.number)
        return (stop - first) * output_dtype(self._plan, job.tensor).itemsize

    def _stored(self, tensor: Tensor, number: int) -> str | None:
        return stored_block(self._plan, self._experts, tensor, number)

    def _sources(self, jobs: list[_Job]) -> Sources:
        """Return the models, of which what these jobs need is read in large pieces."""
        plan, store = self._plan, self._store
        left = self._counter.expert_left
        wanted: list[Location] = []
        located: dict[bytes, tuple[Location, ...]] = {}
        needed = 0
        with store.catalog.read() as txn:
            for job in jobs:
                planned = plan.tensor_by_name.get(job.tensor.name)
                for expert in planned.planned(job.number) if planned else ():
                    assert planned is not None
                    tensor = self._experts[expert].tensor_by_name[job.tensor.name]
                    if tensor.added is not None:
                        needed += sum(block_bytes(txn, tensor, job.tensor, job.number) or ())
                        continue  # a few large blocks, or one by one
                    block, below = (bytes.fromhex(of.blocks[job.number] or "") for of in (tensor, job.tensor))
                    depth = planned.depth(expert, job.number)
                    tiers = get_tiers(txn, block)
                    if len(located) < MOST_LOCATED:
                        located[block] = tiers
                    wanted += read_tiers(tiers, depth)
                    if left is not None:
                        needed += sum(tier_bytes(txn, tiers, below)[:depth])
            factors = factor_tiers(txn, ((expert, plan.tensor_by_name) for expert in self._experts))
            needed += sum(sum(tier_bytes(txn, tiers, b"")) for tiers in factors)
        spare = None if left is None else left - needed
        joined = JoinedReads(
            store.backend,
            wanted,
            spare,
            longest=self._longest,
            apart={location.pack for tiers in factors for location in tiers},
        )
        reader = BlockReader(store.catalog, store.backend, self._counter, joined, EVERY[store.check_blocks], located)
        return Sources(plan, self._base, self._experts, reader, self._factors)

    def _derive(self, writer: BlockWriter, sources: Sources, job: _Job) -> _Done:
        base = sources.base_block(job.tensor, job.number)
        raw = derive(sources, job.tensor, job.number, base)
        return _Done(job, len(raw), encode_derived(self._plan, job.tensor, base, raw, writer.known, self._exact))

    def _keep(self, writer: BlockWriter, done: _Done) -> int:
        stored = done.stored
        writer.note(TABLE, done.job.key, stored.block)
        if stored.encoded is None:
            writer.reuse(stored.block)
            return 0
        before = writer.new_blocks
        dtype = output_dtype(self._plan, done.job.tensor)
        writer.add(stored.block, stored.encoded, raw_length=done.size, dtype=dtype.code, base=stored.root)
        return writer.new_blocks - before

    def _writer(self) -> BlockWriter:
        store = self._store
        return BlockWriter(store.catalog, store.backend, store.path / "tmp", self._lease, sync=store.sync)

    def _output(self, writer: BlockWriter) -> Output:
        def store_blob(data: bytes) -> Blob:
            block = digest(data)
            if writer.known(block):
                writer.reuse(block)
            else:
                u8 = DTYPES["U8"]
                writer.add(block, codecs.encode(data, u8), raw_length=len(data), dtype=u8.code)
            return Blob(block.hex(), len(data))

        return Output(self._plan, self._base, self._reader, store_blob)

    def _publish(self, manifest: Manifest, writer: BlockWriter, counts: BlockCounts, figures: Figures) -> MergeReport:
        with self._store.catalog.read() as txn:
            known = txn.get("manifests", bytes.fromhex(manifest.id)) is not None
        written = writer.stored_bytes + (0 if known else len(manifest.encoded))
        report = MergeReport(
            self._plan.id,
            manifest.id,
            figures.name,
            None,
            figures.budget_bytes,
            figures.expert_raw_bytes,
            figures.predicted_error,
            self._counter.totals,
            written,
            counts,
            time.monotonic() - figures.began,
            figures.notes,
        )
        shown = {k: v for k, v in asdict(report).items() if k not in ("manifest", "ref", "previous")}
        entry: dict[str, object] = {"raw_bytes": manifest.raw_bytes}
        # A refinement that read nothing deeper is the earlier result: what is known of that stays.
        if figures.entry.get("refines") != manifest.id:
            entry["merge"] = {**shown, **figures.entry}
        previous = self._store.publish(
            manifest,
            figures.name,
            entry,
            plan=(self._plan.id, self._plan.encoded),
            expecting=figures.expecting,
        )
        return replace(
            report,
            previous=None if previous == manifest.id else previous,
            seconds=time.monotonic() - figures.began,
        )


def _threads_within(max_memory: int, threads: int, experts: int, store: Store) -> int:
    """Return how many threads keep the blocks under way within the memory limit."""
    # A block under way: raw and float32 for the base, the result and every expert's delta, one expert's raw
    # bytes twice, and the encoder's planes and output; float64 tensors count double.
    element_bytes = 4 * (experts + 3) + 16
    each = store.block_elements * element_bytes
    if each > max_memory:
        raise UserError(
            f"merging {experts} experts needs {each} bytes for one block: raise --max-memory to at least that"
        )
    return max(1, min(threads, max_memory // each))
