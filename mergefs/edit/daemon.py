"""The process behind a mounted session.

    python -m mergefs.edit.daemon --repo REPO --session ID [--ready-fd N] [--log FILE] DIRECTORY

`mergefs.edit.mount` starts it; why it is a process of its own, and how it tells that it serves, is said in
`mergefs.serve.mount_daemon`.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from mergefs.edit.files import SessionFiles
from mergefs.edit.session import Session
from mergefs.errors import MountError
from mergefs.repository import Repository
from mergefs.serve import mount_daemon
from mergefs.serve.mount_table import FILE_SYSTEM

# All changes come through the mount, so that the kernel knows of them.
_CACHE_SECONDS = 60.0
_RENAME_NOREPLACE = 1

log = logging.getLogger(__name__)


def serve(session: Session, directory: Path, ready: Callable[[], None], *, allow_other: bool = False) -> None:
    """Mount a session at `directory` and answer until it is unmounted or the process is told to end.

    To be called on the main thread: libfuse's own handlers for SIGTERM, SIGINT and SIGHUP unmount.

    Args:
        session: what is served.
        directory: where.
        ready: called once, when the kernel and this process have agreed on the mount.
        allow_other: let other users in.

    Raises:
        MountError: when libfuse is missing or cannot mount.
    """
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        import mfusepy
    except ImportError as error:
        raise MountError("mfusepy is missing: pip install 'mergefs[mount]'") from error
    except OSError as error:
        raise MountError("libfuse3 is missing: apt install fuse3") from error

    class Binding(mfusepy.FUSE):  # type: ignore[misc]
        """mfusepy drops the flags of a rename; an exchange of two files would then remove one of them."""

        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            if flags & ~_RENAME_NOREPLACE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return int(self.rename_fuse_2(old, new) or 0)

    serving = threading.Event()

    def started() -> None:
        serving.set()
        ready()

    signal.pthread_sigmask(signal.SIG_UNBLOCK, mount_daemon._END_SIGNALS)
    try:
        Binding(
            SessionFiles(session.tree, session.store.path, started),
            str(directory),
            foreground=True,
            fsname=f"{FILE_SYSTEM}:{os.getpid()}",
            subtype=FILE_SYSTEM,
            default_permissions=True,
            allow_other=allow_other,
            use_ino=True,
            kernel_cache=True,
            entry_timeout=_CACHE_SECONDS,
            attr_timeout=_CACHE_SECONDS,
        )
    except RuntimeError as error:
        if serving.is_set():
            log.info("the mount was ended by a signal (libfuse says %s)", error)
            return
        raise MountError(f"{directory} cannot be mounted (libfuse error {error})") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return its exit code."""
    parser = argparse.ArgumentParser(prog="mergefs.edit.daemon", description="Serve one mergefs session.")
    parser.add_argument("directory", type=_absolute)
    parser.add_argument("--repo", type=_absolute, required=True)
    parser.add_argument("--session", required=True)
    parser.add_argument("--ready-fd", type=int, help="where to say that the mount serves, or why it does not")
    parser.add_argument("--log", type=_absolute, default=Path(os.devnull), help="where errors go once it serves")
    parser.add_argument("--allow-other", action="store_true", help="let other users in")
    parser.add_argument("--no-sync", action="store_true", help="flush nothing to the disk")
    parser.add_argument("--check-blocks", help="how many blocks of merges are compared with their ids")
    return mount_daemon.run(parser.parse_args(arguments), _run)


def _run(options: argparse.Namespace, ready: Callable[[], None]) -> None:
    """Open the session, serve it, and close it however it went."""
    repository = Repository.open(options.repo, sync=not options.no_sync, check_blocks=options.check_blocks)
    try:
        session = Session(repository, options.session)
        try:
            session.placed(options.directory)
            os.chdir("/")  # so as to keep no other file system busy
            serve(session, options.directory, ready, allow_other=options.allow_other)
        finally:
            session.close()
    finally:
        repository.close()


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))


if __name__ == "__main__":
    sys.exit(main())
