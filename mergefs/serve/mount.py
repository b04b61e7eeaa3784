"""Mounting a repository, or one model of it, as a read-only folder, and unmounting it.

Every mount is served by a process of its own (`mergefs.serve.mount_daemon`); here it is started and awaited.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mergefs
from mergefs import errors
from mergefs.errors import MergefsError, MountError, UserError
from mergefs.serve.mount_table import is_stale, mergefs_at, mount_table

_DEVICE = Path("/dev/fuse")
_FUSERMOUNT = "fusermount3"
_FUSE_CONF = Path("/etc/fuse.conf")
_DAEMON = "mergefs.serve.mount_daemon"
_END_SECONDS = 60.0
# Each thread's buffers would lie in an arena of its own, and what is free in one is no use to the others; and every
# buffer of a block would be handed back to the kernel and cleared again for the next.
_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}

DEFAULT_CACHE_BYTES = 256 << 20
"""What is kept of decoded blocks; what has been read is in the kernel's cache besides."""

# The kernel's default of 128 KiB makes eight requests of one block, and then one reader does not keep two cores
# decoding; measured in spec/decisions/0003-fuse-binding.md.
_READAHEAD_KIB = 4096

# Serving processes that this process started, so that it also reaps them.
_started: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class MountInfo:
    """A mount that serves.

    Attributes:
        directory: where; absolute, without symbolic links.
        pid: the process that serves it.
        ref: the model as it was named, or None where everything is mounted.
        cleared: whether a mount that a dead process had left there was cleared away first.
    """

    directory: Path
    pid: int
    ref: str | None
    cleared: bool = False


def mount(
    repo_path: Path,
    ref: str | None,
    directory: Path,
    *,
    foreground: bool = False,
    allow_other: bool = False,
    log: Path | None = None,
    cache_size: int = DEFAULT_CACHE_BYTES,
    keep: int = 0,
    store: bool = False,
    sync: bool = True,
    check_blocks: str | None = None,
) -> MountInfo:
    """Mount one model, or with `ref` None everything, at `directory`; return when the mount serves.

    The directory has to be empty; it is made when only its parent exists. What a dead mergefs process left
    mounted there is cleared away first.

    Args:
        ref: a ref, a manifest id or a unique prefix of one.
        foreground: return only when the mount has ended; Ctrl-C and SIGTERM end it.
        allow_other: let other users read it too.
        log: where the serving process writes its errors; nowhere by default.
        cache_size: bytes of decoded blocks that it keeps in memory, for all models together.
        keep: bytes of derived blocks of lazy merges that it keeps in a file of the repository while it lives.
        store: store derived blocks of lazy merges in packs.
        sync: flush what is stored, leases included, to the disk.
        check_blocks: see `Store`.

    Raises:
        UserError: when derived blocks are to be kept in a file and stored as well, or a size is negative.
        MountError: when FUSE is not usable here, or the directory is not.
        MergefsError: what kept the serving process from opening the repository or the model, for example
            NotFoundError.
    """
    if keep and store:
        raise UserError("derived blocks are stored, or kept while the mount lives: give one of --keep and --store")
    if keep < 0 or cache_size < 0:
        raise UserError("a negative size: give what is to be kept in bytes, at least 0")
    _reap()
    _check_tools(allow_other)
    point = Path(os.path.realpath(directory))
    cleared = _clear(point)
    made = _prepare(point)
    options = ["--repo", os.path.abspath(repo_path)]
    options += [] if ref is None else [f"--ref={ref}"]
    options += ["--allow-other"] if allow_other else []
    options += [f"--cache-size={cache_size}", f"--keep={keep}", *(["--store"] if store else [])]
    options += [] if sync else ["--no-sync"]
    options += [] if check_blocks is None else [f"--check-blocks={check_blocks}"]
    with _Endings(foreground) as endings:
        try:
            process = _start([*options, *_log_options(log, foreground), "--", str(point)], foreground)
        except BaseException:
            _tidy(point, made)
            raise
        endings.end(process)
        _widen_readahead(point)
        _started[process.pid] = process
        if foreground:
            process.wait()
            _started.pop(process.pid, None)
    return MountInfo(point, process.pid, ref, cleared)


