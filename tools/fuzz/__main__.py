"""Feed hostile input to everything that mergefs parses, and report what does not end in an answer.

    python -m tools.fuzz --executions 10000000
    python -m tools.fuzz --target tiers-small --seconds 60 --bounds

Every target runs in a process of its own, so that one that dies is seen and its input kept. An input has to be
accepted or refused with the exceptions that the target names (`MergefsError`, with few exceptions); everything else, an
input that takes longer than a minute, and one that allocates more than spec/hostile-input.md allows, is a crash. The
inputs are made from valid ones by changing what they are made of; those that are refused in a new way, by the lines
that the exception came by, are kept and changed further. With --guided, atheris (the extra `fuzz`) chooses by the
branches taken. With --bounds, compiled loops check every index: slow, and it finds what does not crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.fuzz.target import Target
from tools.fuzz.targets import TARGETS
from tools.fuzz.work import Board, State

SLOWEST = 60.0
"""An execution that takes longer than so many seconds hangs."""
_FIRST, _COMPILING = 100, 600.0
"""The first ones may wait for loops to be compiled."""


@dataclass
class Row:
    """What is reported of a target.

    Attributes:
        name: the target.
        executions, accepted, kept, largest, looked: see `State`, over all its processes.
        crashes: inputs that crashed it, by the files that they were written to.
        seconds: wall time.
    """

    name: str
    executions: int = 0
    accepted: int = 0
    kept: int = 0
    largest: int = 0
    looked: int = 0
    crashes: tuple[Path, ...] = ()
    seconds: float = 0.0

    def add(self, state: State) -> None:
        """Add what one process did."""
        self.executions += state.executions
        self.accepted += state.accepted
        self.kept += state.kept
        self.looked += state.looked
        self.largest = max(self.largest, state.largest)


class Campaign:
    """Fuzzes targets one after another or side by side.

    Args:
        found: a folder for inputs that crash, and what the process said.
        corpus: a folder with a folder of inputs for each target, or None.
        guided, bounds: see the module.
        most_crashes: after so many, a target is left alone.
    """

    def __init__(
        self, found: Path, corpus: Path | None, *, guided: bool = False, bounds: bool = False, most_crashes: int = 10
    ) -> None:
        self._found = found
        self._corpus = corpus
        self._guided = guided
        self._bounds = bounds
        self._most_crashes = most_crashes

    def run(self, target: Target, executions: int, seconds: float, seed: int) -> Row:
        """Fuzz one target, with a new process after each crash."""
        row = Row(target.name)
        began = time.monotonic()
        while row.executions < executions and len(row.crashes) < self._most_crashes:
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                break
            state, said = self._process(target, executions - row.executions, left, seed + len(row.crashes))
            row.add(state)
            if said is None:
                break
            row.crashes = (*row.crashes, self._keep(target, state.data, said))
        row.seconds = time.monotonic() - began
        return row

    def _process(self, target: Target, executions: int, seconds: float, seed: int) -> tuple[State, str | None]:
        """Run a process to its end; return what it did, and what it said where it crashed."""
        with tempfile.TemporaryDirectory(prefix="mergefs-fuzz-") as scratch:
            folder = Path(scratch)
            board = Board(folder / "board", create=True)
            command = [
                sys.executable,
                "-m",
                "tools.fuzz.work",
                "--target",
                target.name,
                "--board",
                str(folder / "board"),
            ]
            command += ["--executions", str(executions), "--seconds", str(seconds), "--seed", str(seed)]
            command += ["--guided"] if self._guided else []
            command += ["--corpus", str(self._corpus / target.name)] if self._corpus is not None else []
            environment = {**os.environ, "TMPDIR": scratch, **(_checked(self._found) if self._bounds else {})}
            with open(folder / "said", "wb") as said:
                process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
                try:
                    hung = self._watch(process, board)
                finally:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
            text = (folder / "said").read_text(errors="replace")
            state = board.state()
        if process.returncode == 0:
            return state, None
        how = "it hung" if hung else f"exit code {process.returncode}"
        if process.returncode < 0 and not hung:
            how = signal.Signals(-process.returncode).name
        return state, f"{how}\n{text}"

    def _watch(self, process: subprocess.Popen[bytes], board: Board) -> bool:
        """Wait for a process; return whether it had to be killed because one input took too long."""
        last, since = -1, time.monotonic()
        while True:
            try:
                process.wait(1)
                return False
            except subprocess.TimeoutExpired:
                now = board.state().executions
                if now != last:
                    last, since = now, time.monotonic()
                elif now and time.monotonic() - since > (SLOWEST if now > _FIRST else _COMPILING):
                    process.kill()
                    process.wait()
                    return True

    def _keep(self, target: Target, data: bytes, said: str) -> Path:
        folder = self._found / target.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.time_ns():x}"
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(said)
        return path


def report(rows: Sequence[Row]) -> str:
    """Return the figures as a table."""
    lines = [f"{'target':<22}{'executions':>12}{'accepted':>12}{'kept':>7}{'1/s':>9}{'largest KiB':>13}{'crashes':>9}"]
    for row in rows:
        speed = row.executions / max(row.seconds, 1e-9)
        lines.append(
            f"{row.name:<22}{row.executions:>12}{row.accepted:>12}{row.kept:>7}{speed:>9.0f}"
            f"{row.largest / 1024:>13.0f}{len(row.crashes):>9}"
        )
    crashes = sum(len(row.crashes) for row in rows)
    largest = max((row.largest for row in rows), default=0)
    lines.append(
        f"{'all':<22}{sum(r.executions for r in rows):>12}{sum(r.accepted for r in rows):>12}"
        f"{sum(r.kept for r in rows):>7}{'':>9}{largest / 1024:>13.0f}{crashes:>9}"
    )
    return "\n".join(lines)


def _checked(found: Path) -> dict[str, str]:
    """Return what has numba check indexes, with a cache of its own."""
    cache = found / "bounds-cache"
    cache.mkdir(parents=True, exist_ok=True)
    return {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(cache),
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "-avx2,-avx512bw,-bmi2",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 where something crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), metavar="NAME", help="default: all")
    parser.add_argument("--executions", type=int, help="over all targets; default 100,000")
    parser.add_argument("--seconds", type=float, help="over all targets, in the place of --executions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where crashing inputs go")
    parser.add_argument("--corpus", type=Path, help="a folder of inputs to begin with, and for those that are kept")
    parser.add_argument("--guided", action="store_true", help="choose inputs with atheris")
    parser.add_argument("--bounds", action="store_true", help="check every index in compiled loops")
    parser.add_argument("--list", action="store_true", help="print the targets")
    given = parser.parse_args(arguments)
    targets = [TARGETS[name] for name in given.target or TARGETS]
    if given.list:
        print("\n".join(target.name for target in targets))
        return 0
    shares = sum(target.share for target in targets)
    executions = given.executions or (1 << 62 if given.seconds else 100_000)
    campaign = Campaign(given.found, given.corpus, guided=given.guided, bounds=given.bounds)
    rows = []
    for target in targets:
        seconds = given.seconds / len(targets) if given.seconds else float(1 << 30)
        rows.append(campaign.run(target, -(-executions * target.share // shares), seconds, given.seed))
        print(f"{rows[-1].name}: {rows[-1].executions} executions in {rows[-1].seconds:.0f} s", file=sys.stderr)
        for path in rows[-1].crashes:
            print(f"  crash: {path}: {path.with_suffix('.txt').read_text().strip().splitlines()[-1]}", file=sys.stderr)
    print(report(rows))
    return 1 if any(row.crashes for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
