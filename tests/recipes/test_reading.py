"""Reading recipes: the lines that messages name, and the schema, which agrees with the parser."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mergefs import recipe_schema
from mergefs.errors import RecipeError
from mergefs.merge import registry
from mergefs.recipe import Recipe

FILE = Path(__file__).parents[2] / "spec" / "recipe.schema.json"
SCHEMA = json.loads(FILE.read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.yml"))

START = """\
merge_method: ties
base_model: base
models:
  - model: a
    parameters:
      weight: 0.5
      density: [0.1, 0.9]
  - model: b
    parameters:
      weight:
        - filter: mlp
          value: [0.1,
            0.2]
        - value: 0.3
parameters:
  normalize: true
dtype: bfloat16
"""
SLICES = """\
merge_method: slerp
base_model: base
slices:
  - sources:
      - model: base
        layer_range: [0, 4]
      - model: a
        layer_range: [2, 6]
    parameters:
      t: 0.1
  - sources:
      - model: base
        layer_range: [4, 6]
      - model: b
        layer_range: [0, 2]
parameters:
  t: [0, 1]
"""

WRONG: dict[str, tuple[str, str, str, int, str]] = {
    # text, what is replaced, by what, the line that is named, part of the message
    "an unknown key": (START, "dtype:", "type:", 17, "unknown key 'type' in a recipe"),
    "an unknown method": (START, "ties", "tie", 1, "unknown merge_method 'tie'"),
    "an unknown key of a model": (START, "  - model: b\n", "  - model: b\n    lora: c\n", 9, "unknown key 'lora'"),
    "a model without a name": (START, "- model: b\n    parameters", "- parameters", 8, "'model' is missing"),
    "a model that is none": (START, "- model: b", "- model: [b]", 8, "is not a model"),
    "an unknown parameter": (START, "density", "sparsity", 7, "ties has no parameter 'sparsity'"),
    "a value out of range": (START, "0.9]", "1.9]", 7, "'density' is 1.9: it has to be in 0..1"),
    "a value of another type": (START, "            0.2]", "            much]", 13, "'weight' is 'much'"),
    "a filter that is a number": (START, "filter: mlp", "filter: 1", 11, "is not text"),
    "a filter without a value": (START, "- value: 0.3", "- filter: attn", 14, "with a 'value'"),
    "a flag that is none": (START, "normalize: true", "normalize: 2", 16, "'normalize' is 2: it is true or false"),
    "parameters that are a list": (START, "  normalize: true", "  - normalize", 16, "has to map names to values"),
    "an unknown dtype": (START, "bfloat16", "int4", 17, "unknown dtype 'int4'"),
    "a key twice": (START, "dtype: bfloat16", "base_model: x", 17, "the key 'base_model' is there twice"),
    "no base": (START, "base_model: base\n", "", 1, "ties needs a base_model"),
    "models and slices": (START, "dtype: bfloat16", "slices: []", 17, "one of 'models', 'slices' and 'modules'"),
    "a source without a range": (SLICES, "        layer_range: [2, 6]\n", "", 7, "no layer_range for 'a'"),
    "a range of text": (SLICES, "[2, 6]", "[2, six]", 8, "slice 1 has the layer_range [2, 'six'] for 'a'"),
    "a range of flags": (SLICES, "[0, 2]", "[true, 2]", 15, "slice 2 has the layer_range [True, 2] for 'b'"),
    "a range of three": (SLICES, "[2, 6]", "[2, 4, 6]", 8, "[first layer, layer behind the last]"),
    "a range that ends first": (SLICES, "[2, 6]", "[6, 2]", 8, "0 <= first <= stop"),
    "a range below zero": (SLICES, "[2, 6]", "[-1, 3]", 8, "0 <= first <= stop"),
    "sources of other lengths": (SLICES, "[2, 6]", "[2, 5]", 4, "sources of slice 1 have 3 and 4 layers"),
    "a weight of skipped layers": (
        SLICES,
        "    parameters:\n      t",
        "    residual_weight: 1\n    parameters:\n      t",
        9,
        "unknown key 'residual_weight' in a slice",
    ),
    "a slice without sources": (
        SLICES,
        "  - sources:\n      - model: base\n        layer_range: [4, 6]",
        "  - parameters:\n      - model: base",
        11,
        "slice 2 has no 'sources'",
    ),
    "too many sources": (
        SLICES,
        "      - model: b\n",
        "      - {model: a, layer_range: [0, 2]}\n      - model: b\n",
        11,
        "slerp merges 1 model(s) besides the base, and 2 are named",
    ),
    "a slice without a parameter": (SLICES, "parameters:\n  t: [0, 1]\n", "", 11, "slice 2 has no t"),
    "a union of tokenizers": (START, "dtype: bfloat16", "tokenizer_source: union", 17, "'union'"),
    "a tokenizer without a source": (START, "dtype: bfloat16", "tokenizer: {}", 17, "'union'"),
    "tokens": (
        START,
        "dtype: bfloat16",
        "tokenizer: {source: base,\n  tokens: {x: {source: a}}}",
        18,
        "'tokens' of a tokenizer",
    ),
    "padding": (
        START,
        "dtype: bfloat16",
        "tokenizer: {source: base, pad_to_multiple_of: 8}",
        17,
        "'pad_to_multiple_of'",
    ),
    "two tokenizers": (
        START,
        "dtype: bfloat16",
        "tokenizer_source: base\ntokenizer: {source: base}",
        18,
        "give one of",
    ),
    "a template of mergekit's": (START, "dtype: bfloat16", "chat_template: chatml", 17, "'chatml' is not part of"),
    "a template that is a list": (START, "dtype: bfloat16", "chat_template: [x]", 17, "is not text"),
    "a name that is a number": (START, "dtype: bfloat16", "name: 3", 17, "the name 3 is not text"),
    "a revision": (START, "- model: b", "- model: {path: b, revision: main}", 8, "revision cannot be chosen"),
    "another architecture": (
        START,
        "- model: b",
        "- model: {model: b, override_architecture: X}",
        8,
        "override_architecture",
    ),
    "another recipe": (START, "dtype: bfloat16", "---\nmerge_method: ties\n" + START[19:], 18, "another recipe begins"),
}


def first_line(message: str) -> int:
    return int(message.split("r.yml, line ")[1].split(":")[0])


@pytest.mark.parametrize("name", WRONG)
def test_messages_name_the_line(name: str) -> None:
    text, old, new, line, part = WRONG[name]
    Recipe.parse(text, "r.yml")
    assert text.count(old) >= 1
    at = text.rindex(old) if name in ("a range of flags", "a slice without a parameter") else text.index(old)
    wrong = text[:at] + new + text[at + len(old) :]
    with pytest.raises(RecipeError) as raised:
        Recipe.parse(wrong, "r.yml")
    assert part in str(raised.value)
    assert first_line(str(raised.value)) == line


def test_modules() -> None:
    def module(**more: Any) -> dict[str, Any]:
        return {"merge_method": "linear", "modules": {"default": {"models": [{"model": "a"}], **more}}}

    asked = Recipe.parse(json.dumps(module(parameters={"weight": 2})))
    assert asked.numbers_of("x", 1).weights == (2.0,)
    two = {"merge_method": "linear", "modules": {name: {"models": [{"model": "a"}]} for name in ("text", "vision")}}
    for wrong, part in (
        (module(), "model a has no weight"),
        (two, "the modules text, vision: models of several modules are not supported"),
        (module(slices=[{"sources": [{"model": "a", "layer_range": [0, 1]}]}]), "one of 'models' and 'slices'"),
        ({"merge_method": "linear", "modules": []}, "has to map a module's name"),
    ):
        with pytest.raises(RecipeError, match=part):
            Recipe.parse(json.dumps(wrong))


def test_names_of_models_with_adapters() -> None:
    def named(model: Any, base: Any = "base") -> Recipe:
        value = {"merge_method": "ties", "base_model": base, "models": [{"model": model, "parameters": {"weight": 1}}]}
        return Recipe.parse(json.dumps(value))

    for model in ("m+x/y", {"model": "m", "lora": "x/y"}, {"model": {"path": "m"}, "lora": {"path": "x/y"}}):
        asked = named(model)
        assert asked.models == ("m+x/y",)
        assert asked.adapters == {"m+x/y": ("m", "x/y")}
    assert named({"path": "m"}).models == named({"model": {"path": "m", "revision": None}}).models == ("m",)
    assert named("x", {"model": "b", "lora": "l"}).base_model == "b+l"
    assert not named("x@2").adapters


# ----------------------------------------------------------------------------------------------------- the schema


def parses(value: Any) -> bool:
    try:
        Recipe.parse(json.dumps(value))
    except RecipeError:
        return False
    return True


def test_the_schema_is_that_of_the_methods() -> None:
    assert FILE.read_text() == recipe_schema.text(), "python -m mergefs.recipe_schema > spec/recipe.schema.json"
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    for value in yaml.safe_load_all(path.read_text()):
        if value["merge_method"] in registry.names():
            assert not list(VALIDATOR.iter_errors(value))
            assert parses(value)


BEYOND = {
    # what only the parser sees
    *("a range that ends first", "sources of other lengths", "too many sources", "a slice without a parameter"),
    *("a key twice", "another recipe"),
}


@pytest.mark.parametrize("name", sorted(set(WRONG) - BEYOND))
def test_the_schema_refuses_what_the_parser_refuses(name: str) -> None:
    text, old, new, _, _ = WRONG[name]
    VALIDATOR.validate(yaml.safe_load(text))
    assert not VALIDATOR.is_valid(yaml.safe_load(text.replace(old, new)))


JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        -1,
        2.5,
        "",
        "union",
        "base",
        "x",
        "1e-5",
        [],
        [0.5],
        [0, 4],
        {},
        {"value": 1},
        {"path": "p"},
        "auto",
    ]
)
KEYS = st.sampled_from(
    [
        "model",
        "models",
        "slices",
        "modules",
        "weight",
        "t",
        "density",
        "filter",
        "value",
        "parameters",
        "path",
        "tokenizer",
        "tokenizer_source",
        "chat_template",
        "out_dtype",
        "name",
        "base_model",
        "layer_range",
        "surprise",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A recipe of which something is replaced, added or left out, at up to three places."""
    value = yaml.safe_load(draw(st.sampled_from([START, SLICES, *(p.read_text().split("---")[0] for p in EXAMPLES)])))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
            if not inner or draw(st.booleans()):
                break
            place = place[draw(st.sampled_from(inner))]
        if isinstance(place, dict) and (not keys or draw(st.booleans())):
            place[draw(KEYS)] = deepcopy(draw(JUNK))
        elif keys and draw(st.booleans()):
            del place[draw(st.sampled_from(keys))]
        elif keys:
            place[draw(st.sampled_from(keys))] = deepcopy(draw(JUNK))
    return value


@settings(max_examples=300, deadline=None)
@given(mutated())
def test_what_the_parser_accepts_the_schema_accepts(value: Any) -> None:
    value = json.loads(json.dumps(value))
    if parses(value):
        assert not list(VALIDATOR.iter_errors(value))
