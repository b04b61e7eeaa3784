"""Sending a model from one side to another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mergefs.again import again_if_collected
from mergefs.blocks import codecs
from mergefs.blocks.encoding import TIERED
from mergefs.blocks.pack import CHECK_BYTES, NO_BASE, Record, largest_block
from mergefs.catalog.tables import Location
from mergefs.configuration import CONFIG
from mergefs.dtypes import BY_CODE
from mergefs.errors import CorruptionError, NotARepositoryError, UserError
from mergefs.hashing import digest
from mergefs.manifest import Manifest
from mergefs.planner import plan as plans
from mergefs.refs import check_ref_name
from mergefs.store import Store
from mergefs.transfer.archive import Archive, is_url
from mergefs.transfer.repository import RepositorySide
from mergefs.transfer.side import Model, Receiver, Side

_BATCH = 16 << 20
"""So many bytes of payloads are read before they are written."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TransferReport:
    """What travelled.

    Attributes:
        ref, manifest: what the receiver has now.
        blocks_sent, blocks_there: blocks that travelled, and that the receiver had.
        bytes_sent: of their payloads.
        bytes_written: by the receiver.
        seconds: wall time.
    """

    ref: str
    manifest: str
    blocks_sent: int
    blocks_there: int
    bytes_sent: int
    bytes_written: int
    seconds: float


