"""Compiled loops: numba's compiler, and where its machine code is kept for the next process.

numba itself keeps a function's code for as long as the function's own file stays as it is, also where other functions
that were compiled into it have changed. Here it is kept for as long as all files with loops stay as they are, so that
after an update nothing runs that was compiled before it.

Importing this module loads numba.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

from mergefs.hashing import digest

_config: Any = numba.config
_Decorator = Callable[[Callable[..., Any]], Any]

PACKAGE = Path(__file__).parent
LOOPS = (
    "blocks/huffman.py",
    "blocks/kernels.py",
    "blocks/tiers/kernels/*.py",
    "merge/*kernels.py",
    "merge/low_rank.py",
    "merge/wide.py",
)
"""The files with loops. They take nothing from other files of the package, but this one."""

_PREFIX = "loops-"
_lock = threading.Lock()


def njit(**options: Any) -> _Decorator:
    """Return what `numba.njit` with these options does, with the code kept on the disk where there is a place for it.

    `NUMBA_CACHE_DIR` names another place than the package's `__pycache__`, or, where that cannot be written to, the
    user's folder of caches.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        with _lock:
            before = _config.CACHE_DIR
            place = _place(before)
            _config.CACHE_DIR = "" if place is None else str(place)
            try:
                return numba.njit(cache=place is not None, **options)(function)
            finally:
                _config.CACHE_DIR = before

    return decorate


@cache
def _place(chosen: str) -> Path | None:
    """Return the folder for the code of these files; None where nothing can be written."""
    name = _PREFIX + sources_digest(PACKAGE)
    if chosen:
        return Path(chosen, name)
    own = PACKAGE / "__pycache__"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mergefs")
    for folder in (own, user):
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder / name, os.W_OK):
            if folder == own:
                _forget_others(own, name)
            return folder / name
    return None


def sources_digest(package: Path) -> str:
    """Return a digest of a package's files with loops, in hexadecimal digits."""
    files = sorted(path.relative_to(package) for pattern in LOOPS for path in package.glob(pattern))
    named = (file.as_posix().encode() + b"\0" + digest((package / file).read_bytes()) for file in files)
    return digest(b"".join(named)).hex()[:16]


def _forget_others(folder: Path, name: str) -> None:
    """Remove what was compiled from earlier files."""
    for other in folder.glob(f"{_PREFIX}*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
