"""How long planning takes: twenty experts of an 8B model, from statistics that the catalog holds.

    python -m benchmarks.planner [-k 20] [--layers 36] [--json]

Makes a repository of a base and K experts of Qwen3-8B shape whose manifests, block locations and statistics are entered
through the catalog's own interface; there are no packs behind them, which a planner never opens. Plans are then
made under a budget in a process of their own each, with the catalog in the page cache. `statistics` is the time that
reading all experts' statistics takes, `plan` that of the whole planning, statistics, manifests and canonical form
included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergefs.blocks.codecs import Encoding
from mergefs.blocks.pack import NO_BASE, Record
from mergefs.catalog.tables import put_packs
from mergefs.dtypes import DTYPES
from mergefs.hashing import digest
from mergefs.manifest import Blob, FileRecipe, Lineage, Manifest, Tensor, TensorData
from mergefs.recipe import Recipe
from mergefs.repository import Repository
from mergefs.statistics.sample import positions, to_bfloat16
from mergefs.statistics.tensor import (
    BLOCK,
    SKETCH_SIZE,
    SKETCHED_FROM,
    Distribution,
    TensorStatistics,
    load,
    statistics_key,
)
from tools.synth import tensor_shapes

BF16 = DTYPES["BF16"]
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
BASE, DELTA = 0.02, 1.3e-4
"""Standard deviations of weights and of their changes, as in tools/synth."""
CORRELATION = 0.2
TIER_SHARES = (0.019, 0.036, 0.047, 0.105)
"""Of a block's raw bytes: what its tiers take."""
ERROR_SHARES = (0.73, 0.16, 0.024)
"""Of a block's energy: what remains after its coarse tiers."""
CASES = ("task_arithmetic --budget 10%", "ties --budget 10%", "dare_ties --budget 10%", "ties --max-error 0.3")


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of Qwen3-8B with so many layers (36)."""
    return tensor_shapes({**QWEN3_8B, "num_hidden_layers": layers})


def model(name: str, layers: int, block_elements: int) -> Manifest:
    """Return a manifest whose blocks are named by the model, the tensor and their number."""
    tensors = []
    for tensor, shape in shapes(layers).items():
        count = len(Tensor(tensor, BF16, shape, ()).grid(block_elements))
        ids = (digest(f"{name} {tensor} {number}".encode()).hex() for number in range(count))
        tensors.append(Tensor(tensor, BF16, shape, tuple(ids)))
    header = Blob(digest(b"header").hex(), 1024)
    size = header.size + sum(tensor.nbytes for tensor in tensors)
    file = FileRecipe("model.safetensors", size, None, (header, *(TensorData(t.name) for t in tensors)))
    return Manifest(block_elements, (file,), tuple(tensors), Lineage("checkpoint"))


def enter_blocks(repository: Repository, name: str, manifest: Manifest, base: Manifest | None) -> None:
    """Enter the locations of a model's blocks, as one pack for each depth."""
    records: list[list[Record]] = [[] for _ in TIER_SHARES]
    for tensor in manifest.tensors:
        below = None if base is None else base.tensor_by_name[tensor.name]
        for number, (first, stop) in enumerate(tensor.grid(manifest.block_elements).elements()):
            raw = 2 * (stop - first)
            block = bytes.fromhex(tensor.blocks[number] or "")
            if below is None:
                records[0].append(Record(block, NO_BASE, bytes(16), 0, raw, raw, Encoding.RAW, BF16.code))
                continue
            root = bytes.fromhex(below.blocks[number] or "")
            for tier, share in enumerate(TIER_SHARES):
                size = max(1, int(raw * share))
                records[tier].append(
                    Record(block, root, bytes(16), 0, size, raw, Encoding.TIERS, BF16.code, tier, len(TIER_SHARES))
                )
    if base is None:
        records[0].append(Record(digest(b"header"), NO_BASE, bytes(16), 0, 1024, 1024, Encoding.RAW, 0))
    packs = [(digest(f"{name} {tier}".encode()), 0, found) for tier, found in enumerate(records)]
    repository.catalog.write(lambda txn: put_packs(txn, packs))


