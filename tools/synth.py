"""Synthetic checkpoints: a base and K experts in Hugging Face layout, with the deltas of a real fine-tune.

What was measured on real bf16 fine-tunes of a 22M-parameter encoder, and is imitated here:

- In a matrix a delta is nearly Gaussian, of about the same scale everywhere (Adam moves every element by
  about the learning rate, whatever the element's size): kurtosis 3.0 to 3.5 at learning rate 2e-5, root
  mean square of rows varying by 13 % and of columns by 8 %, 0.4 to 0.9 % of the weights' own deviation
  (here 0.66 %, on weights of deviation 0.02). Rounding to bf16 leaves 65 to 81 % of the elements changed.
- Of an embedding only the rows of tokens that were seen change: frequent tokens (low ids) in every expert,
  rare ones in few (two experts' sets have 0.22 to 0.33 of their union in common), rarer ones by less.
- Norms hardly change: their elements are near 1, where bf16 is coarse.
- Deltas of experts have a correlation of 0.10 to 0.22 in matrices when they learnt the same task at other
  learning rates, 0.02 to 0.10 when they learnt other tasks. CORRELATION = 0.2 is the upper end, chosen
  because agreement between experts is what a planner has to cope with.

Size of the deltas (difference of order-preserving integers, two byte planes, zstd level 1) over the raw size,
real at learning rates 1e-5, 2e-5, 1e-4: matrices 0.24, 0.27, 0.39; 2,048 rows of an embedding 0.10,
0.14, 0.19, and a whole vocabulary about 0.04 at 2e-5. What this module makes is to be like 2e-5.
`tools/synth --measure DIR` measures DIR/base and the folders beside it; of five experts of qwen3-0.6b:

    matrices     changed 0.73 to 0.75, size 0.258 to 0.265 of raw
    embeddings   changed 0.09 to 0.10, size 0.038 to 0.040 of raw
    vectors      changed 0.03, size 0.08 of raw
    correlation of two experts' matrices: 0.18 (after rounding)

Those 7.15 GB (base and five experts) are made in 35 s on two cores, in 0.15 GB of memory.

Every number comes from a Philox generator keyed by (seed, purpose, tensor, chunk), so that a checkpoint is a
function of shape, K and seed, and expert 0 is the same whatever K is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BASE_STD = 0.02
DELTA_STD = 0.0066 * BASE_STD
NORM_DELTA_STD = 1e-3
CORRELATION = 0.2
ROW_SPREAD = 0.13
COLUMN_SPREAD = 0.08
TENSOR_SPREAD = 0.06
EXPERT_SPREAD = 0.06
CHUNK = 1 << 21
SHARD_SIZE = 5_000_000_000

Floats = NDArray[np.float32]
Words = NDArray[np.uint16]

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": BASE_STD,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": BASE_STD,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3,
        "hidden_size": 64,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_window_layers": 2,
        "max_position_embeddings": 2048,
    },
    "tiny-llama": {
        **_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
    # Large enough for readers to be at different places of it: 50 MB.
    "small": {
        **_QWEN3,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
        "max_window_layers": 4,
        "max_position_embeddings": 2048,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    # The widths of Llama 3 8B, two of its 32 layers and half of its vocabulary: 1.9 GB.
    "llama-8b-slice": {
        **_LLAMA,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "vocab_size": 64128,
    },
}
SHAPES = tuple(CONFIGS)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen3 or Llama checkpoint, sorted by name; a tied head is not stored."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (config["head_dim"],), "self_attn.k_norm": (config["head_dim"],)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return dict(sorted(shapes.items()))


def generator(seed: int, *purpose: object) -> np.random.Generator:
    """The Philox generator of one purpose, such as ("expert", 3, tensor name, chunk)."""
    digest = hashlib.blake2b("\0".join(map(str, (seed, *purpose))).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))


def to_bf16(values: Floats) -> Words:
    """Round to nearest, ties to even; the bits of bf16."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(words: Words) -> Floats:
    """The exact float32 of bf16 bits."""
    return (words.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Chunk:
    """A run of whole rows of one tensor; `rows` counts elements when the tensor has one axis."""

    name: str
    shape: tuple[int, ...]
    index: int
    start: int
    rows: int

    @property
    def row_elements(self) -> int:
        """Elements in a row: one in a vector."""
        return math.prod(self.shape[1:])


def chunks(shapes: dict[str, tuple[int, ...]]) -> Iterator[Chunk]:
    """Cut every tensor into runs of about CHUNK elements, so that memory is bounded and cores are busy."""
    for name, shape in shapes.items():
        step = max(1, CHUNK // math.prod(shape[1:]))
        for index, start in enumerate(range(0, shape[0], step)):
            yield Chunk(name, shape, index, start, min(step, shape[0] - start))


def base_chunk(seed: int, chunk: Chunk) -> Words:
    """The base's bits: norms scattered around 1, everything else Gaussian."""
    rng = generator(seed, "base", chunk.name, chunk.index)
    values = rng.standard_normal(chunk.rows * chunk.row_elements, dtype=np.float32)
    if len(chunk.shape) == 1:
        return to_bf16(1 + np.float32(0.1) * values)
    scale = BASE_STD * math.exp(0.2 * generator(seed, "base scale", chunk.name).standard_normal())
    values *= np.float32(scale)
    return to_bf16(values)


def common_chunk(seed: int, chunk: Chunk) -> Floats:
    """The direction that all experts share, of deviation 1."""
    rng = generator(seed, "common", chunk.name, chunk.index)
    return rng.standard_normal((chunk.rows, chunk.row_elements), dtype=np.float32)


def scales(seed: int, expert: int, chunk: Chunk) -> tuple[Floats, Floats]:
    """The delta's deviation by row (0 where an embedding's row is untouched) and a factor by column."""
    if len(chunk.shape) == 1:
        return np.full(chunk.rows, NORM_DELTA_STD, np.float32), np.ones(1, np.float32)

    def normal(*purpose: object, size: int) -> Floats:
        return generator(seed, *purpose, expert).standard_normal(size, dtype=np.float32)

    overall = EXPERT_SPREAD * normal("expert scale", size=1)
    overall += TENSOR_SPREAD * normal("tensor scale", chunk.name, size=1)
    spread = ROW_SPREAD * normal("rows", chunk.name, chunk.index, size=chunk.rows)
    columns = np.exp(COLUMN_SPREAD * normal("columns", chunk.name, size=chunk.row_elements))
    rows = np.float32(DELTA_STD) * np.exp(overall + spread)
    if chunk.name == "model.embed_tokens.weight":
        uses = expected_uses(chunk)
        draws = generator(seed, "uses", chunk.name, chunk.index, expert).random(chunk.rows)
        rows *= np.clip(0.7 + 0.15 * np.log1p(uses), 0.7, 1.2).astype(np.float32)
        rows[draws >= -np.expm1(-uses)] = 0
    return rows, columns


def expected_uses(chunk: Chunk) -> NDArray[np.float64]:
    """How often a fine-tune's data use these rows' tokens: Zipf's law, so that 17 % of all rows are used."""
    ranks = np.arange(chunk.start, chunk.start + chunk.rows, dtype=np.float64)
    return 0.05 / (ranks / chunk.shape[0] + 1e-3)


def expert_chunk(seed: int, expert: int, chunk: Chunk, base: Words, common: Floats) -> Words:
    """The expert's bits: the base plus a delta, rounded."""
    rows, columns = scales(seed, expert, chunk)
    touched = np.flatnonzero(rows)
    out = base.reshape(chunk.rows, chunk.row_elements).copy()
    if not len(touched):
        return out.ravel()
    whole = len(touched) == chunk.rows
    rng = generator(seed, "expert", expert, chunk.name, chunk.index)
    delta = rng.standard_normal((len(touched), chunk.row_elements), dtype=np.float32)
    delta *= np.float32(math.sqrt(1 - CORRELATION))
    delta += np.float32(math.sqrt(CORRELATION)) * (common if whole else common[touched])
    delta *= rows[touched, None]
    delta *= columns
    delta += from_bf16(out if whole else out[touched])
    out[touched] = to_bf16(delta)
    return out.ravel()


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes begin: which file of a checkpoint, and at which offset."""

    file: str
    offset: int


def lay_out(shapes: dict[str, tuple[int, ...]], shard_size: int) -> tuple[dict[str, bytes], dict[str, Place]]:
    """Share the tensors out to shards: the header of every file, the place of every tensor."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if shards[-1] and size + 2 * math.prod(shape) > shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    headers, places = {}, {}
    for i, shard in enumerate(shards):
        part = "" if len(shards) == 1 else f"-{i + 1:05d}-of-{len(shards):05d}"
        file = f"model{part}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shard.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        for name in shard:
            places[name] = Place(file, len(headers[file]) + header[name]["data_offsets"][0])
    return headers, places


def byte_characters() -> list[str]:
    """The printable stand-in for each of the 256 bytes that byte-level BPE uses, by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = {byte: byte for byte in kept}
    stand_ins |= {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in stand_ins)}
    return [chr(stand_ins[byte]) for byte in range(256)]


def write_side_files(folder: Path, config: dict[str, Any]) -> None:
    """The configuration and a tokenizer that has one token a byte."""
    end, start = 256, 257
    special = {"<|endoftext|>": end, "<|startoftext|>": start}
    tokens = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files: dict[str, dict[str, Any]] = {
        "config.json": {**config, **tokens},
        "generation_config.json": {**tokens, "max_new_tokens": 32},
        "special_tokens_map.json": names,
        "tokenizer_config.json": {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": token, **added} for token, i in special.items()],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {character: i for i, character in enumerate(byte_characters())} | special,
                "merges": [],
            },
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(
    shape: str,
    k: int,
    directory: str | os.PathLike[str],
    seed: int = 0,
    shard_size: int = SHARD_SIZE,
    threads: int | None = None,
) -> list[Path]:
    """Write a base and k experts below a directory; returns their folders, the base's first."""
    config = CONFIGS[shape]
    shapes = tensor_shapes(config)
    headers, places = lay_out(shapes, shard_size)
    folders = [Path(directory) / name for name in ("base", *(f"expert-{i}" for i in range(k)))]
    opened: dict[tuple[Path, str], int] = {}
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("model*.safetensors*"):
                old.unlink()
            write_side_files(folder, config)
            if len(headers) > 1:
                total = sum(2 * math.prod(s) for s in shapes.values())
                index = {
                    "metadata": {"total_size": total},
                    "weight_map": {n: p.file for n, p in places.items()},
                }
                (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            for file, header in headers.items():
                handle = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                opened[folder, file] = handle
                os.write(handle, header)

        def write(chunk: Chunk) -> None:
            place = places[chunk.name]
            offset = place.offset + 2 * chunk.start * chunk.row_elements
            base = base_chunk(seed, chunk)
            common = common_chunk(seed, chunk)
            for number, folder in enumerate(folders):
                words = expert_chunk(seed, number - 1, chunk, base, common) if number else base
                view = memoryview(words).cast("B")
                done = 0
                while done < len(view):
                    done += os.pwrite(opened[folder, place.file], view[done:], offset + done)

        with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(write, chunks(shapes)):
                pass
    finally:
        for handle in opened.values():
            os.close(handle)
    return folders


def coded_size(base: Words, expert: Words) -> int:
    """Bytes of the difference of order-preserving integers, zigzag, as two byte planes, by zstd level 1."""
    from numcodecs import Zstd

    ordered = [np.where(w & 0x8000, ~w, w | 0x8000).astype(np.uint16) for w in (base, expert)]
    difference = (ordered[1] - ordered[0]).view(np.int16)
    zigzag = ((difference << 1) ^ (difference >> 15)).view(np.uint16)
    planes = np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 2).T)
    return sum(len(Zstd(level=1).encode(plane)) for plane in planes)


def read_headers(folder: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """For every bf16 tensor of a checkpoint its file, where the file's data begin, and its header entry."""
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if entry.get("dtype") == "BF16"}
        found |= {name: (path, 8 + length, entry) for name, entry in entries.items()}
    return found


def measure(directory: str | os.PathLike[str]) -> list[str]:
    """What the deltas of DIR/base and its siblings are like: changed elements, coded size, correlations."""
    base_folder = Path(directory) / "base"
    experts = sorted(f for f in Path(directory).iterdir() if f.is_dir() and f != base_folder)
    headers = {folder: read_headers(folder) for folder in (base_folder, *experts)}

    def words(folder: Path, name: str) -> Words:
        path, data, entry = headers[folder][name]
        start, end = entry["data_offsets"]
        return np.fromfile(path, np.uint16, (end - start) // 2, offset=data + start)

    totals = {(e.name, kind): np.zeros(3) for e in experts for kind in ("matrices", "embeddings", "vectors")}
    products = np.zeros((len(experts), len(experts)))
    for name, (_, _, entry) in headers[base_folder].items():
        kind = "vectors" if len(entry["shape"]) == 1 else "embeddings" if "embed" in name else "matrices"
        base = words(base_folder, name)
        deltas = []
        for expert in experts:
            changed = words(expert, name)
            counts = [int(np.count_nonzero(changed != base)), coded_size(base, changed), base.size]
            totals[expert.name, kind] += np.array(counts)
            if kind == "matrices":
                deltas.append(from_bf16(changed) - from_bf16(base))
        if deltas:
            stacked = np.stack(deltas)
            products += stacked @ stacked.T
    lines = []
    for (expert_name, kind), (count, size, elements) in totals.items():
        share = size / elements / 2
        lines.append(f"{expert_name} {kind}: changed {count / elements:.3f}, size {share:.3f} of raw")
    norms = np.sqrt(np.diag(products))
    pairs = (products / np.outer(norms, norms))[np.triu_indices(len(experts), 1)]
    if len(pairs):
        lines.append(f"correlation of two experts' matrices: {pairs.min():.3f} to {pairs.max():.3f}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/synth", description="Make a base and K experts in DIR.")
    parser.add_argument("shape", choices=SHAPES, nargs="?")
    parser.add_argument("k", type=int, nargs="?", metavar="K", help="number of experts")
    parser.add_argument("directory", nargs="?", metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", type=int, default=SHARD_SIZE, metavar="BYTES")
    parser.add_argument("--measure", metavar="DIR", help="only print what DIR's deltas are like")
    options = parser.parse_args(arguments)
    if options.measure:
        print(*measure(options.measure), sep="\n")
        return
    if options.directory is None:
        parser.error("SHAPE, K and DIR are needed")
    started = time.perf_counter()
    folders = make(options.shape, options.k, options.directory, options.seed, options.shard_size)
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    seconds = time.perf_counter() - started
    print(f"{len(folders)} checkpoints, {size / 1e9:.2f} GB in {seconds:.0f} s: {folders[0].parent}")


if __name__ == "__main__":
    main()
