"""--no-sync flushes nothing, and without it what has to be flushed is."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from builders import fine_tuned, random_model, recipe_text, write_model

from mergefs.repository import Repository
from mergefs.testing.crashes import Recording, can_record, record

pytestmark = pytest.mark.skipif(not can_record(), reason="strace is missing here, or may not trace")

COMMANDS = """
import sys
from mergefs.cli import cli
for line in '''
init repository --block-size 4KiB
-R repository ingest base --as base
-R repository ingest x --as x --base base
-R repository merge recipe.yml --as merged --lazy
-R repository materialize merged
-R repository repack --exact small
-R repository tag x again
-R repository rm x
-R repository gc --rewrite-above 0
-R repository export merged out
-R repository push merged file://{here}/archive
init other --block-size 4KiB
-R other pull merged repository
-R repository fsck --repair
-R repository catalog rebuild
'''.format(here=sys.argv[1]).strip().splitlines():
    words = line.split()
    try:
        cli.main([*sys.argv[2:], *words], standalone_mode=False)
    except SystemExit as end:
        assert not end.code, line
    print("done:", line)
"""
EDIT = """
import sys
from mergefs.repository import Repository
with Repository.open("repository", sync=len(sys.argv) < 3) as repository, repository.edit("merged") as session:
    session.filesystem().pipe_file("notes.txt", b"changed")
    session.commit(as_="new")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with checkpoints and a recipe."""
    folder = tmp_path / "folder"
    base = random_model(1)
    write_model(folder / "base", base, {"config.json": b"{}"})
    write_model(folder / "x", fine_tuned(base, 2), {"config.json": b"{}"})
    (folder / "recipe.yml").write_text(recipe_text("task_arithmetic", [("x", {"weight": 0.5})], "base"))
    return folder


def _recorded(program: str, folder: Path, *options: str, **variables: str) -> Recording:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    here = Path.cwd()
    os.chdir(folder)
    try:
        found = record([sys.executable, "-c", program, str(folder), *options], folder, environment=environment)
    finally:
        os.chdir(here)
    assert found.code == 0, found.output
    return found


def _flushes(recording: Recording) -> Counter[str]:
    """Return how often files and folders were flushed, by the first part of their paths."""
    return Counter(
        event.path.split("/")[0]
        for event in recording.events
        if event.kind in ("flush", "flush names") or (event.kind == "write" and event.durable)
    )


@pytest.mark.parametrize("how", ["option", pytest.param("variable", marks=pytest.mark.slow), "neither"])
def test_nothing_is_flushed_without_sync(how: str, folder: Path) -> None:
    options = ["--no-sync"] if how == "option" else []
    variables = {"MERGEFS_NO_SYNC": "1"} if how == "variable" else {}
    flushes = _flushes(_recorded(COMMANDS, folder, *options, **variables))
    if how == "neither":
        # The folder itself, for the names of the new folders in it.
        part = next(name for name in flushes if name.startswith(".out"))
        assert set(flushes) == {".", "repository", "other", "archive", part}
        assert min(flushes.values()) > 0
        assert flushes["repository"] > 50
    else:
        assert not flushes
    for name in ("repository", "other"):
        with Repository.open(folder / name) as repository:
            assert repository.fsck(read_data=True).ok


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_sessions_flush_nothing_either(sync: bool, folder: Path) -> None:
    _recorded(COMMANDS, folder, "--no-sync")
    flushes = _flushes(_recorded(EDIT, folder, *([] if sync else ["without"])))
    assert bool(flushes) == sync


def test_the_option_is_in_the_help(folder: Path) -> None:
    from click.testing import CliRunner

    from mergefs.cli import cli

    assert "--no-sync" in CliRunner().invoke(cli, ["--help"]).output
