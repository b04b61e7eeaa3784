"""Giving stored payloads another place: gc copies what it keeps, repack writes exact tiers anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Self

from mergefs.blocks.pack import PackWriter, Record, pack_name, read_records
from mergefs.blocks.writer import PACK_BYTES, adopt, depth_of
from mergefs.catalog.environment import Transaction
from mergefs.catalog.tables import holds, put_location
from mergefs.errors import CorruptionError
from mergefs.hashing import Buffer
from mergefs.store import Store


class Rewrite:
    """New packs for blocks that have a place already, one for each depth.

    `append` while not `full`, `finish`, `enter` in a transaction, and so on again. Used as a context manager, it
    removes the files of what was not entered.

    Args:
        store: the repository.
        owner: what the names of temporary files begin with: a lease's id, or a process's number.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._count = 0
        self._open: dict[int, PackWriter] = {}
        self._finished: list[tuple[bytes, PackWriter]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pack in self._open.values():
            pack.__exit__(kind, error, trace)
        for _, pack in self._finished:
            pack.path.unlink(missing_ok=True)

    @property
    def full(self) -> bool:
        """Whether the open packs are to be finished."""
        return sum(pack.size for pack in self._open.values()) >= PACK_BYTES

    def append(self, record: Record, payload: Buffer) -> None:
        """Add a payload in the place of the one that a record is of; tiers of one depth lie together."""
        depth = depth_of(record.tier, record.tiers)
        if depth not in self._open:
            path = self._store.path / "tmp" / f"{self._owner}-{self._count}"
            path.unlink(missing_ok=True)
            self._open[depth] = PackWriter(path, sync=self._store.sync)
            self._count += 1
        self._open[depth].append_as(record, payload)

    def finish(self) -> None:
        """Make the open packs durable. Those that were finished before have to be entered already."""
        packs, self._finished = [self._open[depth] for depth in sorted(self._open)], []
        for pack in packs:
            self._finished.append((bytes.fromhex(pack.finish()), pack))
        self._open = {}

    def enter(self, txn: Transaction, moves: Callable[[Record], bool] = lambda record: True) -> None:
        """Make the finished packs known, and move the records there for which `moves` says so.

        May run again, after a transaction that found the map full.

        Raises:
            BlocksCollectedError: when gc came in between and took a pack for an orphan.
        """
        for identity, pack in self._finished:
            adopt(self._store.backend, identity, pack.path)
            txn.put("packs", identity, b'{"size": %d}' % pack.size)
            for record in pack.records:
                if moves(record):
                    put_location(txn, identity, record)


def is_spent(store: Store, txn: Transaction, pack: bytes) -> bool:
    """Tell whether no block of a pack is located in it any more; not of one that cannot be read, which is gc's."""
    try:
        records = read_records(store.path / pack_name(pack))
    except (CorruptionError, FileNotFoundError):
        return False
    return not any(holds(txn, pack, record) for record in records)


def delete_objects(store: Store, txn: Transaction, names: Iterable[str], spared: Collection[str] = frozenset()) -> None:
    """Delete objects that an earlier transaction took out of the catalog, but for what has been entered again since.

    Files go after that transaction, so that a crash in between leaves orphans and never a hole; and inside this one, so
    that nobody can publish an equal object between the last look and its removal.

    Args:
        names: of packs, and of other objects.
        spared: other objects that are needed again.
    """
    packs = {pack_name(key) for key, _ in txn.items("packs")}
    for name in names:
        if name not in packs and name not in spared:
            store.backend.delete(name)
