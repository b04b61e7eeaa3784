"""The files of a session against a model in memory, and what is left of them after the process or the machine."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergefs.edit import journal
from mergefs.edit.content import EXTENT
from mergefs.edit.tree import Tree

SIZES = {"config.json": 300, "model.safetensors": 5 * EXTENT + 77, "extra/vocab.txt": EXTENT, "extra/deep/empty": 0}


def base(path: str) -> bytes:
    return random.Random(path).randbytes(SIZES[path])


def opened(folder: Path) -> Tree:
    return Tree(folder, SIZES, 7, lambda path, offset, size: base(path)[offset : offset + size], sync=False)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return opened(tmp_path)


def contents(tree: Tree) -> dict[str, bytes]:
    return {path: file.read(0, 1 << 30) for path, file in tree.files().items()}


def folders(tree: Tree, path: str = "") -> set[str]:
    found = set()
    for name, node in tree.children(path):
        if hasattr(node, "names"):
            below = f"{path}/{name}".lstrip("/")
            found |= {below} | folders(tree, below)
    return found


def fails(number: int, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert caught.value.errno == number


def test_a_new_session_is_the_model(tree: Tree) -> None:
    assert contents(tree) == {path: base(path) for path in SIZES}
    assert folders(tree) == {"extra", "extra/deep"}
    assert not tree.is_changed


def test_only_what_is_written_to_is_taken_over(tree: Tree, tmp_path: Path) -> None:
    file = tree.file("model.safetensors")
    file.write(2 * EXTENT + 5, b"abc")
    assert file.local == {2}
    assert file.is_unchanged(0, 2 * EXTENT)
    assert file.is_unchanged(3 * EXTENT, 5 * EXTENT + 77)
    assert not file.is_unchanged(0, 2 * EXTENT + 1)
    assert file.stored <= 2 * EXTENT
    expected = bytearray(base("model.safetensors"))
    expected[2 * EXTENT + 5 : 2 * EXTENT + 8] = b"abc"
    assert file.read(0, 1 << 30) == expected
    assert tree.is_changed


def test_what_was_cut_off_does_not_come_back(tree: Tree) -> None:
    file = tree.file("model.safetensors")
    file.write(EXTENT, b"x" * EXTENT)
    file.truncate(EXTENT + 10)
    file.truncate(4 * EXTENT)
    assert file.read(0, 1 << 30) == base("model.safetensors")[:EXTENT] + b"x" * 10 + bytes(3 * EXTENT - 10)
    file.write(3 * EXTENT + 9, b"y")
    assert file.read(3 * EXTENT, 20) == bytes(9) + b"y" + bytes(10)


class Model:
    """What the session has to hold, and one random change at a time to both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files = {path: bytearray(base(path)) for path in SIZES}
        self.folders = {"extra", "extra/deep"}

    def place(self) -> str:
        folder = self.random.choice(["", *sorted(self.folders)])
        return f"{folder}/{self.random.choice('abcd')}".lstrip("/")

    def step(self, tree: Tree) -> None:
        change = self.random.choices(
            ["write", "cut", "create", "remove", "rename", "make", "unmake", "replace"], [30, 12, 5, 4, 8, 3, 3, 3]
        )[0]
        path = self.random.choice(sorted(self.files)) if self.files else self.place()
        if change == "write" and path in self.files:
            data = self.random.randbytes(self.random.choice([1, 100, EXTENT, 2 * EXTENT + 3]))
            offset = self.random.randrange(6 * EXTENT)
            content = self.files[path]
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
            tree.file(path).write(offset, data)
        elif change == "cut" and path in self.files:
            size = self.random.choice([0, self.random.randrange(7 * EXTENT)])
            content = self.files[path]
            content.extend(bytes(max(0, size - len(content))))
            del content[size:]
            tree.file(path).truncate(size)
        elif change == "remove" and path in self.files:
            del self.files[path]
            tree.remove(path)
        elif change in ("create", "replace", "make"):
            path = self.place()
            if path in self.folders:
                fails(
                    errno.EISDIR if change != "make" else errno.EEXIST,
                    getattr(tree, MAKING[change]),
                    *self.new(tree, change, path),
                )
            elif change == "make" and path in self.files:
                fails(errno.EEXIST, tree.make_folder, path)
            else:
                getattr(tree, MAKING[change])(*self.new(tree, change, path))
                if change == "make":
                    self.folders.add(path)
                else:
                    self.files[path] = bytearray(b"new" if change == "replace" else b"")
        elif change == "unmake" and self.folders:
            path = self.random.choice(sorted(self.folders))
            if any(other.startswith(f"{path}/") for other in (*self.files, *self.folders)):
                fails(errno.ENOTEMPTY, tree.remove_folder, path)
            else:
                self.folders.discard(path)
                tree.remove_folder(path)
        elif change == "rename":
            self.rename(tree, self.random.choice(sorted({*self.files, *self.folders}) or ["none"]), self.place())

    def new(self, tree: Tree, change: str, path: str) -> tuple[object, ...]:
        if change != "replace":
            return (path,)
        file = tree.anonymous()
        file.write(0, b"new")
        return file, path

    def rename(self, tree: Tree, old: str, new: str) -> None:
        everything = {*self.files, *self.folders}
        below = [path for path in everything if path.startswith(f"{new}/")]
        if old not in everything:
            fails(errno.ENOENT, tree.rename, old, new)
        elif old == new:
            tree.rename(old, new)
        elif new.startswith(f"{old}/"):
            fails(errno.EINVAL, tree.rename, old, new)
        elif new in self.folders and old in self.files:
            fails(errno.EISDIR, tree.rename, old, new)
        elif new in self.folders and below:
            fails(errno.ENOTEMPTY, tree.rename, old, new)
        elif new in self.files and old in self.folders:
            fails(errno.ENOTDIR, tree.rename, old, new)
        else:
            tree.rename(old, new)
            moved = {path: new + path[len(old) :] for path in everything if path == old or path.startswith(f"{old}/")}
            self.files = {moved.get(path, path): v for path, v in self.files.items() if moved.get(path) or path != new}
            self.folders = {moved.get(path, path) for path in self.folders}


