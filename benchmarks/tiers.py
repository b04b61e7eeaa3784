"""Measure the tiered encoding on the matrices of real fine-tunes: sizes, errors at given rates, speeds.

    python -m benchmarks.tiers --slices DIR [--block-elements N] [--repeats N] [--json]

DIR holds `base/` and one folder an expert, each with safetensors files in bf16. Matrices are tensors of two axes and
more, embeddings left out, in the blocks that a repository cuts them into. Every block is decoded and compared.

- `whole`: all tiers, as a share of the raw bytes; equal depths: bytes and relative error when every block is read
  equally deep.
- `error at 5/10/15/20 %`: the relative error of the delta when at most that share of the raw bytes is read, each block
  at a depth of its own: the best choice where there are at most 64 blocks, along the convex hulls where there are more.
- Speeds are GB/s of raw bytes by CPU time on a block of full size (1 MiB: the beginning of the largest matrix), the
  best of `--repeats`; coarse depths decode to an array that is there already, as in an engine that merges block after
  block. Encoding includes measuring what error remains after each tier.

Compared with: the single-shot difference in units in the last place (mergefs.blocks.codecs), XOR of the bits with zstd
level 1 (as BitX of ZipLLM does), byte-shuffle and zstd without the base, and ZipNN without the base where the package
`zipnn` is there.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numcodecs.zstd as zstd
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from mergefs.blocks import codecs, tiers
from mergefs.blocks.exact import CODINGS
from mergefs.blocks.geometry import grid
from mergefs.dtypes import DTYPES
from mergefs.hashing import Buffer

RATES = (0.05, 0.10, 0.15, 0.20)
BF16 = DTYPES["BF16"]
EXHAUSTIVE = 64
STEPS = 4000


class Block(NamedTuple):
    """A block of an expert and the base's, as bytes."""

    expert: bytes
    base: bytes


class Point(NamedTuple):
    """What reading a block to some depth costs, and the squared error that it leaves."""

    size: int
    error: float


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Return a model's matrices in bf16 by name."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return {
        name: tensor
        for name, tensor in sorted(found.items())
        if tensor.ndim >= 2 and "embed" not in name and tensor.dtype is torch.bfloat16
    }


def blocks(base: dict[str, torch.Tensor], expert: dict[str, torch.Tensor], elements: int) -> Iterator[Block]:
    """Yield the blocks of the matrices that both models have."""
    for name, tensor in expert.items():
        if name in base and base[name].shape == tensor.shape:
            raw, base_raw = (t.contiguous().view(torch.int16).numpy().tobytes() for t in (tensor, base[name]))
            for start, stop in grid(tensor.shape, elements).elements():
                yield Block(raw[2 * start : 2 * stop], base_raw[2 * start : 2 * stop])


def full_block(base: dict[str, torch.Tensor], expert: dict[str, torch.Tensor], elements: int) -> Block:
    """Return the beginning of the largest matrix, of as many elements or all that it has."""
    name = max(expert, key=lambda name: expert[name].numel() if name in base else 0)
    raw, base_raw = (t[name].contiguous().view(torch.int16).numpy().tobytes() for t in (expert, base))
    return Block(raw[: 2 * elements], base_raw[: 2 * elements])


def hull(points: list[Point]) -> list[Point]:
    """Return the lower convex hull of points in the order of their sizes."""
    kept = points[:1]
    for point in points[1:]:
        while len(kept) > 1 and (kept[-1].error - kept[-2].error) * (point.size - kept[-2].size) >= (
            point.error - kept[-2].error
        ) * (kept[-1].size - kept[-2].size):
            kept.pop()
        kept.append(point)
    return kept


def least_error(every: list[list[Point]], budget: float) -> float:
    """Return the least squared error within a budget of bytes, one point a block."""
    if len(every) <= EXHAUSTIVE:
        unit = budget / STEPS
        best = np.zeros(STEPS + 1)
        for points in every:
            new = np.full(STEPS + 1, np.inf)
            for size, error in points:
                k = int(np.ceil(size / unit))
                if k <= STEPS:
                    new[k:] = np.minimum(new[k:], best[: STEPS + 1 - k] + error)
            best = new
        return float(best[-1])
    steps = []
    for number, points in enumerate(every):
        corners = hull(points)
        for a, b in itertools.pairwise(corners):
            steps.append(((b.error - a.error) / (b.size - a.size), number, b.size - a.size, a.error - b.error))
    left, spent, stopped = sum(points[0].error for points in every), 0, set()
    for _, number, size, gain in sorted(steps):
        if number in stopped or spent + size > budget:
            stopped.add(number)
            continue
        spent += size
        left -= gain
    return max(left, 0.0)


