"""Recipes: what the user asks for, in mergekit's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mergefs.errors import RecipeError
from mergefs.merge import registry
from mergefs.merge.method import Method
from mergefs.merge.parameters import INT8_MASK, Scalar
from mergefs.planner.plan import Numbers
from mergefs.setting import Setting, read_setting

_KEYS = {"models", "merge_method", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source"}
_NOT_YET = {"slices", "modules", "tokenizer", "chat_template"}
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
        own: for each model, what the recipe gives for it alone.
        given: what the recipe gives for all models.
        dtype: the output dtype's safetensors name, or None for the base's.
        ignored: parameters of other methods that the recipe gives; this method has none of their names.
        text: the YAML as given.
    """

    method: Method
    base_model: str | None
    models: tuple[str, ...]
    own: tuple[Mapping[str, Setting], ...]
    given: Mapping[str, Setting]
    dtype: str | None
    ignored: tuple[str, ...]
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
        ignored: dict[str, None] = {}
        given = _parameters(value.get("parameters"), where, method, ignored)
        models, own = [], []
        for item in _models(value, where):
            name = _model_name(item.get("model"), where)
            mine = _parameters(item.get("parameters"), f"{where}: model {name}", method, ignored)
            if name == base and not method.base_is_model:
                continue
            models.append(name)
            own.append(mine)
            _check_given(method, {**given, **mine}, f"{where}: model {name}", per_model=True)
        if method.base_is_model and base is not None and base not in models and "weight" in given:
            # As mergekit has it: the base takes part, with the weight that is given for all.
            models.append(base)
            own.append({})
        if not models:
            raise RecipeError(f"{where}: it names no model besides the base")
        _check_count(method, len(models), where)
        _check_given(method, given, where, per_model=False)
        recipe = cls(method, base, tuple(models), tuple(own), given, _dtype(value, where), tuple(ignored), text)
        if not any(len(s.conditions) > 1 or s.conditions[0].filter for s in recipe.settings):
            for position in (0.0, 1.0):
                recipe.numbers("", position)
        return recipe

    @property
    def settings(self) -> list[Setting]:
        """All that the recipe gives."""
        return [setting for part in (self.given, *self.own) for setting in part.values()]

    def numbers(self, tensor: str, position: float) -> Numbers:
        """Return the method's parameters for a tensor.

        A model's own setting goes before what is given for all, and that before the method's default.

        Args:
            tensor: its name.
            position: where it lies between the first layer, 0, and the last one, 1.

        Raises:
            RecipeError: when a parameter that has no default is not given for it, or the weights cannot be normalized.
        """
        specs = self.method.parameters

        def value(name: str, parts: tuple[Mapping[str, Setting], ...], whose: str) -> Scalar:
            for part in parts:
                found = part[name].value(tensor, position) if name in part else None
                if found is not None:
                    return found
            default = specs[name].default
            if default is None:
                raise RecipeError(f"{whose} has no {name} for tensor '{tensor}': give one that its filters do not miss")
            return default

        experts = tuple(
            {name: value(name, (own, self.given), f"model {model}") for name in specs if specs[name].per_model}
            for model, own in zip(self.models, self.own, strict=True)
        )
        shared = {
            name: value(name, (self.given,), "the recipe")
            for name in specs
            if not specs[name].per_model and name != INT8_MASK
        }
        numbers = Numbers(experts, shared)
        if self.method.name == "linear" and shared["normalize"] and abs(sum(numbers.weights)) < 1e-8:
            of = f" of tensor '{tensor}'" if tensor else ""
            raise RecipeError(f"the weights{of} add up to 0 and cannot be normalized: set normalize: false")
        return numbers


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


def _parameters(value: Any, where: str, method: Method, ignored: dict[str, None]) -> dict[str, Setting]:
    """Return the settings; enter the names of those that only other methods have among the ignored ones."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: 'parameters' has to map names to values")
    found = {}
    for name, given in value.items():
        spec = method.parameters.get(name)
        if spec is None and name in registry.parameters():
            ignored[name] = None
            continue
        if spec is None:
            raise RecipeError(
                f"{where}: {method.name} has no parameter '{name}': it has {', '.join(method.parameters)}"
            )
        found[name] = read_setting(given, spec, f"{where}: '{name}'")
    return found


def _check_count(method: Method, count: int, where: str) -> None:
    if not method.fewest <= count <= method.most:
        wanted = str(method.fewest) if method.fewest == method.most else f"at least {method.fewest}"
        besides = " besides the base" if method.needs_base else ""
        raise RecipeError(f"{where}: {method.name} merges {wanted} model(s){besides}, and {count} are named")


def _check_given(method: Method, given: Mapping[str, Setting], where: str, *, per_model: bool) -> None:
    for name, spec in method.parameters.items():
        if spec.per_model is per_model and spec.default is None and name not in given:
            raise RecipeError(f"{where} has no {name}: give one under its parameters, or under the recipe's")


def _dtype(value: dict[str, Any], where: str) -> str | None:
    name = value.get("out_dtype", value.get("dtype"))
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise RecipeError(f"{where}: unknown dtype {name!r}: it is one of {', '.join(DTYPES)}")
    return DTYPES[name]
