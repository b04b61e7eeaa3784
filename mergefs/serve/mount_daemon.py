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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from mergefs.configuration import CONFIG
from mergefs.errors import MergefsError, MountError, NotFoundError
from mergefs.repository import Repository
from mergefs.serve.fuse_binding import load_binding
from mergefs.serve.fuse_tree import ATTRIBUTE, AllModels, Node, OpenFile, SingleModel, Tree
from mergefs.serve.mount_table import FILE_SYSTEM, STATE
from mergefs.serve.served import Keeping, ServedModels

P = ParamSpec("P")
R = TypeVar("R")

_STATFS_BLOCK = 4096
_STAT_BLOCK = 512
_NAME_MAX = 255
# The kernel lets so many readahead requests wait for us; its default of 12 is less than one loader with many
# threads asks for.
_MAX_BACKGROUND = 64
_ATTENTION_SECONDS = 1.0
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
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise
            log.exception("%s failed", operation.__name__)
            raise OSError(errno.EIO, str(error)) from error
        except Exception as error:
            # An OSError too: a missing pack is no missing file to the reader, it is an unreadable one.
            log.exception("%s failed", operation.__name__)
            raise OSError(errno.EIO, str(error)) from error

    return told


class Served:
    """Counts the bytes that were served. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count some more."""
        with self._lock:
            self._bytes += size

    @property
    def bytes(self) -> int:
        """So many so far."""
        with self._lock:
            return self._bytes


class TreeFiles:
    """A tree as the operations that mfusepy calls, on many threads at once.

    Only the tables of open files and folders are shared; each step on them is one atomic operation.
    """

    use_ns = True  # times are integers, in nanoseconds
    # Reads and listings come without their paths: they need only the handle, and libfuse saves building them.
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(
        self, tree: Tree, ready: Callable[[], None], state: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self._tree = tree
        self._ready = ready
        self._served = Served()
        self._more_state = state or dict
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
        return self._status(self._tree.node(path.strip("/")) if path is not None else self._files[fh or 0].node)

    def _status(self, node: Node) -> dict[str, int]:
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
    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        """Return an extended attribute."""
        place = path.strip("/")
        if name == STATE and not place:
            return json.dumps(self._state()).encode()
        if name.startswith(ATTRIBUTE) and (value := self._tree.attributes(place).get(name)) is not None:
            return value
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    @with_errno
    def listxattr(self, path: str) -> list[str]:
        """Return the names of the extended attributes; that of the mount's own state is not among them."""
        return list(self._tree.attributes(path.strip("/")))

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
    def entries(self, fh: int) -> Iterator[tuple[str, dict[str, int], bool]]:
        """Yield what is in a listing: names, attributes, and whether those are complete."""
        yield from ((name, {}, False) for name in (".", ".."))
        yield from ((name, self._status(node), not node.rough) for name, node in self._folders[fh])

    readdir = entries  # what the binding looks for; it calls `entries`

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
    def read_pieces(self, size: int, offset: int, fh: int) -> Sequence[memoryview]:
        """Return bytes of an open file, in pieces."""
        pieces = self._files[fh].pieces(offset, size)
        self._served.add(sum(map(len, pieces)))
        return pieces

    read = read_pieces  # what the binding looks for; it calls `read_pieces`

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

    def _state(self) -> dict[str, Any]:
        """Return what `mergefs mounts` shows of this mount."""
        return {"bytes_served": self._served.bytes, **self._more_state()}

    def _read_only(self, *_: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # The mount is read-only, so the kernel refuses these itself, unless root has remounted it for writing.
    chmod = chown = create = fallocate = link = mkdir = mknod = removexattr = rename = rmdir = _read_only
    setxattr = symlink = truncate = unlink = utimens = write = _read_only


def serve(
    tree: Tree,
    directory: Path,
    ready: Callable[[], None],
    *,
    allow_other: bool = False,
    state: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Mount `tree` at `directory` and answer until it is unmounted or the process is told to end.

    To be called on the main thread: libfuse's own handlers for SIGTERM, SIGINT and SIGHUP unmount.

    Args:
        ready: called once, when the kernel and this process have agreed on the mount.
        allow_other: let other users in.
        state: says more about the mount.

    Raises:
        MountError: when libfuse is missing or cannot mount.
    """
    binding = load_binding()
    serving = threading.Event()

    def started() -> None:
        serving.set()
        ready()

    # Until here no signal could end the process half way.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
    try:
        binding(
            TreeFiles(tree, started, state),
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
            negative_timeout=tree.absent_seconds,
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
    began = time.time()
    readonly = (options.repo / "catalog").is_dir() and not os.access(options.repo / "catalog", os.W_OK)
    with ExitStack() as stack:
        opened = Repository.open(
            options.repo, readonly=readonly, sync=not options.no_sync, check_blocks=options.check_blocks
        )
        repository = stack.enter_context(opened)
        served = ServedModels(repository, Keeping(options.cache_size, options.keep, options.store))
        stack.callback(served.close)
        tree: Tree = AllModels(served) if options.ref is None else SingleModel(served, options.ref)
        stack.callback(tree.close)
        stack.enter_context(_Attention(options.repo, served, tree))

        def state() -> dict[str, Any]:
            return {
                "repository": str(options.repo),
                "ref": options.ref,
                "since": began,
                "cache": asdict(served.cache),
                "read": asdict(served.read),
            }

        os.chdir("/")  # so as to keep no other file system busy
        serve(tree, options.directory, ready, allow_other=options.allow_other, state=state)


class _Attention:
    """Looks after a mount from time to time, on a thread of its own: ends it when its repository is gone.

    Args:
        repository: the folder.
        served: what is tended.
        tree: what is served; one model is made ready first.
    """

    def __init__(self, repository: Path, served: ServedModels, tree: Tree) -> None:
        self._config = repository / CONFIG
        self._device = self._config.stat().st_dev
        self._served = served
        self._tree = tree
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        if isinstance(self._tree, SingleModel):
            try:
                self._tree.warm_up()
            except MergefsError as error:
                log.warning("%s", error)  # who reads it will be told
        while not self._ended.wait(_ATTENTION_SECONDS):
            if not self._is_there():
                log.error("the repository %s is gone: the mount ends", self._config.parent)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._served.tend()
            except Exception:
                log.exception("storing derived blocks failed")

    def _is_there(self) -> bool:
        try:
            return self._config.stat().st_dev == self._device
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it cannot be looked at just now


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
    parser.add_argument("--cache-size", type=int, required=True, help="bytes of decoded blocks kept in memory")
    parser.add_argument("--keep", type=int, default=0, help="bytes of derived blocks kept in a file")
    parser.add_argument("--store", action="store_true", help="store derived blocks in packs")
    parser.add_argument("--no-sync", action="store_true", help="flush nothing to the disk")
    parser.add_argument("--check-blocks", help="how many blocks of merges are compared with their ids")
    return parser


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))


if __name__ == "__main__":
    sys.exit(main())
