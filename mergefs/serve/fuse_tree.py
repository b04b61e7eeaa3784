"""What a mount shows: paths and the nodes behind them. Nothing here knows FUSE.

A single model is its files. Everything is two folders: `manifests/HASH/...` holds the files of every
manifest, and `refs/NAME` is a symbolic link to the manifest that the ref names now. It is a link and not a
second folder because the kernel caches file contents by name: behind one and the same name, the cached pages
of a ref's old and new manifest would mix. Behind a link every name with contents is immutable, a moved ref
is seen at the next lookup, a file that is open keeps the manifest that it was opened in, and two refs to one
manifest share their cached pages.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mergefs.errors import CorruptionError, NotFoundError
from mergefs.hashing import digest, is_hex_id
from mergefs.serve.pool import Pool

REFS = "refs"
MANIFESTS = "manifests"
IDLE_VIEWS = 8
_WARM_BYTES = 1 << 20

ATTRIBUTE = "user.mergefs."
_LONGEST_ATTRIBUTE = 1 << 16
"""The kernel takes no longer ones."""

IMMUTABLE_SECONDS = 86400.0
MUTABLE_SECONDS = 1.0


class FileInfo(Protocol):
    """One file of a view."""

    @property
    def size(self) -> int:
        """The file's length in bytes."""


class Reader(Protocol):
    """A file that is open for reading."""

    def pieces(self, offset: int, size: int) -> Sequence[memoryview]:
        """Return bytes, fewer at the end of the file, in as many pieces as they lie in; called by many threads at
        once."""


class View(Protocol):
    """A manifest that is open for reading; its lease lasts until `close`."""

    @property
    def manifest_id(self) -> str:
        """The manifest's id."""

    @property
    def files(self) -> Mapping[str, FileInfo]:
        """The files by their paths."""

    @property
    def recipe(self) -> str | None:
        """A merge's recipe; None for other models."""

    def sha256(self, path: str) -> str | None:
        """Return a file's SHA-256 where it is known by now."""

    def reader(self, path: str) -> Reader:
        """Open a file."""

    def close(self) -> None:
        """End the lease."""


class Models(Protocol):
    """The part of a repository that a mount needs."""

    def refs(self) -> dict[str, str]:
        """Return every ref's manifest id."""

    def manifest_ids(self) -> list[str]:
        """Return the ids of all manifests."""

    def manifest_time(self, manifest_id: str) -> float:
        """Return when a manifest was made, in seconds since 1970."""

    def raw_bytes(self) -> int:
        """Return the size of all manifests' files together."""

    def view(self, name: str) -> View:
        """Open a manifest, by ref or id.

        Raises:
            NotFoundError: when there is none of this name.
        """


@dataclass(frozen=True, slots=True)
class Node:
    """What is behind one path.

    Attributes:
        mode: kind and permissions, as in `os.stat_result.st_mode`.
        inode: the same for the same manifest and path, in every mount.
        mtime: in seconds since 1970.
        target: where a symbolic link leads, otherwise empty.
        rough: whether only kind and inode are right, because the rest would have cost too much.
    """

    mode: int
    inode: int
    size: int
    mtime: float
    nlink: int
    target: str = ""
    rough: bool = False


@dataclass(frozen=True)
class Totals:
    """How much a mount holds, for `df`."""

    bytes: int = 0
    files: int = 0


@dataclass(frozen=True)
class OpenFile:
    """A file opened in one manifest; it stays the same whatever happens to refs.

    Attributes:
        release: tells the tree that the file is closed.
    """

    node: Node
    reader: Reader
    release: Callable[[], None]

    def pieces(self, offset: int, size: int) -> Sequence[memoryview]:
        """Return up to `size` bytes, fewer at the end of the file, in pieces. Takes no lock."""
        size = min(size, self.node.size - offset)
        return self.reader.pieces(offset, size) if size > 0 else ()


class Tree(Protocol):
    """What the FUSE side asks for. Paths are relative to the mount; the mount itself is the empty path."""

    @property
    def cache_seconds(self) -> float:
        """How long names and attributes may be believed without asking again."""

    @property
    def absent_seconds(self) -> float:
        """How long it may be believed that there is nothing of a name."""

    def node(self, path: str) -> Node:
        """Return what is at `path`.

        Raises:
            NotFoundError: when nothing is.
        """

    def children(self, path: str) -> list[tuple[str, Node]]:
        """Return the names in the folder at `path`, with what is behind each.

        Raises:
            NotFoundError: when there is no such folder.
        """

    def open(self, path: str) -> OpenFile:
        """Open the file at `path`.

        Raises:
            NotFoundError: when there is no such file.
        """

    def attributes(self, path: str) -> Mapping[str, bytes]:
        """Return the extended attributes of what is at `path`.

        Raises:
            NotFoundError: when nothing is.
        """

    def totals(self) -> Totals:
        """Return how much there is."""

    def close(self) -> None:
        """Close every view."""


