"""A session as the operations that libfuse asks for: a folder of ordinary files that can be read and written."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from mergefs.edit.content import Content
from mergefs.edit.tree import Folder, Node, Tree

P = ParamSpec("P")
R = TypeVar("R")

_STAT_BLOCK = 512
# Of linux/stat.h and linux/falloc.h.
_NOW, _OMIT = (1 << 30) - 1, (1 << 30) - 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_ZEROS = 1 << 20
# The kernel forgets what it has of a file where the time of change is another than it knew, which it is after every
# write here. All changes come through the mount, so it has no need to.
_AUTO_INVAL_DATA = 1 << 12
# The kernel lets so many requests wait for us; its default of 12 is less than one loader with many threads asks for.
_MAX_BACKGROUND = 64

log = logging.getLogger(__name__)


def told(operation: Callable[P, R]) -> Callable[P, R]:
    """Turn whatever an operation raises into the error number that the caller gets."""

    @functools.wraps(operation)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(*args, **kwargs)
        except OSError as error:
            if error.errno:
                raise
            log.exception("%s failed", operation.__name__)
            raise OSError(errno.EIO, str(error)) from error
        except Exception as error:
            log.exception("%s failed", operation.__name__)
            raise OSError(errno.EIO, str(error)) from error

    return checked


class SessionFiles:
    """A session's tree as the operations that mfusepy calls, on many threads at once.

    Args:
        tree: the files.
        repository: a folder on the file system that has the room.
        ready: called once the mount serves.
    """

    use_ns = True  # times are integers, in nanoseconds

    def __init__(self, tree: Tree, repository: Path, ready: Callable[[], None]) -> None:
        self._tree = tree
        self._repository = repository
        self._ready = ready
        self._owner = (os.getuid(), os.getgid())
        self._handles = itertools.count(1)
        self._files: dict[int, Content] = {}

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Set what has no mount option, then say that the mount serves."""
        connection.want &= ~_AUTO_INVAL_DATA
        connection.max_background = _MAX_BACKGROUND
        connection.congestion_threshold = _MAX_BACKGROUND * 3 // 4
        self._ready()

    # -- looking -------------------------------------------------------------------------------------------

    @told
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Return the attributes of a path or of an open file."""
        name = path.strip("/")
        node: Node = self._files[fh] if fh in self._files else self._tree.node(name)
        kind = stat.S_IFDIR if isinstance(node, Folder) else stat.S_IFREG
        size = 0 if isinstance(node, Folder) else node.size
        return {
            "st_mode": kind | node.mode,
            "st_ino": node.number,
            "st_nlink": 2 + self._tree.subfolders(name) if isinstance(node, Folder) else 1,
            "st_size": size,
            "st_blocks": -(-size // _STAT_BLOCK),
            "st_uid": self._owner[0],
            "st_gid": self._owner[1],
            "st_atime": node.mtime,
            "st_mtime": node.mtime,
            "st_ctime": node.mtime,
        }

    @told
    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        """Return what is in a folder."""
        found: list[tuple[str, dict[str, int], int]] = [(name, {}, 0) for name in (".", "..")]
        for name, node in self._tree.children(path.strip("/")):
            kind = stat.S_IFDIR if isinstance(node, Folder) else stat.S_IFREG
            found.append((name, {"st_mode": kind | node.mode, "st_ino": node.number}, 0))
        return found

    @told
    def statfs(self, path: str) -> dict[str, int]:
        """Return how much room the repository's file system has."""
        found = os.statvfs(self._repository)
        names = ["f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"]
        return {**{name: getattr(found, name) for name in names}, "f_namemax": 255}

    # -- contents ------------------------------------------------------------------------------------------

    @told
    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        file = self._tree.open(path.strip("/"))
        if flags & os.O_TRUNC and flags & os.O_ACCMODE != os.O_RDONLY:
            file.truncate(0)
        return self._handle(file)

    @told
    def create(self, path: str, mode: int, flags: int) -> int:
        """Make a file and open it."""
        name = path.strip("/")
        self._tree.create(name, mode, exclusive=bool(flags & os.O_EXCL))
        return self._handle(self._tree.open(name))

    @told
    def mknod(self, path: str, mode: int, dev: int) -> int:
        """Make a file; nothing else."""
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self._tree.create(path.strip("/"), mode, exclusive=True)
        return 0

    @told
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Return bytes of an open file."""
        return self._files[fh].read(offset, size)

    @told
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Write bytes of an open file; return how many."""
        return self._files[fh].write(offset, data)

    @told
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """Cut a file, or make it longer with zeros."""
        file = self._files[fh] if fh in self._files else self._tree.file(path.strip("/"))
        file.truncate(length)
        return 0

    @told
    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        """Make a file longer, or punch a hole; room is not set aside."""
        file = self._files[fh]
        if mode == 0:
            if offset + size > file.size:
                file.truncate(offset + size)
        elif mode == _KEEP_SIZE | _PUNCH_HOLE:
            stop = min(offset + size, file.size)
            for at in range(offset, stop, _ZEROS):
                file.write(at, bytes(min(_ZEROS, stop - at)))
        elif mode != _KEEP_SIZE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return 0

    @told
    def flush(self, path: str, fh: int) -> int:
        """Do nothing: what was written is in the session already."""
        return 0

    @told
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        """Have the session reach the disk."""
        self._tree.sync()
        return 0

    fsyncdir = fsync

    @told
    def release(self, path: str, fh: int) -> int:
        """Close a file."""
        self._tree.release(self._files.pop(fh))
        return 0

    # -- names ---------------------------------------------------------------------------------------------

    @told
    def unlink(self, path: str) -> int:
        """Remove a file."""
        self._tree.remove(path.strip("/"))
        return 0

    @told
    def mkdir(self, path: str, mode: int) -> int:
        """Make a folder."""
        self._tree.make_folder(path.strip("/"), mode)
        return 0

    @told
    def rmdir(self, path: str) -> int:
        """Remove an empty folder."""
        self._tree.remove_folder(path.strip("/"))
        return 0

    @told
    def rename(self, old: str, new: str) -> int:
        """Give a file or folder another path."""
        self._tree.rename(old.strip("/"), new.strip("/"))
        return 0

    @told
    def chmod(self, path: str, mode: int) -> int:
        """Set permissions, for as long as the session lasts."""
        self._tree.set_mode(path.strip("/"), mode)
        return 0

    @told
    def chown(self, path: str, uid: int, gid: int) -> int:
        """Refuse another owner than the one that all files have."""
        for given, own in zip((uid, gid), self._owner, strict=True):
            if given not in (-1, own):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return 0

    @told
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Set the time of change, for as long as the session lasts; there is no time of access."""
        mtime = _NOW if times is None else times[1]
        if mtime != _OMIT:
            self._tree.set_time(path.strip("/"), time.time_ns() if mtime == _NOW else mtime)
        return 0

    def _refuse(self, *_: object) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    link = symlink = _refuse  # a model has only files and folders

    def _handle(self, file: Content) -> int:
        handle = next(self._handles)
        self._files[handle] = file
        return handle
