"""The files of a session as an fsspec file system that can be written to."""

from __future__ import annotations

import errno
import io
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.transaction import Transaction

from mergefs.edit.content import Content
from mergefs.edit.tree import Folder, Node, Tree
from mergefs.errors import UserError

if TYPE_CHECKING:
    from mergefs.edit.session import Session

_BUFFER_BYTES = 1 << 20
_COPY_BYTES = 8 << 20


class SessionTransaction(Transaction):  # type: ignore[misc]
    """What is written inside it is seen all at once at its end, or not at all."""

    def complete(self, commit: bool = True) -> None:
        """End it."""
        files, placed = list(self.files), []
        self.files.clear()
        self.fs._intrans = False
        self.fs._transaction = None
        for file in files:
            if commit:
                placed.append(file.finished())
            else:
                file.discard()
        if placed:
            self.fs.session.tree.place_all(placed)


class SessionFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a session: `model.safetensors`, `extra/vocab.txt`.

    A file that is opened with `wb` takes the place of the old one when it is closed; `r+b` and `ab` change the one that
    is there. Folders that are missing are made. In a transaction, `with fs.transaction:`, all files that are written
    get their places together at its end, and none of them after an error. Nothing is in a model before
    `session.commit`.

    Args:
        session: what is changed.
    """

    protocol = "mergefs-session"
    root_marker = ""
    cachable = False
    transaction_type = SessionTransaction

    def __init__(self, session: Session, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self.session = session

    def __reduce__(self) -> Any:
        return _again, (str(self.session.store.path), self.session.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionFileSystem) and other.session is self.session

    def __hash__(self) -> int:
        return hash(self.session.id)

    @property
    def fsid(self) -> str:
        """The same for every file system on the same session."""
        return f"{self.protocol}_{self.session.id}"

    # -- looking -------------------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a folder, or a file itself.

        Raises:
            FileNotFoundError: when there is nothing at `path`.
        """
        path = self._strip_protocol(path)
        node = self._tree.node(path)
        if isinstance(node, Folder):
            below = f"{path}/" if path else ""
            found = [self._info(below + name, child) for name, child in self._tree.children(path)]
        else:
            found = [self._info(path, node)]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe what is at `path`: name, size, type, and mtime in seconds since 1970.

        Raises:
            FileNotFoundError: when there is nothing.
        """
        path = self._strip_protocol(path)
        return self._info(path, self._tree.node(path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Tell whether there is anything at `path`."""
        try:
            self._tree.node(self._strip_protocol(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def modified(self, path: str) -> datetime:
        """Return when what is at `path` was changed."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    created = modified

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return a file's bytes from `start` to `end`, which count from the file's end where negative.

        Raises:
            FileNotFoundError: when there is no such file.
        """
        file: Content = self._tree.file(self._strip_protocol(path))
        first, stop, _ = slice(start, end).indices(file.size)
        return file.read(first, max(0, stop - first))

    # -- changing ------------------------------------------------------------------------------------------

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **kwargs: Any
    ) -> SessionReader | SessionWriter | SessionUpdater:
        size = block_size if isinstance(block_size, int) and block_size > 0 else _BUFFER_BYTES
        if mode == "rb":
            return SessionReader(_Reading(self, path), size)
        if mode not in ("wb", "xb", "ab", "r+b"):
            raise ValueError(f"a file of a session cannot be opened with the mode {mode!r}")
        there = path in self._tree.files()
        if mode == "xb" and there:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if mode == "r+b" or isinstance(self._tree_node(path), Folder):
            self._tree.file(path)  # says what is wrong
        if mode in ("ab", "r+b") and autocommit:
            if not there:
                self.touch(path)
            file = self._tree.open(path)
            return _buffered(_Writing(self, path, file, mode, autocommit=True, is_placed=True), size)
        new = self._tree.anonymous()
        if mode in ("ab", "r+b") and there:
            old = self._tree.file(path)
            for start in range(0, old.size, _COPY_BYTES):
                new.append(old.read(start, _COPY_BYTES))
        opened = _buffered(_Writing(self, path, new, mode, autocommit=autocommit), size)
        if mode == "r+b":
            self.transaction.files.append(opened)  # fsspec takes it for one that is read
        return opened

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder.

        Raises:
            FileExistsError: when there is something at `path`.
        """
        path = self._strip_protocol(path)
        if create_parents:
            self._make_above(path)
        self._tree.make_folder(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it.

        Raises:
            FileExistsError: when there is something at `path`, unless it is a folder and `exist_ok`.
        """
        path = self._strip_protocol(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._make_above(f"{path}/")

    def rmdir(self, path: str) -> None:
        """Remove an empty folder.

        Raises:
            OSError: when there is none, or it is not empty.
        """
        self._tree.remove_folder(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: when there is none.
        """
        self._tree.remove(self._strip_protocol(path))

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and with `recursive` folders and what is in them.

        Raises:
            OSError: when there is nothing, or a folder without `recursive`.
        """
        for found in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.isdir(found):
                if found:
                    self._tree.remove_folder(found)
            else:
                self.rm_file(found)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, or make a folder like another.

        Raises:
            FileNotFoundError: when there is nothing at `path1`.
        """
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if isinstance(self._tree.node(path1), Folder):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            while data := source.read(_COPY_BYTES):
                target.write(data)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Give a file or a folder another path; nothing is copied.

        Raises:
            OSError: as rename(2) does.
        """
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        self._make_above(path2)
        self._tree.rename(path1, path2)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or set its time of change.

        Raises:
            OSError: when the name is malformed, or a folder is there.
        """
        path = self._strip_protocol(path)
        if truncate or not self.exists(path):
            self._make_above(path)
            self._tree.create(path)
        else:
            self._tree.set_time(path, int(datetime.now(UTC).timestamp() * 1e9))

    # -- inside --------------------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        found = super()._strip_protocol(path)
        return found if isinstance(found, list) else found.strip("/")

    @property
    def _tree(self) -> Tree:
        if not self.session.is_open:
            raise UserError(f"session {self.session.id} is over: begin another one")
        return self.session.tree

    def _tree_node(self, path: str) -> Node | None:
        return self._tree.node(path) if self.exists(path) else None

    def _info(self, path: str, node: Node) -> dict[str, Any]:
        is_folder = isinstance(node, Folder)
        return {
            "name": path,
            "size": 0 if isinstance(node, Folder) else node.size,
            "type": "directory" if is_folder else "file",
            "mtime": node.mtime / 1e9,
        }

    def _make_above(self, path: str) -> None:
        """Make the folders above a path that are missing."""
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if not isinstance(self._tree_node(folder), Folder):
                self._tree.make_folder(folder)


class _Positioned(io.RawIOBase):
    """A place in a session's file."""

    _file: Content
    _at: int

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Reading(_Positioned):
    """A file of a session, open for reading; what it holds stays readable when it is removed."""

    def __init__(self, fs: SessionFileSystem, path: str) -> None:
        self._tree = fs._tree
        self._file = self._tree.open(path)
        self._at = 0

    @property
    def content(self) -> Content:
        return self._file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._tree.release(self._file)
        super().close()


class _Writing(_Positioned):
    """A file without a name that is going to be one of a session; or one that is there and is changed in place."""

    def __init__(
        self,
        fs: SessionFileSystem,
        path: str,
        file: Content,
        mode: str,
        *,
        autocommit: bool,
        is_placed: bool = False,
    ) -> None:
        self._fs = fs
        self._path = path
        self._file = file
        self._mode = mode
        self._autocommit = autocommit
        self._is_placed = is_placed
        self._is_pending = not is_placed
        self._at = 0 if mode == "r+b" else file.size

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return self._mode == "r+b"

    def seekable(self) -> bool:
        return self._mode != "ab"

    def write(self, data: Any) -> int:
        written = self._file.write(self._at, memoryview(data).cast("B"))
        self._at += written
        return written

    def truncate(self, size: int | None = None) -> int:
        wanted = self._at if size is None else size
        self._file.truncate(wanted)
        return wanted

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._is_placed:
                self._fs._tree.release(self._file)
            elif self._autocommit:
                self.place()

    def take(self) -> tuple[Content, str]:
        """Return the file and its path, for somebody to place it."""
        self._is_pending = False
        self._fs._make_above(self._path)
        return self._file, self._path

    def place(self) -> None:
        if self._is_pending:
            self._fs._tree.place(*self.take())

    def keep_nameless(self) -> None:
        """Do not place the file when it is closed."""
        self._autocommit = False

    def drop(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._fs._tree.forget(self._file)


class SessionReader(io.BufferedReader):
    """A file that is open for reading."""

    def __init__(self, raw: _Reading, size: int) -> None:
        super().__init__(raw, size)
        self._content = raw.content

    @property
    def size(self) -> int:
        """In bytes."""
        return self._content.size


class _Finishing:
    """What is the same for all files that are open for writing."""

    raw: _Writing

    def close(self) -> None:
        """See `io.BufferedIOBase`."""
        raise NotImplementedError

    def finished(self) -> tuple[Content, str]:
        """Close it, and return the file and its path, for somebody to place it."""
        raw = self.raw
        self.close()
        return raw.take()

    def commit(self) -> None:
        """Give it its name."""
        raw = self.raw
        self.close()
        raw.place()

    def discard(self) -> None:
        """Drop what was written."""
        raw = self.raw
        raw.keep_nameless()
        self.close()
        raw.drop()


class SessionWriter(io.BufferedWriter, _Finishing):  # type: ignore[misc]
    """A file that is open for writing; it is in the session when it is closed, or when its transaction ends."""


class SessionUpdater(io.BufferedRandom, _Finishing):  # type: ignore[misc]
    """A file that is open for reading and writing."""


def _buffered(raw: _Writing, size: int) -> SessionWriter | SessionUpdater:
    return SessionUpdater(raw, size) if raw.readable() else SessionWriter(raw, size)


def _again(path: str, identity: str) -> SessionFileSystem:
    from mergefs.edit.session import reopened

    return SessionFileSystem(reopened(path, identity))
