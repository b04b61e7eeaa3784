"""The tree behind a mount, as data and through the kernel, over models that lie as plain files.

Run as a script (`MODELS DIRECTORY [NAME]`) this file serves such models, for its own tests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import pytest

from mergefs.errors import CorruptionError, NotFoundError
from mergefs.serve.fuse_tree import AllModels, ModelTree, SingleModel, inode_number
from mergefs.serve.mount_daemon import serve

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
TIME = 1_700_000_000.5
PAGE = mmap.PAGESIZE
TOGETHER = 4


@dataclass(frozen=True)
class Info:
    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class PlainReader:
    view: PlainView
    path: str

    def pieces(self, offset: int, size: int) -> list[memoryview]:
        if self.path == "broken":
            raise CorruptionError("a block is damaged")
        if self.path == "meeting":
            self.view.meeting.wait(20)  # returns only when so many reads are under way at once
        with (self.view.folder / self.path).open("rb") as file:
            data = memoryview(os.pread(file.fileno(), size, offset))
        return [data[:100], data[100:]]


class PlainView:
    """A view of a folder; `opened` counts the views that are not closed."""

    opened: ClassVar[list[str]] = []

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest_id = folder.name
        self.opened.append(folder.name)
        self.meeting = threading.Barrier(TOGETHER)

    @cached_property
    def files(self) -> dict[str, Info]:
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        names = [path.relative_to(self.folder).as_posix() for path in found]
        return {name: Info(name, path.stat().st_size) for name, path in zip(names, found, strict=True)}

    recipe = "merge_method: linear"

    def sha256(self, path: str) -> str | None:
        return hashlib.sha256((self.folder / path).read_bytes()).hexdigest() if path.endswith(".json") else None

    def reader(self, path: str) -> PlainReader:
        return PlainReader(self, path)

    def close(self) -> None:
        self.opened.remove(self.manifest_id)


class PlainModels:
    """Models as folders `FOLDER/HASH`, refs as files `FOLDER/refs/NAME` with the id inside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refs(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "refs").iterdir()}

    def manifest_ids(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name != "refs"]

    def manifest_time(self, manifest_id: str) -> float:
        return TIME

    def raw_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def view(self, name: str) -> PlainView:
        manifest_id = self.refs().get(name, name)
        if not (self.folder / manifest_id).is_dir():
            raise NotFoundError(f"there is no {name}")
        return PlainView(self.folder / manifest_id)

    def add(self, manifest_id: str, **files: bytes) -> None:
        for name, content in files.items():
            path = self.folder / manifest_id / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def set_ref(self, name: str, manifest_id: str) -> None:
        new = self.folder / "new"
        new.write_text(manifest_id)
        new.rename(self.folder / "refs" / name)


WEIGHTS = random.Random(1).randbytes(3 * (1 << 20) + 777)


@pytest.fixture
def models(tmp_path: Path) -> Iterator[PlainModels]:
    (tmp_path / "models" / "refs").mkdir(parents=True)
    models = PlainModels(tmp_path / "models")
    models.add(A, config_json=b"{}", model_safetensors=WEIGHTS, sub__deep__x_txt=b"x" * 5, empty=b"")
    models.add(B, config_json=b"{'b': 1}", model_safetensors=WEIGHTS[::-1])
    models.set_ref("math", A)
    models.set_ref("demo@2", B)
    PlainView.opened.clear()
    yield models
    assert not PlainView.opened, "every view is closed in the end"


# -- the tree as data --------------------------------------------------------------------------------------


def names(entries: list[tuple[str, object]]) -> list[str]:
    return [name for name, _ in entries]


def test_single_model_lays_out_files_and_folders(models: PlainModels) -> None:
    tree = SingleModel(models, "math")
    assert names(tree.children("")) == ["config.json", "empty", "model.safetensors", "sub"]
    assert names(tree.children("sub/deep")) == ["x.txt"]
    root, folder, file = tree.node(""), tree.node("sub"), tree.node("sub/deep/x.txt")
    assert (stat.filemode(root.mode), root.nlink) == ("dr-xr-xr-x", 3)
    assert (stat.filemode(folder.mode), folder.nlink) == ("dr-xr-xr-x", 3)
    assert (stat.filemode(file.mode), file.nlink, file.size, file.mtime) == ("-r--r--r--", 1, 5, TIME)
    assert tree.totals().files == 4
    assert tree.totals().bytes == len(WEIGHTS) + 7
    assert tree.cache_seconds > 3600
    tree.close()