MAKING = {"create": "create", "replace": "place", "make": "make_folder"}


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_survive_the_process(tmp_path: Path, seed: int) -> None:
    model = Model(seed)
    folder = tmp_path / "0"
    folder.mkdir()
    tree = opened(folder)
    for step in range(400):
        model.step(tree)
        if step % 40 == 39:
            assert contents(tree) == model.files
            # As it is when the process is killed: nothing was closed, and a line is half written.
            after = tmp_path / str(step)
            shutil.copytree(folder, after)
            with open(after / "journal", "ab") as file:
                file.write(b'12345678 ["remove","mod')
            folder, tree = after, opened(after)
            assert contents(tree) == model.files
            assert folders(tree) == model.folders


def test_a_write_that_never_reached_the_journal_is_taken_back(tmp_path: Path) -> None:
    tree = opened(tmp_path)
    file = tree.create("new")
    file.write(0, b"abc")
    with open(tmp_path / "data" / str(file.number), "ab") as data:
        data.write(b"def")
    again = opened(tmp_path).file("new")
    assert again.read(0, 100) == b"abc"
    again.truncate(6)
    assert again.read(0, 100) == b"abc\0\0\0"


def test_after_the_machine_was_down_the_last_flush_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = opened(tmp_path)
    tree.create("flushed").write(0, b"abc")
    tree.remove("config.json")
    tree.sync()
    tree.create("not")
    tree.remove("flushed")
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert contents(opened(tmp_path)) == {
        "flushed": b"abc",
        **{path: base(path) for path in SIZES if path != "config.json"},
    }


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("a\\b", errno.EINVAL),
        ("a\nb", errno.EINVAL),
        ("\udcff", errno.EILSEQ),
        ("x" * 256, errno.ENAMETOOLONG),
        ("none/x", errno.ENOENT),
        ("config.json/x", errno.ENOTDIR),
    ],
)
def test_names_that_a_model_cannot_have_are_refused(tree: Tree, name: str, number: int) -> None:
    fails(number, tree.create, name)
    fails(number, tree.make_folder, name)
    fails(number, tree.rename, "extra/vocab.txt", name)
    assert not tree.is_changed


def test_a_removed_file_is_readable_until_it_is_released(tree: Tree, tmp_path: Path) -> None:
    tree.create("new").write(0, b"abc")
    file = tree.open("new")
    tree.remove("new")
    tree.sync()
    assert file.read(0, 9) == b"abc"
    tree.release(file)
    tree.sync()
    assert os.listdir(tmp_path / "data") == []


def test_files_without_a_name_are_gone_with_the_session(tree: Tree, tmp_path: Path) -> None:
    file = tree.anonymous()
    file.write(0, b"abc")
    other = tree.anonymous()
    other.write(0, b"x")
    tree.forget(other)
    assert contents(opened(tmp_path)) == {path: base(path) for path in SIZES}
    assert os.listdir(tmp_path / "data") == []