class Synthesis:
    """Statistics like those of a bf16 fine-tune whose deltas are Gaussian before they are rounded."""

    def __init__(self, block_elements: int) -> None:
        self._block_elements = block_elements
        random = np.random.default_rng(0)
        base = (BASE * random.standard_normal(1 << 18)).astype(BF16.numpy)
        expert = (base.astype(np.float64) + DELTA * random.standard_normal(base.size)).astype(BF16.numpy)
        magnitudes = np.abs(expert.astype(np.float32) - base.astype(np.float32))
        bins, counts = np.unique(magnitudes.view(np.uint32) >> 16, return_counts=True)
        self._bins, self._shares = bins.astype("<u2"), counts / counts.sum()

    def tensor(self, tensor: Tensor, random: np.random.Generator) -> TensorStatistics:
        """Return the statistics of one tensor of an expert."""
        firsts = tensor.grid(self._block_elements).firsts()
        sizes = np.diff(firsts)
        blocks = np.zeros(len(sizes), BLOCK)
        blocks["energy"] = sizes * DELTA**2 * random.lognormal(0, 0.2, len(sizes))
        blocks["largest"] = 4.5 * DELTA
        blocks["unchanged"] = sizes // 4
        noise = random.lognormal(0, 0.05, (len(sizes), len(ERROR_SHARES)))
        blocks["errors"] = blocks["energy"][:, None] * np.array(ERROR_SHARES) * noise
        blocks["bytes"] = np.maximum(1, 2 * sizes[:, None] * np.array(TIER_SHARES))
        sketches, sample = np.empty((0, SKETCH_SIZE)), np.empty((0, 4))
        if tensor.elements >= SKETCHED_FROM:
            lane = np.sqrt(blocks["energy"] / SKETCH_SIZE)[:, None]
            sketches = lane * self._correlated((len(sizes), SKETCH_SIZE), random)
            sample = self._sample(len(positions(tensor.elements, 0, tensor.elements)), random)
        counts = np.floor(self._shares * tensor.elements).astype("<u8")
        counts[0] += np.uint64(tensor.elements - int(counts.sum()))
        none = np.empty(0)
        distribution = Distribution(
            to_bfloat16(sample),
            self._bins,
            counts,
            np.zeros(len(counts), "<u8"),
            none.astype("<u8"),
            none.astype("<f4"),
        )
        return TensorStatistics.make(tensor.elements, blocks, to_bfloat16(sketches), distribution)

    def _sample(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        exact = DELTA * self._correlated((count,), random)
        levels = ((2.0,), (0.85, 2.0, 2.9), (0.34, 0.85, 1.42, 2.0, 2.45, 2.9, 3.5))
        columns = []
        for level in levels:
            cell = np.digitize(np.abs(exact) / DELTA, level)
            centre = np.array([0.0, *(0.5 * (a + b) for a, b in zip(level, (*level[1:], level[-1] + 1), strict=True))])
            columns.append(np.sign(exact) * centre[cell] * DELTA)
        return np.stack([*columns, exact], axis=1)

    def _correlated(self, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float64]:
        common = np.random.default_rng(shape[0]).standard_normal(shape)
        own = random.standard_normal(shape)
        return np.asarray(CORRELATION**0.5 * common + (1 - CORRELATION) ** 0.5 * own)


def build(path: Path, experts: int, layers: int) -> None:
    """Make the repository."""
    Repository.init(path).close()
    with Repository.open(path, sync=False) as repository:
        base = model("base", layers, repository.block_elements)
        enter_blocks(repository, "base", base, None)
        repository.publish(base, "base", {"raw_bytes": base.raw_bytes})
        synthesis = Synthesis(repository.block_elements)
        for number in range(experts):
            name = f"expert-{number}"
            manifest = model(name, layers, repository.block_elements)
            enter_blocks(repository, name, manifest, base)
            random = np.random.default_rng([1, number])
            statistics = [
                (
                    "statistics",
                    statistics_key(manifest.id, base.id, tensor.name),
                    synthesis.tensor(tensor, random).encode(),
                )
                for tensor in manifest.tensors
            ]
            repository.publish(manifest, name, {"raw_bytes": manifest.raw_bytes, "base": base.id}, extra=statistics)


def recipe(method: str, experts: int) -> Recipe:
    """Return the recipe that merges all experts with weight 0.4."""
    density = ", density: 0.5" if method != "task_arithmetic" else ""
    models = "".join(f"- {{model: expert-{n}, parameters: {{weight: 0.4{density}}}}}\n" for n in range(experts))
    return Recipe.parse(f"merge_method: {method}\nbase_model: base\nmodels:\n{models}")


def plan_once(path: Path, case: str, experts: int) -> dict[str, Any]:
    """Plan in this process; return what it took."""
    method, option, value = case.split()
    aim = {"budget": value} if option == "--budget" else {"max_error": float(value)}
    with Repository.open(path) as repository:
        ids = {name: identity for name, identity in repository.refs().items() if name != "base"}
        base = repository.resolve("base")
        names = [tensor.name for tensor in repository.manifest(base).tensors]
        with repository.catalog.read() as txn:
            stored = sum(
                len(txn.get("statistics", statistics_key(e, base, n)) or b"") for e in ids.values() for n in names
            )
        began = time.monotonic()
        with repository.catalog.read() as txn:
            for identity in ids.values():
                load(txn, identity, base, names)
        loaded = time.monotonic()
    with Repository.open(path) as repository:
        asked = recipe(method, experts)
        repository.plan(recipe(method, 1), save=False, budget="1%")  # compiled loops are loaded once a process
    with Repository.open(path) as repository:
        start = time.monotonic()
        planned = repository.plan(asked, save=False, **aim)
        made = time.monotonic()
        error = planned.predicted_error
        done = time.monotonic()
    return {
        "case": case,
        "candidates": len(planned.candidates),
        "statistics_bytes": stored,
        "raw_bytes": planned.expert_raw_bytes,
        "statistics": loaded - began,
        "plan": made - start,
        "prediction": done - made,
        "read": planned.expert_bytes / planned.expert_raw_bytes,
        "predicted_error": error,
    }


def main() -> None:
    """Make the repository, plan in fresh processes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", type=int, default=20, metavar="K", help="experts (20)")
    parser.add_argument("--layers", type=int, default=36, help="of the model (36, as Qwen3-8B has)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", nargs=2, metavar=("REPOSITORY", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(plan_once(Path(options.inside[0]), options.inside[1], options.k)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repository"
        build(path, options.k, options.layers)
        command = [sys.executable, "-m", "benchmarks.planner", "-k", str(options.k), "--inside", str(path)]
        for case in CASES:
            done = subprocess.run([*command, case], check=True, capture_output=True, text=True, env=os.environ)
            rows.append(json.loads(done.stdout))
    if options.json:
        print(json.dumps(rows))
        return
    first = rows[0]
    print(
        f"{options.k} experts, {first['candidates']} changed blocks, {first['raw_bytes'] / 1e9:.0f} GB of raw bytes;"
        f" statistics {first['statistics_bytes'] / 1e6:.0f} MB, {first['statistics_bytes'] / first['raw_bytes']:.3%}"
    )
    for row in rows:
        print(
            "{case:30} statistics {statistics:.2f} s, plan {plan:.2f} s, prediction {prediction:.2f} s:"
            " read {read:.4f}, predicted error {predicted_error:.3f}".format(**row)
        )


if __name__ == "__main__":
    main()
