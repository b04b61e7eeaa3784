"""Run commands as a user to whom a repository does not belong: other_user.py FOLDER DIRECTORY, for `test_other_user`.

The interpreter may lie where that user cannot come (in root's home, on a runner): everything is loaded before this
process becomes that user's, by running the same commands as root once.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

from click.testing import CliRunner

from mergefs.cli import cli
from mergefs.errors import UserError
from mergefs.repository import Repository
from mergefs.serve import mount_daemon

NOBODY = 65534


def read_all(repository: Path, to: Path) -> None:
    """List, describe, check and export, as a reader would, and compare."""
    refused = ("ingest", str(repository.parent / "x"), "--as", "z"), ("rm", "x"), ("gc",), ("tag", "x", "y2")
    asked = (
        ("ls",),
        ("show", "merged"),
        ("log", "merged"),
        ("stats",),
        ("fsck", "--read-data"),
        ("export", "merged", str(to / "merged")),
        ("export", "later", str(to / "later")),
        ("verify-export", "merged", str(to / "merged")),
    )
    for arguments in asked:
        result = CliRunner().invoke(cli, ["-R", str(repository), *arguments])
        assert result.exit_code == 0, (arguments, result.output, result.exception)
    if os.geteuid():
        for arguments in refused:
            result = CliRunner().invoke(cli, ["-R", str(repository), *arguments])
            assert isinstance(result.exception, UserError), (arguments, result.output, result.exception)
            assert str(repository) in str(result.exception), arguments
    with Repository.open(repository, readonly=True) as opened, opened.view("later") as view:
        for path in view.files:
            assert view.read(path) == (to / "later" / path).read_bytes()


def serve(repository: Path, to: Path, directory: Path) -> None:
    """Mount a lazy merge in a process of its own, and compare what is there."""
    child = os.fork()
    if not child:
        status = 1
        try:
            own = ["--repo", str(repository), "--ref", "later", "--cache-size", str(1 << 24)]
            status = mount_daemon.main([*own, str(directory)])  # what 'mount' starts an interpreter for
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        while not os.path.ismount(directory):
            found, status = os.waitpid(child, os.WNOHANG)
            assert not found, f"the mount ended with {status}"
        for path in (to / "later").rglob("*"):
            if path.is_file():
                assert (directory / path.relative_to(to / "later")).read_bytes() == path.read_bytes()
    finally:
        subprocess.run(["fusermount3", "-u", str(directory)], check=False)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


if __name__ == "__main__":
    folder, directory = map(Path, sys.argv[1:3])
    repository, first, second = folder / "repository", folder / "first", folder / "second"
    can_mount = bool(shutil.which("fusermount3")) and os.path.exists("/dev/fuse") and os.stat("/dev/fuse").st_mode & 2
    read_all(repository, first)
    if can_mount:
        serve(repository, first, directory)
    # What the mount loads, which was in a process of its own.
    if can_mount:
        "".encode("utf-16-be")
        importlib.import_module("mfusepy")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["HOME"] = str(second)
    os.environ["XDG_RUNTIME_DIR"] = str(second)
    read_all(repository, second)
    if can_mount:
        serve(repository, second, directory)
    print("mounted" if can_mount else "read")