def rate(action: Callable[[], object], size: int, repeats: int) -> float:
    """Return GB/s for `size` bytes a run: the best of several, by CPU time (of all threads: some rivals have more)."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        action()
        best = min(best, time.process_time() - began)
    return size / best / 1e9


def measure(data: list[Block], timed: Block, exact: tiers.Exact, repeats: int) -> dict[str, Any]:
    """Return the figures of one expert's tiers."""
    raw, every = 0, []
    for block in data:
        encoded = tiers.encode_always(block.expert, block.base, exact)
        if tiers.decode(encoded.tiers, block.base) != block.expert:
            raise AssertionError("a block does not decode to its bytes")
        energy = float((tiers.decode_delta(encoded.tiers, block.base).astype(np.float64) ** 2).sum())
        ends = np.cumsum([len(tier) for tier in encoded.tiers]).tolist()
        raw += len(block.expert)
        every.append([Point(0, energy), *map(Point, ends, encoded.errors)])
    energy = sum(points[0].error for points in every)
    size = len(timed.expert)
    payloads = tiers.encode_always(*timed, exact).tiers
    read = payloads[-1:] if exact == "quick" else payloads
    delta = np.empty(size // 2, np.float32)
    return {
        "whole": sum(points[-1].size for points in every) / raw,
        "error_at": {f"{share:.2f}": float(np.sqrt(least_error(every, share * raw) / energy)) for share in RATES},
        "depths": [
            {
                "size": sum(points[min(depth, len(points) - 1)].size for points in every) / raw,
                "error": float(np.sqrt(sum(points[min(depth, len(points) - 1)].error for points in every) / energy)),
            }
            for depth in range(1, max(map(len, every)))
        ],
        "encode": rate(lambda: tiers.encode_always(*timed, exact), size, repeats),
        "decode_depths": [
            rate(functools.partial(tiers.decode_delta, payloads[:depth], timed.base, delta), size, repeats)
            for depth in range(1, len(payloads))
        ],
        "decode": rate(lambda: tiers.decode(read, timed.base), size, repeats),
    }


Codec = tuple[Callable[[Block], Any], Callable[[Any, Block], Any]]


def rivals() -> dict[str, Codec]:
    """Return encoders and decoders of a whole block by name."""

    def bits(raw: Buffer) -> NDArray[np.uint16]:
        return np.frombuffer(raw, np.uint16)

    def decode(encoded: codecs.Encoded, block: Block) -> Any:
        base = block.base if encoded.encoding.needs_base else None
        return codecs.decode(encoded.encoding, encoded.payload, len(block.expert), BF16.code, base)

    def xor(block: Block) -> bytes:
        planes = codecs._shuffle((bits(block.expert) ^ bits(block.base)).tobytes(), 2)
        return bytes(zstd.compress(planes, 1))

    def undo_xor(payload: bytes, block: Block) -> Any:
        planes = np.frombuffer(zstd.decompress(payload), np.uint8)
        return (bits(codecs._unshuffle(planes, 2)) ^ bits(block.base)).tobytes()

    found: dict[str, Codec] = {
        "ULP difference, zstd": (lambda block: codecs.encode(block.expert, BF16, block.base), decode),
        "XOR, byte planes, zstd 1": (xor, undo_xor),
        "XOR, zstd 1": (
            lambda block: bytes(zstd.compress(bits(block.expert) ^ bits(block.base), 1)),
            lambda payload, block: (np.frombuffer(zstd.decompress(payload), np.uint16) ^ bits(block.base)).tobytes(),
        ),
        "byte-shuffle, zstd, no base": (lambda block: codecs.encode(block.expert, BF16), decode),
    }
    try:
        zipnn = importlib.import_module("zipnn").ZipNN(bytearray_dtype="bfloat16", threads=1)
    except ImportError:
        return found
    found["ZipNN, no base"] = (
        lambda block: zipnn.compress(bytearray(block.expert)),  # a copy: it reorders its input in place
        lambda payload, _: zipnn.decompress(payload),
    )
    return found


def compare(data: list[Block], timed: Block, codec: Codec, repeats: int) -> dict[str, float]:
    """Return size and speeds of an encoding without tiers."""
    encode, decode = codec
    size = 0
    for block in data:
        encoded: Any = encode(block)
        if bytes(decode(encoded, block)) != block.expert:
            raise AssertionError("a block does not decode to its bytes")
        size += len(encoded.payload if isinstance(encoded, codecs.Encoded) else encoded)
    encoded, raw = encode(timed), len(timed.expert)
    return {
        "whole": size / sum(len(block.expert) for block in data),
        "encode": rate(lambda: encode(timed), raw, repeats),
        "decode": rate(lambda: decode(encoded, timed), raw, repeats),
    }


def show(results: dict[str, Any]) -> None:
    """Print the figures as tables."""
    for expert, figures in results["experts"].items():
        print(f"\n{expert}: {figures['blocks']} blocks, {figures['raw_bytes'] / 1e6:.1f} MB")
        print("  encoding                      whole   encode   decode   depth 1/2/3          error at 5/10/15/20 %")
        for name, row in figures["encodings"].items():
            line = f"  {name:28} {row['whole']:6.4f}   {row['encode']:6.3f}   {row['decode']:6.2f}"
            if "error_at" in row:
                line += "   " + " ".join(f"{r:5.2f}" for r in row["decode_depths"]).ljust(18)
                line += "   " + " ".join(f"{e:.3f}" for e in row["error_at"].values())
            print(line)
        depths = figures["encodings"]["tiers, fast"]["depths"]
        print("  equal depths, fast: " + ", ".join(f"{d['size']:.4f} of raw: {d['error']:.3f}" for d in depths))


def main() -> None:
    """Measure every expert beside the base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=Path, required=True)
    parser.add_argument("--block-elements", type=int, default=1 << 19)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    base = load(options.slices / "base")
    results: dict[str, Any] = {
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
        "experts": {},
    }
    for folder in sorted(options.slices.iterdir()):
        if folder.name == "base" or not folder.is_dir():
            continue
        expert = load(folder)
        data = list(blocks(base, expert, options.block_elements))
        if not data:
            continue
        timed = full_block(base, expert, options.block_elements)
        encodings: dict[str, Any] = {
            f"tiers, {exact}": measure(data, timed, exact, options.repeats) for exact in CODINGS
        }
        encodings |= {name: compare(data, timed, codec, options.repeats) for name, codec in rivals().items()}
        results["experts"][folder.name] = {
            "blocks": len(data),
            "raw_bytes": sum(len(block.expert) for block in data),
            "timed_bytes": len(timed.expert),
            "encodings": encodings,
        }
    if options.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
