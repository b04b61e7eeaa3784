"""How fast a model is served, beside the same model as plain files on the same disk.

    python -m benchmarks.serve --models DIR [--work DIR] [--runs 3] [--exact fast|small|quick] [--only stored,lazy]
        [--readers sequential,...] [--json]

DIR holds a base and experts (`base`, `expert-0`, ...; tools/synth makes them). The first expert, stored as a delta, and
a lazy merge of two are mounted, and read in many ways: cold (the page cache is dropped before, and the mount is new)
and warm (once more). Each figure is the best of the runs; beside it, the time of plain files over it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import MERGEFS, ROOT, Machine, told
from mergefs.blocks.exact import CODINGS

WEIGHTS = "model.safetensors"
PIECE = 1 << 20
RANDOM_READS = 200

RECIPE = """
merge_method: ties
base_model: base
dtype: bfloat16
models:
  - model: expert-0
    parameters: {weight: 0.7, density: 0.5}
  - model: expert-1
    parameters: {weight: 0.5, density: 0.4}
"""


# -- readers: each runs in a process of its own, and prints how long it took ------------------------------


def sequential(folder: Path) -> None:
    """What `cat` does."""
    with (folder / WEIGHTS).open("rb", buffering=0) as file:
        buffer = bytearray(PIECE)
        while file.readinto(buffer):
            pass


def mapped(folder: Path) -> None:
    """Touch every page of a mapping, in order."""
    import numpy as np

    with (folder / WEIGHTS).open("rb") as file:
        pages = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        pages[:: mmap.PAGESIZE].sum()


def at_random(folder: Path) -> None:
    """Read pieces of 1 MiB here and there."""
    chosen = random.Random(7)
    with (folder / WEIGHTS).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(RANDOM_READS):
            os.pread(file.fileno(), PIECE, chosen.randrange(size - PIECE))


def with_transformers(folder: Path) -> Callable[[], None]:
    """Load the model for inference; importing the library is not counted."""
    from transformers import AutoModelForCausalLM

    return lambda: _used(AutoModelForCausalLM.from_pretrained(folder))


def _used(model: Any) -> None:
    """Use every weight, so that none is only mapped."""
    for parameter in model.parameters():
        parameter.detach().flatten()[::2048].sum()


def with_safetensors(folder: Path) -> Callable[[], None]:
    """Load all tensors into memory of their own."""
    from safetensors.torch import load_file

    return lambda: [tensor.clone() for tensor in load_file(folder / WEIGHTS).values()] and None


def with_zarr(repository: Path, name: str) -> Callable[[], None]:
    """Read every array of the model as a Zarr store."""
    import zarr

    from mergefs.repository import Repository

    opened = Repository.open(repository)

    def read() -> None:
        group = zarr.open_group(opened.zarr(name), mode="r")
        for _, array in group.members(max_depth=None):
            if isinstance(array, zarr.Array):
                array[...]

    return read


def with_fsspec(repository: Path, name: str) -> Callable[[], None]:
    """Read the file by fsspec."""
    import fsspec

    file_system = fsspec.filesystem("mergefs", repo=str(repository))
    return lambda: file_system.cat_file(f"{name}/{WEIGHTS}") and None


def with_state_dict(repository: Path, name: str) -> Callable[[], None]:
    """Read all tensors by the library's own interface."""
    import torch  # noqa: F401 (its import is not counted)

    from mergefs.repository import Repository

    opened = Repository.open(repository)

    def read() -> None:
        with opened.view(name) as view:
            view.state_dict()

    return read


FILE_READERS: dict[str, Callable[[Path], Callable[[], None] | None]] = {
    "sequential": sequential,
    "mapped": mapped,
    "random 1 MiB": at_random,
    "transformers": with_transformers,
    "safetensors": with_safetensors,
}
DIRECT_READERS: dict[str, Callable[[Path, str], Callable[[], None]]] = {
    "zarr": with_zarr,
    "fsspec cat": with_fsspec,
    "state_dict": with_state_dict,
}
TWIN = {"zarr": "safetensors", "fsspec cat": "sequential", "state_dict": "safetensors", "export": "cp"}
"""What is compared with which reader of plain files; those of files with themselves."""


def read_once(reader: str, place: str, name: str) -> float:
    """Read in this process; return the seconds, without what importing took."""
    if reader in DIRECT_READERS:
        read = DIRECT_READERS[reader](Path(place), name)
    else:
        prepare = FILE_READERS[reader]
        read = None
        if prepare in (sequential, mapped, at_random):
            import numpy  # noqa: F401 (its import is not counted)
        else:
            read = prepare(Path(place))
    began = time.perf_counter()
    if read is None:
        FILE_READERS[reader](Path(place))
    else:
        read()
    return time.perf_counter() - began