def test_a_read_stops_at_the_end_of_the_file(models: PlainModels) -> None:
    tree = SingleModel(models, A)
    file = tree.open("sub/deep/x.txt")
    assert [b"".join(file.pieces(*place)) for place in [(3, 10), (5, 1), (99, 1)]] == [b"xx", b"", b""]
    file.release()
    tree.close()


@pytest.mark.parametrize("path", ["nothing", "config.json/x", "sub/nothing", "sub/"])
def test_what_is_not_there_is_not_found(models: PlainModels, path: str) -> None:
    tree = SingleModel(models, "math")
    for look in (tree.node, tree.children, tree.open):
        with pytest.raises(NotFoundError):
            look(path)
    tree.close()


def test_a_folder_cannot_be_opened_nor_a_file_listed(models: PlainModels) -> None:
    tree = SingleModel(models, "math")
    with pytest.raises(NotFoundError):
        tree.open("sub")
    with pytest.raises(NotFoundError):
        tree.children("config.json")
    tree.close()


def test_a_path_that_is_file_and_folder_is_corruption() -> None:
    with pytest.raises(CorruptionError, match="'a' as a file and as a folder"):
        ModelTree(A, {"a": Info("a", 1), "a/b": Info("a/b", 1)}, 0)


def test_inode_numbers_name_manifest_and_path(models: PlainModels) -> None:
    numbers = {inode_number(m, p) for m in (A, B) for p in ("", "x", "x/y")}
    assert len(numbers) == 6
    assert all(1 < number < 1 << 63 for number in numbers)
    everything, single = AllModels(models), SingleModel(models, "math")
    assert everything.node(f"manifests/{A}/config.json").inode == single.node("config.json").inode
    everything.close()
    single.close()


def test_everything_has_manifests_and_refs(models: PlainModels) -> None:
    tree = AllModels(models)
    assert names(tree.children("")) == ["manifests", "refs"]
    assert names(tree.children("manifests")) == [A, B]
    assert names(tree.children("refs")) == ["demo@2", "math"]
    assert [tree.node(path).nlink for path in ("", "manifests", "refs", f"manifests/{A}")] == [4, 4, 2, 3]
    assert names(tree.children(f"manifests/{A}/sub")) == ["deep"]
    link = tree.node("refs/math")
    assert (stat.S_ISLNK(link.mode), link.target, link.size) == (True, f"../manifests/{A}", 77)
    tree.close()


def test_a_moved_ref_is_seen_and_an_open_file_stays(models: PlainModels) -> None:
    tree = AllModels(models)
    before = tree.open(f"manifests/{A}/config.json")
    models.set_ref("math", B)
    models.set_ref("new", A)
    assert tree.node("refs/math").target == f"../manifests/{B}"
    assert names(tree.children("refs")) == ["demo@2", "math", "new"]
    assert b"".join(before.pieces(0, 99)) == b"{}"
    before.release()
    tree.close()


@pytest.mark.parametrize(
    "path",
    ["x", "refs/none", "refs/math/config.json", "manifests/math", f"manifests/{A[:8]}", f"manifests/{C}"],
)
def test_everything_knows_whole_ids_and_existing_refs_only(models: PlainModels, path: str) -> None:
    tree = AllModels(models)
    with pytest.raises(NotFoundError):
        tree.node(path)
    with pytest.raises(NotFoundError):
        tree.open(path)
    tree.close()


def test_refs_that_are_no_file_names_are_left_out(models: PlainModels) -> None:
    tree = AllModels(models)
    models.refs = lambda: {"..": A, "a/b": A, "fine": A}  # type: ignore[method-assign]
    assert names(tree.children("refs")) == ["fine"]
    tree.close()


