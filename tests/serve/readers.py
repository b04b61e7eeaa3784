"""Programs that read a mounted model as loaders do, until the time is over, and compare with a copy of it.

    python readers.py transformers|threads|processes SECONDS MOUNTED COPY

They print how often they did what they do; a difference ends them.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
WEIGHTS = "model.safetensors"
THREADS = 32
PROCESSES = 8
PIECE = 128 << 10


def load_with_transformers(end: float, mounted: Path, copy: Path) -> int:
    """Load the model again and again, with transformers' own threads."""
    os.environ["HF_ENABLE_PARALLEL_LOADING"] = "true"
    os.environ["HF_PARALLEL_LOADING_WORKERS"] = "8"
    import torch
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(copy).state_dict()
    times = 0
    while not times or time.monotonic() < end:
        loaded = AutoModelForCausalLM.from_pretrained(mounted).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        del loaded
        forget(mounted / WEIGHTS)
        times += 1
    return times


def forget(path: Path) -> None:
    """Have the kernel forget the pages of a file that nobody has mapped."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fault_with_threads(end: float, mounted: Path, copy: Path) -> int:
    """Touch pages of one mapping from many threads, in an order of each thread's own."""
    expected = np.fromfile(copy / WEIGHTS, np.uint8)
    with (
        (mounted / WEIGHTS).open("rb") as file,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        pages = np.frombuffer(mapping, np.uint8)

        def touch(seed: int) -> int:
            chosen = random.Random(seed)
            found = np.empty(PAGE, np.uint8)
            touched = 0
            while touched < 100 or time.monotonic() < end:
                start = chosen.randrange(len(expected) // PAGE) * PAGE
                # numpy copies without the interpreter's lock: so many faults are under way at once.
                np.copyto(found, pages[start : start + PAGE])
                assert np.array_equal(found, expected[start : start + PAGE]), start
                touched += 1
                if touched % 500 == 0:
                    mapping.madvise(mmap.MADV_DONTNEED)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return touched

        return sum(threads.map(touch, range(THREADS)))


def read_with_processes(end: float, mounted: Path, copy: Path) -> int:
    """Have processes read on at places far from each other, of one descriptor that they all have."""
    with (mounted / WEIGHTS).open("rb", buffering=0) as file:
        number = file.fileno()
        command = [sys.executable, __file__, "share", str(end - time.monotonic()), str(number), str(copy)]
        readers = [
            subprocess.Popen([*command, str(n)], pass_fds=[number], stdout=subprocess.PIPE) for n in range(PROCESSES)
        ]
        printed = [reader.communicate()[0] for reader in readers]
    assert all(reader.returncode == 0 for reader in readers)
    return sum(map(int, printed))


def share(end: float, number: int, copy: Path, place: int) -> int:
    """Read on in one eighth of a file, round and round."""
    expected = (copy / WEIGHTS).read_bytes()
    start, stop = (len(expected) * n // PROCESSES for n in (place, place + 1))
    reads = 0
    while not reads or time.monotonic() < end:
        for at in range(start, stop, PIECE):
            size = min(PIECE, stop - at)
            assert os.pread(number, size, at) == expected[at : at + size], at
            reads += 1
        os.posix_fadvise(number, start, stop - start, os.POSIX_FADV_DONTNEED)
    return reads


ROLES: dict[str, Callable[[float, Path, Path], int]] = {
    "transformers": load_with_transformers,
    "threads": fault_with_threads,
    "processes": read_with_processes,
}

if __name__ == "__main__":
    role, seconds, first, second, *rest = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    if role == "share":
        print(share(until, int(first), Path(second), int(rest[0])))
    else:
        print(ROLES[role](until, Path(first), Path(second)))
