"""Making a lost or damaged `mergefs.json` again: from its copy, or else from what the manifests tell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mergefs.backend import LocalBackend
from mergefs.errors import FormatVersionError, MergefsError, NotARepositoryError
from mergefs.hashing import hex_digest
from mergefs.manifest import decode
from mergefs.store import (
    CONFIG,
    CONFIG_COPY,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_EXACT,
    FORMAT,
    VERSION,
    decode_config,
    write_config,
)

_FIXED = ("format", "hash", "block_size", "block_elements", "created")
"""What never changes."""


def configuration_damage(path: Path) -> str | None:
    """Return what is wrong with the configuration of a repository or with its copy; None when nothing is.

    A copy that is missing is nothing wrong where the repository is of the first version, which had none.
    """
    try:
        config = decode_config(path / CONFIG)
    except FormatVersionError:
        raise
    except (MergefsError, OSError) as error:
        return str(error)
    try:
        copy = decode_config(path / CONFIG_COPY)
    except FileNotFoundError:
        return None if config["version"] == 1 else "its copy is missing"
    except (MergefsError, OSError) as error:
        return f"its copy is damaged: {error}"
    # Whoever changes the rest writes the copy first, and may be interrupted.
    return None if all(config[key] == copy[key] for key in _FIXED) else "it and its copy disagree"


def mend_configuration(path: Path, *, sync: bool = True) -> str | None:
    """Make a repository's configuration, or its copy, again where it is lost or damaged.

    Args:
        path: the repository's folder; nobody may have it open when the configuration itself is damaged.
        sync: see `Store`.

    Returns:
        A sentence about what was done; None when nothing was.

    Raises:
        NotARepositoryError: when there is nothing to make it from.
        FormatVersionError: when the repository is of a newer mergefs.
    """
    if configuration_damage(path) is None:
        return None
    if not ((path / "packs").is_dir() and (path / "manifests").is_dir() and (path / "catalog").is_dir()):
        raise NotARepositoryError(f"{path} is not a mergefs repository: 'mergefs init {path}' makes one")
    for file, what in ((CONFIG, "the copy of the configuration was made again"), (CONFIG_COPY, "")):
        try:
            config = decode_config(path / file)
        except (MergefsError, OSError):
            continue
        write_config(path, config, sync=sync)
        return what or f"{CONFIG} was made again from its copy"
    size = _block_size(path)
    made: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "hash": "blake3",
        "block_size": size,
        "block_elements": size // 2,
        "exact": DEFAULT_EXACT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_config(path, made, sync=sync)
    return f"{CONFIG} was made again from the manifests: blocks of {size} bytes, exact tiers '{DEFAULT_EXACT}'"


def _block_size(path: Path) -> int:
    """Return the block size that the manifests say that they were made with; the usual one where there is none."""
    backend = LocalBackend(path)
    for name, _ in backend.list("manifests"):
        data = backend.get(name)
        if hex_digest(data) == Path(name).stem:
            return 2 * decode(data).block_elements
    return DEFAULT_BLOCK_SIZE
