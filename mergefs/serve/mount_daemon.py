"""The process behind a mount: it opens a repository and answers the kernel until it is unmounted.

    python -m mergefs.serve.mount_daemon --repo REPO [--ref REF] [--ready-fd N] [--log FILE] DIRECTORY

It is a process of its own because a reader that waits for a page holds its interpreter's lock: a mount in the
reader's process would wait for that lock and the reader for the mount, for ever. `mergefs.serve.mount` starts
it; it says on `--ready-fd` when it serves, or why it does not.
"""

from __future__ import annotations

import argparse
import errno
import functools
import itertools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from mergefs.errors import MergefsError, MountError, NotFoundError
from mergefs.repository import Repository
from mergefs.serve.fuse_tree import AllModels, Node, OpenFile, SingleModel, Tree

P = ParamSpec("P")
R = TypeVar("R")

FILE_SYSTEM = "mergefs"

_STATFS_BLOCK = 4096
_STAT_BLOCK = 512
_NAME_MAX = 255
# The kernel lets so many readahead requests wait for us; its default of 12 is less than one loader with many
# threads asks for.
_MAX_BACKGROUND = 64
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


def with_errno(operation: Callable[P, R]) -> Callable[P, R]:
    """Turn whatever an operation raises into the error number that the reader gets."""

    @functools.wraps(operation)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(*args, **kwargs)
        except NotFoundError as error:
            raise OSError(errno.ENOENT, str(error)) from None
        except Exception as error:
            # An OSError too: a missing pack is no missing file to the reader, it is an unreadable one.
            log.exception("%s failed", operation.__name__)
            raise OSError(errno.EIO, str(error)) from error

    return told


class TreeFiles:
    """A tree as the operations that mfusepy calls, on many threads at once.

    Only the tables of open files and folders are shared; each step on them is one atomic operation.
    """

    use_ns = True  # times are integers, in nanoseconds
    # Reads and listings come without their paths: they need only the handle, and libfuse saves building them.
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(self, tree: Tree, ready: Callable[[], None]) -> None:
        self._tree = tree
        self._ready = ready
        self._owner = (os.getuid(), os.getgid())
        self._handles = itertools.count(1)
        self._files: dict[int, OpenFile] = {}
        self._folders: dict[int, list[tuple[str, Node]]] = {}

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Set what has no mount option, then say that the mount serves."""
        connection.max_background = _MAX_BACKGROUND
        connection.congestion_threshold = _MAX_BACKGROUND * 3 // 4
        self._ready()

    @with_errno
    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        """Return the attributes of a path or of an open file."""
        node = self._tree.node(path.strip("/")) if path is not None else self._files[fh or 0].node
        time = int(node.mtime * 1e9)
        return {
            "st_mode": node.mode,
            "st_ino": node.inode,
            "st_nlink": node.nlink,
            "st_size": node.size,
            "st_blocks": -(-node.size // _STAT_BLOCK),
            "st_uid": self._owner[0],
            "st_gid": self._owner[1],
            "st_atime": time,
            "st_mtime": time,
            "st_ctime": time,
        }

    @with_errno
    def readlink(self, path: str) -> str:
        """Return where a symbolic link leads now."""
        return self._tree.node(path.strip("/")).target

    @with_errno
    def opendir(self, path: str) -> int:
        """Take a folder's listing; who reads it sees it as it was now."""
        entries = self._tree.children(path.strip("/"))
        handle = next(self._handles)
        self._folders[handle] = entries
        return handle

    @with_errno
    def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
        """Return a listing."""
        dots: list[tuple[str, dict[str, int], int]] = [(name, {}, 0) for name in (".", "..")]
        return dots + [(n, {"st_mode": node.mode, "st_ino": node.inode}, 0) for n, node in self._folders[fh]]

    @with_errno
    def releasedir(self, path: str | None, fh: int) -> int:
        """Forget a listing."""
        del self._folders[fh]
        return 0

    def open(self, path: str, flags: int) -> int:
        """Open a file for reading."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._read_only()
        return self._open(path)

    @with_errno
    def _open(self, path: str) -> int:
        file = self._tree.open(path.strip("/"))
        handle = next(self._handles)
        self._files[handle] = file
        return handle

    @with_errno
    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        """Return bytes of an open file."""
        return self._files[fh].read(offset, size)

    @with_errno
    def release(self, path: str | None, fh: int) -> int:
        """Close a file."""
        self._files.pop(fh).release()
        return 0

    @with_errno
    def statfs(self, path: str) -> dict[str, int]:
        """Return how much there is; nothing is free."""
        totals = self._tree.totals()
        return {
            "f_bsize": _STATFS_BLOCK,
            "f_frsize": _STATFS_BLOCK,
            "f_blocks": -(-totals.bytes // _STATFS_BLOCK),
            "f_files": totals.files,
            "f_namemax": _NAME_MAX,
        }

    def _read_only(self, *_: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # The mount is read-only, so the kernel refuses these itself, unless root has remounted it for writing.
    chmod = chown = create = fallocate = link = mkdir = mknod = removexattr = rename = rmdir = _read_only
    setxattr = symlink = truncate = unlink = utimens = write = _read_only


def serve(tree: Tree, directory: Path, ready: Callable[[], None], *, allow_other: bool = False) -> None:
    """Mount `tree` at `directory` and answer until it is unmounted or the process is told to end.

    To be called on the main thread: libfuse's own handlers for SIGTERM, SIGINT and SIGHUP unmount.

    Args:
        ready: called once, when the kernel and this process have agreed on the mount.

    Raises:
        MountError: when libfuse is missing or cannot mount.
    """
    # With both libraries there, mfusepy would take libfuse 2, which knows other options.
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        import mfusepy
    except ImportError as error:
        raise MountError("mfusepy is missing: pip install 'mergefs[mount]'") from error
    except OSError as error:
        raise MountError("libfuse3 is missing: apt install fuse3") from error
    serving = threading.Event()

    def started() -> None:
        serving.set()
        ready()

    # Until here no signal could end the process half way.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
    try:
        mfusepy.FUSE(
            TreeFiles(tree, started),
            str(directory),
            foreground=True,  # the process is in the background already, and LMDB survives no fork
            ro=True,
            fsname=f"{FILE_SYSTEM}:{os.getpid()}",  # how umount finds the process to wait for
            subtype=FILE_SYSTEM,
            default_permissions=True,
            allow_other=allow_other,
            use_ino=True,
            kernel_cache=True,  # what is behind a name never changes, so its pages stay good
            entry_timeout=tree.cache_seconds,
            attr_timeout=tree.cache_seconds,
        )
    except RuntimeError as error:
        if serving.is_set():
            log.info("the mount was ended by a signal (libfuse says %s)", error)
            return
        raise MountError(f"{directory} cannot be mounted (libfuse error {error})") from error


class _Pipe:
    """The way to tell the starting process, once, how it went."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            # The helper that libfuse starts must not hold the pipe open.
            os.set_inheritable(fd, False)

    def tell(self, **message: Any) -> None:
        """Send `message` the first time; afterwards do nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with open(fd, "w") as file:
                json.dump(message, file)


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return its exit code."""
    return run(_parser().parse_args(arguments), _run)


