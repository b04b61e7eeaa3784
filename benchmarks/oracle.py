"""How far merged models are from the definitions of their methods, in float64, on some of their tensors.

    python -m benchmarks.oracle JOB     JOB: a JSON file; prints one JSON object

JOB names the models' folder (`models`), the recipe (`method`, `k`), and the `results`: each a name with the `folder` of
a checkpoint, or with a `repository` and a `ref`. For each result the squared norms are summed over the sampled tensors:

- `error`: of the difference from the definition, relative to the norm of the definition's tensor,
- `delta_error`: the same, relative to the norm of the definition's delta,
- `rounded_delta_error`: what the definition itself, rounded to bf16, has: nothing in bf16 can have much less,
- `equal`: the share of elements that equal the rounded definition,
- `compared`: the share of elements that these are about. Where a delta's magnitude equals the trim threshold of `ties`,
  tools differ in what they keep, and bf16 deltas are few different numbers: those elements are left out.

Random masks: mergefs's are drawn here again from their definition (`spec/merging.md`), and its results compared with
it. Those of others are not known. For `dare_ties` both tools' results are compared with the mean of rounded merges over
masks as well: `slope` is that of the merged delta on the mean (1 where nothing is lost), `variance` that around the
mean as a share of what independent masks give.

The embedding is not sampled: most of its rows are the base's, so that every trim threshold of it is 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from benchmarks.recipes import DENSITY, RANDOM, T, weight
from mergefs.repository import Repository

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DRAWS = 64
DRAWN_ELEMENTS = 20_000
SEED = 0
"""Of mergefs's masks: the command line's default."""


# --- the definitions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defined:
    """What a tensor has to be.

    Attributes:
        values: float64, flat.
        unclear: where an expert's magnitude equals its trim threshold.
    """

    values: Floats
    unclear: Bools


def define(method: str, base: Floats, experts: Sequence[Floats], masks: Sequence[Bools] = ()) -> Defined:
    """Return the merge of a tensor."""
    weights = [weight(i) for i in range(len(experts))]
    unclear = np.zeros(base.shape, bool)
    if method == "slerp":
        return Defined(slerp(base, experts[0]), unclear)
    if method == "linear":
        total = sum(w * x for w, x in zip(weights, experts, strict=True))
        return Defined(np.asarray(total / sum(weights)), unclear)
    deltas = [x - base for x in experts]
    if method == "task_arithmetic":
        return Defined(np.asarray(base + sum(w * d for w, d in zip(weights, deltas, strict=True))), unclear)
    if method == "ties":
        for number, delta in enumerate(deltas):
            magnitude = np.abs(delta)
            kept = max(1, int(DENSITY * delta.size))
            threshold = np.partition(magnitude, delta.size - kept)[delta.size - kept]
            deltas[number] = np.where(magnitude >= threshold, delta, 0.0)
            unclear |= (magnitude == threshold) & (threshold > 0)
        return Defined(base + elect(deltas, weights, normalize=True), unclear)
    assert method == "dare_ties"
    dropped = [np.where(mask, delta / DENSITY, 0.0) for mask, delta in zip(masks, deltas, strict=True)]
    return Defined(base + elect(dropped, weights, normalize=False), unclear)


def elect(deltas: Sequence[Floats], weights: Sequence[float], normalize: bool) -> Floats:
    """Return the sum of the weighted deltas whose sign is that of the sum of all."""
    positive = np.asarray(sum(w * d for w, d in zip(weights, deltas, strict=True))) >= 0
    total, divisor = np.zeros(positive.shape), np.zeros(positive.shape)
    for w, delta in zip(weights, deltas, strict=True):
        agrees = (delta != 0) & ((w * delta > 0) == positive)
        total += np.where(agrees, w * delta, 0.0)
        divisor += np.where(agrees, w, 0.0)
    return total / np.where(divisor > 0, divisor, 1.0) if normalize else total


def slerp(base: Floats, expert: Floats) -> Floats:
    """Return the point on the great circle; on the line where the directions are nearly the same."""
    norms = np.linalg.norm(base) * np.linalg.norm(expert)
    cosine = base @ expert / norms if norms else 1.0
    if abs(cosine) > 0.9995:
        return (1 - T) * base + T * expert
    angle = np.arccos(cosine)
    return (np.sin((1 - T) * angle) * base + np.sin(T * angle) * expert) / np.sin(angle)


def philox(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the four words of Philox4x32-10 (Salmon et al., SC 2011) for each counter below 2^64."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    zero = np.zeros_like(counters)
    c0, c1, c2, c3 = counters & low, counters >> shift, zero, zero
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def mask(identity: str, tensor: str, count: int) -> Bools:
    """Return which elements of an expert's tensor mergefs keeps."""
    hashed = blake3.blake3(f"mergefs-mask\0{SEED}\0{identity}\0{0}\0{tensor}".encode()).digest()
    key = int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:8], "little")
    words = philox(np.arange(-(-count // 4), dtype=np.uint64), key)
    return words.ravel()[:count] < round(DENSITY * 2**32)


# --- comparing ---------------------------------------------------------------------------------------------


class Sums:
    """Sums over the tensors of one result."""

    def __init__(self) -> None:
        self._error = self._tensor = self._delta = self._rounding = 0.0
        self._elements = self._compared = self._equal = 0
        self._products = self._squares = self._around = self._expected = 0.0

    def compare(self, found: Floats, base: Floats, defined: Defined) -> None:
        """Take in a tensor whose definition is known."""
        clear = ~defined.unclear
        values, found = defined.values[clear], found[clear]
        rounded = to_bfloat16(values)
        self._error += float(np.sum((found - values) ** 2))
        self._tensor += float(np.sum(values**2))
        self._delta += float(np.sum((values - base[clear]) ** 2))
        self._rounding += float(np.sum((rounded - values) ** 2))
        self._elements += defined.values.size
        self._compared += values.size
        self._equal += int(np.count_nonzero(rounded == found))

    def compare_mean(self, found: Floats, base: Floats, experts: Sequence[Floats], random: np.random.Generator) -> None:
        """Take in a tensor whose masks are random."""
        chosen = random.permutation(base.size)[:DRAWN_ELEMENTS]
        at = base[chosen]
        parts = [expert[chosen] for expert in experts]
        draws = [
            to_bfloat16(define("dare_ties", at, parts, [random.random(at.size) < DENSITY for _ in experts]).values) - at
            for _ in range(DRAWS)
        ]
        mean, variance = np.mean(draws, axis=0), np.var(draws, axis=0, ddof=1)
        delta = found[chosen] - at
        self._products += float(delta @ mean)
        # The mean over draws has an error of its own, whose square is taken off again.
        self._squares += float(mean @ mean - np.sum(variance) / DRAWS)
        self._around += float(np.sum((delta - mean) ** 2))
        self._expected += float(np.sum(variance) * (1 + 1 / DRAWS))

    def told(self) -> dict[str, float]:
        """Return the figures."""
        value = {}
        if self._elements:
            value |= {
                "error": (self._error / self._tensor) ** 0.5,
                "delta_error": (self._error / self._delta) ** 0.5,
                "rounded_delta_error": (self._rounding / self._delta) ** 0.5,
                "equal": self._equal / self._compared,
                "compared": self._compared / self._elements,
            }
        if self._squares:
            value |= {"slope": self._products / self._squares, "variance": self._around / self._expected}
        return value


def to_bfloat16(values: Floats) -> Floats:
    """Round to bf16."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def sampled(names: Sequence[str]) -> list[str]:
    """Return some tensors of every kind, from the first, the middle and the last layer."""
    layers = sorted({int(n.split(".")[2]) for n in names if n.startswith("model.layers.")})
    first, middle, last = layers[0], layers[len(layers) // 2], layers[-1]
    wanted = [
        f"model.layers.{first}.self_attn.q_proj.weight",
        f"model.layers.{first}.input_layernorm.weight",
        f"model.layers.{middle}.self_attn.k_proj.weight",
        f"model.layers.{middle}.mlp.gate_proj.weight",
        f"model.layers.{last}.self_attn.v_proj.weight",
        f"model.layers.{last}.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    return sorted({name for name in wanted if name in names})


def reader(folder: Path, stack: ExitStack) -> tuple[list[str], Callable[[str], Floats]]:
    """Open a checkpoint; return its tensors' names and a function that reads one, flat."""
    where = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = stack.enter_context(safe_open(file, "pt"))
        where |= dict.fromkeys(opened.keys(), opened)
    return list(where), lambda name: np.asarray(where[name].get_tensor(name).double().numpy()).ravel()


def judge(job: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of every result."""
    method, k, models = job["method"], job["k"], Path(job["models"])
    found: dict[str, Callable[[str], Floats]] = {}
    sums = {result["name"]: Sums() for result in job["results"]}
    own_masks: dict[str, Callable[[str, int], list[Bools]]] = {}
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        names, read_base = reader(models / "base", stack)
        readers = [reader(models / f"expert-{i}", stack)[1] for i in range(k)]
        for result in job["results"]:
            if "folder" in result:
                found[result["name"]] = reader(Path(result["folder"]), stack)[1]
                continue
            repository = stack.enter_context(Repository.open(Path(result["repository"])))
            view = stack.enter_context(repository.view(result["ref"]))
            found[result["name"]] = lambda name, view=view: view.tensor(name).double().numpy().ravel()
            ids = [repository.resolve(f"expert-{i}") for i in range(k)]
            own_masks[result["name"]] = lambda name, count, ids=ids: [mask(i, name, count) for i in ids]
        for name in sampled(names):
            base, experts = read_base(name), [read(name) for read in readers]
            plain = None if method in RANDOM else define(method, base, experts)
            for label, sum_ in sums.items():
                values = found[label](name)
                if plain is not None:
                    sum_.compare(values, base, plain)
                    continue
                if label in own_masks:
                    sum_.compare(values, base, define(method, base, experts, own_masks[label](name, base.size)))
                sum_.compare_mean(values, base, experts, random)
    return {label: sum_.told() for label, sum_ in sums.items()}


def main() -> None:
    """Read the job and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    print(json.dumps(judge(json.loads(parser.parse_args().job.read_text()))))


if __name__ == "__main__":
    main()
