"""Keys of a Zarr store that no tensor has: each in a file of the session's folder, as are those that were deleted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from mergefs.hashing import hex_digest

_VALUE, _DELETED = b"=", b"-"
_LENGTH_BYTES = 4


class Keys:
    """What was set and deleted beside the tensors. Safe to use from many threads.

    A file holds `=` or `-` (deleted), the length of the key in four bytes, the key, and the value. Its name is the hash
    of the key. It is replaced all at once, so that what a killed process leaves is whole.

    Args:
        folder: for the files; it is made when the first key is set.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._set: set[str] = set()
        self._deleted: set[str] = set()
        for path in folder.iterdir() if folder.is_dir() else ():
            data = path.read_bytes()
            stop = 1 + _LENGTH_BYTES + int.from_bytes(data[1 : 1 + _LENGTH_BYTES], "little")
            name = data[1 + _LENGTH_BYTES : stop]
            key = _text(name) if path.name == hex_digest(name) else None
            if key is not None:
                (self._set if data[:1] == _VALUE else self._deleted).add(key)
            else:
                path.unlink()  # half written when the machine went down

    def __bool__(self) -> bool:
        return bool(self._set or self._deleted)

    def knows(self, key: str) -> bool:
        """Tell whether a key was set or deleted."""
        with self._lock:
            return key in self._set or key in self._deleted

    @property
    def given(self) -> set[str]:
        """The keys that were set."""
        with self._lock:
            return set(self._set)

    @property
    def deleted(self) -> set[str]:
        """The keys that were deleted."""
        with self._lock:
            return set(self._deleted)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key that was set, or None."""
        with self._lock:
            if key not in self._set:
                return None
            return self._path(key).read_bytes()[1 + _LENGTH_BYTES + len(key.encode()) :]

    def size(self, key: str) -> int | None:
        """Return the length of the value of a key that was set, or None."""
        with self._lock:
            if key not in self._set:
                return None
            return self._path(key).stat().st_size - 1 - _LENGTH_BYTES - len(key.encode())

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        with self._lock:
            self._write(key, _VALUE, value)
            self._deleted.discard(key)
            self._set.add(key)

    def delete(self, key: str) -> None:
        """Note that a key was deleted."""
        with self._lock:
            self._write(key, _DELETED, b"")
            self._set.discard(key)
            self._deleted.add(key)

    def forget(self, keys: Iterable[str]) -> None:
        """Know nothing of keys any more: they are what the tensors say."""
        with self._lock:
            for key in keys:
                if key in self._set or key in self._deleted:
                    self._path(key).unlink(missing_ok=True)
                    self._set.discard(key)
                    self._deleted.discard(key)

    def _path(self, key: str) -> Path:
        return self._folder / hex_digest(key.encode())

    def _write(self, key: str, kind: bytes, value: bytes) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._path(key)
        new = path.with_suffix(".new")
        name = key.encode()
        with open(new, "wb") as file:
            file.write(b"".join((kind, len(name).to_bytes(_LENGTH_BYTES, "little"), name, value)))
        os.replace(new, path)


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
