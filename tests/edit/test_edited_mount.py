"""Sessions that are mounted, through the kernel: as a file system, and from `edit` to `commit` and `discard`."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import builders
import pytest
from operations import Checker
from safetensors.torch import load_file, save_file

from mergefs.edit.mount import commit, discard, edit
from mergefs.errors import CheckpointError, MergefsError, MountError, NotFoundError, RefMovedError, UserError
from mergefs.repository import Repository
from mergefs.serve.mount import umount

WEIGHTS = "model.safetensors"
FILES = {"config.json": b'{"a": 1}', "extra/vocab.txt": b"a\nb\n", "big.bin": bytes(range(256)) * 800}

pytestmark = pytest.mark.fuse


@dataclass
class Mounted:
    """A repository with the model `model`, the folder that it came from, and where it is mounted."""

    repository: Repository
    model: Path
    at: Path

    def edit(self, name: str | None = "model", **options: object) -> str:
        info = edit(self.repository, self.at, name, **options)  # type: ignore[arg-type]
        return info.session


@pytest.fixture
def mounted(repository: Repository, tmp_path: Path) -> Iterator[Mounted]:
    folder = builders.write_model(tmp_path / "model", builders.random_model(1), FILES)
    repository.ingest(folder, "model")
    at = tmp_path / "at"
    at.mkdir()
    yield Mounted(repository, folder, at)
    subprocess.run(["fusermount3", "-uz", at], check=False, capture_output=True)


@pytest.fixture
def at(mounted: Mounted) -> Iterator[Path]:
    """The model `model`, mounted for writing."""
    mounted.edit()
    return mounted.at


def data_start(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def refused(number: int, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert caught.value.errno == number


# -- a file system -----------------------------------------------------------------------------------------


def check(mounted: Mounted, seed: int, operations: int) -> None:
    """Run random operations on a mount, then unmount, resume, commit and serve, comparing after each."""
    weights = (mounted.model / WEIGHTS).read_bytes()
    more = {f"{n}.bin": random.Random(n).randbytes(40_000 * n) for n in range(1, 8)}
    for path, content in more.items():
        (mounted.model / path).write_bytes(content)
    mounted.repository.ingest(mounted.model, "model")
    session = mounted.edit()
    checker = Checker(mounted.at, seed, {**FILES, **more, WEIGHTS: weights}, {WEIGHTS: data_start(weights)})
    try:
        checker.run(operations)
    finally:
        checker.close()
    assert len(checker.done) == 22
    umount(mounted.at)
    mounted.edit(None, resume=session)
    checker.verify()
    expected = {path: builders.sha256(data) for path, data in checker.contents().items()}
    commit(mounted.repository, str(mounted.at), "after")
    assert builders.served(mounted.repository, "after") == expected
    assert mounted.repository.fsck(read_data=True).ok


def test_random_operations(mounted: Mounted) -> None:
    check(mounted, 1, 1000)


@pytest.mark.slow
def test_a_hundred_thousand_random_operations(mounted: Mounted) -> None:
    check(mounted, 2026, 100_000)


def test_what_posix_asks_of_names(at: Path) -> None:
    (at / "new").write_bytes(b"1")
    refused(errno.EEXIST, os.open, at / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    refused(errno.EEXIST, os.mkdir, at / "new")
    refused(errno.ENOTDIR, os.open, at / "new" / "x", os.O_RDONLY)
    refused(errno.ENOENT, os.open, at / "none" / "x", os.O_CREAT | os.O_WRONLY)
    refused(errno.ENOTEMPTY, os.rmdir, at / "extra")
    refused(errno.EISDIR, os.unlink, at / "extra")
    refused(errno.EISDIR, os.open, at / "extra", os.O_WRONLY)
    refused(errno.EINVAL, os.rename, at / "extra", at / "extra" / "inside")
    refused(errno.ENOTDIR, os.rename, at / "extra", at / "new")
    refused(errno.EISDIR, os.rename, at / "new", at / "extra")
    refused(errno.ENAMETOOLONG, os.mkdir, at / ("x" * 256))
    for name in ("a\\b", "a\nb"):
        refused(errno.EINVAL, os.mkdir, at / name)
    refused(errno.EPERM, os.link, at / "new", at / "link")
    refused(errno.EPERM, os.symlink, "new", at / "link")
    refused(errno.EPERM, os.mkfifo, at / "fifo")
    os.mknod(at / "plain", stat.S_IFREG | 0o600)
    os.mkdir(at / "empty")
    os.rename(at / "extra", at / "empty")
    assert (at / "empty" / "vocab.txt").read_bytes() == FILES["extra/vocab.txt"]
    assert sorted(os.listdir(at)) == ["big.bin", "config.json", "empty", WEIGHTS, "new", "plain"]
    os.rename(at / "new", at / "config.json")
    assert (at / "config.json").read_bytes() == b"1"


def test_an_exchange_of_names_is_refused_and_loses_nothing(at: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2
    first, second = os.fsencode(at / "config.json"), os.fsencode(at / "big.bin")
    assert libc.renameat2(here, first, here, second, exchange) == -1
    assert ctypes.get_errno() == errno.EINVAL
    assert (at / "big.bin").read_bytes() == FILES["big.bin"]


def test_attributes(at: Path) -> None:
    before = os.stat(at / "config.json")
    assert (before.st_size, before.st_nlink, stat.S_IMODE(before.st_mode)) == (8, 1, 0o644)
    assert before.st_uid == os.getuid()
    assert os.stat(at).st_nlink == 3
    (at / "config.json").write_bytes(b"longer than before")
    after = os.stat(at / "config.json")
    assert (after.st_size, after.st_ino) == (18, before.st_ino)
    assert after.st_mtime_ns > before.st_mtime_ns
    os.utime(at / "config.json", ns=(5, 1_234_567_890_123_456_789))
    assert os.stat(at / "config.json").st_mtime_ns == 1_234_567_890_123_456_789
    os.utime(at / "config.json")
    assert time.time() - os.stat(at / "config.json").st_mtime < 60
    os.chmod(at / "config.json", 0o600)
    assert stat.S_IMODE(os.stat(at / "config.json").st_mode) == 0o600
    os.chown(at / "config.json", os.getuid(), -1)
    refused(errno.EPERM, os.chown, at / "config.json", 12345, -1)
    assert os.statvfs(at).f_bavail > 0
    os.rename(at / "config.json", at / "other")
    assert os.stat(at / "other").st_ino == before.st_ino


def test_open_modes(at: Path) -> None:
    with open(at / "log", "ab", buffering=0) as first, open(at / "log", "ab", buffering=0) as second:
        first.write(b"a")
        second.write(b"b")
        first.write(b"c")
    assert (at / "log").read_bytes() == b"abc"
    with open(at / "big.bin", "r+b") as file:
        os.truncate(at / "big.bin", 10)
        assert file.read() == FILES["big.bin"][:10]
        with open(at / "big.bin", "wb"):
            pass
        assert os.fstat(file.fileno()).st_size == 0
        os.unlink(at / "big.bin")
        file.write(b"still here")
        file.flush()
        assert os.pread(file.fileno(), 100, 0)[-10:] == b"still here"
    assert not (at / "big.bin").exists()
    with open(at / "hole", "wb") as file:
        file.seek(10 << 20)
        file.write(b"x")
    assert (at / "hole").read_bytes() == bytes(10 << 20) + b"x"


def test_shared_mappings_are_the_file(at: Path) -> None:
    content = (at / WEIGHTS).read_bytes()
    start = data_start(content)
    with (
        open(at / WEIGHTS, "r+b") as file,
        mmap.mmap(file.fileno(), 0) as first,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as second,
    ):
        first[start + 5000 : start + 5004] = b"abcd"
        assert second[start + 5000 : start + 5004] == b"abcd"
        assert os.pread(file.fileno(), 4, start + 5000) == b"abcd"
        os.pwrite(file.fileno(), b"efgh", start + 5002)
        assert first[start + 5000 : start + 5006] == b"abefgh"
    assert (at / WEIGHTS).read_bytes() == content[: start + 5000] + b"abefgh" + content[start + 5006 :]


def test_many_threads_write_one_file(at: Path) -> None:
    size = 1 << 15

    def write(number: int) -> None:
        with open(at / "shared", "r+b", buffering=0) as file:
            for block in range(number, 64, 8):
                file.seek(block * size)
                file.write(bytes([block]) * size)
                (at / f"own-{number}").write_bytes(bytes([number]) * 1000)

    (at / "shared").touch()
    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (at / "shared").read_bytes() == b"".join(bytes([block]) * size for block in range(64))
    assert all((at / f"own-{n}").read_bytes() == bytes([n]) * 1000 for n in range(8))


def test_ordinary_programs(mounted: Mounted, at: Path, tmp_path: Path) -> None:
    """cp, mv, sed, tar and safetensors do what they do on any folder; the result is what they leave on a disk."""
    plain = tmp_path / "plain"
    shutil.copytree(mounted.model, plain)
    tensors = load_file(plain / WEIGHTS)
    tensors["embed.weight"] += 1
    for folder in (at, plain):
        commands = """
            cp -a config.json copy.json && sed -i 's/1/2/' config.json && mv extra more && mkdir -p a/b
            tar -c -f a/all.tar more config.json && tar -x -f a/all.tar -C a/b && rm a/all.tar
            dd if=big.bin of=big.bin bs=1000 skip=3 seek=7 count=2 conv=notrunc status=none && echo end >> big.bin
        """
        subprocess.run(["bash", "-ec", commands], cwd=folder, check=True)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    again = load_file(at / WEIGHTS)
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())
    del again
    expected = builders.tree(plain)
    assert builders.tree(at) == expected
    commit(mounted.repository, str(at), "result")
    assert builders.served(mounted.repository, "result") == expected


# -- sessions ----------------------------------------------------------------------------------------------


def test_edit_and_commit(mounted: Mounted) -> None:
    session = mounted.edit()
    (mounted.at / "note").write_bytes(b"note")
    report = commit(mounted.repository, str(mounted.at), "noted")
    assert (report.session, report.ref) == (session, "noted")
    assert list(mounted.at.iterdir()) == []  # the mount ended with it
    assert "note" in builders.served(mounted.repository, "noted")
    assert mounted.repository.sessions() == []


def test_unmounting_keeps_the_session(mounted: Mounted) -> None:
    session = mounted.edit()
    (mounted.at / "note").write_bytes(b"note")
    umount(mounted.at)
    (info,) = mounted.repository.sessions()
    assert (info.id, info.directory, info.in_use) == (session, mounted.at, False)
    mounted.edit(None, resume=str(mounted.at))
    assert (mounted.at / "note").read_bytes() == b"note"
    (info,) = mounted.repository.sessions()
    assert info.in_use
    umount(mounted.at)
    assert "note" in builders.served(mounted.repository, commit(mounted.repository, session[:5], "noted").ref)


def test_discard(mounted: Mounted) -> None:
    session = mounted.edit()
    (mounted.at / "note").write_bytes(b"note")
    assert discard(mounted.repository, str(mounted.at)) == session
    assert list(mounted.at.iterdir()) == []
    assert list((mounted.repository.path / "sessions").iterdir()) == []
    with pytest.raises(NotFoundError, match="neither a session nor a folder"):
        discard(mounted.repository, str(mounted.at))


@pytest.mark.parametrize("first", ["resume", "commit", "discard"])
def test_a_killed_process_loses_nothing(mounted: Mounted, first: str) -> None:
    info = edit(mounted.repository, mounted.at, "model")
    content = bytearray((mounted.at / WEIGHTS).read_bytes())
    with open(mounted.at / WEIGHTS, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-4:] = content[-4:] = b"abcd"
        mapped.flush()
    (mounted.at / "note").write_bytes(b"note")
    os.rename(mounted.at / "extra", mounted.at / "more")
    open_file = open(mounted.at / "removed", "wb")  # noqa: SIM115 - open when the process is killed
    os.unlink(mounted.at / "removed")
    os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(OSError):
        retried(os.stat)(mounted.at / "note")
    with pytest.raises(OSError):
        open_file.write(b"x" * 100_000)
    with pytest.raises(OSError):
        open_file.close()
    mounted.repository.remove(["model"])
    mounted.repository.gc()
    if first == "resume":
        mounted.edit(None, resume=str(mounted.at))
        assert sorted(os.listdir(mounted.at)) == ["big.bin", "config.json", WEIGHTS, "more", "note"]
        assert (mounted.at / WEIGHTS).read_bytes() == content
    if first == "discard":
        discard(mounted.repository, str(mounted.at))
    else:
        commit(mounted.repository, str(mounted.at), "saved")
        served = builders.served(mounted.repository, "saved")
        assert served[WEIGHTS] == builders.sha256(content)
        assert served["note"] == builders.sha256(b"note")
        assert "removed" not in served
    assert os.listdir(mounted.at) == []
    assert mounted.repository.sessions() == []
    assert mounted.repository.fsck(read_data=True).ok


def retried(call: Callable[..., object]) -> Callable[..., object]:
    """The kernel notices a moment after the process is gone."""

    def again(*args: object) -> object:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            call(*args)
            time.sleep(0.01)
        return None

    return again


def test_a_mount_in_use_is_not_committed(mounted: Mounted) -> None:
    mounted.edit()
    with open(mounted.at / "note", "wb") as file:
        file.write(b"no")
        with pytest.raises(MountError, match="in use"):
            commit(mounted.repository, str(mounted.at), "noted")
        file.write(b"te")
    assert (mounted.at / "note").read_bytes() == b"note"
    commit(mounted.repository, str(mounted.at), "noted")
    assert builders.served(mounted.repository, "noted")["note"] == builders.sha256(b"note")


def test_a_moved_name_leaves_the_mount_as_it_is(mounted: Mounted) -> None:
    mounted.edit()
    (mounted.at / "note").write_bytes(b"note")
    with mounted.repository.edit("model") as other:
        other.tree.create("first")
        other.commit()
    with pytest.raises(RefMovedError, match="--force"):
        commit(mounted.repository, str(mounted.at))
    with pytest.raises(UserError, match="cannot be a name"):
        commit(mounted.repository, str(mounted.at), "a/b")
    assert (mounted.at / "note").read_bytes() == b"note"
    commit(mounted.repository, str(mounted.at), force=True)
    assert "first" not in builders.served(mounted.repository, "model")


def test_weights_that_are_none_are_refused_and_can_be_mended(mounted: Mounted) -> None:
    session = mounted.edit()
    os.truncate(mounted.at / WEIGHTS, 5000)
    with pytest.raises(CheckpointError, match=f"'mergefs edit --resume {session} .*' mounts the session again"):
        commit(mounted.repository, str(mounted.at), "damaged")
    mounted.edit(None, resume=session)
    shutil.copy(mounted.model / WEIGHTS, mounted.at)
    assert commit(mounted.repository, str(mounted.at), "mended").blocks_new == 0
    assert builders.served(mounted.repository, "mended") == builders.tree(mounted.model)


def test_what_cannot_be_mounted_leaves_no_session(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for directory, name, kind in (
        (tmp_path / "full", "model", MountError),
        (tmp_path / "none" / "none", "model", MountError),
        (mounted.at, "none", NotFoundError),
    ):
        with pytest.raises(kind):
            edit(mounted.repository, directory, name)
    assert mounted.repository.sessions() == []
    mounted.edit()
    with pytest.raises(UserError, match="open in another process; it was mounted at"):
        edit(mounted.repository, tmp_path / "other", resume=str(mounted.at))
    with pytest.raises(MountError, match="is a mount point already"):
        mounted.edit()
    assert not (tmp_path / "other").exists()
    assert len(mounted.repository.sessions()) == 1


def test_damage_reaches_who_reads_and_the_log(mounted: Mounted, tmp_path: Path) -> None:
    for pack in mounted.repository.path.glob("packs/*/*"):
        data = bytearray(pack.read_bytes())
        for at in range(64, len(data) - 200, 97):
            data[at] ^= 0xFF
        pack.write_bytes(data)
    mounted.edit(log=tmp_path / "log")
    refused(errno.EIO, (mounted.at / WEIGHTS).read_bytes)
    with open(mounted.at / WEIGHTS, "r+b", buffering=0) as file:
        file.seek(20_000)
        with pytest.raises(OSError):
            file.write(b"x")
    assert "damaged" in (tmp_path / "log").read_text()
    (mounted.at / "note").write_bytes(b"what is new can be written all the same")
    umount(mounted.at)


def command(repository: Repository, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mergefs", "-R", str(repository.path), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_commands(mounted: Mounted, tmp_path: Path) -> None:
    at, repository = str(mounted.at), mounted.repository
    info = json.loads(command(repository, "edit", "model", at, "--json").stdout)
    assert set(info) == {"session", "directory", "pid", "manifest", "ref"}
    (mounted.at / "note").write_bytes(b"note")
    (listed,) = json.loads(command(repository, "sessions", "--json").stdout)["sessions"]
    assert (listed["id"], listed["in_use"], listed["directory"]) == (info["session"], True, at)
    done = json.loads(command(repository, "commit", at, "--as", "noted", "--json").stdout)
    assert done["manifest"] == repository.resolve("noted")
    log = json.loads(command(repository, "log", "noted", "--json").stdout)
    assert (log["kind"], log["parent"]["refs"]) == ("edit", ["model"])
    assert "  of       " in command(repository, "log", "noted").stdout
    assert command(repository, "edit", "noted", at).returncode == 0
    assert "in use" in command(repository, "sessions").stdout
    assert command(repository, "discard", at).stdout.startswith("discarded session ")
    for arguments, words in (
        (["commit", at], "neither a session"),
        (["edit", "model", at, "--resume", "x"], "edit takes"),
        (["edit", "--resume", "abcd", at], "neither a session"),
    ):
        failed = command(repository, *arguments)
        assert failed.returncode == 2
        assert failed.stderr.startswith("mergefs: ")
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1


def test_errors_of_mergefs_are_its_own(mounted: Mounted) -> None:
    """A session that cannot be opened by the serving process says why."""
    session = mounted.edit()
    umount(mounted.at)
    (mounted.repository.path / "sessions" / session / "session.json").write_text("{}")
    with pytest.raises(MergefsError, match="is damaged"):
        mounted.edit(None, resume=session)
    assert command(mounted.repository, "discard", session).returncode == 0
