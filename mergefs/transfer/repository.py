"""A repository on this machine as one side of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from mergefs.blocks.codecs import Encoded, Encoding
from mergefs.blocks.pack import NO_BASE, Record, pack_name
from mergefs.blocks.writer import BlockWriter
from mergefs.catalog.leases import Lease
from mergefs.catalog.tables import Location
from mergefs.errors import BlocksCollectedError, CorruptionError, RefMovedError
from mergefs.manifest import Manifest
from mergefs.store import Store, plan_name
from mergefs.transfer.side import Model, Receiver, Side

_LOOKS = 4
"""How often a payload is looked for where the catalog says that gc has moved it."""


class RepositorySide(Side):
    """See `Side`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def block_elements(self) -> int:
        """See `Side.block_elements`."""
        return self._store.block_elements

    def resolve(self, name: str) -> str:
        """See `Side.resolve`."""
        return self._store.resolve(name)

    def manifest(self, identity: str) -> Manifest:
        """See `Side.manifest`."""
        return self._store.manifest(identity)

    def plan(self, identity: str) -> bytes:
        """See `Side.plan`."""
        return self._store.read_object(plan_name(identity), identity, "plan")

    def tiers(self, block: bytes) -> tuple[Location, ...]:
        """See `Side.tiers`."""
        return self._store.catalog.tiers(block)

    def payloads(self, locations: Iterable[Location]) -> list[bytes]:
        """See `Side.payloads`."""
        return [self._payload(location) for location in locations]

    def _payload(self, location: Location) -> bytes:
        """Return what was at a place, also where gc has moved it since.

        Raises:
            BlocksCollectedError: when it is not there any more as it was: repack wrote the tier anew.
        """
        record, places = location.record, [location]
        for _ in range(_LOOKS):
            for place in places:
                with suppress(FileNotFoundError):
                    return self._store.backend.get(pack_name(place.pack), place.record.offset, place.record.length)
            found = self._store.catalog.tiers(record.block)
            places = [p for p in found if (p.record.tier, p.record.check) == (record.tier, record.check)]
        if location in self._store.catalog.tiers(record.block):
            raise CorruptionError(f"pack {location.pack.hex()} with block {record.block.hex()} is missing")
        raise BlocksCollectedError(f"block {record.block.hex()} was stored anew while it was being sent")

    def sending(self, identities: Iterable[str]) -> AbstractContextManager[object]:
        """See `Side.sending`."""
        return self._store.reading("push", identities)

    @contextmanager
    def receiving(self) -> Iterator[Receiver]:
        """See `Side.receiving`."""
        store = self._store
        with (
            store.lease("pull") as lease,
            BlockWriter(store.catalog, store.backend, store.path / "tmp", lease, sync=store.sync) as writer,
        ):
            yield _Receiver(store, lease, writer)


class _Receiver(Receiver):
    def __init__(self, store: Store, lease: Lease, writer: BlockWriter) -> None:
        self._store = store
        self._lease = lease
        self._writer = writer

    def has(self, block: bytes) -> bool:
        if not self._store.catalog.tiers(block):
            return False
        self._writer.reuse(block)
        return True

    def stands_alone(self, block: bytes) -> bool:
        location = self._store.catalog.locate(block)
        return location is not None and location.record.base == NO_BASE

    def add(self, records: Sequence[Record], payloads: Sequence[bytes]) -> None:
        first = records[0]
        encoded = Encoded(Encoding(records[-1].encoding), tuple(payloads))
        self._writer.add(first.block, encoded, raw_length=first.raw_length, dtype=first.dtype, base=first.base)

    def publish(self, model: Model, name: str, *, replace: bool) -> None:
        self._writer.flush()
        for other in model.others:
            self._store.keep(other, self._lease, {"raw_bytes": other.raw_bytes})
        old = self._store.refs().get(name)
        if old not in (None, model.manifest.id) and not replace:
            raise RefMovedError(
                f"'{name}' names {str(old)[:12]} there, another model: move it with --force, or give another name with"
                " --as"
            )
        self._store.publish(
            model.manifest,
            name,
            {"raw_bytes": model.manifest.raw_bytes},
            plan=model.plan,
            expecting=None if replace else old or "",
        )

    @property
    def added_bytes(self) -> int:
        return self._writer.stored_bytes
