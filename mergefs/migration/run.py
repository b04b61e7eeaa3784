"""Taking a repository from its version to the next, until it is at this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mergefs.catalog.leases import living
from mergefs.configuration import VERSION, read_config
from mergefs.errors import UserError
from mergefs.migration.from_1 import from_1
from mergefs.migration.step import Done, Progress
from mergefs.store import Store

_STEPS: dict[int, Callable[[Store, Progress | None], Done]] = {1: from_1, 2: lambda store, progress: Done()}
"""What leads from each version to the next. Nothing of version 2 has to be changed."""


@dataclass(frozen=True)
class MigrateReport:
    """What a migration did.

    Attributes:
        repository: its folder.
        before, version: its versions before and now.
        blocks_rewritten: blocks whose payloads were written anew.
        statistics_dropped: statistics of tensors that are measured again when somebody needs them.
        refs_copied: copies of refs that were missing.
        damaged: blocks (their ids) that are damaged, and were left as they are.
        seconds: wall time.
    """

    repository: Path
    before: int
    version: int
    blocks_rewritten: int
    statistics_dropped: int
    refs_copied: int
    damaged: tuple[str, ...]
    seconds: float


def migrate(path: str | Path, *, sync: bool = True, progress: Progress | None = None) -> MigrateReport:
    """Bring a repository to this version. Ids of blocks, manifests and plans stay what they are.

    Its version is raised last. When this is interrupted, at whatever moment, the repository is still of its old version
    and whole, and another run does the rest. One that is of this version already is left alone.

    Args:
        path: the repository's folder.
        sync: see `Store`.
        progress: told how far it is: blocks done and blocks in all.

    Raises:
        NotARepositoryError, FormatVersionError: see `Store.open`.
        CatalogMissingError: when there is no catalog: it is rebuilt first.
        UserError: when a process is using the repository.
    """
    began = time.monotonic()
    folder = Path(path).absolute()
    before = version = int(read_config(folder, oldest=1)["version"])
    if version < VERSION and living(folder / "catalog"):
        raise UserError(f"{folder} is in use: end what uses it (mounts too) before it is migrated")
    done = Done()
    while version < VERSION:
        with Store(folder, sync=sync, oldest=version) as store:
            done += _STEPS[version](store, progress)
            version += 1
            store.set_version(version)
    return MigrateReport(
        folder,
        before,
        version,
        done.blocks_rewritten,
        done.statistics_dropped,
        done.refs_copied,
        done.damaged,
        time.monotonic() - began,
    )