def push(
    store: Store,
    name: str,
    remote: str,
    as_: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> TransferReport:
    """Send a model to another repository (a path) or to an archive (an fsspec URL), which is made where there is none.

    What the other side has is not sent. The ref is set last. When it is interrupted, it goes on from what has arrived.

    Args:
        store: the repository.
        name: a ref or an id.
        remote: the other side.
        as_: the ref there; by default the same.
        force: move a ref there that names another model.
        progress: told the bytes sent and to be sent.

    Raises:
        NotFoundError: when there is no such model.
        RefMovedError: when the ref there names another model, and it is not to be moved.
        UserError: when the other side cuts blocks of another size, or cannot be used.
        CorruptionError: when something that is needed is missing or damaged.
    """
    source = RepositorySide(store)
    check_ref_name(as_ or name)
    if is_url(remote):
        return copy(
            source,
            name,
            Archive(remote, store.block_elements, sync=store.sync),
            as_ or name,
            force=force,
            progress=progress,
        )
    with _repository(remote, readonly=False, sync=store.sync) as other:
        return copy(source, name, RepositorySide(other), as_ or name, force=force, progress=progress)


def pull(
    store: Store,
    name: str,
    remote: str,
    as_: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> TransferReport:
    """Fetch a model from another repository or from an archive; see `push`."""
    target = RepositorySide(store)
    check_ref_name(as_ or name)
    if is_url(remote):
        return copy(Archive(remote), name, target, as_ or name, force=force, progress=progress)
    # Who may write there can tell gc what is being read.
    readonly = not os.access(Path(remote) / "catalog", os.W_OK)
    with _repository(remote, readonly=readonly, sync=store.sync) as other:
        return copy(RepositorySide(other), name, target, as_ or name, force=force, progress=progress)


@again_if_collected
def copy(
    source: Side, name: str, target: Side, as_: str, *, force: bool = False, progress: Progress | None = None
) -> TransferReport:
    """Send a model from one side to another; see `push`."""
    began = time.monotonic()
    if source.block_elements != target.block_elements:
        raise UserError(
            f"blocks have {source.block_elements} elements here and {target.block_elements} there: models cannot share"
            " them; export and ingest instead"
        )
    identity = source.resolve(name)
    with source.sending([identity]), target.receiving() as receiver:
        model = _model(source, identity)
        places, there = _missing(source, receiver, model)
        sending = {tiers[0].record.block for tiers in places}
        total = sum(location.record.length for tiers in places for location in tiers)
        sent = 0
        for batch in _batches(places):
            payloads = iter(source.payloads([location for tiers in batch for location in tiers]))
            for tiers in batch:
                records = [location.record for location in tiers]
                mine = [_checked(location, next(payloads)) for location in tiers]
                sent += sum(map(len, mine))
                base = records[0].base
                if base != NO_BASE and not (base in sending or receiver.stands_alone(base)):
                    records, mine = _alone(source, records[0], mine)
                receiver.add(records, mine)
                if progress:
                    progress(sent, total)
        receiver.publish(model, as_, replace=force)
        written = receiver.added_bytes
    return TransferReport(as_, identity, len(places), there, sent, written, time.monotonic() - began)


def _model(source: Side, identity: str) -> Model:
    manifest = _manifest(source, identity)
    if manifest.lineage.plan is None:
        return Model(manifest, (), None)
    encoded = source.plan(manifest.lineage.plan)
    others: tuple[Manifest, ...] = ()
    if manifest.is_lazy:
        plan = plans.decode(encoded)
        others = tuple(_manifest(source, other) for other in dict.fromkeys((plan.base, *plan.experts)))
    return Model(manifest, others, (manifest.lineage.plan, encoded))


def _alone(source: Side, record: Record, payloads: list[bytes]) -> tuple[list[Record], list[bytes]]:
    """Encode a block by itself: the receiver has the one that it stands on encoded against yet another one, and what is
    read stands on one block at most.

    Args:
        source: has both.
        record: of the block's first tier.
        payloads: of all its tiers.
    """
    places = _tiers(source, record.base)
    of_base = [_checked(location, payload) for location, payload in zip(places, source.payloads(places), strict=True)]
    below = places[0].record
    base = codecs.decode(below.encoding, of_base[0], below.raw_length, below.dtype)
    if record.encoding in TIERED:
        raw = codecs.decode_tiers(payloads, record.raw_length, base)
    else:
        raw = codecs.decode(record.encoding, payloads[0], record.raw_length, record.dtype, base)
    if digest(raw) != record.block:
        raise CorruptionError(f"block {record.block.hex()} is damaged where the model comes from")
    encoded = codecs.encode(raw, BY_CODE[record.dtype])
    changed = record._replace(base=NO_BASE, encoding=int(encoded.encoding), tier=0, tiers=1)
    return [changed], list(map(bytes, encoded.payloads))


def _manifest(source: Side, identity: str) -> Manifest:
    found = source.manifest(identity)
    if found.block_elements != source.block_elements:
        raise CorruptionError(f"manifest {identity} is cut into blocks of another size than the others it lies with")
    return found


def _missing(source: Side, receiver: Receiver, model: Model) -> tuple[list[tuple[Location, ...]], int]:
    """Return the places of blocks that the receiver lacks, those first that others stand on, and how many it has."""
    has = receiver.has
    roots: dict[bytes, tuple[Location, ...]] = {}
    others: dict[bytes, tuple[Location, ...]] = {}
    there = 0
    for block in sorted(model.block_ids()):
        if has(block):
            there += 1
            continue
        tiers = _tiers(source, block)
        base = tiers[0].record.base
        if base == NO_BASE:
            roots[block] = tiers
            continue
        others[block] = tiers
        if base not in roots and not has(base):
            roots[base] = _tiers(source, base)
    by_place = sorted(roots.values(), key=_place) + sorted(others.values(), key=_place)
    return by_place, there


def _place(tiers: tuple[Location, ...]) -> tuple[bytes, int]:
    return tiers[0].pack, tiers[0].record.offset


def _tiers(source: Side, block: bytes) -> tuple[Location, ...]:
    tiers = source.tiers(block)
    if not tiers:
        raise CorruptionError(f"block {block.hex()} is missing where the model comes from")
    for location in tiers:
        record, first = location.record, tiers[0].record
        kind = (record.base, record.dtype, record.raw_length, record.tiers)
        # What is stored from here on is read without asking how large it may be.
        if (
            kind != (first.base, first.dtype, first.raw_length, len(tiers))
            or not codecs.is_sound(record)
            or record.raw_length > largest_block(source.block_elements)
        ):
            raise CorruptionError(f"block {block.hex()} is described wrongly where the model comes from")
    return tiers


def _batches(places: list[tuple[Location, ...]]) -> Iterator[list[tuple[Location, ...]]]:
    batch: list[tuple[Location, ...]] = []
    size = 0
    for tiers in places:
        batch.append(tiers)
        size += sum(location.record.length for location in tiers)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked(location: Location, payload: bytes) -> bytes:
    record = location.record
    if len(payload) != record.length or digest(payload)[:CHECK_BYTES] != record.check:
        raise CorruptionError(f"block {record.block.hex()} is damaged where the model comes from")
    return payload


def _repository(path: str, *, readonly: bool, sync: bool) -> Store:
    if not (Path(path) / CONFIG).is_file():
        raise NotARepositoryError(f"{path} is no repository: 'mergefs init {path}' makes one, or give a URL")
    return Store.open(path, readonly=readonly, sync=sync)
