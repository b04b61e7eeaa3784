"""What the tests of codings and of repack look at."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from builders import served, tree

import mergefs.cli
import mergefs.repack
import mergefs.rewriting
from mergefs.blocks import tiers
from mergefs.blocks.encoding import TIERED
from mergefs.blocks.pack import pack_name
from mergefs.blocks.reader import BlockReader, Kind
from mergefs.catalog.tables import Location, locations
from mergefs.repository import Repository

EXPERTS = ("x", "y", "few")
BLOCK = 1 << 18
TINY_PACK = 40_000
"""Of the exact tiers of about two blocks."""


def filled(path: Path, models: Path, exact: str) -> Repository:
    Repository.init(path, BLOCK, exact=exact).close()
    made = Repository.open(path, sync=False)
    for name in ("base", *EXPERTS):
        made.ingest(models / name, name, base=None if name == "base" else "base")
    return made


def tiered(repository: Repository) -> dict[bytes, tuple[Location, ...]]:
    """Return the tiers of every block that has any."""
    with repository.catalog.read() as txn:
        blocks = {at.record.block for at in locations(txn) if at.record.encoding in TIERED}
    return {block: repository.catalog.tiers(block) for block in blocks}


def checks(repository: Repository) -> dict[bytes, list[bytes]]:
    """Return the hashes of the payloads of every block that has tiers."""
    return {block: [at.record.check for at in found] for block, found in tiered(repository).items()}


def payload(repository: Repository, at: Location) -> bytes:
    return repository.backend.get(pack_name(at.pack), at.record.offset, at.record.length)


def codings(repository: Repository) -> dict[str, int]:
    """Return how many blocks have their exact tier in each coding."""
    found = [tiers.coding(payload(repository, at[-1])) for at in tiered(repository).values()]
    return {str(name): found.count(name) for name in set(found)}


def coarse(repository: Repository) -> dict[tuple[bytes, int], bytes]:
    """Return the delta of every block at every depth below all of its tiers."""
    reader = BlockReader(repository.catalog, repository.backend)
    return {
        (block, depth): reader.read_coarse(block, depth, Kind.EXPERT, {})[0].tobytes()
        for block, at in tiered(repository).items()
        for depth in range(len(at))
    }


def kinds(repository: Repository) -> Counter[int]:
    """Return how many payloads there are of each encoding."""
    with repository.catalog.read() as txn:
        return Counter(at.record.encoding for at in locations(txn))


def pack_bytes(repository: Repository) -> int:
    return sum(size for _, size in repository.backend.list("packs"))


def check_whole(repository: Repository, models: Path) -> None:
    """Check that every model is served byte for byte and that nothing is damaged, lost or left behind."""
    for name in ("base", *EXPERTS):
        assert served(repository, name) == tree(models / name)
    report = repository.fsck(read_data=True)
    assert report.ok, report.errors
    assert report.garbage_packs == 0
    assert not list((repository.path / "tmp").iterdir())
    with repository.catalog.read() as txn:
        assert {key for key, _ in txn.items("packs")} == {at.pack for at in locations(txn)}
        assert txn.count("leases") == 0


def in_tiny_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergefs.rewriting, "PACK_BYTES", TINY_PACK)
