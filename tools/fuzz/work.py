"""One process that fuzzes one target, and what it tells its parent through shared memory."""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import mmap
import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.fuzz.target import Run, Target

_HEAD = struct.Struct("<QQQQQQ")
_ROOM = 1 << 17
SAMPLED = 256
"""Of so many executions one is run under `tracemalloc`."""
LIMIT = 512 << 20
"""More address space than this beyond what the process begins with is refused by the kernel."""
_MOST_KEPT = 4096
_MOST_RUNS = (1 << 31) - 1
"""libFuzzer counts in 32 bits."""


@dataclass
class State:
    """What a process has done.

    Attributes:
        executions, accepted: inputs that were run, and those that were not refused.
        kept: inputs that did something new.
        largest: most bytes that one execution that was looked at allocated.
        looked: executions whose allocations were looked at.
        data: the input that is being run.
    """

    executions: int = 0
    accepted: int = 0
    kept: int = 0
    largest: int = 0
    looked: int = 0
    data: bytes = b""


class Board:
    """Shared memory with a process's state, which survives it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_HEAD.size + _ROOM))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _HEAD.size + _ROOM)

    def begin(self, state: State, data: bytes) -> None:
        """Say which input is run now."""
        stop = _HEAD.size + len(data[:_ROOM])
        self._map[_HEAD.size : stop] = data[:_ROOM]
        self._map[: _HEAD.size] = _HEAD.pack(
            state.executions, state.accepted, state.kept, state.largest, state.looked, len(data)
        )

    def state(self) -> State:
        """Return what was said last."""
        *numbers, size = _HEAD.unpack(self._map[: _HEAD.size])
        return State(*numbers, self._map[_HEAD.size : _HEAD.size + min(size, _ROOM)])


class TooMuchError(Exception):
    """An execution allocated more than it may."""


class Worker:
    """Runs inputs one after another.

    Args:
        target: what is fuzzed.
        board: what the parent looks at.
    """

    def __init__(self, target: Target, board: Board) -> None:
        self._target = target
        self._board = board
        self._run: Run = target.prepare()
        self.state = State()
        self._seen: set[int] = set()

    def execute(self, data: bytes) -> bool:
        """Run one input; return whether it did something that none before did.

        Raises:
            BaseException: what the target must not raise.
        """
        state = self.state
        state.executions += 1
        self._board.begin(state, data)
        if state.executions % SAMPLED == 0:
            self._measured(data)
            return False
        try:
            self._run(data)
        except self._target.refused as error:
            return self._is_new(_signature(error))
        state.accepted += 1
        return self._is_new(len(data).bit_length())

    def warm(self, inputs: Sequence[bytes]) -> None:
        """Run inputs once, so that compiled loops and kept arrays are there before anything is measured."""
        for data in inputs:
            self.execute(data)

    def _measured(self, data: bytes) -> None:
        tracemalloc.start()
        try:
            self._run(data)
            self.state.accepted += 1
        except self._target.refused:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        self.state.looked += 1
        self.state.largest = max(self.state.largest, peak)
        if peak > self._target.allowed_bytes(len(data)):
            raise TooMuchError(f"{peak} bytes were allocated for an input of {len(data)}")

    def _is_new(self, signature: int) -> bool:
        if signature in self._seen:
            return False
        self._seen.add(signature)
        return True


def _signature(error: BaseException) -> int:
    """Return what tells ways of being refused apart: the lines that the exception, and what caused it, came by."""
    lines: list[int] = [hash(type(error))]
    current: BaseException | None = error
    while current is not None and len(lines) < 40:
        trace = current.__traceback__
        while trace is not None:
            lines.append(trace.tb_lineno)
            trace = trace.tb_next
        current = current.__cause__ or current.__context__
    return hash(tuple(lines))


def limit_memory() -> None:
    """Have the kernel refuse this process more memory than an execution may ever need."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def fuzz(target: Target, board: Board, executions: int, seconds: float, seed: int, corpus: Path | None) -> int:
    """Fuzz a target until so many executions or seconds have passed; return the exit code.

    Args:
        corpus: a folder of inputs to begin with, and to which new ones are added.
    """
    rng = random.Random(seed)
    kept = [*target.seeds(), *_inputs(corpus)]
    worker = Worker(target, board)
    try:
        worker.warm(kept)
        limit_memory()
        stop = time.monotonic() + seconds
        state = worker.state
        while state.executions < executions and (state.executions % 64 or time.monotonic() < stop):
            data = kept[rng.randrange(len(kept))]
            for _ in range(rng.choice((1, 1, 1, 2))):
                data = target.mutate(rng, data, kept)
            data = data[: target.largest]
            if worker.execute(data) and len(kept) < _MOST_KEPT:
                kept.append(data)
                state.kept += 1
                _keep(corpus, data)
        board.begin(state, b"")
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        return 3
    return 0


def guided(target: Target, board: Board, executions: int, seconds: float, seed: int, corpus: Path | None) -> int:
    """As `fuzz`, by atheris, which goes by the branches that Python code takes."""
    import atheris

    worker = Worker(target, board)
    kept = [*target.seeds(), *_inputs(corpus)]
    try:
        worker.warm(kept)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        return 3

    def one(data: bytes) -> None:
        try:
            worker.execute(data)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        rng = random.Random(number)
        if not data or rng.randrange(20) == 0:
            data = rng.choice(kept)
        return target.mutate(rng, data, kept)[:most]

    with tempfile.TemporaryDirectory(prefix="mergefs-fuzz-") as scratch:
        folder = corpus or Path(scratch)
        for data in kept:
            _keep(folder, data)
        options = [f"-runs={min(executions, _MOST_RUNS)}", f"-max_total_time={max(1, int(seconds))}"]
        options += [f"-seed={seed or 1}", f"-max_len={target.largest}"]
        options += ["-rss_limit_mb=0", "-verbosity=0", "-detect_leaks=0", "-timeout=60"]
        limit_memory()
        atheris.Setup([sys.argv[0], *options, str(folder)], one, custom_mutator=mutate)
        atheris.Fuzz()  # ends the process
    return 0


def _inputs(corpus: Path | None) -> list[bytes]:
    if corpus is None or not corpus.is_dir():
        return []
    return [path.read_bytes() for path in sorted(corpus.iterdir()) if path.is_file()]


def _keep(corpus: Path | None, data: bytes) -> None:
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def main() -> int:
    """Fuzz one target in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--board", required=True, type=Path)
    parser.add_argument("--executions", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--guided", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()
    board = Board(given.board)
    if given.guided:
        import atheris

        with atheris.instrument_imports(include=["mergefs"]):
            from tools.fuzz.targets import TARGETS
    else:
        from tools.fuzz.targets import TARGETS
    way = guided if given.guided else fuzz
    return way(TARGETS[given.target], board, given.executions, given.seconds, given.seed, given.corpus)


if __name__ == "__main__":
    sys.exit(main())
