"""One of the processes: random commands on a repository that others use too.

    python -m tools.stress.worker FOLDER NUMBER SECONDS SEED

It keeps no model of the repository. It writes down what its commands reported and what it saw, and what a content has
to be where that is known beforehand.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mergefs.errors import BlocksCollectedError, MergefsError, NotFoundError, RefMovedError, UserError
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from tools.stress.history import ABSENT, Event

HERE, THERE = "repository", "remote"
MOUNT = "mount"
EXPERTS = 6
MERGED = 6
_BELIEVED = 1.5
"""Seconds for which a mount may believe in a ref, and some."""
_SHARE_THERE = 0.15
"""Of the commands that can be run on either repository."""
_MODEL_GONE = re.compile(r"'([^']+)' is neither a ref|there is no ref '([^']+)'")
_MOVED = re.compile(r"'([^']+)'.*?(?:names ([0-9a-f]{12})|(was removed))")

_ACCOUNTED = {
    "there is nothing to materialize": "no merge",
    "within its budget": "repacked since",
    "which a budget needs": "ingested without a base",
}
"""Parts of sentences that a command may be refused with, whatever the others do; and why."""


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return what tells a model's content: a hash of all names and bytes."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    return found.hexdigest()


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint's folder by their names."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_model(repository: Repository, name: str) -> tuple[str, str]:
    """Return a model's manifest id and the digest of its content, read through a view."""
    with repository.view(name, cache_bytes=0) as view:
        return view.manifest_id, digest_of({path: view.read(path) for path in view.files})


