"""Tiny models of several architectures, made and written without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from builders import Array, array, write_model

VOCABULARY, HIDDEN, INNER = 48, 16, 24
LAYERS = 40

State = dict[str, np.ndarray[Any, Any]]


def llama(seed: int, layers: int = LAYERS, *, tied: bool = False, rows: int = VOCABULARY) -> State:
    """Return the tensors of a Llama, in the order of a checkpoint."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray[Any, Any]:
        return random.normal(0.0, 0.2, shape)

    found: State = {} if tied else {"lm_head.weight": matrix(rows, HIDDEN)}
    found["model.embed_tokens.weight"] = matrix(rows, HIDDEN)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        found[f"{name}.input_layernorm.weight"] = 1.0 + matrix(HIDDEN)
        found[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        found[f"{name}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{name}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{name}.post_attention_layernorm.weight"] = 1.0 + matrix(HIDDEN)
        found[f"{name}.self_attn.k_proj.weight"] = matrix(HIDDEN // 2, HIDDEN)
        found[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        found[f"{name}.self_attn.q_proj.weight"] = matrix(HIDDEN, HIDDEN)
        found[f"{name}.self_attn.v_proj.weight"] = matrix(HIDDEN // 2, HIDDEN)
    found["model.norm.weight"] = 1.0 + matrix(HIDDEN)
    return found


def llama_config(layers: int = LAYERS, *, tied: bool = False, rows: int = VOCABULARY, **more: Any) -> bytes:
    """Return the configuration of such a Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
    }
    return json.dumps(config | more).encode()


def gpt2(seed: int, layers: int = 12) -> State:
    """Return the tensors of a GPT-2 without its head, as its checkpoint names them."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray[Any, Any]:
        return random.normal(0.0, 0.2, shape)

    found: State = {}
    for layer in range(layers):
        name = f"h.{layer}"
        for part, shape in (
            ("attn.c_attn", (HIDDEN, 3 * HIDDEN)),
            ("attn.c_proj", (HIDDEN, HIDDEN)),
            ("mlp.c_fc", (HIDDEN, 4 * HIDDEN)),
            ("mlp.c_proj", (4 * HIDDEN, HIDDEN)),
        ):
            found[f"{name}.{part}.weight"] = matrix(*shape)
            found[f"{name}.{part}.bias"] = matrix(shape[1])
        for part in ("ln_1", "ln_2"):
            found[f"{name}.{part}.weight"] = 1.0 + matrix(HIDDEN)
            found[f"{name}.{part}.bias"] = matrix(HIDDEN)
    found["ln_f.weight"], found["ln_f.bias"] = 1.0 + matrix(HIDDEN), matrix(HIDDEN)
    found["wpe.weight"], found["wte.weight"] = matrix(64, HIDDEN), matrix(VOCABULARY, HIDDEN)
    return found


def gpt2_config(layers: int = 12) -> bytes:
    """Return the configuration of such a GPT-2."""
    return json.dumps(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_head": 2,
            "n_layer": layers,
            "n_positions": 64,
            "torch_dtype": "float16",
        }
    ).encode()


def near(base: State, seed: int, delta: float = 0.02) -> State:
    """Return a fine-tune."""
    random = np.random.default_rng(seed)
    return {name: values + random.normal(0.0, delta, values.shape) for name, values in base.items()}


def written(state: State, dtype: str) -> dict[str, Array]:
    """Return the tensors as a file has them."""
    return {name: array(values, dtype) for name, values in state.items()}


def write(folder: Path, state: State, config: bytes, dtype: str = "F16", **files: bytes) -> dict[str, Array]:
    """Write a model directory, and return its tensors."""
    tensors = written(state, dtype)
    extra = {name.replace("__", "."): content for name, content in files.items()}
    write_model(folder, tensors, {"config.json": config, **extra})
    return tensors
