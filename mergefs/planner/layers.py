"""Which layer of a model a tensor belongs to, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def kind_of(name: str) -> str:
    """Return a tensor's name without the numbers in it: the same for all layers."""
    return _NUMBER.sub("*", name)


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer; None for one that belongs to none, such as an embedding."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def layer_count(names: Iterable[str]) -> int:
    """Return how many layers a model of these tensors has."""
    return 1 + max((layer for name in names if (layer := layer_of(name)) is not None), default=-1)


def position(name: str, layers: int) -> float:
    """Return where a tensor lies between the first layer, 0, and the last one, 1; 0 for one that belongs to none."""
    layer = layer_of(name)
    if layer is None:
        return 0.0
    return layer / (layers - 1) if layers > 1 else 1.0