def umount(directory: Path) -> bool:
    """Unmount `directory`; return when the serving process, and with it every lease of the mount, is gone.

    Returns:
        Whether the mount was one that a dead process had left.

    Raises:
        MountError: when no mergefs is mounted there, or somebody uses it.
    """
    _find_fusermount()
    point = Path(os.path.realpath(directory))
    source = mergefs_at(point)
    if source is None:
        raise MountError(f"{directory} is not a mergefs mount")
    if _clear(point):
        return True
    # Taken before unmounting: afterwards the number could belong to another process.
    watch = _watch(source)
    try:
        _fusermount("-u", point)
        if watch is not None and not select.select([watch], [], [], _END_SECONDS)[0]:
            raise MountError(f"{directory} is unmounted, but its process {source} does not end")
    finally:
        if watch is not None:
            os.close(watch)
    if process := _started.pop(source, None):
        process.wait()
    return False


# --- before: is everything there, and is the directory fit? ---------------------------------------


def _check_tools(allow_other: bool) -> None:
    if not _DEVICE.exists():
        raise MountError(f"{_DEVICE} is missing: load the kernel module fuse, or give the container --device {_DEVICE}")
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise MountError(f"{_DEVICE} may not be opened by this user")
    _find_fusermount()
    if importlib.util.find_spec("mfusepy") is None:
        raise MountError("mfusepy is missing: pip install 'mergefs[mount]'")
    if allow_other and os.getuid() != 0 and not _others_allowed():
        raise MountError(f"other users may be let in only when {_FUSE_CONF} has a line 'user_allow_other'")


def _find_fusermount() -> str:
    found = shutil.which(_FUSERMOUNT)
    if found is None:
        raise MountError(f"{_FUSERMOUNT} is missing: apt install fuse3")
    return found


def _others_allowed() -> bool:
    try:
        lines = _FUSE_CONF.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def _clear(point: Path) -> bool:
    """Clear away what a dead mergefs process left mounted at `point`; tell whether there was anything."""
    cleared = False
    while mergefs_at(point) is not None and is_stale(point):
        _fusermount("-uz", point)
        cleared = True
    return cleared


