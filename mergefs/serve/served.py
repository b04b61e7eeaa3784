"""The models of a repository as one mount serves them: one cache of blocks for all, made by a few threads."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from mergefs.blocks.reader import ReadCounter, ReadTotals
from mergefs.errors import UserError
from mergefs.pipeline import available_cores
from mergefs.repository import Repository
from mergefs.serve.cache import BlockCache, CacheFigures
from mergefs.serve.kept import KeptBlocks, ScratchFile, Storing
from mergefs.serve.view import View

_BLOCKS_TO_MAKE_ONE = 16
"""Blocks of memory that making one takes: a base's, an expert's, the deltas of a few, in float32."""

_ANSWERS = 32 << 20
"""Bytes that answers to the kernel take on their way, and what lies between them."""


@dataclass(frozen=True)
class Keeping:
    """What a mount keeps of blocks.

    Attributes:
        cache: bytes of decoded blocks in memory, for all models together.
        derived: bytes of derived blocks in a file, for as long as the mount lives.
        store: store derived blocks in packs, so that later mounts and merges have them too.
    """

    cache: int
    derived: int = 0
    store: bool = False


class ServedModels:
    """A repository's models; see `mergefs.serve.fuse_tree.Models`.

    Args:
        repository: that they are in.
        keeping: what is kept of their blocks.

    Raises:
        UserError: when blocks are to be stored and the repository is open for reading only.
    """

    def __init__(self, repository: Repository, keeping: Keeping) -> None:
        if keeping.store and repository.readonly:
            raise UserError(f"{repository.path} is open for reading only: mount it without --store")
        self._repository = repository
        self._counter = ReadCounter()
        folder = Path(tempfile.gettempdir()) if repository.readonly else repository.path / "tmp"
        self._kept = KeptBlocks(
            ScratchFile(keeping.derived, folder) if keeping.derived else None,
            Storing(repository) if keeping.store else None,
        )
        threads = available_cores()
        aside = threads * _BLOCKS_TO_MAKE_ONE * 2 * repository.block_elements + _ANSWERS
        self._cache = BlockCache(keeping.cache, threads, aside)
        self.refs = repository.refs
        self.manifest_ids = repository.manifest_ids
        self.manifest_time = repository.manifest_time

    def raw_bytes(self) -> int:
        """Return the size of all manifests' files together, as far as the catalog knows it."""
        ids = self._repository.manifest_ids()
        return sum(int(self._repository.manifest_entry(identity).get("raw_bytes", 0)) for identity in ids)

    def view(self, name: str) -> View:
        """Open a manifest, by ref or id.

        Raises:
            NotFoundError: when there is none of this name.
        """
        return View(self._repository, name, purpose="mount", cache=self._cache, kept=self._kept, counter=self._counter)

    @property
    def cache(self) -> CacheFigures:
        """What the cache has done so far."""
        return self._cache.figures

    @property
    def read(self) -> ReadTotals:
        """Bytes read from packs so far."""
        return self._counter.totals

    def tend(self) -> None:
        """Do what is to be done from time to time."""
        self._kept.tend()

    def close(self) -> None:
        """End the threads and give back what is used."""
        self._cache.close()
        self._kept.close()
