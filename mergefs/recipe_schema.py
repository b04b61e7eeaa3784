"""The JSON schema of recipes, made from the methods' parameters: `python -m mergefs.recipe_schema` prints what
spec/recipe.schema.json has.

It accepts whatever the parser accepts. What a schema cannot say (how many models are left without the base, that
weights do not cancel) the parser refuses besides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from mergefs.merge import registry
from mergefs.merge.method import Method
from mergefs.merge.parameters import ParameterSpec
from mergefs.recipe import DTYPES
from mergefs.recipe_yaml import NAMED_TEMPLATES
from mergefs.setting import NUMBER

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}
_MODEL: Schema = {"$ref": "#/$defs/model"}
_DTYPES = [name for dtype in DTYPES for name in (dtype, f"torch.{dtype}")]


def schema(methods: Iterable[Method]) -> Schema:
    """Return the schema (draft 2020-12) of recipes of these methods."""
    known = list(methods)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of mergefs",
        "type": "object",
        "required": ["merge_method"],
        "additionalProperties": False,
        "properties": {
            "merge_method": {"enum": [method.name for method in known]},
            "base_model": _optional(_MODEL),
            "models": True,
            "slices": True,
            "modules": True,
            "parameters": True,
            "dtype": {"enum": [None, *_DTYPES, "float64", "torch.float64"]},
            "out_dtype": {"enum": [None, *_DTYPES]},
            "tokenizer_source": {"$ref": "#/$defs/tokenizer_source"},
            "tokenizer": _optional(
                _map(
                    {"source": {"$ref": "#/$defs/tokenizer_source"}, "tokens": _NOTHING, "pad_to_multiple_of": _NOTHING}
                )
                | {"required": ["source"]}
            ),
            "chat_template": {"type": ["string", "null"], "not": {"enum": list(NAMED_TEMPLATES)}},
            "name": {"type": ["string", "null"]},
        },
        "oneOf": [_given(key) for key in ("models", "slices", "modules")],
        "not": {"allOf": [_given("tokenizer"), _given("tokenizer_source")]},
        "allOf": [
            {
                "if": {"properties": {"merge_method": {"const": method.name}}, "required": ["merge_method"]},
                "then": {"$ref": f"#/$defs/{method.name}"},
            }
            for method in known
        ],
        "$defs": {
            "model": _model(),
            "ignored": {"description": "A parameter of other methods: of no effect with this one."},
            "tokenizer_source": _optional({**_MODEL, "not": {"const": "union"}}),
            **_settings(known),
            **{name: part for method in known for name, part in _of_method(method).items()},
        },
    }


def _of_method(method: Method) -> Schema:
    """Return what recipes of a method are made of, by its name in the schema."""
    of = method.name
    parameters: Schema = {"$ref": f"#/$defs/parameters-of-{of}"}
    layers = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
    source = _map({"model": _MODEL, "layer_range": layers, "parameters": parameters})
    source["required"] = ["model", "layer_range"]
    part = _map({"sources": _list(source), "parameters": parameters, "base_model": _optional(_MODEL)})
    part["required"] = ["sources"]
    merged: Schema = {
        "models": _optional({"$ref": f"#/$defs/models-of-{of}"}),
        "slices": _optional({"$ref": f"#/$defs/slices-of-{of}"}),
    }
    module = _map({**merged, "parameters": parameters}) | {"oneOf": [_given("models"), _given("slices")]}
    modules: Schema = {"type": "object", "additionalProperties": module, "minProperties": 1, "maxProperties": 1}
    whole: Schema = {"properties": {**merged, "modules": _optional(modules), "parameters": parameters}}
    if method.needs_base:
        whole |= {"if": _given("models"), "then": _given("base_model")}
    return {
        of: whole,
        f"models-of-{of}": _list(_map({"model": _MODEL, "parameters": parameters}) | {"required": ["model"]}),
        f"slices-of-{of}": _list(part),
        f"parameters-of-{of}": _parameters(method),
    }


def _parameters(method: Method) -> Schema:
    """Return what a method's parameters may be, by their names."""
    found: Schema = {}
    for name, spec in method.parameters.items():
        found[name] = {"$ref": f"#/$defs/{_kind(spec)}"}
        if spec.default is not None:
            found[name]["default"] = spec.default
    for name in sorted(set(registry.parameters()) - set(found)):
        found[name] = {"$ref": "#/$defs/ignored"}
    return _optional(_map(found))


def _settings(methods: Iterable[Method]) -> Schema:
    """Return what may be given for a parameter of each kind: a value, a gradient, or values by filters."""
    found: Schema = {}
    for spec in (spec for method in methods for spec in method.parameters.values()):
        value: Schema = {"$ref": f"#/$defs/one-{_kind(spec)}"}
        condition = _map({"filter": {"type": ["string", "null"]}, "value": {"anyOf": [value, _list(value)]}})
        condition["required"] = ["value"]
        found[f"one-{_kind(spec)}"] = _value(spec)
        found[_kind(spec)] = {"anyOf": [value, _list(value), condition, _list(condition)]}
    return found


def _kind(spec: ParameterSpec) -> str:
    """Return what a parameter's values are called."""
    if spec.is_flag:
        return "flag"
    bounds = [f"{spec.lowest:g}" if math.isfinite(spec.lowest) else "", f"{spec.highest:g}"]
    return "number" if spec.lowest == -spec.highest == -math.inf else f"number-{bounds[0]}..{bounds[1]}"


def _value(spec: ParameterSpec) -> Schema:
    if spec.is_flag:
        return {"enum": [True, False, 0, 1]}
    number: Schema = {"type": "number"}
    if math.isfinite(spec.lowest):
        number["minimum"] = spec.lowest
    if math.isfinite(spec.highest):
        number["maximum"] = spec.highest
    # YAML 1.1 reads 1e-5 as text.
    return {"anyOf": [number, {"type": "string", "pattern": NUMBER}]}


def _model() -> Schema:
    name: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}
    path = _map({"path": _MODEL, "revision": _NULL}) | {"required": ["path"]}
    parts = _map({"model": _MODEL, "lora": _optional(_MODEL), "override_architecture": _NULL}) | {"required": ["model"]}
    return {"anyOf": [name, path, parts]}


def _map(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [_NULL, schema]}


def _given(key: str) -> Schema:
    """Return the schema of maps that have a key and do not leave it empty."""
    return {"required": [key], "properties": {key: {"not": _NULL}}}


def text() -> str:
    """Return the schema of recipes of mergefs's own methods, as the file has it."""
    return json.dumps(schema(registry.own()), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