def _prepare(point: Path) -> bool:
    """Make sure that `point` is an empty folder with nothing mounted; tell whether it was made for that."""
    if point in mount_table():
        raise MountError(f"{point} is a mount point already: unmount it first or take another folder")
    try:
        mode = point.stat().st_mode
    except FileNotFoundError:
        return _make(point)
    except OSError as error:
        raise MountError(f"{point} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise MountError(f"{point} is not a folder")
    try:
        empty = not any(point.iterdir())
    except OSError as error:
        raise MountError(f"{point} cannot be read: {error.strerror}") from error
    if not empty:
        raise MountError(f"{point} is not empty")
    return False


def _make(point: Path) -> bool:
    try:
        point.mkdir()
    except FileNotFoundError:
        raise MountError(f"{point} does not exist, and neither does the folder above it") from None
    except OSError as error:
        raise MountError(f"{point} cannot be made: {error.strerror}") from error
    return True


# --- the serving process --------------------------------------------------------------------------


def _start(options: list[str], foreground: bool, daemon: str = _DAEMON) -> subprocess.Popen[bytes]:
    """Start the serving process, of the module `daemon`, and wait until it serves.

    Raises:
        MergefsError: when it ends instead; of the class and with the sentence that it gave.
    """
    receive, send = os.pipe()
    # Without -P the interpreter would also import from the current folder, which may be a model's.
    command = [sys.executable, "-P", "-m", daemon, "--ready-fd", str(send), *options]
    with open(receive, "rb") as answers, tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if foreground else printed,
                stderr=None if foreground else printed,
                pass_fds=(send,),
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(send)
        try:
            answer = answers.read()  # ends when the process closes its side, at the latest by ending
        except BaseException:
            process.terminate()
            process.wait()
            raise
        message: dict[str, Any] = json.loads(answer) if answer else {}
        if "ready" in message:
            return process
        code = process.wait()
        printed.seek(0)
        raise _failure(message, code, printed.read().decode(errors="replace"))


def _environment() -> dict[str, str]:
    """Return the environment in which the process finds this very mergefs, wherever it was imported from."""
    here = str(Path(mergefs.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    python = {"PYTHONPATH": os.pathsep.join([here, path] if path else [here])}
    return {**_MALLOC, **os.environ, **python}


def _failure(message: dict[str, Any], code: int, printed: str) -> MergefsError:
    """Return the error that the serving process reported, or the best account of why it did not."""
    lines = [line for line in printed.splitlines() if line.strip()]
    if "error" not in message:
        last = f": {lines[-1]}" if lines else ""
        return MountError(f"the process for the mount ended with exit code {code}{last}")
    kind: type[MergefsError] = getattr(errors, message["kind"], MergefsError)
    if kind is not MountError:
        return kind(message["error"])
    # libfuse gives its reason only on standard error.
    reasons = [line for line in lines if line.startswith(("fuse:", "fusermount3:"))]
    return MountError("; ".join([message["error"], *reasons[-1:]]))


def _log_options(log: Path | None, foreground: bool) -> list[str]:
    if log is not None:
        return ["--log", os.path.abspath(log)]
    return ["--log", "/dev/stderr"] if foreground else []


class _Endings:
    """While a mount is in the foreground, Ctrl-C and SIGTERM end the serving process, from its very start on.

    Only the main thread can arrange that; in others nothing is done.
    """

    def __init__(self, foreground: bool) -> None:
        here = foreground and threading.current_thread() is threading.main_thread()
        self._signals = (signal.SIGTERM, signal.SIGINT) if here else ()
        self._previous: dict[signal.Signals, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def __enter__(self) -> _Endings:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Let the signals end this process; at once where one came before."""
        self._process = process
        if self._asked:
            process.terminate()

    def _ask(self, *_: object) -> None:
        self._asked = True
        if self._process is not None:
            self._process.terminate()


def _reap() -> None:
    """Forget the serving processes that have ended by themselves."""
    for pid, process in list(_started.items()):
        if process.poll() is not None:
            _started.pop(pid, None)


def _tidy(point: Path, made: bool) -> None:
    """Leave nothing of a mount that failed."""
    if mergefs_at(point) is not None and is_stale(point):
        _fusermount("-uz", point)
    if made:
        try:
            point.rmdir()
        except OSError:
            pass


def _watch(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the serving process ends; None when it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        command = b""
    if any(daemon.encode() in command for daemon in (_DAEMON, "mergefs.edit.daemon")):
        return fd
    os.close(fd)
    return None


# --- mounts ---------------------------------------------------------------------------------------


def _fusermount(option: str, point: Path) -> None:
    command = [_find_fusermount(), option, "--", str(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode == 0:
        return
    reason = done.stderr.strip()
    if "busy" in reason:
        raise MountError(f"{point} is in use: close the files and shells in it, then unmount it")
    raise MountError(f"{point} cannot be unmounted: {reason}")


def _widen_readahead(point: Path) -> None:
    """Let the kernel read some blocks ahead; only root may, and it is only about speed."""
    mounted = mount_table().get(point)
    if mounted is None:
        return
    try:
        Path(f"/sys/class/bdi/{mounted.device}/read_ahead_kb").write_text(f"{_READAHEAD_KIB}\n")
    except OSError:
        pass
