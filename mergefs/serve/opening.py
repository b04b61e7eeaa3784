"""`mergefs.open`: one model of a repository, for the length of a `with` block."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mergefs.configuration import find_repository
from mergefs.serve.view import View
from mergefs.store import Store

_VARIABLE = "MERGEFS_REPO"


class _OwnView(View):
    """A view that closes its repository too."""

    def close(self) -> None:
        """Give the lease back and close the repository. Does nothing the second time."""
        if self._is_open:
            self._is_open = False
            super().close()
            self.store.close()

    _is_open = True


def open(name: str, repo: str | os.PathLike[str] | None = None, **options: Any) -> View:
    """Open a model for reading; close it, or use it in a `with` block.

    with mergefs.open("merged", repo="repo") as model:
        weights = model.state_dict(device="cuda", tensors="model.layers.0.*")

    Args:
        name: a ref, a manifest's id, or its beginning.
        repo: the repository's folder; by default that of MERGEFS_REPO, or the nearest one from the current folder
            upwards. Where this user may not write to it, the model has no lease.
        options: see `View`.

    Raises:
        NotARepositoryError: when there is no repository.
        NotFoundError: when it has no such model.
    """
    given = repo or os.environ.get(_VARIABLE)
    path = Path(given).expanduser() if given else find_repository(Path.cwd())
    catalog = path / "catalog"
    store = Store.open(path, readonly=catalog.is_dir() and not os.access(catalog, os.W_OK))
    try:
        return _OwnView(store, name, **options)
    except BaseException:
        store.close()
        raise
