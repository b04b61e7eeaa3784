"""What users and checkpoints give as text: headers, indexes, recipes, configurations."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mergefs.blocks.pack import NO_BASE
from mergefs.checkpoint.adapter import adapt, read_config
from mergefs.checkpoint.directory import INDEX, open_checkpoint
from mergefs.checkpoint.safetensors import build_header, read_header
from mergefs.dtypes import DTYPES
from mergefs.hashing import hex_digest
from mergefs.manifest import Blob, FileRecipe, Lineage, Manifest
from mergefs.planner.importance import load_importance
from mergefs.recipe import Recipe
from tools.fuzz.mutate import change_bytes, change_json, either, with_length, words
from tools.fuzz.target import Run, Target
from tools.fuzz.targets.objects import scratch

_TENSORS = [("model.embed.weight", DTYPES["BF16"], (4, 3)), ("a", DTYPES["F32"], ()), ("b.0", DTYPES["U8"], (0, 2))]


def _header_seeds() -> list[bytes]:
    found = []
    for tensors, metadata in ((_TENSORS, {"format": "pt"}), (_TENSORS[:1], None), ([], {}), (_TENSORS * 0, None)):
        size = 28 if len(tensors) == 3 else 24 * len(tensors)
        found.append(build_header(tensors, metadata) + bytes(size))
    many = [(f"layers.{i}.weight", DTYPES["I8"], (2,)) for i in range(20)]
    return [*found, build_header(many) + bytes(40)]


def _file(name: str) -> Callable[[bytes], str]:
    """Return what writes a file in memory and returns its path; the same file each time."""
    descriptor = os.memfd_create(name)

    def written(data: bytes) -> str:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return f"/proc/self/fd/{descriptor}"

    return written


def _header() -> Run:
    written = _file("header")

    def run(data: bytes) -> None:
        _touch_header(read_header(written(data)))

    return run


def _touch_header(header: Any) -> None:
    for entry in header.tensors:
        assert 8 <= entry.start <= entry.stop <= header.file_size
        assert entry.name.isprintable() or "\n" not in entry.name


def _index_seeds() -> list[bytes]:
    weights = {"model.embed.weight": "one.safetensors", "a": "one.safetensors", "b.0": "one.safetensors"}
    weights |= {f"layers.{i}.weight": "two.safetensors" for i in range(20)}
    return [
        json.dumps({"metadata": {"total_size": 68}, "weight_map": weights}).encode(),
        json.dumps({"weight_map": dict(list(weights.items())[:3])}).encode(),
    ]


def _index() -> Run:
    folder = scratch()
    seeds = _header_seeds()
    (folder / "one.safetensors").write_bytes(seeds[0])
    (folder / "two.safetensors").write_bytes(seeds[-1])
    descriptor = os.open(folder / INDEX, os.O_RDWR | os.O_CREAT)

    def run(data: bytes) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        found = open_checkpoint(folder)
        assert all(Path(file.source).parent == folder for file in found.files)

    return run


_RECIPES = [
    """merge_method: linear
models:
  - model: x
    parameters: {weight: 0.5}
  - model: y
    parameters:
      weight: 1
dtype: bfloat16
""",
    """merge_method: ties
base_model: b
models:
- {model: x, parameters: {weight: [0, 0.5, 1], density: 0.3}}
- model: y
  parameters:
    weight: [{filter: mlp, value: 0.5}, {value: 1}]
    density: 0.2
parameters: {normalize: true, lambda: 1.1}
""",
    """slices:
- sources:
  - {model: x, layer_range: [0, 2]}
  - model: y
    layer_range: [0, 2]
merge_method: slerp
base_model: x
parameters:
  t: [0, 1]
tokenizer_source: base
chat_template: auto
""",
    """name: one
merge_method: dare_ties
base_model: b
models: &m
  - model: x+lora
    parameters: {weight: 1, density: 0.5}
---
name: two
merge_method: linear
models:
 - {model: one, parameters: {weight: 1}}
 - {model: z, parameters: {weight: 1}}
""",
    """a: &a [x, x]
merge_method: task_arithmetic
base_model: b
models:
  - &x {model: x, parameters: &p {weight: 1}}
  - {<<: *x, model: y}
  - {model: z, parameters: *p}
""",
    """modules:
  default:
    models: [{model: x, parameters: {weight: 1}}]
    parameters: {normalize: false}
merge_method: linear
out_dtype: float16
dtype: float32
""",
    """{"merge_method": "della", "base_model": "b", 
"models": [{"model": "x", "parameters": {"weight": 1, "density": 0.4, "epsilon": 0.1}}]}""",
    """merge_method: model_stock
base_model: b
models: [{model: x}, {model: y}, {model: z}]
""",
    """merge_method: nuslerp