def inode_number(manifest_id: str, path: str) -> int:
    """Return the inode number of a path in a manifest: 63 bits of a hash, never 0 or 1."""
    return max(2, int.from_bytes(digest(f"{manifest_id}\0{path}".encode())[:8]) >> 1)


class ModelTree:
    """The folders and files of one manifest: plain data, valid also when the manifest's view is closed."""

    def __init__(self, manifest_id: str, files: Mapping[str, FileInfo], mtime: float) -> None:
        """Lay out `files`.

        Raises:
            CorruptionError: when a path is a file and a folder at once.
        """
        names = _folders(files)
        if clash := next((path for path in files if path in names), None):
            raise CorruptionError(f"manifest {manifest_id} has {clash!r} as a file and as a folder")
        self._nodes = {
            path: Node(stat.S_IFREG | 0o444, inode_number(manifest_id, path), info.size, mtime, 1)
            for path, info in files.items()
        }
        self._names = {folder: tuple(sorted(inside)) for folder, inside in names.items()}
        for folder, inside in self._names.items():
            subfolders = sum(_join(folder, name) in names for name in inside)
            self._nodes[folder] = _folder(inode_number(manifest_id, folder), mtime, subfolders)
        self.totals = Totals(sum(info.size for info in files.values()), len(files))

    def node(self, path: str) -> Node:
        """Return what is at `path`, relative to the model.

        Raises:
            NotFoundError: when nothing is.
        """
        try:
            return self._nodes[path]
        except KeyError:
            raise NotFoundError(f"there is no {path!r}") from None

    def file(self, path: str) -> Node:
        """Return the file at `path`.

        Raises:
            NotFoundError: when there is no such file.
        """
        if path in self._names:
            raise NotFoundError(f"{path!r} is a folder")
        return self.node(path)

    def children(self, path: str) -> list[tuple[str, Node]]:
        """Return the names in the folder at `path`, sorted, with what is behind each.

        Raises:
            NotFoundError: when there is no such folder.
        """
        if path not in self._names:
            raise NotFoundError(f"there is no folder {path!r}")
        return [(name, self._nodes[_join(path, name)]) for name in self._names[path]]


class SingleModel:
    """A mount of one model: its files lie in the mount's own folder.

    The manifest is the one that the name stands for now, for as long as the mount lives: a model must not
    change between two of its files while somebody loads it.
    """

    cache_seconds = absent_seconds = IMMUTABLE_SECONDS

    def __init__(self, models: Models, name: str) -> None:
        """Open the model `name` (a ref or an id).

        Raises:
            NotFoundError: when there is none of this name.
        """
        self._view = models.view(name)
        manifest_id = self._view.manifest_id
        self._model = ModelTree(manifest_id, self._view.files, models.manifest_time(manifest_id))
        self.node = self._model.node
        self.children = self._model.children

    def open(self, path: str) -> OpenFile:
        """Open the file at `path` (see `Tree.open`)."""
        return OpenFile(self._model.file(path), self._view.reader(path), _nothing)

    def attributes(self, path: str) -> Mapping[str, bytes]:
        """Return extended attributes (see `Tree.attributes`)."""
        return _attributes(self._view, path, self._model.node(path))

    def warm_up(self) -> None:
        """Read the beginning of the largest file, so that what that needs is loaded when somebody asks for it.

        Raises:
            CorruptionError: when a block is missing or damaged.
        """
        largest = max(self._view.files, key=lambda path: self._view.files[path].size, default=None)
        if largest is not None:
            self._view.reader(largest).pieces(0, _WARM_BYTES)

    def totals(self) -> Totals:
        """Return the model's size."""
        return self._model.totals

    def close(self) -> None:
        """Close the view."""
        self._view.close()


