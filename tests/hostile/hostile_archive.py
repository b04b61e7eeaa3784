"""An archive whose objects can be forged for a while, with names that are right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergefs.blocks.pack import PackWriter, read_records
from mergefs.manifest import Manifest
from mergefs.planner.plan import Plan
from mergefs.repository import Repository
from mergefs.store import manifest_name, plan_name


class Archived:
    """An archive, and the repository that it came from."""

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.repository = repository
        self.folder = folder
        self._url = f"file://{folder}"

    def manifest(self, name: str) -> Manifest:
        """Return a model's manifest."""
        return self.repository.manifest(self.repository.resolve(name))

    @contextmanager
    def offering(self, *objects: Manifest | Plan) -> Iterator[str]:
        """Have more manifests and plans in it, by the names that their content has; yield its URL."""
        paths = []
        for made in objects:
            name = manifest_name(made.id) if isinstance(made, Manifest) else plan_name(made.id)
            path = self.folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(made.encoded)
                paths.append(path)
        yield self._url
        for path in paths:
            path.unlink()

    @contextmanager
    def with_records(self, changes: Mapping[str, Any]) -> Iterator[str]:
        """Have every record in its packs say something else; yield its URL."""
        packs = self.folder / "packs"
        kept = self.folder.parent / "kept"
        shutil.copytree(packs, kept)
        for path in list(packs.rglob("*.pack")):
            content, records = path.read_bytes(), read_records(path)
            path.unlink()
            with PackWriter(path, sync=False) as writer:
                for record in records:
                    writer.append_as(record, content[record.offset : record.offset + record.length])
                writer.records[:] = [record._replace(**changes) for record in writer.records]
                identity = writer.finish()
            named = packs / identity[:2] / f"{identity}.pack"
            named.parent.mkdir(exist_ok=True)
            path.rename(named)
        try:
            yield self._url
        finally:
            shutil.rmtree(packs)
            kept.rename(packs)

    def put_packs(self, repository: Path) -> None:
        """Put its packs into a repository's folder."""
        shutil.copytree(self.folder / "packs", repository / "packs", dirs_exist_ok=True)