models: [{model: x, parameters: {weight: 1}}, {model: y, parameters: {weight: 2}}]
tokenizer: {source: x}
""",
]
_YAML = [
    "&a ", "*a", "<<: ", "- ", "? ", ": ", "|\n", ">\n", "[", "]", "{", "}", "!!binary ", "!!set ", "!!timestamp ",
    "!!float ",
    "!!int ", "!!null ", "!!omap ", "!!pairs ", "!!str ", "!!bool ", "!!python/name:os.system", "---\n", "...\n",
    "# ", "\t", "'", '"',
    "%YAML 1.1\n", "%TAG ! x\n", "0o7", "0x_", "1_000", "190:20:30", "2001-01-01", "2001-99-99", "0b", ".inf",
    ".nan", "~", "yes", "=",
    "&a [*a, *a]", "&b [*a,*a,*a,*a,*a,*a,*a,*a]", "weight", "density", "lambda", "models", "model", "slices",
    "sources", "layer_range",
    "parameters", "filter", "value", "base_model", "merge_method", "linear", "ties", "slerp", "tokenizer",
    "chat_template", "modules",
    "[" * 3000, "- " * 3000, "{a: " * 2000, "? " * 2000, "9" * 5000,
]  # fmt: skip


def _recipe() -> Run:
    def run(data: bytes) -> None:
        from mergefs.recipe_yaml import read_recipes

        for recipe in read_recipes(data.decode("utf-8", "replace"), "it.yml"):
            _use(recipe)

    return run


def _use(recipe: Recipe) -> None:
    assert recipe.named is not None
    for tensor in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        recipe.numbers_of(tensor, 2)


_ADAPTERS = [
    {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {}, "lora_dropout": 0.1, "modules_to_save": None,
    },
    {"peft_type": "LORA", "r": 2, "rank_pattern": {"layers.0.q": 4, "^v": 4},
    "alpha_pattern": {"layers\\.\\d+\\.q": 3}, "use_rslora": True},
]  # fmt: skip
_ADAPTED = {
    "base_model.model.model.layers.0.q.lora_A.weight": (4, 8),
    "base_model.model.model.layers.0.q.lora_B.weight": (6, 4),
    "base_model.model.model.layers.0.v.lora_A.weight": (4, 8),
    "base_model.model.model.layers.0.v.lora_B.weight": (8, 4),
}
_ADAPTED_MODEL = {"model.layers.0.q.weight": (6, 8), "model.layers.0.v.weight": (8, 8), "model.layers.0.norm": (8,)}


def _adapter() -> Run:
    def run(data: bytes) -> None:
        config, _, shapes = data.partition(b"\0")
        found = read_config(config, "adapter_config.json")
        given = _ADAPTED
        if shapes:
            try:
                given = {str(name): tuple(map(int, shape)) for name, shape in json.loads(shapes).items()}
            except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
                given = _ADAPTED
        adapt(found, given, _ADAPTED_MODEL, "it")

    return run


def _adapter_mutate(rng: random.Random, data: bytes, kept: Sequence[bytes]) -> bytes:
    config, _, shapes = data.partition(b"\0")
    if rng.randrange(3) == 0:
        shapes = change_json(rng, shapes or json.dumps(_ADAPTED).encode(), ())
    else:
        config = change_json(rng, config, ())
    return config + (b"\0" + shapes if shapes else b"")


_CONFIGS = [
    {"num_hidden_layers": 2, "layer_types": ["a", "b"], "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "mlp_only_layers": [0]},
    {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}],
    "text_config": {"n_layer": 2, "layers": [1, 2]}},
    {"model": {"vocab": [["a", 0.1], ["b", 0.2]]}, "chat_template": [{"name": "default", "template": "x"}]},
    {"metadata": {"total_size": 4}, "weight_map": {"w": "model.safetensors"}},
]  # fmt: skip


def _model_files() -> Run:
    """Everything that reads the JSON that lies beside weights."""
    from mergefs.checkpoint.companions import rewritten, set_dtype, set_total_size
    from mergefs.planner import relaid, stacked_files, tokenizers, vocabulary

    block = NO_BASE.hex()

    def run(data: bytes) -> None:
        def read(blob: Blob) -> bytes:
            return data

        def store(content: bytes) -> Blob:
            return Blob(hex_digest(content), max(1, len(content)))

        size = max(1, len(data))
        paths = sorted({"config.json", "tokenizer.json", "tokenizer_config.json", INDEX})
        files = tuple(FileRecipe(path, size, None, (Blob(block, size),)) for path in paths)
        model = Manifest(1024, files, (), Lineage("checkpoint"))
        vocabulary.ties(model, read)
        tokenizers._tokens(model, read)
        tokenizers._template_of(model, read)
        relaid.relaid(model, set(), (), read, store)
        origins = [stacked_files.Origin(model, 0), stacked_files.Origin(model, 1), stacked_files.Origin(model, 1)]
        stacked_files.stacked_files(model, (), origins, read, store)
        for change in (lambda value: set_dtype(value, DTYPES["F16"]), lambda value: set_total_size(value, 4)):
            rewritten(data, change)

    return run


def _importance() -> Run:
    written = _file("importance")

    def run(data: bytes) -> None:
        load_importance(written(data))

    return run


def _dumps(values: Sequence[Any]) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(value).encode() for value in values]


TARGETS = (
    Target(
        "safetensors-header", _header_seeds, _header, with_length(either(change_json, change_json, change_bytes)), 60
    ),
    Target("index", _index_seeds, _index, change_json, 40),
    Target("recipe", lambda: [text.encode() for text in _RECIPES], _recipe, either(words(*_YAML), change_json), 6),
    Target("adapter-config", _dumps(_ADAPTERS), _adapter, _adapter_mutate, 40),
    Target("model-files", _dumps(_CONFIGS), _model_files, change_json, 30),
    Target("importance", _dumps([{"w": 2.0, "v": [1.0, 0.5]}]), _importance, change_json, 30),
)
