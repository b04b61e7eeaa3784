"""Which layer of a model a tensor belongs to, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)")

_EMBEDDING = re.compile(r"(?:^|\.)(?:wte|wpe|cls_token|(?!embed_out)[^.]*embed[^.]*)(?:\.|$)")

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


def position(layer: int | None, layers: int) -> float:
    """Return where a layer lies between the first of so many, 0, and the last one, 1; 0 for None."""
    if layer is None:
        return 0.0
    return layer / (layers - 1) if layers > 1 else 1.0


def with_layer(name: str, layer: int) -> str:
    """Return the name that a layer's tensor has in another layer."""
    match = _LAYER.search(name)
    assert match is not None
    return f"{name[: match.start(1)]}{layer}{name[match.end(1) :]}"


def stack_of(name: str) -> str | None:
    """Return what stands before the layer's number in a tensor's name: the same for all layers of one stack."""
    match = _LAYER.search(name)
    return name[: match.start(1)] if match else None


def comes_first(name: str) -> bool:
    """Tell whether a tensor that belongs to no layer lies before the first one, as an embedding does, and not behind
    the last."""
    return _EMBEDDING.search(name) is not None
