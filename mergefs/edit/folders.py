"""The folders of sessions in a repository: `sessions/ID/`. What lies there keeps the session's model from gc.

Nothing here opens a model, so that gc and fsck can ask it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergefs.backend import flush_folder
from mergefs.blocks.pack import hash_file
from mergefs.errors import CorruptionError, NotFoundError, RefMovedError, RefNameError, UserError
from mergefs.hashing import is_hex, is_hex_id
from mergefs.json_input import json_check, load_json
from mergefs.locks import is_locked, take
from mergefs.refs import check_ref_name
from mergefs.store import Store

SESSIONS = "sessions"
FORMAT = "mergefs-session"
VERSION = 1
_DESCRIPTION = "session.json"
_LOCK = "lock"
_PLACE = "mounted.json"
_RESULT = "result.json"
_CLOSED = "closed.json"
_ID_BYTES = 6
_UNFINISHED_AFTER = 3600.0
"""Seconds after which a folder without a description is taken for left behind."""


@dataclass(frozen=True)
class SessionInfo:
    """A session as its folder has it.

    Attributes:
        id: hexadecimal.
        manifest: the id of the model that it changes.
        ref: the name that this model was opened by, or None where it was an id.
        created: seconds since 1970.
        directory: where it is or was mounted last, or None.
        in_use: whether a process has it open.
    """

    id: str
    manifest: str
    ref: str | None
    created: float
    directory: Path | None
    in_use: bool


def create(store: Store, name: str) -> SessionInfo:
    """Make the folder of a new session of the model that `name` names.

    Raises:
        NotFoundError: when there is no such model.
        UserError: when the repository is open for reading only.
    """
    identity = secrets.token_hex(_ID_BYTES)
    folder = _folder(store, identity)
    if store.readonly:
        store.lease("edit")  # says what is wrong
    manifest, lease = store.lookup("edit", name)
    # The lease holds gc off until the folder does.
    with lease:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        description = {
            "format": FORMAT,
            "version": VERSION,
            "manifest": manifest,
            # A ref may have been moved since it was looked up: the commit then says so.
            "ref": None if manifest.startswith(name) and store.refs().get(name) != manifest else name,
            "created": time.time(),
        }
        _write(folder / _DESCRIPTION, description, sync=store.sync)
        if store.sync:
            flush_folder(folder)
            flush_folder(folder.parent)
            flush_folder(store.path)
    return read(store, identity)


def read(store: Store, identity: str) -> SessionInfo:
    """Return what the folder of a session says.

    Raises:
        NotFoundError: when there is no such session.
        CorruptionError: when it is damaged.
    """
    folder = _folder(store, identity)
    try:
        value = _read(folder / _DESCRIPTION)
        if value["format"] != FORMAT or value["version"] != VERSION or not is_hex_id(value["manifest"]):
            raise ValueError("it is of another format")
        ref = value["ref"]
        if ref is not None:
            check_ref_name(ref)
        return SessionInfo(
            identity,
            value["manifest"],
            None if ref is None else str(ref),
            float(value["created"]),
            _directory(folder),
            is_locked(folder / _LOCK),
        )
    except FileNotFoundError:
        if (folder / _CLOSED).exists():
            raise CorruptionError(
                f"{folder / _DESCRIPTION} is missing: 'mergefs discard {identity}' removes the session"
            ) from None
        raise NotFoundError(f"there is no session {identity}: 'mergefs sessions' shows them") from None
    except (ValueError, KeyError, TypeError, OverflowError, RefNameError) as error:
        raise CorruptionError(
            f"{folder / _DESCRIPTION} is damaged ({error}): 'mergefs discard {identity}' removes the session"
        ) from error


def identities(store: Store) -> list[str]:
    """Return the ids of all sessions, those that are damaged included, but for those that are only half made."""
    try:
        names = os.listdir(store.path / SESSIONS)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if is_hex(name) and _is_session(store.path / SESSIONS / name))


def remove_unfinished(store: Store) -> None:
    """Remove folders of sessions that were only half made, or half removed, when their process ended."""
    try:
        found = [entry for entry in os.scandir(store.path / SESSIONS) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for entry in found:
        folder = Path(entry.path)
        try:
            old = time.time() - entry.stat().st_mtime > _UNFINISHED_AFTER
        except FileNotFoundError:
            continue  # committed or discarded just now
        if old and not _is_session(folder) and not is_locked(folder / _LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def sessions(store: Store) -> Iterator[SessionInfo]:
    """Yield every session.

    Raises:
        CorruptionError: when one is damaged.
    """
    for identity in identities(store):
        try:
            yield read(store, identity)
        except NotFoundError:
            continue  # committed or discarded just now


def find(store: Store, text: str | os.PathLike[str]) -> str:
    """Return the id of the session that is meant by its id, the beginning of it, or the folder that it is mounted at.

    Raises:
        NotFoundError: when there is none, or the beginning fits several.
    """
    known = identities(store)
    point = Path(os.path.realpath(text))
    # A mount point is looked up without touching it: nobody may answer there any more.
    at = [identity for identity in known if _directory(_folder(store, identity)) == point]
    if at:
        return max(at, key=lambda identity: (_folder(store, identity) / _PLACE).stat().st_mtime)
    name = os.fspath(text)
    fits = [identity for identity in known if len(name) >= 4 and identity.startswith(name)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise NotFoundError(f"'{name}' is the beginning of {len(fits)} sessions' ids: give more digits")
    raise NotFoundError(
        f"'{name}' is neither a session nor a folder that one is mounted at: 'mergefs sessions' shows them"
    )


def check_commit(store: Store, info: SessionInfo, as_: str | None, *, force: bool) -> str:
    """Return the name that a session is to be committed under, checked before anything is done.

    Args:
        store: the repository.
        info: the session.
        as_: the name; by default the one that the model was opened by.
        force: whether somebody else's move of that name counts for nothing.

    Raises:
        UserError: when there is no name, or it is malformed.
        RefMovedError: when a commit would undo somebody else's.
    """
    name = as_ or info.ref
    if name is None:
        raise UserError("the session was begun from a manifest's id: say the name of the result with --as")
    check_ref_name(name)
    now = store.refs().get(name)
    # Where the process ended between the commit and the end of the session, it names the result already.
    if name == info.ref and now not in (info.manifest, _result(_folder(store, info.id))) and not force:
        what = "was removed" if now is None else f"names {now[:12]} now"
        raise RefMovedError(
            f"'{name}' {what}, and named {info.manifest[:12]} when the session was begun: commit under another name"
            " with --as, or overrule with --force"
        )
    return name


class Hold:
    """The right to a session, which one process at a time has until `release` or its end.

    Raises:
        NotFoundError: when there is no such session.
        UserError: when another process has it.
    """

    def __init__(self, store: Store, identity: str) -> None:
        self.folder = _folder(store, identity)
        self._sync = store.sync
        try:
            self._descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise NotFoundError(f"there is no session {identity}: 'mergefs sessions' shows them") from None
        if not take(self._descriptor):
            os.close(self._descriptor)
            at = _directory(self.folder)
            where = "" if at is None else f"; it was mounted at {at} last"
            raise UserError(f"session {identity} is open in another process{where}: end that first")

    def place(self, directory: Path) -> None:
        """Note where the session is mounted."""
        _write(self.folder / _PLACE, {"directory": str(directory), "pid": os.getpid()}, sync=self._sync)

    def note_result(self, manifest: str) -> None:
        """Note the id of a manifest that is about to be committed."""
        _write(self.folder / _RESULT, {"manifest": manifest}, sync=self._sync)

    def close(self) -> None:
        """Note what the session's files are, so that damage is found until it is opened again; nothing may change them
        from now on."""
        sums = {name: list(_sum(self.folder / name)) for name in _files(self.folder)}
        _write(self.folder / _CLOSED, {"files": sums}, sync=self._sync)
        if self._sync:
            flush_folder(self.folder)

    def reopen(self) -> None:
        """Forget what the files are, as they are going to change, when they still are that.

        Raises:
            CorruptionError: when one is not.
        """
        damage = damaged_files(self.folder)
        if damage:
            raise CorruptionError(
                f"session {self.folder.name} is damaged: {', '.join(damage)}; 'mergefs discard {self.folder.name}'"
                f" drops it, and without {self.folder / _CLOSED} it is opened as it is"
            )
        self._forget_sums()

    def _forget_sums(self) -> None:
        try:
            (self.folder / _CLOSED).unlink()
        except FileNotFoundError:
            return
        if self._sync:
            flush_folder(self.folder)

    def remove(self) -> None:
        """Remove the session's folder. gc may take the model from then on."""
        self._forget_sums()
        (self.folder / _DESCRIPTION).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)