# -- the measurement -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way of reading one model.

    Attributes:
        model: `stored` or `lazy`.
        reader: how it was read.
        state: `cold` or `warm`.
        seconds: the best of the runs.
        plain_seconds: of plain files, in the same state.
    """

    model: str
    reader: str
    state: str
    seconds: float
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """Speed, relative to plain files."""
        return self.plain_seconds / self.seconds


def measure(
    models: Path, work: Path, exact: str, runs: int, wanted: list[str], readers: list[str]
) -> tuple[list[Row], dict[str, Any]]:
    """Ingest, mount and read; return the rows and what the machine is."""
    machine = Machine(work)
    described = machine.describe()
    repository = _repository(models, work, exact)
    names = {"stored": "expert-0", "lazy": "lazy"}
    rows: list[Row] = []
    for model in wanted:
        name = names[model]
        plain = work / f"plain-{model}"
        if not plain.exists():
            _mergefs("-R", str(repository), "export", name, str(plain))
        times: dict[tuple[str, str, bool], list[float]] = {}

        def note(reader: str, state: str, is_plain: bool, seconds: float, times: Any = times) -> None:
            times.setdefault((reader, state, is_plain), []).append(seconds)

        for _ in range(runs):
            for reader in (reader for reader in FILE_READERS if reader in readers):
                machine.prepare()
                for state in ("cold", "warm"):
                    note(reader, state, True, _reading(reader, plain))
                with _mounted(repository, name, work / "mounted") as mounted:
                    machine.prepare()
                    for state in ("cold", "warm"):
                        note(reader, state, False, _reading(reader, mounted))
            for reader in (reader for reader in DIRECT_READERS if reader in readers):
                machine.prepare()
                for state in ("cold", "warm"):
                    note(reader, state, False, _reading(reader, repository, name))
            for state in ("cold", "warm") if "export" in readers else ():
                for is_plain in (True, False):
                    note(
                        "cp" if is_plain else "export",
                        state,
                        is_plain,
                        _copying(machine, state, is_plain, plain, repository, name, work),
                    )
        best = {key: min(seconds) for key, seconds in times.items()}
        for (reader, state, is_plain), seconds in best.items():
            if not is_plain:
                rows.append(Row(model, reader, state, seconds, best[TWIN.get(reader, reader), state, True]))
    return rows, described


def _copying(
    machine: Machine, state: str, is_plain: bool, plain: Path, repository: Path, name: str, work: Path
) -> float:
    """Copy the files with `cp`, or export them; durably, since export is. Cold first drops the page cache."""
    out = work / "copied"
    shutil.rmtree(out, ignore_errors=True)
    if state == "cold":
        machine.prepare()
    else:
        os.sync()
    began = time.perf_counter()
    if is_plain:
        subprocess.run(["cp", "-r", plain, out], check=True)
        subprocess.run(["sync", *out.iterdir()], check=True)
    else:
        _mergefs("-R", str(repository), "export", name, str(out))
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    return seconds


def _repository(models: Path, work: Path, exact: str) -> Path:
    repository = work / "repository"
    if not repository.exists():
        _mergefs("init", str(repository), "--exact", exact)
        _mergefs("-R", str(repository), "ingest", str(models / "base"), "--as", "base")
        for name in ("expert-0", "expert-1"):
            _mergefs("-R", str(repository), "ingest", str(models / name), "--as", name, "--base", "base")
        recipe = work / "recipe.yml"
        recipe.write_text(RECIPE)
        _mergefs("-R", str(repository), "merge", str(recipe), "--as", "lazy", "--lazy")
    return repository


@contextmanager
def _mounted(repository: Path, name: str, directory: Path) -> Iterator[Path]:
    _mergefs("-R", str(repository), "mount", name, str(directory))
    try:
        yield directory
    finally:
        _mergefs("umount", str(directory))


def _reading(reader: str, place: Path, name: str = "") -> float:
    command = [sys.executable, "-m", "benchmarks.serve", "--read", reader, str(place), name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"reading by {reader} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _mergefs(*arguments: str) -> None:
    subprocess.run([*MERGEFS, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _table(rows: list[Row]) -> str:
    lines = ["| model | read by | | seconds | plain files, seconds | speed, plain = 1 |", "|---|---|---|--:|--:|--:|"]
    lines += [
        f"| {row.model} | {row.reader} | {row.state} | {row.seconds:.2f} | {row.plain_seconds:.2f} | {row.ratio:.2f} |"
        for row in sorted(rows, key=lambda row: (row.model != "stored", row.reader, row.state))
    ]
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=__doc__)
    parser.add_argument("--models", type=Path, help="a folder with base, expert-0 and expert-1")
    parser.add_argument("--work", type=Path, help="where the repository and the plain files go; kept when given")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--exact", choices=CODINGS, default=CODINGS[0], help="the repository's coding")
    parser.add_argument("--only", default="stored,lazy", help="which models")
    parser.add_argument("--readers", default=",".join([*FILE_READERS, *DIRECT_READERS, "export"]))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(read_once(*options.read))
        return
    if options.models is None:
        parser.error("--models is missing: tools/synth qwen3-0.6b 2 DIR makes them")
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        work = options.work or Path(temporary)
        only, readers = options.only.split(","), options.readers.split(",")
        rows, machine = measure(options.models, work, options.exact, options.runs, only, readers)
    machine["load_after"] = Machine(Path("/")).describe()["load_before"]
    if options.json:
        shown = [{**asdict(row), "ratio": row.ratio} for row in rows]
        print(json.dumps({"machine": machine, "rows": shown}))
    else:
        print(told(machine), _table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
