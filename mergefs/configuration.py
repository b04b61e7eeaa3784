"""The configuration of a repository, `mergefs.json`, and its copy: read strictly, written, made again
where they are lost. See spec/format.md."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from mergefs.backend import LocalBackend
from mergefs.blocks.exact import CODINGS, Exact
from mergefs.blocks.geometry import MOST_BLOCK_ELEMENTS
from mergefs.errors import FormatVersionError, MergefsError, NotARepositoryError
from mergefs.hashing import hex_digest
from mergefs.json_input import json_check, load_json
from mergefs.manifest import decode

CONFIG = "mergefs.json"
CONFIG_COPY = "mergefs.copy.json"
FORMAT = "mergefs-repository"
VERSION = 3
DEFAULT_BLOCK_SIZE = 1 << 20
LARGEST_BLOCK_SIZE = 2 * MOST_BLOCK_ELEMENTS
DEFAULT_EXACT: Exact = "fast"
_FIXED = ("format", "hash", "block_size", "block_elements", "created")
"""What never changes."""


def find_repository(start: Path) -> Path:
    """Return the nearest folder from `start` upwards that is a repository.

    Raises:
        NotARepositoryError: when there is none.
    """
    for folder in (start, *start.parents):
        if (folder / CONFIG).is_file():
            return folder
    raise NotARepositoryError(
        f"{start} is not inside a mergefs repository: give one with -R DIR or MERGEFS_REPO, or make one with"
        " 'mergefs init DIR'"
    )


def new_config(block_size: int, exact: Exact) -> dict[str, Any]:
    """Return the configuration of a repository that is made now.

    Args:
        block_size: bytes of a block of 2-byte elements.
        exact: the coding of experts' exact tiers.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "hash": "blake3",
        "block_size": block_size,
        "block_elements": block_size // 2,
        "exact": exact,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_config(path: Path, *, oldest: int = VERSION) -> dict[str, Any]:
    """Return a repository's configuration.

    Args:
        path: its folder.
        oldest: the lowest version that will do.

    Raises:
        NotARepositoryError: when the folder is not a repository.
        FormatVersionError: when it was made by a newer mergefs, or is of a version below the lowest one.
        MergefsError: when the configuration is damaged.
    """
    try:
        return decode_config(path / CONFIG, oldest=oldest)
    except (FileNotFoundError, NotADirectoryError):
        if all((path / name).is_dir() for name in ("packs", "manifests", "catalog")):
            raise NotARepositoryError(
                f"{path} has lost its {CONFIG}: 'mergefs -R {path} fsck --repair' makes it again"
            ) from None
        raise NotARepositoryError(f"{path} is not a mergefs repository: 'mergefs init {path}' makes one") from None
    except PermissionError as error:
        raise NotARepositoryError(f"{path} cannot be read: {error.strerror}") from error


def decode_config(file: Path, *, oldest: int = 1) -> dict[str, Any]:
    """Return what a file with a repository's configuration says.

    Args:
        file: the configuration, or its copy.
        oldest: the lowest version that will do.

    Raises:
        OSError: when it cannot be read.
        NotARepositoryError, FormatVersionError, MergefsError: see `read_config`.
    """
    mending = f"'mergefs -R {file.parent} fsck --repair' makes it again"
    try:
        config = load_json(file.read_bytes())
    except ValueError as error:
        raise MergefsError(f"{file} is damaged: {error}; {mending}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise NotARepositoryError(f"{file} is not a mergefs repository's, or it is damaged: {mending}")
    version = config.get("version")
    if "check" in config and config["check"] != json_check(config):
        raise MergefsError(f"{file} is damaged, or was changed by hand: {mending}")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FormatVersionError(
            f"{file.parent} has format version {version!r}, this mergefs knows up to {VERSION}: upgrade mergefs"
        )
    if version < oldest:
        raise FormatVersionError(
            f"{file.parent} has format version {version}, and this mergefs works with version {VERSION}:"
            f" 'mergefs -R {file.parent} migrate' brings it there, without changing any model"
        )
    size = config.get("block_elements")
    if (
        config.get("hash") != "blake3"
        or type(size) is not int
        or not 1 <= size <= LARGEST_BLOCK_SIZE // 2
        or (version > 1 and "check" not in config)
    ):
        raise MergefsError(f"{file} is damaged: it lacks its hash, block size or check; {mending}")
    config.setdefault("exact", DEFAULT_EXACT)
    if config["exact"] not in CODINGS:
        raise MergefsError(f"{file} is damaged: the exact tier has no coding {config['exact']!r}; {mending}")
    return config


def write_config(path: Path, config: dict[str, Any], *, sync: bool = True) -> None:
    """Write a repository's configuration, and its copy before; one of the first version has neither check nor copy."""
    backend = LocalBackend(path, sync=sync)
    if config["version"] > 1:
        config = {**config, "check": json_check(config)}
    data = json.dumps(config, indent=2).encode() + b"\n"
    if config["version"] > 1:
        backend.replace(CONFIG_COPY, data)
    backend.replace(CONFIG, data)


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
    write_config(path, new_config(size, DEFAULT_EXACT), sync=sync)
    return f"{CONFIG} was made again from the manifests: blocks of {size} bytes, exact tiers '{DEFAULT_EXACT}'"


def _block_size(path: Path) -> int:
    """Return the block size that the manifests say that they were made with; the usual one where there is none."""
    backend = LocalBackend(path)
    for name, _ in backend.list("manifests"):
        data = backend.get(name)
        if hex_digest(data) == Path(name).stem:
            return 2 * decode(data).block_elements
    return DEFAULT_BLOCK_SIZE
