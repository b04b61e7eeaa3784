"""Recipes: what the user asks for, in mergekit's YAML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mergefs.errors import RecipeError
from mergefs.merge import registry
from mergefs.merge.method import Method
from mergefs.merge.parameters import Scalar

_KEYS = {"models", "merge_method", "base_model", "parameters", "dtype", "tokenizer_source"}
_NOT_YET = {"slices", "modules", "out_dtype", "tokenizer", "chat_template"}
_MODEL_KEYS = {"model", "parameters"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The output dtypes of a recipe, and their safetensors names."""


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        method: the merge method.
        base_model: how the recipe names the base, or None.
        models: how it names each model, in order (the base left out where the method needs one).
        parameters: for each model, every parameter of the method with its value.
        shared: the parameters that are not per model.
        dtype: the output dtype's safetensors name, or None for the base's.
        text: the YAML as given.
    """

    method: Method
    base_model: str | None
    models: tuple[str, ...]
    parameters: tuple[Mapping[str, Scalar], ...]
    shared: Mapping[str, Scalar]
    dtype: str | None
    text: str

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe from a YAML file.

        Raises:
            RecipeError: when the file cannot be read or is not a recipe.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RecipeError(f"the recipe {path} cannot be read: {reason}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = "the recipe") -> Recipe:
        """Read a recipe from YAML text.

        Args:
            text: the YAML.
            where: what messages call it.

        Raises:
            RecipeError: when something in it is unknown, missing, not supported yet or out of range.
        """
        value = _load_yaml(text, where)
        _check_keys(value, where)
        method = _method(value, where)
        base = value.get("base_model")
        if base is not None:
            base = _model_name(base, where)
        if method.needs_base and base is None:
            raise RecipeError(f"{where}: {method.name} needs a base_model")
        shared_given = _parameters(value.get("parameters"), where, method)
        models, parameters = [], []
        for item in _models(value, where):
            name = _model_name(item.get("model"), where)
            given = {**shared_given, **_parameters(item.get("parameters"), f"{where}: model {name}", method)}
            if method.needs_base and name == base:
                continue
            models.append(name)
            parameters.append(_resolve(given, method, f"{where}: model {name}"))
        if not models:
            raise RecipeError(f"{where}: it names no model besides the base")
        shared = _resolve(shared_given, method, where, per_model=False)
        _check_weights(method, parameters, shared, where)
        return cls(method, base, tuple(models), tuple(parameters), shared, _dtype(value, where), text)


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, with a key given twice refused."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
        if key in found:
            raise yaml.MarkedYAMLError(problem=f"the key '{key}' is there twice", problem_mark=key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _load_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{where}{line}: {error.problem}: correct the YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{where} is not a recipe: it needs keys such as merge_method and models")
    return value


def _check_keys(value: dict[str, Any], where: str) -> None:
    for key in value:
        if key in _NOT_YET:
            raise RecipeError(f"{where}: '{key}' is not supported yet, and would change the result: remove it")
        if key not in _KEYS:
            raise RecipeError(f"{where}: unknown key '{key}': a recipe has {', '.join(sorted(_KEYS))}")
    if value.get("tokenizer_source", "base") != "base":
        raise RecipeError(f"{where}: tokenizer_source can only be 'base' so far")


def _method(value: dict[str, Any], where: str) -> Method:
    name = value.get("merge_method")
    if not isinstance(name, str) or name not in registry.names():
        raise RecipeError(f"{where}: unknown merge_method {name!r}: this mergefs has {', '.join(registry.names())}")
    return registry.method(name)


def _models(value: dict[str, Any], where: str) -> list[dict[str, Any]]:
    models = value.get("models")
    if not isinstance(models, list) or not models:
        raise RecipeError(f"{where}: 'models' has to be a list of models")
    for item in models:
        if not isinstance(item, dict):
            raise RecipeError(f"{where}: each of 'models' needs the form '- model: NAME', not {item!r}")
        for key in item:
            if key not in _MODEL_KEYS:
                raise RecipeError(f"{where}: unknown key '{key}' in a model: it has model and parameters")
    return models


def _model_name(value: Any, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # an all-digit ref or id without quotes
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{where}: {value!r} is not a model: give a ref, a manifest's id or a path")
    return value


def _parameters(value: Any, where: str, method: Method) -> dict[str, Scalar]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: 'parameters' has to map names to values")
    return {name: _scalar(name, given, where, method) for name, given in value.items()}


def _scalar(name: str, value: Any, where: str, method: Method) -> Scalar:
    spec = method.parameters.get(name)
    if spec is None:
        raise RecipeError(f"{where}: {method.name} has no parameter '{name}': it has {', '.join(method.parameters)}")
    if isinstance(value, (list, dict)):
        raise RecipeError(f"{where}: '{name}' is a gradient or filter, which is not supported yet: give one value")
    if spec.is_flag:
        if not isinstance(value, bool) and value not in (0, 1):
            raise RecipeError(f"{where}: '{name}' is {value!r}: it is true or false")
        return bool(value)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{where}: '{name}' is {value!r}: it has to be a number")
    if not spec.lowest <= number <= spec.highest:
        raise RecipeError(f"{where}: '{name}' is {number:g}: it has to be in {spec.lowest:g}..{spec.highest:g}")
    return number


def _resolve(given: Mapping[str, Scalar], method: Method, where: str, *, per_model: bool = True) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name, spec in method.parameters.items():
        if spec.per_model is not per_model:
            continue
        value = given.get(name, spec.default)
        if value is None:
            raise RecipeError(f"{where} has no {name}: give one under its parameters, or under the recipe's")
        found[name] = value
    return found


def _check_weights(
    method: Method, parameters: list[dict[str, Scalar]], shared: Mapping[str, Scalar], where: str
) -> None:
    if method.name == "linear" and shared["normalize"] and abs(sum(p["weight"] for p in parameters)) < 1e-8:
        raise RecipeError(f"{where}: the weights add up to 0 and cannot be normalized: set normalize: false")


def _dtype(value: dict[str, Any], where: str) -> str | None:
    name = value.get("dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise RecipeError(f"{where}: unknown dtype {name!r}: it is one of {', '.join(DTYPES)}")
    return DTYPES[name]