def run(options: argparse.Namespace, serve_it: Callable[[argparse.Namespace, Callable[[], None]], None]) -> int:
    """Run a process that serves a mount, and return its exit code.

    Args:
        options: with `ready_fd` and `log`, as `mergefs.serve.mount` gives them.
        serve_it: opens what is to be served, and serves it until the mount ends; called with the options, and with
            what it is to call when the mount serves.
    """
    # Threads inherit the mask, so that the signals come to the main thread, where libfuse waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe = _Pipe(options.ready_fd)

    def ready() -> None:
        _log_to(options.log)
        pipe.tell(ready=os.getpid())

    try:
        serve_it(options, ready)
    except MergefsError as error:
        log.error("%s", error)
        pipe.tell(error=str(error), kind=type(error).__name__, exit_code=error.exit_code)
        return error.exit_code
    except Exception as error:
        log.exception("the mount failed")
        pipe.tell(error=f"the mount failed: {error!r}", kind=MergefsError.__name__, exit_code=1)
        return 1
    return 0


def _run(options: argparse.Namespace, ready: Callable[[], None]) -> None:
    """Open the repository, serve, and end the leases however it went."""
    repository = Repository.open(options.repo)
    try:
        tree: Tree = AllModels(repository) if options.ref is None else SingleModel(repository, options.ref)
        try:
            os.chdir("/")  # so as to keep no other file system busy
            serve(tree, options.directory, ready, allow_other=options.allow_other)
        finally:
            tree.close()
    finally:
        repository.close()


def _log_to(file: Path) -> None:
    """Send standard output and errors to `file` from now on; so far the starting process has them."""
    with file.open("ab", buffering=0) as target:
        os.dup2(target.fileno(), 1)
        os.dup2(target.fileno(), 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mergefs.serve.mount_daemon", description="Serve one mergefs mount.")
    parser.add_argument("directory", type=_absolute)
    parser.add_argument("--repo", type=_absolute, required=True)
    parser.add_argument("--ref", help="one model, by ref or manifest hash; without it, everything")
    parser.add_argument("--ready-fd", type=int, help="where to say that the mount serves, or why it does not")
    parser.add_argument("--log", type=_absolute, default=Path(os.devnull), help="where errors go once it serves")
    parser.add_argument("--allow-other", action="store_true", help="let other users read the mount")
    return parser


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))


if __name__ == "__main__":
    sys.exit(main())
