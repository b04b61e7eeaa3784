"""Small models for the tools that put mergefs under strain: a base, fine-tunes of it, and recipes that merge these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from mergefs.checkpoint.safetensors import build_header
from mergefs.dtypes import DTYPES

SHAPES = [("model.embed_tokens.weight", (600, 96)), ("model.layers.0.mlp.up_proj.weight", (256, 96)), ("norm", (96,))]
BLOCK_SIZE = "16KiB"
"""Cuts these models into eleven blocks."""


def write_models(folder: Path, experts: int) -> None:
    """Write the checkpoints `base` and `expert-0`, `expert-1` and so on below a folder; always the same ones."""
    chance = np.random.default_rng(0)
    base = [chance.standard_normal(shape).astype(np.float32) * 0.02 for _, shape in SHAPES]
    _write(folder / "base", base)
    for number in range(experts):
        noise = [chance.standard_normal(values.shape).astype(np.float32) * 0.0005 for values in base]
        _write(folder / f"expert-{number}", [values + change for values, change in zip(base, noise, strict=True)])


def recipe_text(method: str, weights: Mapping[str, float], **parameters: float) -> str:
    """Return a recipe in YAML that merges some models, each with its weight, into `base`."""
    lines = [f"merge_method: {method}", "base_model: base", "models:"]
    for name, weight in weights.items():
        lines += [f"  - model: {name}", f"    parameters: {{weight: {weight}}}"]
    lines += ["parameters:", *(f"  {key}: {value}" for key, value in parameters.items())] if parameters else []
    return "\n".join(lines) + "\n"


def _write(folder: Path, values: list[np.ndarray]) -> None:
    folder.mkdir(parents=True)
    header = build_header([(tensor, DTYPES["BF16"], shape) for tensor, shape in SHAPES])
    data = b"".join(array.astype(ml_dtypes.bfloat16).tobytes() for array in values)
    (folder / "model.safetensors").write_bytes(header + data)
    (folder / "config.json").write_text("{}")
