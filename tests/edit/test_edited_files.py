"""A session through fsspec: its own suites, transactions, and what a commit makes of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest
from fsspec.tests import abstract

from mergefs.edit.filesystem import SessionFileSystem
from mergefs.edit.session import Session
from mergefs.errors import UserError
from mergefs.repository import Repository

WEIGHTS = "model.safetensors"


@pytest.fixture
def session(repository: Repository, tmp_path: Path) -> Iterator[Session]:
    folder = builders.write_model(
        tmp_path / "model", builders.random_model(1), {"config.json": b"{}", "a/b.txt": b"ab"}
    )
    repository.ingest(folder, "model")
    with repository.edit("model") as opened:
        yield opened
        if opened.is_open:
            opened.discard()


@pytest.fixture
def fs(session: Session) -> SessionFileSystem:
    return session.filesystem()


# -- fsspec's own suites -----------------------------------------------------------------------------------


class Fixtures(abstract.AbstractFixtures):
    """A session's files as what the suites run on."""

    @pytest.fixture
    def fs(self, session: Session) -> SessionFileSystem:
        return session.filesystem()

    @pytest.fixture
    def fs_path(self, fs: SessionFileSystem) -> str:
        # For relative paths without a folder, fsspec's own `get` finds another place than the suites expect.
        fs.mkdir("base")
        return "base"

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(part for part in parts if part)


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGet(Fixtures, abstract.AbstractGetTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    pass


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass


# -- files -------------------------------------------------------------------------------------------------


def test_the_files_of_the_model_are_there(fs: SessionFileSystem) -> None:
    assert sorted(fs.find("")) == ["a/b.txt", "config.json", WEIGHTS]
    assert fs.info("a")["type"] == "directory"
    assert fs.cat_file(WEIGHTS, -3) == builders.pack(builders.random_model(1), {"format": "pt"})[-3:]
    assert fs.open("config.json").size == 2
    with fs.open("a/b.txt", "r") as file:
        assert file.read() == "ab"
    for path in ("none", "a/b.txt/c"):
        assert not fs.exists(path)
        with pytest.raises(OSError):
            fs.info(path)


def test_modes(fs: SessionFileSystem) -> None:
    with fs.open("deep/er/new", "wb") as file:
        file.write(b"0123456789")
        assert not fs.exists("deep/er/new")
    with fs.open("deep/er/new", "ab") as file:
        file.write(b"a")
    with fs.open("deep/er/new", "r+b") as file:
        file.seek(2)
        assert file.read(2) == b"23"
        file.seek(4)
        file.write(b"xy")
    assert fs.cat("deep/er/new") == b"0123xy6789a"
    with fs.open("deep/er/new", "rb") as file:
        fs.rm("deep", recursive=True)
        assert file.read() == b"0123xy6789a"
    assert not fs.exists("deep")
    with pytest.raises(FileNotFoundError):
        fs.open("none", "r+b")
    with pytest.raises(IsADirectoryError):
        fs.open("a", "wb")
    fs.mv("a", "moved/a")
    assert fs.cat("moved/a/b.txt") == b"ab"


def test_patching_weights_takes_over_what_is_touched(session: Session, fs: SessionFileSystem) -> None:
    with fs.open(WEIGHTS, "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\2")
    assert session.tree.file(WEIGHTS).base == WEIGHTS
    assert session.commit("patched").blocks_new == 1


# -- transactions ------------------------------------------------------------------------------------------


def test_a_transaction_is_seen_at_its_end(fs: SessionFileSystem) -> None:
    with fs.transaction:
        fs.pipe_file("config.json", b"new")
        fs.pipe_file("x/y", b"xy")
        with fs.open("a/b.txt", "ab") as file:
            file.write(b"d")
        with fs.open("a/b.txt", "r+b") as file:
            file.write(b"x")
        assert fs.cat("config.json") == b"{}"
        assert not fs.exists("x/y")
    assert fs.cat(["config.json", "x/y", "a/b.txt"]) == {"config.json": b"new", "x/y": b"xy", "a/b.txt": b"xb"}
    fs.pipe_file("config.json", b"outside")
    assert fs.cat("config.json") == b"outside"


def test_a_transaction_with_an_error_is_not_seen(session: Session, fs: SessionFileSystem) -> None:
    def fail() -> None:
        with fs.transaction:
            fs.pipe_file("config.json", b"new")
            fs.pipe_file("x", b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert fs.cat("config.json") == b"{}"
    assert not fs.exists("x")
    assert not session.is_changed
    assert os.listdir(session.folder / "data") == []


def test_a_transaction_is_whole_after_the_process_was_killed(repository: Repository, session: Session) -> None:
    fs = session.filesystem()
    with fs.transaction:
        for number in range(20):
            fs.pipe_file(f"{number}", b"x" * number)
    journal = (session.folder / "journal").read_bytes()
    lines = journal.splitlines(keepends=True)
    placed = [number for number, line in enumerate(lines) if b'["place"' in line]
    assert len(placed) == 1  # one line: there or not


def test_put_and_commit(repository: Repository, session: Session, tmp_path: Path) -> None:
    tuned = builders.fine_tuned(builders.random_model(1), 3)
    folder = builders.write_model(tmp_path / "tuned", tuned, {"config.json": b'{"b": 2}'})
    fs = session.filesystem()
    with fs.transaction:
        fs.put(f"{folder}/", "", recursive=True)
    session.commit("tuned")
    assert builders.tensors_of(repository, "tuned") == tuned
    assert builders.served(repository, "tuned") == {**builders.tree(folder), "a/b.txt": builders.sha256(b"ab")}
    with pytest.raises(UserError, match="is over"):
        fs.ls("")


def test_a_pickle_is_the_same_session(fs: SessionFileSystem) -> None:
    again = pickle.loads(pickle.dumps(fs))
    assert again == fs
    again.pipe_file("x", b"x")
    assert fs.cat("x") == b"x"
