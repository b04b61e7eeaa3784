"""The files and folders of a session, and every change to them. Paths are relative with `/`; the top is empty.

What cannot be done raises OSError with the number that a file system gives.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergefs.checkpoint.strict import LARGEST
from mergefs.edit.content import Content, ReadBase, extents
from mergefs.edit.journal import Journal, Record, replay
from mergefs.errors import CorruptionError
from mergefs.manifest import safe_path
from mergefs.parts import cut, natural, text

JOURNAL = "journal"
DATA = "data"
HIDDEN = ".fuse_hidden"
"""How libfuse begins the names of files that are removed while somebody has them open."""
_CHANGES = frozenset(("next", "folder", "file", "create", "place", "remove", "rename", "mode", "time"))
"""What lines of the journal are called besides `write` and `cut`."""
_DROP_ABOVE = 256 << 20
"""Bytes of removed files from which on the session is flushed, so that they can go."""


@dataclass
class Folder:
    """A folder.

    Attributes:
        number: see `Content`; folders and files are numbered together.
        names: what is in it.
        mtime: nanoseconds since 1970.
        mode: permissions.
    """

    number: int
    mtime: int
    mode: int = 0o755
    names: set[str] = field(default_factory=set)


Node = Content | Folder


class Tree:
    """The files and folders of a session. Safe to use from many threads.

    Args:
        folder: of the session; its journal is replayed, where it has one, and begun anew.
        files: the sizes of the model's files by their paths.
        mtime: of the model, in nanoseconds since 1970.
        read_base: reads the model.
        sync: whether anything is flushed to the disk.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, int], mtime: int, read_base: ReadBase, *, sync: bool = True
    ) -> None:
        self._data = folder / DATA
        self._data.mkdir(mode=0o700, exist_ok=True)
        self._read_base = read_base
        self._sync = sync
        self._lock = threading.RLock()
        self._model = dict(files)
        self._nodes: dict[str, Node] = {"": Folder(1, mtime)}
        self._next = 2
        self._doomed: list[Content] = []
        self._doomed_bytes = 0
        self._replayed: dict[int, Content] = {}
        records = replay(folder / JOURNAL)
        if records:
            try:
                self._replay(records)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise CorruptionError(
                    f"{folder / JOURNAL} is damaged ({cut(repr(error))}): 'mergefs discard {folder.name}' removes the"
                    " session"
                ) from error
        else:
            self._lay_out(mtime)
        self._tidy()
        self._journal = Journal(folder / JOURNAL, self._snapshot(), sync=sync)

    # -- looking -------------------------------------------------------------------------------------------

    def node(self, path: str) -> Node:
        """Return what is at a path.

        Raises:
            FileNotFoundError, NotADirectoryError: when nothing is.
        """
        found = self._nodes.get(path)
        if found is None:
            raise self._absent(path)
        return found

    def file(self, path: str) -> Content:
        """Return the file at a path.

        Raises:
            FileNotFoundError, IsADirectoryError: when there is none.
        """
        found = self.node(path)
        if isinstance(found, Folder):
            raise _error(errno.EISDIR, path)
        return found

    def is_at(self, path: str, file: Content) -> bool:
        """Tell whether a file has this path."""
        return self._nodes.get(path) is file

    def folder(self, path: str) -> Folder:
        """Return the folder at a path.

        Raises:
            FileNotFoundError, NotADirectoryError: when there is none.
        """
        found = self.node(path)
        if isinstance(found, Content):
            raise _error(errno.ENOTDIR, path)
        return found

    def children(self, path: str) -> list[tuple[str, Node]]:
        """Return the names in a folder, sorted, with what is behind each."""
        with self._lock:
            names = sorted(name for name in self.folder(path).names if not name.startswith(HIDDEN))
            return [(name, self._nodes[_join(path, name)]) for name in names]

    def files(self) -> dict[str, Content]:
        """Return every file by its path, but for those that are removed and still open."""
        with self._lock:
            found = {path: node for path, node in self._nodes.items() if isinstance(node, Content)}
        return {path: found[path] for path in sorted(found) if not path.rpartition("/")[2].startswith(HIDDEN)}

    def subfolders(self, path: str) -> int:
        """Return how many folders are directly in a folder."""
        with self._lock:
            return sum(isinstance(self._nodes[_join(path, name)], Folder) for name in self.folder(path).names)

    @property
    def is_changed(self) -> bool:
        """Whether any file is not the model's, or has another name."""
        files = self.files()
        return set(files) != set(self._model) or any(
            node.size != self._model[path] or (node.size > 0 and (node.base != path or bool(node.local)))
            for path, node in files.items()
        )

    # -- changing ------------------------------------------------------------------------------------------

    def create(self, path: str, mode: int = 0o644, *, exclusive: bool = False) -> Content:
        """Make an empty file, or empty the one that is there.

        Raises:
            OSError: when the name is malformed, or the folder is not there.
            FileExistsError: when it is there, and is to be new.
        """
        with self._lock:
            found = self._nodes.get(path)
            if found is not None:
                if exclusive:
                    raise _error(errno.EEXIST, path)
                file = self.file(path)
                file.truncate(0)
                return file
            self._check_new(path)
            file = self._new(mode)
            self._journal.append("create", path, file.number, file.mtime, file.mode)
            self._enter(path, file)
            return file

    def anonymous(self) -> Content:
        """Make a file without a name: `place` gives it one, and it is gone with the session otherwise."""
        with self._lock:
            file = self._new(0o644, journaled=False)
            file.opened = 1
            return file

    def place(self, file: Content, path: str) -> None:
        """Give a file without a name a path, in the place of the file that is there.

        Raises:
            OSError: when the name is malformed, the folder is not there or a folder is in the way.
        """
        self.place_all([(file, path)])

    def place_all(self, files: Sequence[tuple[Content, str]]) -> None:
        """Give several files without names their paths, all of them or none, whatever happens to the process.

        Raises:
            OSError: see `place`.
        """
        with self._lock:
            for file, path in files:
                if path in self._nodes:
                    self.file(path)
                else:
                    self._check_new(path)
                if self._sync:
                    file.sync()
            self._journal.append("place", [[path, f.number, f.mtime, f.mode, f.size] for f, path in files])
            for file, path in files:
                self._drop(path)
                file.keep_journal(self._journal.append)
                self._enter(path, file)
                file.opened -= 1
            self._relieve()

    def forget(self, file: Content) -> None:
        """Let a file without a name go."""
        with self._lock:
            file.opened -= 1
            file.drop()

    def make_folder(self, path: str, mode: int = 0o755) -> Folder:
        """Make a folder.

        Raises:
            OSError: when the name is malformed or taken, or the folder above is not there.
        """
        with self._lock:
            if path in self._nodes:
                raise _error(errno.EEXIST, path)
            self._check_new(path)
            folder = Folder(self._number(), _now(), mode & 0o7777)
            self._journal.append("folder", path, folder.number, folder.mtime, folder.mode)
            self._enter(path, folder)
            return folder

    def remove(self, path: str) -> None:
        """Remove a file.

        Raises:
            OSError: when there is no such file.
        """
        with self._lock:
            self.file(path)
            self._journal.append("remove", path)
            self._drop(path)
            self._relieve()

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder.

        Raises:
            OSError: when there is none, or it is not empty.
        """
        with self._lock:
            if self.folder(path).names:
                raise _error(errno.ENOTEMPTY, path)
            if not path:
                raise _error(errno.EBUSY, path)
            self._journal.append("remove", path)
            self._drop(path)

    def rename(self, old: str, new: str) -> None:
        """Give a file or a folder another path, in the place of the file or empty folder that is there.

        Raises:
            OSError: as rename(2) does.
        """
        with self._lock:
            moved = self.node(old)
            if old == new:
                return
            if not old or not new or new.startswith(f"{old}/"):
                raise _error(errno.EINVAL, old)
            there = self._nodes.get(new)
            if there is None:
                self._check_new(new)
            elif isinstance(there, Folder):
                if isinstance(moved, Content):
                    raise _error(errno.EISDIR, new)
                if there.names:
                    raise _error(errno.ENOTEMPTY, new)
            elif isinstance(moved, Folder):
                raise _error(errno.ENOTDIR, new)
            self._journal.append("rename", old, new)
            self._rename(old, new)
            self._relieve()

    def set_mode(self, path: str, mode: int) -> None:
        """Set permissions. They last as long as the session: a model has none."""
        with self._lock:
            node = self.node(path)
            self._journal.append("mode", path, mode & 0o7777)
            node.mode = mode & 0o7777

    def set_time(self, path: str, mtime: int) -> None:
        """Set when a file was changed, in nanoseconds since 1970. It lasts as long as the session."""
        with self._lock:
            node = self.node(path)
            self._journal.append("time", path, mtime)
            node.mtime = mtime

    def open(self, path: str) -> Content:
        """Return the file at a path; what it holds stays readable until `release`, also when it is removed."""
        with self._lock:
            file = self.file(path)
            file.opened += 1
            return file

    def release(self, file: Content) -> None:
        """Say that somebody is done with a file."""
        with self._lock:
            file.opened -= 1

    def sync(self) -> None:
        """Have everything so far reach the disk."""
        with self._lock:
            self._journal.begin_mark()
            if self._sync:
                for node in self._nodes.values():
                    if isinstance(node, Content) and node.dirty:
                        node.sync()
            self._journal.mark()
            # Not before: where the machine goes down, the journal is read up to here, and names them until here.
            for file in [file for file in self._doomed if not file.opened]:
                self._doomed.remove(file)
                file.drop()
            self._doomed_bytes = 0

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    # -- the journal ---------------------------------------------------------------------------------------

    def _lay_out(self, mtime: int) -> None:
        """Begin with the model's files."""
        for path in self._model:
            folder = path.rpartition("/")[0]
            for above in _above(folder):
                if above not in self._nodes:
                    self._enter(above, Folder(self._number(), mtime))
            self._enter(path, self._base_file(self._number(), path, mtime))
        for node in self._nodes.values():
            if isinstance(node, Folder):
                node.mtime = mtime

    def _snapshot(self) -> Iterator[Record]:
        """Yield the records that make the tree what it is."""
        yield ["next", self._next]
        for path, node in sorted(self._nodes.items()):
            if isinstance(node, Folder):
                yield ["folder", path, node.number, node.mtime, node.mode]
            else:
                local = list(_ranges(node.local)) if node.base is not None else []
                yield ["file", path, node.number, node.mtime, node.mode, node.size, node.base, node.kept, local]

    def _replay(self, records: list[Record]) -> None:
        for name, *operands in records:
            if name == "write":
                number, *rest = operands
                self._replayed[number].apply_write(*rest)
            elif name == "cut":
                number, size = operands
                self._replayed[number].apply_cut(size)
            elif name in _CHANGES:
                getattr(self, f"_replay_{name}")(*operands)
            else:
                raise ValueError(f"there is no change {name!r}")
        self._replayed.clear()
        self._check()

    def _check(self) -> None:
        """Check what no file system would hold: lines with checksums can still say anything."""
        top = self._nodes.get("")
        if not isinstance(top, Folder):
            raise ValueError("there is no top folder")
        natural(self._next)
        for path, node in self._nodes.items():
            if path and not (safe_path(text(path)) and isinstance(self._nodes.get(path.rpartition("/")[0]), Folder)):
                raise ValueError(f"{path!r} is no path")
            natural(node.number), natural(node.mtime), natural(node.mode)
            if isinstance(node, Content):
                kept = natural(node.kept)
                if natural(node.size) > LARGEST or (node.base is None and kept):
                    raise ValueError(f"'{path}' cannot have {node.size} bytes")
                if node.base is not None and kept > self._model[text(node.base)]:
                    raise ValueError(f"'{path}' has more bytes of '{node.base}' than there are")
        numbers = [node.number for node in self._nodes.values()]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two files have one number")

    def _replay_next(self, number: int) -> None:
        self._next = natural(number)

    def _replay_folder(self, path: str, number: int, mtime: int, mode: int) -> None:
        self._next = max(self._next, number + 1)
        if path:
            self._enter(path, Folder(number, mtime, mode))
        else:
            self._nodes[""] = Folder(number, mtime, mode)

    def _replay_file(self, path: str, number: int, mtime: int, mode: int, size: int, *rest: Any) -> None:
        base, kept, local = rest
        self._drop(path)
        file = self._content(number, mtime=mtime, mode=mode, size=size, base=base, kept=kept)
        for first, stop in local:
            file.local.update(extents(first, stop, size))
        self._enter(path, file)
        self._replayed[number] = file

    def _replay_create(self, path: str, number: int, mtime: int, mode: int) -> None:
        self._replay_file(path, number, mtime, mode, 0, None, 0, [])

    def _replay_place(self, files: list[list[Any]]) -> None:
        for path, number, mtime, mode, size in files:
            self._replay_file(path, number, mtime, mode, size, None, 0, [])

    def _replay_remove(self, path: str) -> None:
        self._drop(path)

    def _replay_rename(self, old: str, new: str) -> None:
        self._rename(old, new)

    def _replay_mode(self, path: str, mode: int) -> None:
        self._nodes[path].mode = mode

    def _replay_time(self, path: str, mtime: int) -> None:
        self._nodes[path].mtime = mtime

    def _tidy(self) -> None:
        """Remove what only an ended process needed: files of nobody, and those that it had removed while open."""
        for path in [path for path in self._nodes if path.rpartition("/")[2].startswith(HIDDEN)]:
            self._drop(path)
        used = {str(node.number) for node in self._nodes.values()}
        for name in os.listdir(self._data):
            if name not in used:
                (self._data / name).unlink()
        self._doomed.clear()
        for node in self._nodes.values():
            if isinstance(node, Content):
                node.mend()
                if self._sync:
                    node.sync()

    # -- inside --------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _content(self, number: int, **state: Any) -> Content:
        self._next = max(self._next, number + 1)
        return Content(number, self._data, self._read_base, self._append, **state)

    def _append(self, *record: Any) -> None:
        self._journal.append(*record)

    def _new(self, mode: int, *, journaled: bool = True) -> Content:
        file = self._content(self._number(), mtime=_now(), mode=mode & 0o7777)
        if not journaled:
            file.keep_journal(lambda *record: None)
        return file

    def _base_file(self, number: int, path: str, mtime: int) -> Content:
        size = self._model[path]
        return self._content(number, base=path if size else None, kept=size, size=size, mtime=mtime)

    def _check_new(self, path: str) -> None:
        """Check that something may get this path.

        Raises:
            OSError: when the name is malformed, or there is no such folder.
        """
        try:
            fits = safe_path(path)
            too_long = len(path.rpartition("/")[2].encode()) > 255 or len(path.encode()) > 4096
        except UnicodeEncodeError:
            raise _error(errno.EILSEQ, path) from None
        if too_long:
            raise _error(errno.ENAMETOOLONG, path)
        if not fits:
            raise _error(errno.EINVAL, path)
        self.folder(path.rpartition("/")[0])

    def _absent(self, path: str) -> OSError:
        for above in _above(path):
            if isinstance(self._nodes.get(above), Content):
                return _error(errno.ENOTDIR, path)
        return _error(errno.ENOENT, path)

    def _enter(self, path: str, node: Node) -> None:
        self._nodes[path] = node
        self._parent(path).names.add(path.rpartition("/")[2])

    def _drop(self, path: str) -> None:
        node = self._nodes.pop(path, None)
        if node is None:
            return
        self._parent(path).names.discard(path.rpartition("/")[2])
        if isinstance(node, Content):
            self._doomed.append(node)
            self._doomed_bytes += node.stored

    def _relieve(self) -> None:
        """Let removed files go once they take much room."""
        if self._doomed_bytes > _DROP_ABOVE:
            self.sync()

    def _parent(self, path: str) -> Folder:
        parent = self._nodes[path.rpartition("/")[0]]
        assert isinstance(parent, Folder)
        parent.mtime = _now()
        return parent

    def _rename(self, old: str, new: str) -> None:
        self._drop(new)
        node = self._nodes.pop(old)
        self._parent(old).names.discard(old.rpartition("/")[2])
        self._enter(new, node)
        if isinstance(node, Folder):
            below = f"{old}/"
            for path in [path for path in self._nodes if path.startswith(below)]:
                self._nodes[f"{new}/{path[len(below) :]}"] = self._nodes.pop(path)


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the folders of a path, itself included, from the top."""
    parts = path.split("/") if path else []
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _ranges(numbers: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs (first, stop) of some numbers."""
    first = stop = -1
    for number in sorted(numbers):
        if number != stop:
            if first >= 0:
                yield first, stop
            first = number
        stop = number + 1
    if first >= 0:
        yield first, stop


def _now() -> int:
    return time.time_ns()


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
