"""A plain merge, as one would write it with safetensors and torch: every expert is read whole, tensor by tensor.

    python -m benchmarks.plain METHOD K MODELS OUT     methods: linear, task_arithmetic, ties, dare_ties

It holds one tensor of every expert in float32 at a time, and writes the result as the base's files are laid out. It is
what the paper calls the naive pipeline; prints the bytes that it read of experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.recipes import DENSITY, weight

METHODS = ("linear", "task_arithmetic", "ties", "dare_ties")


def merge_tensor(method: str, base: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the merge of one tensor in float32; the experts' tensors are changed."""
    weights = [weight(i) for i in range(len(experts))]
    if method == "linear":
        total = torch.zeros_like(base)
        for expert, w in zip(experts, weights, strict=True):
            total.add_(expert, alpha=w)
        return total.div_(sum(weights))
    total = torch.zeros_like(base)
    for delta, w in zip(experts, weights, strict=True):
        delta.sub_(base)
        if method == "ties":
            kept = max(1, int(DENSITY * delta.numel()))
            magnitude = delta.abs()
            threshold = magnitude.flatten().kthvalue(delta.numel() - kept + 1).values
            delta.masked_fill_(magnitude < threshold, 0)
        elif method == "dare_ties":
            delta.mul_(torch.rand_like(delta) < DENSITY).div_(DENSITY)
        total.add_(delta, alpha=w)
    if method == "task_arithmetic":
        return total.add_(base)
    positive = total >= 0
    merged, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for delta, w in zip(experts, weights, strict=True):
        agrees = ((delta > 0) == positive) & (delta != 0)
        merged.add_(delta * agrees, alpha=w)
        divisor.add_(agrees, alpha=w)
    if method == "ties":
        merged.div_(divisor.masked_fill_(divisor == 0, 1))
    return merged.add_(base)


def reader(folder: Path, stack: ExitStack) -> Callable[[str], torch.Tensor]:
    """Open a checkpoint; return a function that reads a tensor."""
    where = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = stack.enter_context(safe_open(file, "pt"))
        where |= dict.fromkeys(opened.keys(), opened)
    return lambda name: where[name].get_tensor(name)


def merge(method: str, k: int, models: Path, out: Path) -> int:
    """Write the merge of bf16 models into a new folder; return the bytes that were read of experts."""
    out.mkdir(parents=True)
    read = 0
    with ExitStack() as stack:
        of_base = reader(models / "base", stack)
        of_experts = [reader(models / f"expert-{i}", stack) for i in range(k)]
        for source in sorted((models / "base").iterdir()):
            if source.suffix != ".safetensors":
                (out / source.name).write_bytes(source.read_bytes())
                continue
            with source.open("rb") as opened:
                size = opened.read(8)
                header = opened.read(int.from_bytes(size, "little"))
            places = {n: p for n, p in json.loads(header).items() if n != "__metadata__"}
            with (out / source.name).open("wb") as target:
                target.write(size + header)
                for name in sorted(places, key=lambda n: places[n]["data_offsets"]):
                    experts = [of(name) for of in of_experts]
                    read += sum(expert.nbytes for expert in experts)
                    merged = merge_tensor(method, of_base(name).float(), [expert.float() for expert in experts])
                    target.write(memoryview(merged.bfloat16().contiguous().view(torch.uint8).numpy().ravel()))
    return read


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("k", type=int, metavar="K")
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(json.dumps({"expert_bytes": merge(options.method, options.k, options.models, options.out)}))


if __name__ == "__main__":
    main()
