"""Counts what merges read at the operating system: /proc/PID/io of a new process, with packs put out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import forget

from mergefs.blocks.pack import pack_name
from mergefs.repository import Repository

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 0.05
FIXED = 1 << 16
"""Bytes that the catalog and the programs may have read besides."""
ATTEMPTS = 4

# Runs one command of mergefs; its last line says how many bytes the disk gave meanwhile.
MEASURED = """
import sys
import mergefs.blocks.kernels, mergefs.merge.engine, mergefs.merge.kernels
from mergefs.cli import cli

def read_bytes():
    with open("/proc/self/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("read_bytes:"))

before = read_bytes()
cli.main(sys.argv[1:], standalone_mode=False)
print(read_bytes() - before)
"""

# Reads one file to its end, 1 MiB at a time.
READING = """
import sys

def read_bytes():
    with open("/proc/self/io") as io:
        return next(int(line.split()[1]) for line in io if line.startswith("read_bytes:"))

before = read_bytes()
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
print(read_bytes() - before)
"""


@dataclass(frozen=True)
class Prepared:
    """A repository with a base and experts, and the packs that hold them."""

    path: Path
    recipe: Path
    base_packs: frozenset[Path]
    expert_packs: frozenset[Path]


def child(code: str, *arguments: str | Path) -> list[str]:
    """Run code in a new process and return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def evict(paths: Sequence[Path] | frozenset[Path]) -> None:
    """Have the kernel forget what it has in memory of some files. No other file is touched, and no right needed."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def packs_of(repo: Repository, ref: str) -> frozenset[Path]:
    """Return the packs that the blocks of a model's tensors lie in."""
    blocks = {bytes.fromhex(b) for t in repo.manifest(repo.resolve(ref)).tensors for b in t.blocks if b is not None}
    tiers = (location for block in blocks for location in repo.catalog.tiers(block))
    return frozenset(repo.path / pack_name(location.pack) for location in tiers)


def merge(prepared: Prepared, recipe: Path, name: str, budget: str) -> tuple[dict[str, Any], int]:
    """Merge in a new process, deriving everything; return the report and the bytes that the disk gave."""
    with Repository.open(prepared.path) as repository:
        forget(repository)
    command = ("--repo", prepared.path, "merge", recipe, "--as", name, "--budget", budget, "--json")
    report, disk = child(MEASURED, *command)
    return json.loads(report), int(disk)


def skip_unless_counted(packs: frozenset[Path]) -> None:
    """Skip where reading evicted files does not show in /proc/PID/io, or shows once they are in memory."""
    pack = max(packs, key=lambda path: path.stat().st_size)
    evict([pack])
    cold = int(child(READING, pack)[0])
    warm = int(child(READING, pack)[0])
    size = pack.stat().st_size
    if cold < size:
        pytest.skip(
            f"the file system of the temporary folder keeps evicted files in memory or does not count reads: {cold} of"
            f" {size} bytes"
        )
    if warm > size // 10:
        pytest.skip(
            f"the file system of the temporary folder does not cache what was read: {warm} of {size} bytes again"
        )


class Canary:
    """A file in memory, which nobody else knows: when it is gone, something emptied the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            path.write_bytes(bytes(1 << 20))
        child(READING, path)

    @property
    def is_gone(self) -> bool:
        return int(child(READING, self._path)[0]) > 0


def measure(
    prepared: Prepared, packs: frozenset[Path], name: str, budget: str, kinds: tuple[str, ...]
) -> dict[str, Any]:
    """Merge with some packs out of memory; check that the disk gave what is reported for these kinds of reads.

    Another process that empties the page cache meanwhile adds the programs and the other packs to what the disk
    gives, so it is tried again. Too few bytes fail at once.
    """
    undisturbed = 0
    for _ in range(ATTEMPTS):
        with Repository.open(prepared.path) as repository:
            forget(repository)
        canary = Canary(prepared.path.parent / "canary")
        evict(packs)
        report, disk = merge(prepared, prepared.recipe, name, budget)
        reported = sum(report["read"][kind] for kind in kinds)
        assert disk >= (1 - TOLERANCE) * reported
        if disk <= (1 + TOLERANCE) * reported + FIXED:
            return report
        undisturbed += not canary.is_gone
    if not undisturbed:
        pytest.skip("another process keeps emptying the page cache")
    pytest.fail(f"the disk gave {disk} bytes for the {reported} that were reported")
