"""Looks at repositories, each in a process of its own: reads their paths, writes what it found, a line of JSON each."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import served, sha256

from mergefs.catalog.tables import TABLES
from mergefs.configuration import CONFIG, decode_config
from mergefs.errors import MergefsError
from mergefs.fsck import catalog_damage
from mergefs.repository import Repository

NAMES = ("base", "x", "y", "merged", "later")


def check(path: Path) -> dict[str, Any]:
    """Check a repository, and return its catalog's contents and its configuration where nothing is wrong."""
    damage = catalog_damage(path)  # as `mergefs fsck` does
    if damage is not None:
        return {"errors": [[damage.kind, list(damage.affects)]]}
    with Repository.open(path, readonly=True) as repository:
        report = repository.fsck(read_data=True)
        found: dict[str, Any] = {"errors": [[problem.kind, list(problem.affects)] for problem in report.errors]}
        if report.ok:
            with repository.catalog.read() as txn:
                values = [(table, list(txn.items(table))) for table in TABLES]
            found |= {"catalog": sha256(repr(values).encode()), "configuration": decode_config(path / CONFIG)}
    return found


def serve(path: Path) -> dict[str, Any]:
    """Read all models, and the session; None stands for what is refused."""
    content: dict[str, Any] = dict.fromkeys(NAMES)
    with Repository.open(path, sync=False) as repository:
        for name in NAMES:
            try:
                content[name] = served(repository, name)
            except MergefsError:
                continue
        edited = None
        try:
            for info in repository.sessions():
                with repository.edit(resume=info.id) as session:
                    files = session.filesystem()
                    edited = {name: sha256(files.cat_file(name)) for name in session.contents()}
        except MergefsError:
            pass
    return {"served": content, "session": edited}


def apart(look: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Run in a process of its own; return what it found, how it was refused, or which signal ended it."""
    with tempfile.TemporaryFile("w+") as result:
        child = os.fork()
        if child == 0:
            try:
                try:
                    found = look(path)
                except MergefsError as error:
                    found = {"refused": str(error)}
                json.dump(found, result)
                result.flush()
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        result.seek(0)
        if status == 0:
            value = json.load(result)
            assert isinstance(value, dict)
            return value
    if status in (-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT):
        return {"ended": status}
    return {"failed": status}


def main() -> None:
    """Answer until there is nothing more to be read. The first repository is sound."""
    warm = False
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        found: dict[str, Any] = {"errors": None, "refused": None, "served": {}, "session": None}
        for look in (check, serve):
            # Once here, so that what is imported and compiled is there for all that follow.
            found |= apart(look, path) if warm else look(path)
        warm = True
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