class AllModels:
    """A mount of a whole repository: `refs/NAME` and `manifests/HASH/...`."""

    cache_seconds = MUTABLE_SECONDS
    absent_seconds = 0.0

    def __init__(self, models: Models, idle_views: int = IDLE_VIEWS) -> None:
        self._models = models
        self._views = Pool(lambda manifest_id: _opened(models, manifest_id), idle_views)
        self._mtime = time.time()

    def node(self, path: str) -> Node:
        """Return what is at `path` (see `Tree.node`)."""
        match path.split("/", 2):
            case [""]:
                return _folder(inode_number("", ""), self._mtime, 2)
            case ["refs"]:
                return _folder(inode_number("", REFS), self._mtime, 0)
            case ["manifests"]:
                return _folder(inode_number("", MANIFESTS), self._mtime, len(self._models.manifest_ids()))
            case ["refs", name]:
                return self._link(name, self._refs().get(name))
            case ["manifests", manifest_id, *inside]:
                return self._tree(manifest_id).node("".join(inside))
        raise NotFoundError(f"there is no {path!r}")

    def children(self, path: str) -> list[tuple[str, Node]]:
        """Return the names in the folder at `path` (see `Tree.children`)."""
        match path.split("/", 2):
            case [""]:
                return [(name, self.node(name)) for name in (MANIFESTS, REFS)]
            case ["refs"]:
                return [(name, self._link(name, target)) for name, target in sorted(self._refs().items())]
            case ["manifests"]:
                # Listing opens no views: who wants more than the names looks each folder up.
                return [
                    (i, replace(_folder(inode_number(i, ""), 0, 0), rough=True))
                    for i in sorted(self._models.manifest_ids())
                ]
            case ["manifests", manifest_id, *inside]:
                return self._tree(manifest_id).children("".join(inside))
        raise NotFoundError(f"there is no folder {path!r}")

    def open(self, path: str) -> OpenFile:
        """Open the file at `path` (see `Tree.open`)."""
        match path.split("/", 2):
            case ["manifests", manifest_id, inside]:
                return self._open(manifest_id, inside)
        raise NotFoundError(f"there is no file {path!r}")

    def attributes(self, path: str) -> Mapping[str, bytes]:
        """Return extended attributes (see `Tree.attributes`)."""
        match path.split("/", 2):
            case ["manifests", manifest_id, *inside]:
                with self._views.using(manifest_id) as opened:
                    name = "".join(inside)
                    return _attributes(opened.view, name, opened.tree.node(name))
        self.node(path)
        return {}

    def totals(self) -> Totals:
        """Return the size of all models, without how many files they have: that would read every manifest."""
        return Totals(self._models.raw_bytes())

    def close(self) -> None:
        """Close every view."""
        self._views.close()

    def _tree(self, manifest_id: str) -> ModelTree:
        with self._views.using(manifest_id) as opened:
            return opened.tree  # plain data, valid also when the view is closed

    def _open(self, manifest_id: str, path: str) -> OpenFile:
        opened = self._views.acquire(manifest_id)
        try:
            node = opened.tree.file(path)
        except BaseException:
            self._views.release(manifest_id)
            raise
        return OpenFile(node, opened.view.reader(path), lambda: self._views.release(manifest_id))

    def _refs(self) -> dict[str, str]:
        """Return the refs as they are now, without those that cannot be a file's name."""
        return {name: i for name, i in self._models.refs().items() if _is_file_name(name)}

    def _link(self, name: str, manifest_id: str | None) -> Node:
        if manifest_id is None:
            raise NotFoundError(f"there is no ref {name!r}")
        target = f"../{MANIFESTS}/{manifest_id}"
        mtime = self._models.manifest_time(manifest_id)
        inode = inode_number("", f"{REFS}/{name}")
        return Node(stat.S_IFLNK | 0o777, inode, len(target), mtime, 1, target)


@dataclass(frozen=True)
class _Opened:
    """A view with its layout."""

    view: View
    tree: ModelTree

    def close(self) -> None:
        """Close the view."""
        self.view.close()


def _opened(models: Models, manifest_id: str) -> _Opened:
    """Open a manifest by its whole id.

    Raises:
        NotFoundError: when there is none of this id.
    """
    # Only whole ids are names here: a ref or a prefix would be a second name for the same cached pages.
    if not is_hex_id(manifest_id):
        raise NotFoundError(f"there is no manifest {manifest_id!r}")
    view = models.view(manifest_id)
    try:
        return _Opened(view, ModelTree(manifest_id, view.files, models.manifest_time(manifest_id)))
    except BaseException:
        view.close()
        raise


def _attributes(view: View, path: str, node: Node) -> Mapping[str, bytes]:
    """Return what there is to say of a file or folder of a model, by the names of extended attributes."""
    found = {f"{ATTRIBUTE}manifest": view.manifest_id}
    if stat.S_ISREG(node.mode) and (sha256 := view.sha256(path)):
        found[f"{ATTRIBUTE}sha256"] = sha256
    if recipe := view.recipe:
        found[f"{ATTRIBUTE}recipe"] = recipe
    encoded = {name: value.encode() for name, value in found.items()}
    return {name: value for name, value in encoded.items() if len(value) <= _LONGEST_ATTRIBUTE}


def _folder(inode: int, mtime: float, subfolders: int) -> Node:
    return Node(stat.S_IFDIR | 0o555, inode, 0, mtime, 2 + subfolders)


def _folders(paths: Mapping[str, object]) -> dict[str, set[str]]:
    """Return what is in each folder, given the paths of all files; the top is the empty path."""
    names: dict[str, set[str]] = {"": set()}
    for path in paths:
        while path:
            folder, _, name = path.rpartition("/")
            names.setdefault(folder, set()).add(name)
            path = folder
    return names


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _nothing() -> None:
    pass
