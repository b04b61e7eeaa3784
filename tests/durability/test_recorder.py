"""mergefs.testing.crashes as somebody uses it who writes a backend: what was not flushed is seen to be lost."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mergefs.testing.crashes import RecordError, can_record, crash_states, record

pytestmark = pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")

PUT = """
import os, sys
def put(name, data, flush_file, flush_folder):
    with open(name + ".part", "wb") as file:
        file.write(data)
        file.flush()
        if flush_file:
            os.fsync(file.fileno())
    os.replace(name + ".part", name)
    if flush_folder:
        descriptor = os.open(os.path.dirname(name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
put(sys.argv[1] + "/object", b"new" * 3000, *map(int, sys.argv[2:]))
"""
NEW, OLD = b"new" * 3000, b"old"


def _found(folder: Path, tmp_path: Path, *flushes: int) -> tuple[set[bytes | None], set[bytes | None]]:
    """Return what an object may be after a crash at any moment, and after the program has ended."""
    recording = record([sys.executable, "-c", PUT, str(folder), *map(str, flushes)], folder)
    assert recording.code == 0, recording.output
    ever: set[bytes | None] = set()
    finished: set[bytes | None] = set()
    for state in crash_states(recording):
        crashed = tmp_path / "crashed"
        state.write(crashed)
        path = crashed / "object"
        found = path.read_bytes() if path.exists() else None
        ever.add(found)
        if state.finished:
            finished.add(found)
        shutil.rmtree(crashed)
    return ever, finished


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an object in it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "object").write_bytes(OLD)
    return folder


def test_a_careful_program_loses_nothing(folder: Path, tmp_path: Path) -> None:
    assert _found(folder, tmp_path, 1, 1) == ({OLD, NEW}, {NEW})


def test_a_name_that_is_not_flushed_may_not_be_there(folder: Path, tmp_path: Path) -> None:
    assert _found(folder, tmp_path, 1, 0) == ({OLD, NEW}, {OLD, NEW})


def test_bytes_that_are_not_flushed_may_be_lost(folder: Path, tmp_path: Path) -> None:
    ever, finished = _found(folder, tmp_path, 0, 1)
    assert b"" in finished  # the well-known file of no bytes
    assert ever - {OLD, NEW}


def test_what_cannot_be_followed_is_refused(folder: Path) -> None:
    program = "import os, sys; os.link(sys.argv[1] + '/object', sys.argv[1] + '/twin')"
    with pytest.raises(RecordError, match="link"):
        record([sys.executable, "-c", program, str(folder)], folder)
