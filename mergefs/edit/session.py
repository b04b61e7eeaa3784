"""A session: one model opened for writing, until it is committed or discarded."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mergefs.blocks.writer import BlockWriter
from mergefs.edit import folders
from mergefs.edit.commit import make_manifest
from mergefs.edit.content import Content
from mergefs.edit.folders import Hold
from mergefs.edit.keys import Keys
from mergefs.edit.tree import Tree
from mergefs.errors import BlocksCollectedError, UserError
from mergefs.manifest import Manifest
from mergefs.serve.view import View
from mergefs.store import Store

if TYPE_CHECKING:
    from mergefs.edit.filesystem import SessionFileSystem
    from mergefs.edit.zarr_session import SessionStore

CACHE_BYTES = 64 << 20
_ATTEMPTS = 3
_KEYS = "keys"


@dataclass(frozen=True)
class CommitReport:
    """What a commit did.

    Attributes:
        session: the id of the session, which is over.
        manifest: the id of the committed model.
        ref: its name.
        previous: the id of the manifest that the ref named before, or None.
        parent: the id of the model that was edited.
        stored_bytes: bytes added to the repository's packs and manifests.
        blocks_new: blocks that were not in the repository before.
        blocks_reused: blocks that were looked at and were there already.
        blocks_kept: blocks that nobody touched, shared without looking.
        seconds: wall time.
    """

    session: str
    manifest: str
    ref: str
    previous: str | None
    parent: str
    stored_bytes: int
    blocks_new: int
    blocks_reused: int
    blocks_kept: int
    seconds: float


class Session:
    """A model that is being changed. Safe to use from many threads.

    No other process can have it open meanwhile. Used as a context manager, it is closed at the end, and discarded
    where nothing was changed; what was changed and not committed stays in the repository, for
    `Repository.edit(resume=...)`.

    Attributes:
        id: hexadecimal; names the session.
        manifest_id: of the model that is being changed.
        ref: the name that the model was opened by, or None where it was an id.
        tree: its files.
        keys: what was set and deleted through Zarr beside the tensors.

    Args:
        store: the repository.
        identity: of a session in it.

    Raises:
        NotFoundError: when there is no such session.
        UserError: when another process has it open.
    """

    def __init__(self, store: Store, identity: str) -> None:
        self._store = store
        self._hold = Hold(store, identity)
        try:
            info = folders.read(store, identity)
            self.id = identity
            self.manifest_id = info.manifest
            self.ref = info.ref
            self._hold.reopen()
            self.view = View(store, info.manifest, cache_bytes=CACHE_BYTES, purpose="edit")
            try:
                sizes = {path: file.size for path, file in self.view.files.items()}
                mtime = int(store.manifest_time(info.manifest) * 1e9)
                self.tree = Tree(self._hold.folder, sizes, mtime, self.view.read, sync=store.sync)
            except BaseException:
                self.view.close()
                raise
        except BaseException:
            self._hold.release()
            raise
        self.keys = Keys(self._hold.folder / _KEYS)
        self._is_open = True
        _open_sessions[store.path, identity] = self

    @classmethod
    def begin(cls, store: Store, name: str) -> Self:
        """Begin a session of a model.

        Raises:
            NotFoundError: when there is no such model.
        """
        return cls(store, folders.create(store, name).id)

    @classmethod
    def resume(cls, store: Store, text: str) -> Self:
        """Open a session again that was interrupted or closed.

        Args:
            store: the repository.
            text: its id, the beginning of it, or the folder that it was mounted at.

        Raises:
            NotFoundError: when there is no such session.
            UserError: when another process has it open.
        """
        return cls(store, folders.find(store, text))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_open and not self.is_changed:
            self.discard()
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it is neither closed, committed nor discarded."""
        return self._is_open

    @property
    def is_changed(self) -> bool:
        """Whether the files are not those of the model any more."""
        return self.tree.is_changed or bool(self.keys)

    @property
    def folder(self) -> Path:
        """Where the session lies in the repository."""
        return self._hold.folder

    @property
    def store(self) -> Store:
        """The repository."""
        return self._store

    def placed(self, directory: Any) -> None:
        """Note where the session is mounted."""
        self._hold.place(directory)

    def zarr(self) -> SessionStore:
        """Return the tensors as a writable Zarr v3 store; see `mergefs.edit.zarr_session.SessionStore`."""
        from mergefs.edit.zarr_session import SessionStore

        return SessionStore(self)

    def filesystem(self) -> SessionFileSystem:
        """Return the files as a writable fsspec file system; see `mergefs.edit.filesystem.SessionFileSystem`."""
        from mergefs.edit.filesystem import SessionFileSystem

        return SessionFileSystem(self)

    def close(self) -> None:
        """Close the session; it can be resumed. Does nothing the second time."""
        if self._is_open:
            try:
                self.tree.sync()
                self._hold.close()
            finally:
                self._end()

    def discard(self) -> None:
        """Drop the session and all that was changed."""
        self._check_open()
        self._hold.remove()
        self._end()

    def commit(self, as_: str | None = None, *, force: bool = False, threads: int | None = None) -> CommitReport:
        """Make the files a model of the repository; the session is over then.

        Args:
            as_: its name; by default the one that the model was opened by.
            force: move that name even where it names another model than when the session was begun.
            threads: how many to work with; all cores by default.

        Raises:
            UserError: when there is no name.
            RefMovedError: when the name that the model was opened by was moved or removed meanwhile. The session goes
                on, as after every error.
            CheckpointError: when a file of weights is damaged, or there is none.
            UserError: when something was set through Zarr that no tensor can be.
        """
        self._check_open()
        began = time.monotonic()
        name = folders.check_commit(self._store, folders.read(self._store, self.id), as_, force=force)
        if self.keys:
            from mergefs.edit.zarr_commit import apply_keys

            apply_keys(self)
        self.tree.sync()
        for attempt in range(_ATTEMPTS):
            try:
                report = self._commit(name, began, force=force, threads=threads)
                break
            except BlocksCollectedError:
                if attempt == _ATTEMPTS - 1:
                    raise
        self._hold.remove()
        self._end()
        return report

    # -- inside --------------------------------------------------------------------------------------------

    def _commit(self, name: str, began: float, *, force: bool, threads: int | None) -> CommitReport:
        store = self._store
        with self._writer() as writer:
            made = make_manifest(store, writer, self.view, self.contents(), self._hold.folder, threads)
            manifest = made.manifest
            known = manifest.id in store.manifest_ids()
            self._hold.note_result(manifest.id)
            expecting = self.manifest_id if name == self.ref and not force else None
            previous = store.publish(manifest, name, self._entry(manifest), expecting=expecting)
        return CommitReport(
            self.id,
            manifest.id,
            name,
            None if previous == manifest.id else previous,
            self.manifest_id,
            writer.stored_bytes + (0 if known else len(manifest.encoded)),
            writer.new_blocks,
            writer.reused_blocks,
            made.kept,
            time.monotonic() - began,
        )

    def contents(self) -> dict[str, Content]:
        """Return the files by their paths, as a commit takes them."""
        return self.tree.files()

    @contextmanager
    def _writer(self) -> Iterator[BlockWriter]:
        store = self._store
        with (
            store.lease("commit", [self.manifest_id]) as lease,
            BlockWriter(store.catalog, store.backend, store.path / "tmp", lease, sync=store.sync) as writer,
        ):
            yield writer

    def _entry(self, manifest: Manifest) -> dict[str, Any]:
        """Return what the catalog is to say of the result: it is a fine-tune of what its parent is one of."""
        if manifest.id == self.manifest_id:
            return {}
        mine = self._store.manifest_entry(self.manifest_id)
        entry: dict[str, Any] = {"raw_bytes": manifest.raw_bytes, "kind": mine.get("kind", "model")}
        base = mine.get("base")
        if base is None and self.view.manifest.lineage.kind == "checkpoint" and entry["kind"] == "model":
            base = self.manifest_id
        return entry if base is None else {**entry, "base": base}

    def _end(self) -> None:
        self._is_open = False
        self.tree.close()
        self.view.close()
        self._hold.release()

    def _check_open(self) -> None:
        if not self._is_open:
            raise UserError(f"session {self.id} is over: begin another one")


_open_sessions: weakref.WeakValueDictionary[tuple[Path, str], Session] = weakref.WeakValueDictionary()
"""Those that this process has open, for what was pickled in it: nobody can open one twice."""


def reopened(path: str, identity: str) -> Session:
    """Return a session that this process has open, or resume it.

    Raises:
        UserError: when another process has it open.
    """
    found = _open_sessions.get((Path(path), identity))
    return found if found is not None and found.is_open else Session(Store.open(path), identity)
