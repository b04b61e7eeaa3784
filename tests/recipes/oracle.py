"""What a recipe means, tensor by tensor, in float64: written from mergekit's rules, without the code under test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Models = Mapping[str, Mapping[str, Vector]]
"""Float64 tensors by their names, by the model's name."""

_LAYER = re.compile(r"(.*?\b(?:layers|h|layer)\.)(\d+)(\..*)")


def evaluate(value: Any, tensor: str, t: float) -> Any:
    """Return a setting's value for a tensor, or None."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return value
    if isinstance(value[0], dict):
        for item in value:
            if item.get("filter") in (None, "*") or item["filter"] in tensor:
                return evaluate(item["value"], tensor, t)
        return None
    if isinstance(value[0], bool):
        return value[int(t * (len(value) - 1))]
    return float(np.interp(t * (len(value) - 1), range(len(value)), value))


def layers_of(tensors: Mapping[str, Any]) -> int:
    return 1 + max(int(found[2]) for name in tensors if (found := _LAYER.fullmatch(name)))


def as_slices(recipe: Mapping[str, Any], models: Models) -> list[dict[str, Any]]:
    """Return a recipe's slices; whole models are one."""
    recipe = next(iter(recipe["modules"].values())) if "modules" in recipe else recipe
    if "slices" in recipe:
        return list(recipe["slices"])
    sources = [{**item, "layer_range": [0, layers_of(models[item["model"]])]} for item in recipe["models"]]
    return [{"sources": sources}]


def tensors_of_result(recipe: Mapping[str, Any], models: Models) -> Iterator[tuple[str, int, int | None, float]]:
    """Yield each tensor's name, the number of its slice, its layer there and its t."""
    slices = as_slices(recipe, models)
    first, last = (models[slices[place]["sources"][0]["model"]] for place in (0, -1))
    for name in first:
        if not _LAYER.fullmatch(name) and ("embed" in name or name in ("wte.weight", "wpe.weight")):
            yield name, 0, None, 0.0
    done = 0
    for number, part in enumerate(slices):
        source = part["sources"][0]
        start, stop = source["layer_range"]
        for name in models[source["model"]]:
            found = _LAYER.fullmatch(name)
            if found and start <= int(found[2]) < stop:
                layer = int(found[2]) - start
                t = layer / (stop - start - 1) if stop - start > 1 else 1.0
                yield f"{found[1]}{done + layer}{found[3]}", number, layer, t
        done += stop - start
    for name in last:
        if not _LAYER.fullmatch(name) and not ("embed" in name or name in ("wte.weight", "wpe.weight")):
            yield name, len(slices) - 1, None, 0.0


def expected(recipe: Mapping[str, Any], models: Models) -> dict[str, Vector]:
    """Return the merged tensors, unrounded.

    Args:
        recipe: as YAML reads it.
        models: all models that it names.
    """
    slices = as_slices(recipe, models)
    module = next(iter(recipe["modules"].values())).get("parameters") if "modules" in recipe else None
    found = {}
    for name, number, layer, t in tensors_of_result(recipe, models):
        part = slices[number]
        base_name = part.get("base_model") or recipe.get("base_model")
        base, entries = None, []
        for source in part["sources"]:
            match = _LAYER.fullmatch(name)
            called = name
            if layer is not None:
                assert match is not None
                called = f"{match[1]}{source['layer_range'][0] + layer}{match[3]}"
            values = models[source["model"]][called]
            if (
                source["model"] == base_name
                and base is None
                and recipe["merge_method"] not in ("linear", "passthrough")
            ):
                base = values
                continue
            scopes = [source.get("parameters"), part.get("parameters"), module, recipe.get("parameters")]
            entries.append((values, _scoped(scopes, called, t)))
        if base is None and base_name is not None:
            base = models[base_name][name]
        shared = _scoped([part.get("parameters"), module, recipe.get("parameters")], name, t)
        found[name] = METHODS[recipe["merge_method"]](base, entries, shared)
    return found


def _scoped(scopes: list[Any], tensor: str, t: float) -> Callable[[str, Any], Any]:
    def look(key: str, default: Any) -> Any:
        for scope in scopes:
            if scope and key in scope:
                value = evaluate(scope[key], tensor, t)
                if value is not None:
                    return value
        return default

    return look


def _linear(base: Any, entries: Any, shared: Any) -> Vector:
    weights = [look("weight", None) for _, look in entries]
    total = sum(w * values for w, (values, _) in zip(weights, entries, strict=True))
    return np.asarray(total / sum(weights) if shared("normalize", True) else total)


def _task_arithmetic(base: Any, entries: Any, shared: Any) -> Vector:
    delta = sum(look("weight", None) * (values - base) for values, look in entries)
    if shared("normalize", False):
        delta = delta / sum(look("weight", None) for _, look in entries)
    return np.asarray(base + shared("lambda", 1.0) * delta)


def _ties(base: Any, entries: Any, shared: Any) -> Vector:
    weights = np.array([look("weight", None) for _, look in entries])
    kept = []
    for values, look in entries:
        delta, density = values - base, look("density", 1.0)
        if density < 1.0:
            count = max(1, int(density * delta.size))
            delta = np.where(np.abs(delta) >= np.sort(np.abs(delta).ravel())[-count], delta, 0.0)
        kept.append(delta)
    weighted = np.stack([w * d for w, d in zip(weights, kept, strict=True)])
    agree = np.where(weighted.sum(0) >= 0, weighted > 0, weighted < 0)
    total = np.where(agree, weighted, 0.0).sum(0)
    if shared("normalize", True):
        divisor = (agree * weights.reshape(-1, *[1] * base.ndim)).sum(0)
        total = total / np.where(np.abs(divisor) < 1e-8, 1.0, divisor)
    return np.asarray(base + shared("lambda", 1.0) * total)


def _slerp(base: Any, entries: Any, shared: Any) -> Vector:
    ((values, _),), t = entries, shared("t", None)
    norms = np.linalg.norm(base) * np.linalg.norm(values)
    cosine = float((base * values).sum() / norms) if norms else 1.0
    if abs(cosine) > 0.9995:
        return np.asarray((1 - t) * base + t * values)
    angle = np.arccos(cosine)
    return np.asarray((np.sin((1 - t) * angle) * base + np.sin(t * angle) * values) / np.sin(angle))


def _passthrough(base: Any, entries: Any, shared: Any) -> Vector:
    ((values, look),) = entries
    return np.asarray(look("scale", 1.0) * values)


METHODS: dict[str, Callable[[Any, Any, Any], Vector]] = {
    "linear": _linear,
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "slerp": _slerp,
    "passthrough": _passthrough,
}