class Worker:
    """Runs commands until its time is over.

    Args:
        folder: with the repositories, the checkpoints, and `truth.json`.
        number: of this process.
        seed: for the commands.
    """

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        self._folder = folder
        self._number = number
        self._chance = random.Random(f"{seed}-{number}")
        self._truth = json.loads((folder / "truth.json").read_text())
        self._log = folder / f"history-{number}.jsonl"
        self._open: dict[str, Repository] = {}
        self._own = [f"own-{number}-{k}" for k in range(3)]
        self._sessions: list[str] = []

    def run(self, seconds: float) -> None:
        """Run commands for so long."""
        commands: dict[Callable[[], None], int] = {
            self._ingest: 14,
            self._merge: 14,
            self._read: 20,
            self._read_mount: 6 if os.path.ismount(self._folder / MOUNT) else 0,
            self._list: 10,
            self._tag: 8,
            self._remove: 10,
            self._collect: 8,
            self._repack: 2,
            self._materialize: 5,
            self._edit: 7,
            self._push: 4,
            self._pull: 4,
            self._check: 3,
        }
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            command = self._chance.choices(list(commands), list(commands.values()))[0]
            try:
                command()
            except Exception as error:
                what = f"{command.__name__.strip('_')} of process {self._number} ended with {type(error).__name__}"
                text = f"{what}: {error}\n{traceback.format_exc()}"
                self._note("violation", time.monotonic(), text=text)
            if self._chance.random() < 0.2:
                self._close()
        for session in self._sessions:
            try:
                self._at(HERE).edit(resume=session).discard()
            except NotFoundError:
                pass
        self._close()

    # -- commands ------------------------------------------------------------------------------------------

    def _ingest(self) -> None:
        number = self._chance.randrange(EXPERTS + 1)
        source = "base" if number == EXPERTS else f"expert-{number}"
        base = "base" if source != "base" and self._chance.random() < 0.8 else None
        repository = self._at(HERE)
        with self._command("ingest", HERE, source, *([base] if base else [])) as began:
            report = repository.ingest(self._folder / "models" / source, source, base=base, threads=2)
            self._set(began, HERE, source, report.manifest, self._truth[source])

    def _merge(self) -> None:
        number = self._chance.randrange(len(self._truth["recipes"]))
        recipe = self._truth["recipes"][number]
        name = self._result(f"merged-{self._chance.randrange(MERGED)}")
        how = self._chance.choice([{}, {"lazy": True}, {"budget": "30%"}])
        content = None if "budget" in how else self._truth["merged"][number]
        repository = self._at(HERE)
        with self._command("merge --lazy" if how.get("lazy") else "merge", HERE, "base", *recipe["names"]) as began:
            report = repository.merge(Recipe.parse(recipe["text"]), name, threads=2, **how)
            self._set(began, HERE, name, report.manifest, content)

    def _read(self) -> None:
        where = self._either()
        name = self._existing(where)
        repository = self._at(where)
        with self._command("read", where, name) as began:
            with repository.view(name, cache_bytes=0) as view:
                seen = time.monotonic()
                self._note("see", began, seen, where, (name,), view.manifest_id)
                files = {}
                slow = self._chance.random() < 0.3
                for path in view.files:
                    if slow:
                        time.sleep(self._chance.uniform(0, 0.5))
                    files[path] = view.read(path)
            self._note("read", seen, manifest=view.manifest_id, content=digest_of(files))

    def _read_mount(self) -> None:
        name = self._existing(HERE)
        began = time.monotonic()
        try:
            manifest = os.readlink(self._folder / MOUNT / "refs" / name).rpartition("/")[2]
        except FileNotFoundError:
            return
        try:
            content = digest_of(checkpoint_files(self._folder / MOUNT / "manifests" / manifest))
        except FileNotFoundError:
            self._note("hidden", began - _BELIEVED, where=HERE, manifest=manifest)
            self._note("refused", began, text="read from the mount: collected")
            return
        self._note("read", began, manifest=manifest, content=content)
        self._note("command", began, text="read from the mount")

    def _list(self) -> None:
        where = self._either()
        repository = self._at(where)
        began = time.monotonic()
        refs = repository.refs()
        ended = time.monotonic()
        for name, manifest in refs.items():
            self._note("see", began, ended, where, (name,), manifest)
        for name in {"base", *self._own, *(f"expert-{k}" for k in range(EXPERTS))} - refs.keys():
            self._note("see", began, ended, where, (name,))
        self._note("command", began, text="list")

    def _tag(self) -> None:
        source, name = self._existing(HERE), self._result(f"tag-{self._chance.randrange(4)}")
        repository = self._at(HERE)
        with self._command("tag", HERE, source) as began:
            manifest = repository.tag(name, source)
            self._note("see", began, time.monotonic(), HERE, (source,), manifest)
            self._set(began, HERE, name, manifest)

    def _remove(self) -> None:
        where = self._either()
        name = self._existing(where)
        if name == "base" and self._chance.random() < 0.8:
            return
        repository = self._at(where)
        with self._command("rm", where, name) as began:
            removed = repository.remove([name])[name]
            self._note("see", began, time.monotonic(), where, (name,), removed)
            self._set(began, where, name, ABSENT)

    def _collect(self) -> None:
        where = self._either()
        repository = self._at(where)
        with self._command("gc", where):
            repository.gc(rewrite_above=self._chance.choice([0, 0.5]))

    def _repack(self) -> None:
        repository = self._at(HERE)
        with self._command("repack", HERE):
            repository.repack(self._chance.choice(["small", "fast"]), threads=2)

    def _materialize(self) -> None:
        name = f"merged-{self._chance.randrange(MERGED)}"
        repository = self._at(HERE)
        with self._command("materialize", HERE, name) as began:
            report = repository.materialize(name, threads=2)
            self._set(began, HERE, name, report.manifest)

    def _edit(self) -> None:
        name = self._existing(HERE)
        as_ = self._chance.choice([None, self._result(f"edit-{self._chance.randrange(4)}")])
        if name in self._truth:  # what merges are made from stays what the truth says
            as_ = as_ or self._result("edit-0")
        repository = self._at(HERE)
        with self._command("edit and commit", HERE, name) as began:
            session = repository.edit(name)
            self._sessions.append(session.id)
            with session:
                opened = time.monotonic()
                self._note("see", began, opened, HERE, (name,), session.manifest_id)
                files = {path: session.view.read(path) for path in session.view.files}
                self._note("read", opened, manifest=session.manifest_id, content=digest_of(files))
                weights = bytearray(files["model.safetensors"])
                at = self._chance.randrange(len(weights) - 5000, len(weights))
                weights[at : at + 40] = self._chance.randbytes(len(weights[at : at + 40]))
                files = {**files, "model.safetensors": bytes(weights), "notes.txt": self._chance.randbytes(100)}
                with session.filesystem().open("model.safetensors", "r+b") as file:
                    file.seek(at)
                    file.write(weights[at : at + 40])
                session.filesystem().pipe_file("notes.txt", files["notes.txt"])
                try:
                    report = session.commit(as_=as_, threads=2)
                except RefMovedError:
                    session.discard()
                    raise
                self._set(opened, HERE, report.ref, report.manifest, digest_of(files))

    def _push(self) -> None:
        name = self._existing(HERE)
        repository = self._at(HERE)
        force = self._chance.random() < 0.5
        with self._command("push", HERE, name, there=(THERE, name)) as began:
            report = repository.push(name, str(self._folder / THERE), force=force)
            self._note("see", began, time.monotonic(), HERE, (name,), report.manifest)
            self._set(began, THERE, name, report.manifest)

    def _pull(self) -> None:
        name = self._existing(THERE)
        as_ = self._result(f"merged-{self._chance.randrange(MERGED)}")
        repository = self._at(HERE)
        force = self._chance.random() < 0.5
        with self._command("pull", THERE, name, there=(HERE, as_)) as began:
            report = repository.pull(name, str(self._folder / THERE), as_=as_, force=force)
            self._note("see", began, time.monotonic(), THERE, (name,), report.manifest)
            self._set(began, HERE, as_, report.manifest)

    def _check(self) -> None:
        where = self._either()
        repository = self._at(where)
        with self._command("fsck", where) as began:
            report = repository.fsck(read_data=self._chance.random() < 0.3)
            if not report.ok:
                self._note("violation", began, text=f"fsck of {where} found {report.errors}")

    # -- inside --------------------------------------------------------------------------------------------

    @contextmanager
    def _command(self, kind: str, where: str, *names: str, there: tuple[str, str] = ("", "")) -> Iterator[float]:
        """Run a command that may find that others changed the refs that it is about; note how it ended.

        Args:
            kind: its name.
            where, names: the refs that it begins from.
            there: the repository and name of the ref that it compares and sets, where these are others.
        """
        began = time.monotonic()
        try:
            yield began
        except NotFoundError as error:
            found = _MODEL_GONE.search(str(error))
            name = next(filter(None, found.groups())) if found else None
            if name not in names:
                raise
            self._note("see", began, time.monotonic(), where, (name,))
            self._note("refused", began, text=f"{kind}: the name is not known")
        except RefMovedError as error:
            found = _MOVED.search(str(error))
            if found is None or found[1] not in (*names, there[1]):
                raise
            where, name = there if found[1] == there[1] else (where, found[1])
            self._note("see", began, time.monotonic(), where, (name,), found[2] or ABSENT)
            self._note("refused", began, text=f"{kind}: the name was moved")
        except BlocksCollectedError:
            if not names:
                raise
            self._note("changes", began, where=where, names=names)
            self._note("refused", began, text=f"{kind}: collected meanwhile")
        except UserError as error:
            why = next((why for sentence, why in _ACCOUNTED.items() if sentence in str(error)), None)
            if why is None:
                raise
            self._note("refused", began, text=f"{kind}: {why}")
        else:
            self._note("command", began, text=kind)

    def _set(self, began: float, where: str, name: str, manifest: str, content: str | None = None) -> None:
        self._note("set", began, time.monotonic(), where, (name,), manifest, content)

    def _note(
        self,
        kind: str,
        began: float,
        ended: float | None = None,
        where: str = "",
        names: tuple[str, ...] = (),
        manifest: str = ABSENT,
        content: str | None = None,
        text: str = "",
    ) -> None:
        now = time.monotonic() if ended is None else ended
        with open(self._log, "a") as log:
            log.write(Event(kind, began, now, where, names, manifest, content, text).line())

    def _at(self, where: str) -> Repository:
        """Return a repository, opened where it is not open; half the time it does not wait for the disk."""
        if where not in self._open:
            self._open[where] = Repository.open(self._folder / where, sync=self._chance.random() < 0.5)
        return self._open[where]

    def _close(self) -> None:
        for repository in self._open.values():
            repository.close()
        self._open = {}

    def _either(self) -> str:
        return THERE if self._chance.random() < _SHARE_THERE else HERE

    def _existing(self, where: str) -> str:
        """Return a ref that there was just now; one that there is not where there are none."""
        return self._chance.choice(sorted(self._at(where).refs()) or ["base"])

    def _result(self, shared: str) -> str:
        """Return a name for a result: one that others use too, or one of this process's own."""
        return shared if self._chance.random() < 0.6 else self._chance.choice(self._own)


def main(arguments: list[str]) -> None:
    """Run one worker."""
    folder, number, seconds, seed = arguments
    try:
        Worker(Path(folder), int(number), int(seed)).run(float(seconds))
    except MergefsError as error:
        sys.exit(f"worker {number} ended: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
