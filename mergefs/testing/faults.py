"""Disks that fail, and disks that return other bytes than were written.

`places` runs a program under strace and lists the calls by which it changes or opens something in one folder, those of
LMDB included. `run_failing` runs it again and has the kernel fail one of them, with an error such as EIO or ENOSPC.
`WrongReads` returns a wrong bit.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergefs.backend import LocalBackend
from mergefs.testing.crashes import RecordError

CALLS = (
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "fsync",
    "fdatasync",
    "ftruncate",
    "rename",
    "renameat",
    "renameat2",
    "openat",
    "mkdir",
    "unlink",
)
"""System calls that are made to fail."""

_CALL = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\(")


@dataclass(frozen=True, order=True)
class Place:
    """A call of a program.

    Attributes:
        call: the system call.
        number: which one of a thread it is; where several threads make as many, all of these.
    """

    call: str
    number: int


@dataclass(frozen=True)
class Outcome:
    """How a program with a fault ended.

    Attributes:
        code: its exit code; negative for a signal.
        errors: what it wrote to stderr.
        injected: how many calls in the folders failed; 0 when it went another way this time.
        elsewhere: how many others did: another thread's, such as one that loads a library.
    """

    code: int
    errors: str
    injected: int
    elsewhere: int


def places(
    command: Sequence[str], folders: Sequence[Path], *, environment: Mapping[str, str] | None = None
) -> tuple[Place, ...]:
    """Run a program and return its calls that change or open something in some folders.

    Args:
        command: the program and its arguments; it has to name the folders by their absolute paths.
        folders: what it works on.
        environment: variables for the program; this process's when None.

    Raises:
        RecordError: when there is no strace here, or the program fails by itself.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        done = _traced(["-y", "-s", "4096", "-e", f"trace={','.join(CALLS)}", "-o", str(log)], command, environment)
        if done.returncode:
            raise RecordError(f"the program fails without a fault, or cannot be traced: {done.stderr.strip()}")
        lines = log.read_text(errors="replace").splitlines()
    found = set()
    counts: dict[tuple[str, str], int] = {}
    for line in lines:
        match = _CALL.match(line)
        if match is None:
            continue
        key = match["thread"], match["call"]
        counts[key] = counts.get(key, 0) + 1
        if _is_in(line, match["call"], folders):
            found.add(Place(match["call"], counts[key]))
    return tuple(sorted(found))


def _is_in(line: str, call: str, folders: Sequence[Path]) -> bool:
    """Tell whether a call that strace shows changes or opens something in some folders."""
    # Of what is written, strace shows the bytes: a folder that is only named there is not meant.
    shown = line[: line.find(", ")] if call.startswith(("write", "pwrite")) else line
    names = "|".join(re.escape(str(folder.resolve())) for folder in folders)
    return re.search(rf'[<"]({names})[/>"]', shown) is not None


def run_failing(
    command: Sequence[str],
    folders: Sequence[Path],
    place: Place,
    error: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a program, of which one call fails.

    Args:
        command, folders, environment: see `places`.
        place: of the call.
        error: its name, such as `EIO`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        inject = f"inject={place.call}:error={error}:when={place.number}"
        options = ["-y", "-s", "4096", "-e", f"trace={place.call}", "-e", inject, "-o", str(log)]
        done = _traced(options, command, environment)
        failed = [line for line in log.read_text(errors="replace").splitlines() if line.endswith("(INJECTED)")]
    injected = sum(_is_in(line, place.call, folders) for line in failed)
    return Outcome(done.returncode, done.stderr, injected, len(failed) - injected)


def _traced(
    options: Sequence[str], command: Sequence[str], environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    strace = shutil.which("strace")
    if strace is None:
        raise RecordError("strace is missing: apt install strace")
    return subprocess.run(
        [strace, "-f", "--seccomp-bpf", *options, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=dict(os.environ if environment is None else environment),
    )


class WrongReads(LocalBackend):
    """Objects of which one read returns a wrong bit.

    Args:
        root: the folder.
        number: of the read, from 0; none is wrong where there are not as many.
        seed: of the choice of the bit.
    """

    def __init__(self, root: Path, number: int, seed: int = 0) -> None:
        super().__init__(root, sync=False)
        self.reads = 0
        """How many there were so far."""
        self._number = number
        self._chance = random.Random(seed)

    def get(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """See `Backend.get`."""
        data = super().get(name, offset, size)
        self.reads += 1
        if self.reads - 1 != self._number or not data:
            return data
        wrong = bytearray(data)
        wrong[self._chance.randrange(len(wrong))] ^= 1 << self._chance.randrange(8)
        return bytes(wrong)
