"""Mounting a session as a folder that can be written to, and ending it with a commit or without."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergefs.edit import folders
from mergefs.edit.session import CommitReport, Session
from mergefs.errors import CorruptionError, UserError
from mergefs.serve import mount as mounting
from mergefs.store import Store

_DAEMON = "mergefs.edit.daemon"


@dataclass(frozen=True)
class EditInfo:
    """A session that is mounted.

    Attributes:
        session: its id.
        directory: where; absolute, without symbolic links.
        pid: the process that serves it.
        manifest: the id of the model that is changed.
        ref: the name that it was opened by, or None.
    """

    session: str
    directory: Path
    pid: int
    manifest: str
    ref: str | None


def edit(
    store: Store,
    directory: Path,
    name: str | None = None,
    *,
    resume: str | None = None,
    foreground: bool = False,
    allow_other: bool = False,
    log: Path | None = None,
) -> EditInfo:
    """Mount a session at `directory`, and return when the mount serves.

    The directory has to be empty; it is made when only its parent exists. What a dead process left mounted there is
    cleared away first. Unmounting leaves the session as it is.

    Args:
        store: the repository.
        directory: where.
        name: the model, for a new session.
        resume: a session to go on with: its id, the beginning of it, or where it was mounted.
        foreground: return only when the mount has ended; Ctrl-C and SIGTERM end it.
        allow_other: let other users in.
        log: where the serving process writes its errors; nowhere by default.

    Raises:
        MountError: when FUSE is not usable here, or the directory is not. A new session is gone then.
        NotFoundError: when there is no such model or session.
        UserError: when another process has the session open.
    """
    mounting._reap()
    mounting._check_tools(allow_other)
    point = Path(os.path.realpath(directory))
    if (name is None) == (resume is None):
        raise UserError("edit takes a model, or a session with --resume")
    # Before the mount point is cleared: it may be by it that the session is named.
    session = (
        folders.create(store, name) if name is not None else folders.read(store, folders.find(store, resume or ""))
    )
    try:
        if _is_dead(point):
            mounting.umount(point)
        made = mounting._prepare(point)
        options = ["--repo", str(store.path), f"--session={session.id}", *(["--allow-other"] if allow_other else [])]
        options += [f"--check-blocks={store.check_blocks}", *([] if store.sync else ["--no-sync"])]
        options += [*mounting._log_options(log, foreground), "--", str(point)]
        with mounting._Endings(foreground) as endings:
            try:
                process = mounting._start(options, foreground, _DAEMON)
            except BaseException:
                mounting._tidy(point, made)
                raise
            endings.end(process)
            mounting._widen_readahead(point)
            mounting._started[process.pid] = process
            if foreground:
                process.wait()
                mounting._started.pop(process.pid, None)
    except BaseException:
        if name is not None:
            folders.discard(store, session.id)
        raise
    return EditInfo(session.id, point, process.pid, session.manifest, session.ref)


def commit(
    store: Store, text: str, as_: str | None = None, *, force: bool = False, threads: int | None = None
) -> CommitReport:
    """Commit a session; where it is mounted, the mount ends first.

    Args:
        store: the repository.
        text: where the session is mounted, its id, or the beginning of it.
        as_, force, threads: see `Session.commit`.

    Raises:
        NotFoundError: when there is no such session.
        MountError: when somebody uses the mount. It goes on then.
        RefMovedError: when the name was moved meanwhile. The mount goes on then.
        UserError: see `Session.commit`. The session can be mounted again then.
    """
    info = folders.read(store, folders.find(store, text))
    # While the mount still serves: whoever is refused wants to go on with it.
    folders.check_commit(store, info, as_, force=force)
    was_mounted = _end_mount(info)
    with Session(store, info.id) as session:
        try:
            return session.commit(as_, force=force, threads=threads)
        except UserError as error:
            if was_mounted:
                again = f"'mergefs edit --resume {info.id} {info.directory}' mounts the session again"
                raise type(error)(f"{error} ({again})") from error
            raise


def discard(store: Store, text: str) -> str:
    """Drop a session, also a damaged one; where it is mounted, the mount ends first.

    Returns:
        Its id.

    Raises:
        NotFoundError: when there is no such session.
        MountError: when somebody uses the mount. It goes on then.
    """
    identity = folders.find(store, text)
    with suppress(CorruptionError):
        _end_mount(folders.read(store, identity))
    folders.discard(store, identity)
    return identity


def _end_mount(info: folders.SessionInfo) -> bool:
    """End the mount of a session; tell whether it had one."""
    point = info.directory
    if point is None or not (_is_dead(point) or (info.in_use and os.path.ismount(point))):
        return False
    mounting.umount(point)
    return True


def _is_dead(point: Path) -> bool:
    """Tell whether a process was serving a mount here and is gone."""
    try:
        os.statvfs(point)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError:
        return True
    return False