def test_views_are_bounded_but_never_closed_under_an_open_file(models: PlainModels) -> None:
    models.add(C, config_json=b"c")
    tree = AllModels(models, idle_views=1)
    file = tree.open(f"manifests/{A}/config.json")
    tree.node(f"manifests/{B}/config.json")
    assert sorted(PlainView.opened) == [A, B]
    tree.node(f"manifests/{C}/config.json")
    assert sorted(PlainView.opened) == [A, C]
    assert b"".join(file.pieces(0, 2)) == b"{}"
    file.release()
    tree.node(f"manifests/{C}/config.json")
    assert sorted(PlainView.opened) == [A, C]
    tree.node(f"manifests/{B}/config.json")
    assert PlainView.opened == [B]
    tree.close()


# -- the tree through the kernel ---------------------------------------------------------------------------


@contextmanager
def served(models: PlainModels, name: str | None = None) -> Iterator[Path]:
    """Serve by a process of its own, until the block ends."""
    directory = models.folder.parent / "mount"
    directory.mkdir()
    command = [sys.executable, __file__, str(models.folder), str(directory), *([name] if name else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield directory
        finally:
            done = subprocess.run(["fusermount3", "-u", str(directory)], check=False)
            if done.returncode:
                process.kill()
                subprocess.run(["fusermount3", "-uz", str(directory)], check=False)
    assert process.returncode == 0


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.fuse
def test_a_served_model_equals_its_files(models: PlainModels, tmp_path: Path) -> None:
    with served(models, "math") as directory:
        assert snapshot(directory) == snapshot(models.folder / A)
        info = (directory / "sub/deep/x.txt").stat()
        assert (info.st_mode, info.st_nlink, info.st_size) == (stat.S_IFREG | 0o444, 1, 5)
        assert (info.st_uid, info.st_gid, info.st_mtime) == (os.getuid(), os.getgid(), TIME)
        assert info.st_ino == inode_number(A, "sub/deep/x.txt")
        listed = {entry.name: entry.inode() for entry in os.scandir(directory)}
        assert listed["config.json"] == inode_number(A, "config.json")
        assert os.stat(directory).st_nlink == 3
        space = os.statvfs(directory)
        assert (space.f_bfree, space.f_files) == (0, 4)
        assert 0 <= space.f_blocks * space.f_frsize - len(WEIGHTS) < 2 * 4096
        subprocess.run(["cp", "-r", f"{directory}/.", str(tmp_path / "copy")], check=True)
        summed = subprocess.run(["sha256sum", directory / "model.safetensors"], capture_output=True, check=True)
    assert snapshot(tmp_path / "copy") == snapshot(models.folder / A)
    assert summed.stdout.split()[0].decode() == hashlib.sha256(WEIGHTS).hexdigest()


@pytest.mark.fuse
@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_a_served_file_can_be_mapped(models: PlainModels, flags: int) -> None:
    with (
        served(models, "math") as directory,
        (directory / "model.safetensors").open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ) as pages,
    ):
        assert pages[:] == WEIGHTS


@pytest.mark.fuse
def test_sixteen_threads_fault_one_mapping(models: PlainModels) -> None:
    """Each thread touches the pages in an order of its own, so that faults on all of them are under way."""

    def touch(pages: mmap.mmap, seed: int) -> bool:
        starts = list(range(0, len(WEIGHTS), PAGE))
        random.Random(seed).shuffle(starts)
        return all(pages[start : start + PAGE] == WEIGHTS[start : start + PAGE] for start in starts)

    with (
        served(models, "math") as directory,
        (directory / "model.safetensors").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages,
        ThreadPoolExecutor(16) as threads,
    ):
        assert all(threads.map(lambda seed: touch(pages, seed), range(16), timeout=60))


@pytest.mark.fuse
def test_reads_are_served_at_the_same_time(models: PlainModels) -> None:
    """No read of this file returns before several are under way: served one by one, they would fail."""
    models.add(A, meeting=bytes(TOGETHER * (1 << 20)))
    with (
        served(models, "math") as directory,
        (directory / "meeting").open("rb", buffering=0) as file,
        ThreadPoolExecutor(TOGETHER) as threads,
    ):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # one request a read, none ahead
        reads = threads.map(lambda n: os.pread(file.fileno(), PAGE, n << 20), range(TOGETHER), timeout=60)
        assert list(reads) == [bytes(PAGE)] * TOGETHER


@pytest.mark.fuse
def test_a_damaged_block_is_an_input_output_error(models: PlainModels) -> None:
    models.add(A, broken=b"x")
    with served(models, "math") as directory:
        with pytest.raises(OSError) as raised:
            (directory / "broken").read_bytes()
        assert raised.value.errno == errno.EIO
        assert (directory / "config.json").read_bytes() == b"{}"


@pytest.mark.fuse
def test_everything_served_follows_refs(models: PlainModels) -> None:
    with served(models) as directory:
        assert sorted(os.listdir(directory / "refs")) == ["demo@2", "math"]
        assert sorted(os.listdir(directory / "manifests")) == [A, B]
        weights = directory / "refs" / "math" / "model.safetensors"
        with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            assert file.read(1 << 20) == WEIGHTS[: 1 << 20]
            models.set_ref("math", B)
            assert weights.read_bytes() == WEIGHTS[::-1]
            assert file.read() == WEIGHTS[1 << 20 :]
            assert pages[:] == WEIGHTS
        models.set_ref("new", A)
        assert (directory / "refs/new/model.safetensors").read_bytes() == WEIGHTS
        (models.folder / "refs" / "math").unlink()
        assert not weights.exists()
        time.sleep(1.1)
        assert not os.path.lexists(directory / "refs" / "math")


def bind(path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path itself may be longer than addresses can be
    finally:
        os.close(folder)


def opened(flags: int) -> Callable[[Path], object]:
    return lambda path: os.close(os.open(path, flags, 0o600))


MAKES: dict[str, Callable[[Path], object]] = {
    "open O_CREAT": opened(os.O_CREAT | os.O_WRONLY),
    "open O_CREAT O_EXCL": opened(os.O_CREAT | os.O_EXCL | os.O_RDWR),
    "mkdir": os.mkdir,
    "mkfifo": os.mkfifo,
    "mknod": lambda path: os.mknod(path, stat.S_IFREG | 0o600),
    "symlink": lambda path: os.symlink("config.json", path),
    "link": lambda path: os.link(path.parent / "config.json", path),
    "rename a file": lambda path: os.rename(path.parent / "config.json", path),
    "rename a folder": lambda path: os.rename(path.parent / "sub", path),
    "bind": bind,
}
"""Calls that would make something of a name that is not there."""

CHANGES: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: os.chmod(path, 0o700),
    "chown": lambda path: os.chown(path, 1, 1),
    "chown of the group": lambda path: os.chown(path, -1, 1),
    "utimensat": lambda path: os.utime(path, (1, 1)),
    "utimensat now": os.utime,
    "setxattr": lambda path: os.setxattr(path, "user.x", b"1"),
    "setxattr of ours": lambda path: os.setxattr(path, "user.mergefs.manifest", b"1"),
    "removexattr": lambda path: os.removexattr(path, "user.mergefs.manifest"),
    "rename": lambda path: os.rename(path, path.parent / "other"),
}
"""Calls that would change a file or a folder."""

FILE_CHANGES: dict[str, Callable[[Path], object]] = {
    "open O_WRONLY": opened(os.O_WRONLY),
    "open O_RDWR": opened(os.O_RDWR),
    "open O_APPEND": opened(os.O_WRONLY | os.O_APPEND),
    "open O_TRUNC": opened(os.O_WRONLY | os.O_TRUNC),
    "open O_CREAT of what is there": opened(os.O_WRONLY | os.O_CREAT),
    "truncate": lambda path: os.truncate(path, 0),
    "truncate to be longer": lambda path: os.truncate(path, 1 << 20),
    "unlink": os.unlink,
    "rename over another": lambda path: os.rename(path, path.parent / "empty"),
    "link to it": lambda path: os.link(path, path.parent / "other"),
}
FOLDER_CHANGES: dict[str, Callable[[Path], object]] = {
    "rmdir": os.rmdir,
    "mkdir in it": lambda path: os.mkdir(path / "new"),
    "create in it": lambda path: opened(os.O_CREAT | os.O_WRONLY)(path / "new"),
    "rename into it": lambda path: os.rename(path.parent / "config.json", path / "config.json"),
}


def refusals(top: Path) -> Iterator[tuple[str, int | None]]:
    """Try every call that changes something; yield what it was and the error number."""
    tried = [(what, change, top / "new") for what, change in MAKES.items()]
    tried += [(what, change, top / "config.json") for what, change in (CHANGES | FILE_CHANGES).items()]
    tried += [(what, change, top / "sub") for what, change in (CHANGES | FOLDER_CHANGES).items()]
    for what, change, path in tried:
        try:
            change(path)
        except OSError as error:
            yield f"{what} {path.name}", error.errno
        else:
            yield f"{what} {path.name}", None


@pytest.mark.fuse
def test_every_change_is_refused(models: PlainModels) -> None:
    with served(models, "math") as directory:
        before = snapshot(directory)
        assert [what for what, number in refusals(directory) if number != errno.EROFS] == []
        with pytest.raises(OSError) as raised:
            os.open(directory, os.O_TMPFILE | os.O_RDWR)
        assert raised.value.errno == errno.EROFS
        if os.getuid() == 0:  # the mount itself refuses too, when root has made it writable
            subprocess.run(["mount", "-i", "-o", "remount,rw", str(directory)], check=True)
            assert [what for what, number in refusals(directory) if number != errno.EROFS] == []
        assert snapshot(directory) == before == snapshot(models.folder / A)


@pytest.mark.fuse
def test_the_links_of_refs_cannot_be_changed(models: PlainModels) -> None:
    with served(models) as directory:
        link = directory / "refs/math"
        for change in (
            os.unlink,
            lambda path: os.rename(path, path.parent / "other"),
            lambda path: os.utime(path, (1, 1), follow_symlinks=False),
            lambda path: os.chown(path, 1, 1, follow_symlinks=False),
            lambda path: os.symlink("x", path.parent / "other"),
            lambda path: (path / "new").touch(),
        ):
            with pytest.raises(OSError) as raised:
                change(link)
            assert raised.value.errno == errno.EROFS
        assert os.readlink(link) == f"../manifests/{A}"


@pytest.mark.fuse
def test_extended_attributes_name_the_manifest(models: PlainModels) -> None:
    expected = {"user.mergefs.manifest": A.encode(), "user.mergefs.recipe": b"merge_method: linear"}
    sums = {"user.mergefs.sha256": hashlib.sha256(b"{}").hexdigest().encode()}
    with served(models) as directory:
        model = directory / "refs/math"

        def attributes(path: Path) -> dict[str, bytes]:
            return {name: os.getxattr(path, name) for name in os.listxattr(path)}

        assert attributes(model) == attributes(model / "sub") == attributes(model / "model.safetensors") == expected
        assert attributes(model / "config.json") == expected | sums
        assert attributes(directory) == attributes(directory / "refs") == {}
        for path, name in [(model / "sub", "user.mergefs.sha256"), (model, "user.other"), (directory, "user.x")]:
            with pytest.raises(OSError) as raised:
                os.getxattr(path, name)
            assert raised.value.errno == errno.ENODATA
        state = json.loads(os.getxattr(directory, "user.mergefs.mount"))
        assert state == {"bytes_served": 0}
        (model / "empty").read_bytes()
        (model / "model.safetensors").read_bytes()
        assert json.loads(os.getxattr(directory, "user.mergefs.mount")) == {"bytes_served": len(WEIGHTS)}


@pytest.mark.fuse
def test_a_listing_has_the_attributes_too(models: PlainModels) -> None:
    """Names, kinds, sizes and links as `stat` tells them, whatever the kernel kept from the listing."""
    with served(models) as directory:
        for folder in (directory / "manifests" / A, directory / "manifests", directory):
            for entry in os.scandir(folder):
                listed = entry.stat(follow_symlinks=False)
                now = os.stat(entry.path, follow_symlinks=False)
                assert (listed.st_ino, listed.st_mode, listed.st_size) == (now.st_ino, now.st_mode, now.st_size)
                assert (listed.st_nlink, listed.st_mtime) == (now.st_nlink, now.st_mtime)
        assert (directory / "manifests" / A).stat().st_nlink == 3


def main(folder: str, directory: str, name: str | None = None) -> None:
    """Serve the models in `folder` at `directory`."""
    models = PlainModels(Path(folder))
    tree = AllModels(models) if name is None else SingleModel(models, name)
    serve(tree, Path(directory), lambda: print("ready", flush=True))
    tree.close()
    assert not PlainView.opened


if __name__ == "__main__":
    main(*sys.argv[1:])
