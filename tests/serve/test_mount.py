"""Mounting and unmounting a repository, with the processes, leases and errors around it."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pwd
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from builders import wait_until
from safetensors.torch import load_file, save_file

from mergefs.catalog.leases import leases
from mergefs.errors import MergefsError, MountError, NotARepositoryError, NotFoundError, UserError
from mergefs.ingest import ingest
from mergefs.serve import mount as mounting
from mergefs.serve import mount_table
from mergefs.serve.mount import MountInfo, mount, umount
from mergefs.serve.mount_table import MountState, is_stale, mounts
from mergefs.store import Store

PAGE = mmap.PAGESIZE
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.fuse


@dataclass
class Models:
    """A repository with two models, the folders that they came from, and an empty folder to mount at."""

    store: Store
    math: Path
    code: Path
    directory: Path

    @property
    def repo(self) -> Path:
        return self.store.path

    def leases(self) -> int:
        with self.store.catalog.read() as txn:
            return sum(lease.alive for lease in leases(txn))


def checkpoint(folder: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layers.{n}.weight": torch.randn(256, 512, generator=generator).bfloat16() for n in range(8)}
    (folder / "extra").mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "extra" / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    math, code = checkpoint(tmp_path / "math", 1), checkpoint(tmp_path / "code", 2)
    directory = tmp_path / "at"
    directory.mkdir()
    with Store.init(tmp_path / "repo", 1 << 16) as store:
        ingest(store, math, "math")
        ingest(store, code, "code@2")
        yield Models(store, math, code, directory)
        if os.path.ismount(directory) or not directory.exists():
            subprocess.run(["fusermount3", "-uz", directory], check=False)


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# -- serving -----------------------------------------------------------------------------------------------


def test_a_mounted_model_is_its_checkpoint(models: Models) -> None:
    info = mount(models.repo, "math", models.directory)
    assert info == MountInfo(models.directory, info.pid, "math")
    assert info.pid != os.getpid()
    assert os.getsid(info.pid) == info.pid
    assert snapshot(models.directory) == snapshot(models.math)
    expected = load_file(models.math / WEIGHTS)
    loaded = load_file(models.directory / WEIGHTS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    del loaded
    assert models.leases() == 1
    umount(models.directory)
    assert is_gone(info.pid)
    assert models.leases() == 0
    assert list(models.directory.iterdir()) == []


def test_a_model_can_be_named_by_the_beginning_of_its_hash(models: Models) -> None:
    mount(models.repo, models.store.resolve("code@2")[:12], models.directory)
    assert (models.directory / "config.json").read_bytes() == (models.code / "config.json").read_bytes()
    umount(models.directory)


def test_a_mounted_model_does_not_change_when_its_ref_moves(models: Models) -> None:
    mount(models.repo, "math", models.directory)
    models.store.tag("math", "code@2")
    assert snapshot(models.directory) == snapshot(models.math)
    umount(models.directory)


def test_everything_mounted_follows_refs(models: Models) -> None:
    mount(models.repo, None, models.directory)
    refs, manifests = models.directory / "refs", models.directory / "manifests"
    assert sorted(os.listdir(refs)) == ["code@2", "math"]
    assert sorted(os.listdir(manifests)) == sorted(models.store.manifest_ids())
    assert snapshot(refs / "math") == snapshot(models.math)
    with (refs / "math" / WEIGHTS).open("rb") as file:
        models.store.tag("math", "code@2")
        models.store.tag("new", "math")
        assert snapshot(refs / "math") == snapshot(refs / "new") == snapshot(models.code)
        assert file.read() == (models.math / WEIGHTS).read_bytes()
    models.store.remove(["new"])
    assert not (refs / "new").exists()
    umount(models.directory)
    assert models.leases() == 0


def test_threads_fault_one_mapping_of_real_blocks(models: Models) -> None:
    expected = (models.math / WEIGHTS).read_bytes()
    mount(models.repo, "math", models.directory)

    def touch(seed: int) -> bool:
        starts = list(range(0, len(expected), PAGE))
        random.Random(seed).shuffle(starts)
        return all(pages[start : start + PAGE] == expected[start : start + PAGE] for start in starts)

    with (
        (models.directory / WEIGHTS).open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages,
        ThreadPoolExecutor(16) as threads,
    ):
        assert all(threads.map(touch, range(16), timeout=60))
    umount(models.directory)


def test_a_damaged_block_reaches_the_reader_and_the_log(models: Models, tmp_path: Path) -> None:
    for pack in models.repo.glob("packs/*/*"):
        pack.chmod(0o600)
        with pack.open("r+b") as file:
            file.write(bytes(pack.stat().st_size // 2))
    mount(models.repo, "math", models.directory, log=tmp_path / "log")
    with pytest.raises(OSError, match="Input/output error"):
        snapshot(models.directory)
    umount(models.directory)
    assert "CorruptionError" in (tmp_path / "log").read_text()


def test_importing_the_module_does_not_import_the_binding() -> None:
    probe = "import sys, mergefs.serve.mount; print('mfusepy' in sys.modules, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert printed == "False False\n"


# -- ending ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_and_gives_the_lease_back(models: Models, number: signal.Signals) -> None:
    info = mount(models.repo, "math", models.directory)
    file = os.open(models.directory / "config.json", os.O_RDONLY)
    os.kill(info.pid, number)
    wait_until(lambda: not os.path.ismount(models.directory))
    wait_until(lambda: models.leases() == 0)
    with pytest.raises(OSError, match="not connected"):
        os.close(file)
    wait_until(lambda: mounting._reap() or is_gone(info.pid))
    mount(models.repo, "math", models.directory)
    umount(models.directory)


def test_what_a_killed_process_left_is_cleared_away(models: Models) -> None:
    for _ in range(2):
        info = mount(models.repo, "math", models.directory)
        os.kill(info.pid, signal.SIGKILL)
        wait_until(lambda: is_stale(models.directory))
    umount(models.directory)
    assert list(models.directory.iterdir()) == []


def test_a_mount_in_use_is_not_unmounted(models: Models) -> None:
    info = mount(models.repo, "math", models.directory)
    with (models.directory / "config.json").open() as file:
        with pytest.raises(MountError, match="is in use"):
            umount(models.directory)
        assert file.read()
    umount(models.directory)
    assert is_gone(info.pid)


def test_another_process_can_unmount(models: Models) -> None:
    info = mount(models.repo, "math", models.directory)
    command = f"from mergefs.serve.mount import umount; umount({str(models.directory)!r})"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert not os.path.ismount(models.directory)
    assert models.leases() == 0
    mounting._reap()
    assert is_gone(info.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_foreground_lasts_until_a_signal(models: Models, number: signal.Signals) -> None:
    command = (
        "from pathlib import Path; from mergefs.serve.mount import mount;"
        f"mount(Path({str(models.repo)!r}), 'math', Path({str(models.directory)!r}), foreground=True)"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        wait_until(lambda: (models.directory / WEIGHTS).exists())
        assert process.poll() is None
        process.send_signal(number)
        assert process.communicate(timeout=20)[0] == b""
    assert process.returncode == 0
    assert not os.path.ismount(models.directory)
    assert models.leases() == 0


def test_the_foreground_ends_with_the_mount(models: Models) -> None:
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(mount, models.repo, "math", models.directory, foreground=True)
        wait_until(lambda: (models.directory / WEIGHTS).exists())
        umount(models.directory)
        assert is_gone(served.result(20).pid)


def test_a_mount_ends_when_its_repository_goes_away(models: Models, tmp_path: Path) -> None:
    info = mount(models.repo, "math", models.directory, log=tmp_path / "log")
    models.repo.rename(tmp_path / "elsewhere")
    wait_until(lambda: not os.path.ismount(models.directory))
    wait_until(lambda: mounting._reap() or is_gone(info.pid))
    assert f"the repository {models.repo} is gone: the mount ends" in (tmp_path / "log").read_text()
    (tmp_path / "elsewhere").rename(models.repo)
    assert models.leases() == 0


# -- what is mounted ---------------------------------------------------------------------------------------


def state_of(directory: Path) -> MountState:
    (state,) = [state for state in mounts() if state.directory == directory]
    return state


def test_mounts_are_listed_with_what_they_served(models: Models) -> None:
    before = time.time()
    info = mount(models.repo, "math", models.directory, cache_size=8 << 20)
    state = state_of(models.directory)
    assert (state.pid, state.state, state.ref) == (info.pid, "serving", "math")
    assert (state.manifest, state.repository) == (models.store.resolve("math"), str(models.repo))
    assert state.user == pwd.getpwuid(os.getuid()).pw_name
    assert before - 1 < (state.since or 0) < time.time()
    assert state.bytes_served == 0
    (models.directory / WEIGHTS).read_bytes()
    state = state_of(models.directory)
    assert state.bytes_served is not None
    assert state.cache is not None
    assert state.read is not None
    assert state.bytes_served >= (models.math / WEIGHTS).stat().st_size
    assert state.cache["hits"] + state.cache["misses"] >= 32  # every block was wanted, once or more often
    assert 0 < state.cache["bytes"] <= state.cache["limit"] <= 8 << 20
    assert state.read["base"] > 0
    umount(models.directory)
    assert models.directory not in [state.directory for state in mounts()]


def test_a_mount_of_everything_is_listed(models: Models) -> None:
    mount(models.repo, None, models.directory)
    state = state_of(models.directory)
    assert (state.state, state.ref, state.manifest) == ("serving", None, None)
    assert os.statvfs(models.directory).f_blocks * 4096 >= 2 * (models.math / WEIGHTS).stat().st_size
    umount(models.directory)


def test_mounts_that_do_not_answer_are_listed_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_table, "_ANSWER_SECONDS", 0.3)
    info = mount(models.repo, "math", models.directory)
    os.kill(info.pid, signal.SIGSTOP)
    assert state_of(models.directory).state == "silent"
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: state_of(models.directory).state == "stale")
    again = mount(models.repo, "math", models.directory)
    assert again.cleared
    assert not umount(models.directory)


def test_extended_attributes_say_what_a_file_is(models: Models) -> None:
    mount(models.repo, "math", models.directory)
    weights = models.directory / WEIGHTS
    assert os.getxattr(weights, "user.mergefs.manifest").decode() == models.store.resolve("math")
    digest = hashlib.sha256((models.math / WEIGHTS).read_bytes()).hexdigest()
    assert os.getxattr(weights, "user.mergefs.sha256").decode() == digest
    assert os.listxattr(weights) == ["user.mergefs.manifest", "user.mergefs.sha256"]
    umount(models.directory)


# -- errors ------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_the_users_error_and_leaves_nothing(models: Models) -> None:
    new = models.directory / "new"
    with pytest.raises(NotFoundError, match="'physics' is neither a ref nor a manifest") as raised:
        mount(models.repo, "physics", new)
    assert raised.value.exit_code == 2
    assert not new.exists()
    with pytest.raises(NotFoundError):
        mount(models.repo, "--help", models.directory)


def test_options_that_exclude_each_other(models: Models) -> None:
    with pytest.raises(UserError, match="one of --keep and --store"):
        mount(models.repo, "math", models.directory, keep=1 << 20, store=True)
    with pytest.raises(UserError, match="negative size"):
        mount(models.repo, "math", models.directory, cache_size=-1)


def test_a_folder_that_is_no_repository(models: Models) -> None:
    with pytest.raises(NotARepositoryError):
        mount(models.math, "math", models.directory)


def test_the_directory_is_made_when_its_parent_is_there(models: Models) -> None:
    new = models.directory / "a b\tc"
    assert mount(models.repo, "math", new).directory == new
    assert snapshot(new) == snapshot(models.math)
    umount(new)
    with pytest.raises(MountError, match="does not exist"):
        mount(models.repo, "math", models.directory / "x" / "y")


def test_a_symbolic_link_to_the_directory_will_do(models: Models, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(models.directory)
    assert mount(models.repo, "math", link).directory == models.directory
    umount(link)


def test_directories_that_cannot_be_mounted_at(models: Models) -> None:
    with pytest.raises(MountError, match="is not a folder"):
        mount(models.repo, "math", models.math / "config.json")
    with pytest.raises(MountError, match="is not empty"):
        mount(models.repo, "math", models.math)
    mount(models.repo, "math", models.directory)
    with pytest.raises(MountError, match="is a mount point already"):
        mount(models.repo, "math", models.directory)
    umount(models.directory)


@pytest.mark.parametrize("directory", ["/", "/proc", "/does/not/exist"])
def test_only_mergefs_mounts_are_unmounted(directory: str) -> None:
    with pytest.raises(MountError, match="is not a mergefs mount"):
        umount(Path(directory))


def test_what_is_missing_is_named(models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(MountError) as raised:
            mount(models.repo, "math", models.directory)
        assert isinstance(raised.value, MergefsError)
        return str(raised.value)

    with monkeypatch.context() as patch:
        patch.setattr(mounting, "_DEVICE", tmp_path / "none")
        assert "none is missing: load the kernel module fuse" in message()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert message() == "fusermount3 is missing: apt install fuse3"
        with pytest.raises(MountError, match="apt install fuse3"):
            umount(models.directory)
    with monkeypatch.context() as patch:
        patch.setattr(mounting.importlib.util, "find_spec", lambda name: None)
        assert message() == "mfusepy is missing: pip install 'mergefs[mount]'"