def discard(store: Store, identity: str) -> None:
    """Remove a session that no process has open, also a damaged one.

    Raises:
        NotFoundError, UserError: see `Hold`.
    """
    hold = Hold(store, identity)
    try:
        hold.remove()
    finally:
        hold.release()


def _folder(store: Store, identity: str) -> Path:
    return store.path / SESSIONS / identity


def _directory(folder: Path) -> Path | None:
    try:
        found = str(_read(folder / _PLACE)["directory"])
        return None if "\0" in found else Path(found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _result(folder: Path) -> str | None:
    """Return the id of the manifest that was going to be committed last; None where there was none."""
    try:
        return str(_read(folder / _RESULT)["manifest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damaged_files(folder: Path, *, read_data: bool = True) -> list[str]:
    """Return which files of a session are not what they were when it was closed, or are damaged by themselves.

    Args:
        folder: of the session. While it is open, or when its process was killed, nobody knows what its contents were.
        read_data: whether contents are read, rather than sizes compared.
    """
    damaged = []
    for name in (_DESCRIPTION, _PLACE, _RESULT, _CLOSED):
        try:
            _read(folder / name)
        except FileNotFoundError:
            continue
        except ValueError:
            damaged.append(f"{name} is not what was written")
    try:
        known = _read(folder / _CLOSED)["files"]
    except (OSError, ValueError, KeyError):
        return damaged
    found = set(_files(folder))
    for name, (size, identity) in sorted(known.items()):
        path = folder / name
        if name not in found:
            damaged.append(f"{name} is missing")
        elif path.stat().st_size != size or (read_data and hash_file(path) != identity):
            damaged.append(f"{name} is not what was written")
    return damaged + [f"{name} is new" for name in sorted(found - set(known))]


def _is_session(folder: Path) -> bool:
    return (folder / _DESCRIPTION).exists() or (folder / _CLOSED).exists()


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of the files that hold what was changed."""
    own = {_DESCRIPTION, _PLACE, _RESULT, _CLOSED, _LOCK}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in own and not name.endswith(".new"):
            yield name


def _sum(path: Path) -> tuple[int, str]:
    return path.stat().st_size, hash_file(path)


def _read(path: Path) -> dict[str, Any]:
    """Return what a file of a session says.

    Raises:
        FileNotFoundError: when there is none.
        ValueError: when it is damaged.
    """
    value = load_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    check = value.pop("check", None)  # there is none in those of before there were checks
    if check is not None and check != json_check(value):
        raise ValueError("its bytes have another hash")
    return value


def _write(path: Path, value: dict[str, Any], *, sync: bool) -> None:
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.write(json.dumps({**value, "check": json_check(value)}, indent=2).encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(new, path)
