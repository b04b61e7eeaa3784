"""Run a command in a process of its own and measure it: seconds, memory, and bytes at the operating system.

A child's peak memory is at least its parent's size when it was started: programs that measure with this stay small
and leave numpy and torch to their children.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MERGEFS = (sys.executable, "-m", "mergefs")
PROGRAMS = """
import mergefs.cli.merging, mergefs.cli.models, mergefs.cli.serving
import mergefs.ingest, mergefs.merge.engine, mergefs.merge.kernels, mergefs.serve.export
from mergefs.blocks import codecs
from mergefs.dtypes import DTYPES
raw, bf16 = bytes(1 << 16), DTYPES["BF16"]
encoded = codecs.encode(raw, bf16, raw)
codecs.decode(encoded.encoding, encoded.payload, len(raw), bf16.code, raw)
"""
LOAD_MERGEFS = (sys.executable, "-c", PROGRAMS)
SAMPLING_SECONDS = 0.05

Command = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Measured:
    """What one process took; for the bytes, with the children that it waited for.

    Attributes:
        seconds: wall time from its start to its end.
        peak_bytes: its largest resident set, the pages of mapped files included.
        anonymous_bytes: the largest resident set without the pages of files, by samples; 0 for very short processes.
        disk_read_bytes, disk_written_bytes: what the operating system read from the disk for it, and what it is to
            write to the disk for it (now or later).
        report: the JSON object that it printed.
    """

    seconds: float
    peak_bytes: int
    anonymous_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    report: dict[str, Any] = field(default_factory=dict)


class StepFailedError(Exception):
    """A child ended with another code than 0."""


class Machine:
    """Where the measurement runs.

    Args:
        work: the folder whose file system is described.
        cold: whether to empty the page cache before every step, where that is allowed.
    """

    def __init__(self, work: Path, cold: bool = True) -> None:
        self._flushes = cold
        self.cold = cold and DROP_CACHES.exists() and os.access(DROP_CACHES, os.W_OK)
        self.work = work

    def prepare(self, programs: Command = LOAD_MERGEFS) -> None:
        """Flush what is dirty, empty the page cache, and read programs (those that a command loads) back in."""
        if self._flushes:
            os.sync()
        if self.cold:
            try:
                DROP_CACHES.write_text("3\n")
            except OSError:
                self.cold = False
            subprocess.run(programs, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            subprocess.run(["cp", "--version"], check=True, stdout=subprocess.DEVNULL)

    def describe(self) -> dict[str, Any]:
        """Return the machine's size and what else runs on it."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "cores": len(os.sched_getaffinity(0)),
            "processor": _processor(),
            "memory_bytes": memory,
            "file_system": _file_system(self.work),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "page_cache_dropped": self.cold,
            "load_before": load(),
        }


def told(machine: Mapping[str, Any]) -> str:
    """Return in words what `Machine.describe` says, with `load_after` where it is known."""
    dropped = "dropped" if machine["page_cache_dropped"] else "NOT dropped"
    after = f" and {machine['load_after']} after" if "load_after" in machine else ""
    return (
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 2**30:.0f} GiB of memory,"
        f" {machine['file_system']}, Linux {machine['kernel']}, Python {machine['python']}\n"
        f"load {machine['load_before']} before{after}; page cache {dropped} before each step"
    )


def run(
    command: Command, name: str, work: Path, environment: Mapping[str, str] | None = None, reports: bool = True
) -> Measured:
    """Run a command in its own process and measure it.

    Args:
        command: the program and its arguments.
        name: of the step, for errors.
        work: a folder for its output.
        environment: of the process; by default this one's.
        reports: whether its standard output is one JSON object, or nothing.

    Raises:
        StepFailedError: when it does not end with 0.
    """
    with tempfile.TemporaryFile(dir=work) as out, tempfile.TemporaryFile(dir=work) as errors:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT, env=environment)
        sampler = _Sampler(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        anonymous = sampler.stop()
        out.seek(0)
        errors.seek(0)
        text = out.read()
        if child.returncode:
            raise StepFailedError(
                f"{name} ended with {child.returncode}: {errors.read().decode(errors='replace').strip()[-2000:]}"
            )
    report = json.loads(text) if reports and text.strip() else {}
    return Measured(seconds, usage.ru_maxrss * 1024, anonymous, usage.ru_inblock * 512, usage.ru_oublock * 512, report)


class _Sampler:
    """Looks at a process's anonymous memory every now and then."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._largest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLING_SECONDS):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            found = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
            self._largest = max(self._largest, found * 1024)

    def stop(self) -> int:
        """Return the largest sample in bytes."""
        self._ended.set()
        self._thread.join()
        return self._largest


def load() -> float:
    """Return how many processes ran or waited, on average of the last minute."""
    return round(os.getloadavg()[0], 2)


def find_models(folder: Path, k: int) -> list[Path]:
    """Return `folder`'s base and its first k experts."""
    found = [folder / "base", *(folder / f"expert-{i}" for i in range(k))]
    missing = [model.name for model in found if not model.is_dir()]
    if missing:
        raise SystemExit(f"{folder} lacks {', '.join(missing)}: tools/synth makes them")
    return found


def make_models(shape: str, k: int, folder: Path) -> None:
    """Make a base and k experts with tools/synth."""
    command = [sys.executable, "-m", "tools.synth", shape, str(k), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)


def files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in files(folder))


def fsync(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the rows of a table as lines; the first columns are flushed left, the others right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(folder: Path) -> str:
    shown = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False)
    found = shown.stdout.strip() or "unknown file system"
    if shutil.which("findmnt"):
        shown = subprocess.run(["findmnt", "-no", "FSTYPE", "-T", folder], capture_output=True, text=True, check=False)
        found = shown.stdout.strip() or found
    return found
